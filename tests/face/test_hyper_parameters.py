"""Hyper-parameters that change on the way change what an optimizer keeps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.values import same
from lowdiff.protocols import Compressor
from tests.face.loops import Loop


@pytest.mark.parametrize("compressor", [TopK(0.1), None], ids=["log", "replica"])
def test_momentum_that_begins_later_is_recovered(
    tmp_path: Path, compressor: Compressor | None
) -> None:
    loop = Loop(
        tmp_path,
        make=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.0),
        settings={"snapshot_every": 1000, "compressor": compressor},
    )
    loop.attach()
    for number in loop.checkpointer.steps(12):
        loop.step(number)
        loop.optimizer.param_groups[0]["momentum"] = 0.9 if number >= 5 else 0.0
    if compressor is None:  # only what is in its file outlives the replica
        while loop.checkpointer.stats()["replica_step"] < 12:
            time.sleep(0.01)
    expected, state = loop.weights(), loop.optimizer.state_dict()["state"]
    assert all(entries["momentum_buffer"] is not None for entries in state.values())
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert same(dict(recovered.model_state_dict()), expected)
    assert same(recovered.optimizer_state_dict()["state"], state)


def test_what_a_newer_pytorch_added_is_at_its_default(tmp_path: Path) -> None:
    def newer(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        optimizer.defaults["added"] = True
        for group in optimizer.param_groups:
            group["added"] = True
        return optimizer

    Loop(tmp_path).run(2)
    loop = Loop(tmp_path, make=newer)
    assert loop.attach() == 2
    assert loop.optimizer.param_groups[0]["added"] is True
    loop.checkpointer.close()
