"""Strategy gradients: every step since the older of two images comes back from memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lowdiff import testing
from lowdiff.recovery import recover
from tests.unit.loops import Loop

SETTINGS: dict[str, Any] = {"compressor": None, "strategy": "gradients", "snapshot_every": 1000}


def loop_in(folder: Path, **settings: Any) -> Loop:
    return Loop(folder, settings=SETTINGS | settings)


def trained(loop: Loop, until: int) -> dict[int, dict[str, torch.Tensor]]:
    """Train and commit; returns the weights of every step."""
    start = loop.attach()
    weights = {start: loop.weights()}
    for number in range(start, until):
        loop.step(number)
        loop.checkpointer.commit()
        weights[number + 1] = loop.weights()
    loop.settle()
    return weights


def assert_recovered(
    loop: Loop, step: int | None, weights: dict[int, dict[str, torch.Tensor]]
) -> int:
    state = recover(loop.folder / "run", step, staging=loop.folder / "staging")
    found = state.model_state_dict()
    for name, value in weights[state.step].items():
        assert torch.equal(found[name], value), name
    return state.step


def test_a_kill_costs_no_step_and_every_step_since_the_older_image_comes_back(
    tmp_path: Path,
) -> None:
    with testing.limits(staging_chunk_bytes=64):
        loop = loop_in(tmp_path, snapshot_every=12)
        weights = trained(loop, 40)
        stats = loop.checkpointer.stats()
        loop.die()
    kept = stats["kept_steps"]
    assert 12 <= kept < 40
    assert assert_recovered(loop, None, weights) == 40
    for step in range(40 - kept, 41):
        assert assert_recovered(loop, step, weights) == step


def small(folder: Path, **settings: Any) -> Loop:
    """A loop whose ring holds some steps of its small model alone."""
    return loop_in(folder, **settings)


def test_images_that_stay_in_memory_do_not_become_durable(tmp_path: Path) -> None:
    with testing.limits(staging_chunk_bytes=64):
        loop = loop_in(tmp_path, snapshot_every=12)
        trained(loop, 12 * 3 + 1)
