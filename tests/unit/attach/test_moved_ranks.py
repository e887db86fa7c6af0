"""Machines that come back in another order: each makes durable what lies in its memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import small_model


def live(
    rank: int, world_size: int, folder: str, machines: str, run: str, store: str | None, until: int
) -> tuple[int, dict[str, torch.Tensor]]:
    """A life that is killed before anything but its base is durable: its begin and its weights."""
    machine = f"{folder}/{machines[rank]}"
    model = wrapped(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        run.format(machine=machine, folder=folder),
        compressor=TopK(0.1),
        staging=f"{machine}/staging",
        store=store,
        batch_size=1000,
        snapshot_every=1000,
    )
    resumed = checkpointer.attach(model, optimizer)
    for step in checkpointer.steps(until):
        optimizer.zero_grad()
        model(torch.full((4, 20), step + rank + 1.0)).square().mean().backward()
        optimizer.step()
    testing.kill(checkpointer)
    return resumed, {name: value.clone() for name, value in model.module.state_dict().items()}


def recovered_from(run: str, expected: dict[str, torch.Tensor]) -> int:
    found = lowdiff.recover(run, step=5)
    state = found.model_state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    return found.step


def test_all_that_was_staged_is_durable_when_attach_returns(pool: Pool, tmp_path: Path) -> None:
    run = "{folder}/run"
    lives = pool.run(live, 2, str(tmp_path), "AB", run, None, 5)
    again = pool.run(live, 2, str(tmp_path), "BA", run, None, 6)
    assert [resumed for resumed, _ in again] == [5, 5]
    assert not list(tmp_path.glob("*/staging/*/i000000-*"))
    for machine in "AB":
        shutil.rmtree(tmp_path / machine)
    assert recovered_from(str(tmp_path / "run"), lives[0][1]) == 5


def test_what_ranks_that_are_no_more_left_on_a_machine_is_adopted_by_one_that_is(
    pool: Pool, tmp_path: Path
) -> None:
    run = "{folder}/run"
    lives = pool.run(live, 2, str(tmp_path), "AA", run, None, 5)
    for begins in (5, 6):  # the first starts with a snapshot, so its attach does not wait for them
        ((resumed, _),) = pool.run(live, 1, str(tmp_path), "A", run, None, begins + 1)
        assert resumed == begins
    assert not list(tmp_path.glob("A/staging/*/i000000-*"))
    shutil.rmtree(tmp_path / "A")
    assert recovered_from(str(tmp_path / "run"), lives[0][1]) == 5


def test_all_of_it_is_in_the_store_though_each_machine_sees_only_its_own_files(
    pool: Pool, tmp_path: Path
) -> None:
    run, store = "{machine}/run", f"file://{tmp_path}/store"
    lives = pool.run(live, 2, str(tmp_path), "AB", run, store, 5)
    again = pool.run(live, 2, str(tmp_path), "BA", run, store, 6)
    assert [resumed for resumed, _ in again] == [5, 5]
    for machine in "AB":
        shutil.rmtree(tmp_path / machine)
    assert recovered_from(store, lives[0][1]) == 5
