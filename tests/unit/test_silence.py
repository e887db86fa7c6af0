"""An ordinary training, killed and resumed, is warned of nothing: each code appears only where there is cause."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lowdiff
from lowdiff import testing
from lowdiff.compressors import PowerSGD, Quantize, TopK

STRATEGIES: dict[str, dict[str, Any]] = {
    "topk": {"compressor": TopK(0.2)},
    "powersgd": {"compressor": PowerSGD(2)},
    "quantize": {"compressor": Quantize(8)},
    "replica": {},
    "survivors": {"strategy": "survivors"},
}
_EPOCHS, _BATCHES = 3, 5


def life(folder: Path, settings: dict[str, Any], killed_at: int | None = None) -> int:
    """A loop as many have it; returns where it resumed.

    It accumulates two batches to a step, counts them, clips, scales, averages, evaluates and keeps the best loss.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8, shuffle=True)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", snapshot_every=3, **settings
    )
    begun = checkpointer.attach(
        model, optimizer, scheduler=scheduler, scaler=scaler, average=average, loader=loader
    )
    checkpointer.state.setdefault("best", float("inf"))
    step = begun
    for _ in range(checkpointer.epoch_of(loader), _EPOCHS):
        for i, (inputs,) in enumerate(loader, start=checkpointer.batch_of(loader)):
            loss = model(inputs).square().mean()
            scaler.scale(loss / 2).backward()
            if i % 2 == 0 and i < _BATCHES - 1:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(model)
            checkpointer.state["best"] = min(checkpointer.state["best"], loss.item())
            if step == killed_at:
                testing.kill(checkpointer)
                return begun
            checkpointer.commit()
            step += 1
        model.eval()
        with torch.no_grad():
            for (inputs,) in loader:
                model(inputs)
        model.train()
    checkpointer.close()
    return begun


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_said(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings, keeps = STRATEGIES[name], name != "survivors"
    assert life(tmp_path, settings, killed_at=4) == 0
    assert life(tmp_path, settings, killed_at=7) == (4 if keeps else 3)
    assert life(tmp_path, settings) == (7 if keeps else 6)
    assert life(tmp_path, settings) == 9  # finished: its loop is over at once
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [line for line in said if keeps or not line.startswith("LD315")] == []
