"""A run whose tensors are all sent whole owes nothing: it is resumed without a word about error feedback."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK


def train(folder: Path, steps: int) -> int:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)  # fewer elements than `dense_below`
    optimizer = torch.optim.Adam(model.parameters())
    with lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", compressor=TopK(density=0.01)
    ) as checkpointer:
        begun = checkpointer.attach(model, optimizer)
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.commit()
    return begun


def test_a_finished_run_is_started_again_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(tmp_path, 3) == 0
    assert train(tmp_path, 0) == 3
    assert train(tmp_path, 2) == 3
    assert train(tmp_path, 0) == 5
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
