"""A state goes to the device where it is replayed, and comes back."""

from __future__ import annotations

from pathlib import Path

import torch

import lowdiff
from tests.unit.recovery.training import train


def test_all_that_steps_with_a_parameter_goes_with_it_also_where_it_has_one_element(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path, 2, snapshot_every=2)
    state = lowdiff.recover(trained.run, 2, staging=trained.staging)
    assert state.parameters["scale"].numel() == 1
    state.move(torch.device("meta"))
    assert state.parameters["scale"].is_meta
    for entries in state.optimizers[0].state.values():
        assert entries["exp_avg"].is_meta
        assert entries["exp_avg_sq"].is_meta
        assert entries["step"].is_cpu
