"""Rolling snapshots in a live run: what ends a cycle, what takes its place, and what survives."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.collecting import collect_run
from lowdiff.compressors import Cast, PowerSGD, TopK
from lowdiff.persistence.catalog import SnapshotSet, scan
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.values import same
from lowdiff.recovery.verify import verify
from lowdiff.stager import Stager
from tests.face.loops import Loop, wait_until
from tests.mounts import tmpfs_or_skip


def rolling_loop(folder: Path, **settings: Any) -> Loop:
    chosen = {"snapshot": "rolling", "snapshot_every": 6, "batch_size": 2, **settings}
    return Loop(folder, settings=chosen)


def stager_of(loop: Loop) -> Stager:
    opened = loop.checkpointer._opened
    assert opened is not None
    return opened.session.stager


def snapshots(folder: Path) -> list[SnapshotSet]:
    return list(scan(RunFolder(folder / "run")).snapshots)


def bases(folder: Path) -> dict[int, int]:
    """Step of each snapshot -> its first base."""
    return {s.step: s.first_base for s in snapshots(folder)}


def trained(
    loop: Loop, until: int, inside: Callable[[int], None] = lambda step: None
) -> dict[int, Any]:
    """Attach and train; what the model was after each step."""
    start = loop.attach()
    live = {start: loop.weights()}
    for step in loop.checkpointer.steps(until):
        loop.step(step)
        inside(step + 1)
        live[step + 1] = loop.weights()
    return live


def check(folder: Path, live: dict[int, Any]) -> None:
    """Every step comes back, and rolling snapshots are what replay makes of those before."""
    for step, weights in live.items():
        state = lowdiff.recover(folder / "run", step, staging=folder / "staging")
        assert same(dict(state.model_state_dict()), weights), f"step {step}"
    report = verify(folder / "run", folder / "staging")
    assert report.ok, report.failures


def test_a_cycle_ends_at_every_multiple_and_holds_blocks_of_its_steps(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path)
    live = trained(loop, 15)
    assert loop.checkpointer.stats()["snapshots"] == 3
    loop.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 6: 1, 12: 7, 15: 15}
    check(tmp_path, live)
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_what_a_compressor_keeps_beside_residuals_is_in_a_rolling_image(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path, compressor=PowerSGD(2))
    live = trained(loop, 7)
    wait_until(lambda: bases(tmp_path) == {0: 0, 6: 1})
    loop.die()
    check(tmp_path, live)
    state = lowdiff.recover(tmp_path / "run", 6, staging=tmp_path / "staging")
    assert set(state.residuals[0]) == {"0.weight", "0.weight/warm_start"}
    shutil.rmtree(tmp_path / "staging")
    again = rolling_loop(tmp_path, compressor=PowerSGD(2))
    assert again.attach() == 6
    assert same(again.weights(), live[6])
    again.step(6)
    again.die()


@pytest.mark.slow
def test_the_image_of_an_atomic_snapshot_takes_no_memory_once_cycles_run(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path)
    trained(loop, 2)
    assert not list((tmp_path / "staging").rglob("snapshot"))
    loop.die()


def test_a_last_snapshot_takes_the_place_of_a_rolling_one_of_its_step(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path)
    live = trained(loop, 12)
    loop.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 6: 1, 12: 12}, "only an atomic one holds that residual"
    assert not (tmp_path / "staging").exists() or not list((tmp_path / "staging").iterdir())
    check(tmp_path, live)


def test_optimizer_state_that_appears_in_a_cycle_begins_another(tmp_path: Path) -> None:
    class Late(nn.Module):
        """Its second half is used from step 3 on."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(20, 60), nn.Linear(60, 60)
            self.steps = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            hidden: torch.Tensor = self.first(inputs)
            return hidden if self.steps < 3 else hidden + self.second(hidden)

    loop = Loop(tmp_path, model=Late(), settings={"snapshot": "rolling", "snapshot_every": 6})
    live = trained(loop, 8)
    loop.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 6: 3, 8: 8}
    check(tmp_path, live)


def test_a_step_that_cannot_be_replayed_ends_a_cycle(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path)

    def clamp(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                next(loop.model.parameters()).clamp_(-0.1, 0.1)

    live = trained(loop, 8, clamp)
    loop.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 3: 3, 6: 4, 8: 8}
    check(tmp_path, live)


def test_a_life_that_begins_late_in_a_cycle_takes_an_atomic_snapshot(tmp_path: Path) -> None:
    first = rolling_loop(tmp_path)
    live = trained(first, 4)
    first.die()
    second = rolling_loop(tmp_path)
    live |= trained(second, 8)
    wait_until(lambda: 6 in bases(tmp_path))
    second.die()
    third = rolling_loop(tmp_path)
    live |= trained(third, 14)
    third.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 6: 6, 12: 9, 14: 14}
    check(tmp_path, live)


@pytest.mark.slow
def test_steps_that_are_kept_for_ever_are_atomic(tmp_path: Path) -> None:
    retention = lowdiff.Retention(2, every_steps=12)
    loop = rolling_loop(tmp_path, retention=retention)
    trained(loop, 26)
    loop.checkpointer.close()
    assert bases(tmp_path) == {12: 12, 24: 24, 26: 26}
    state = lowdiff.recover(tmp_path / "run", 12, staging=tmp_path / "staging")
    assert state.base_step == 12


def test_retention_keeps_what_a_cycle_needs(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path, retention=1, snapshot_every=4)
    live = trained(loop, 14)
    wait_until(lambda: set(bases(tmp_path)) == {8, 12})
    loop.die()
    assert bases(tmp_path) == {8: 5, 12: 9}
    check(tmp_path, {step: live[step] for step in range(8, 15)})
    with pytest.raises(lowdiff.LowDiffError, match="no snapshot lies at or before it"):
        lowdiff.recover(tmp_path / "run", 7, staging=tmp_path / "staging")
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.recoverable == ((8, 14),)


def test_a_kill_while_an_atomic_snapshot_takes_a_rolling_ones_place_loses_nothing(
    tmp_path: Path,
) -> None:
    loop = rolling_loop(tmp_path, retention=1, snapshot_every=4)
    live = trained(loop, 12)
    wait_until(lambda: set(bases(tmp_path)) == {8, 12})
    loop.die()
    # As `close()` leaves it between the manifest that goes and the one that comes.
    (tmp_path / "run/snapshots/i000000-s0000000012/rank-0000.json").unlink()
    check(tmp_path, {step: live[step] for step in range(8, 13)})
    again = rolling_loop(tmp_path, retention=1, snapshot_every=4)
    assert again.attach() == 12
    again.checkpointer.close()
    assert bases(tmp_path) == {12: 12}


def test_a_writer_that_dies_in_a_cycle_has_a_successor_that_completes_it(tmp_path: Path) -> None:
    loop = rolling_loop(tmp_path, snapshot_every=12)

    def kill(step: int) -> None:
        if step in (4, 9):
            writer = stager_of(loop).writer
            wait_until(lambda: writer.status().durable_step >= step - 2)
            os.kill(writer._process.pid, signal.SIGKILL)
            writer._process.wait()

    live = trained(loop, 14, kill)
    assert loop.checkpointer.stats()["writer_restarts"] == 2
    loop.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 12: 1, 14: 14}
    check(tmp_path, live)


def test_an_atomic_snapshot_takes_the_place_of_a_cycle_that_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = rolling_loop(tmp_path)
    live = trained(loop, 4)
    partials: list[Path] = []

    def has_begun() -> bool:
        partials[:] = (tmp_path / "run").rglob("*.safetensors.partial")
        return bool(partials) and partials[0].stat().st_size > 0  # else there is nothing to lose

    wait_until(has_begun)
    partials[0].write_bytes(b"")
    steps = loop.checkpointer.steps(12)
    with caplog.at_level(logging.WARNING):
        for step in steps:
            loop.step(step)
            live[step + 1] = loop.weights()
            if step == 6:
                wait_until(lambda: loop.checkpointer.stats()["durable_step"] >= 6)
                wait_until(lambda: "no rolling snapshot of step 6" in caplog.text or poll(loop))
    loop.checkpointer.close()
    found = bases(tmp_path)
    assert 6 not in found
    assert min(step for step in found if step > 0) in (7, 8)
    del live[12]
    live[12] = loop.weights()
    check(tmp_path, live)


def poll(loop: Loop) -> bool:
    """Let the trainer look at what its writer says."""
    stager_of(loop).is_lost(0)
    return False


@pytest.mark.slow
def test_a_cycle_whose_slices_were_dropped_never_counts(tmp_path: Path) -> None:
    """With ``backpressure="degrade"`` and a writer that stands still."""
    with tmpfs_or_skip(tmp_path / "memory", 4) as memory:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
        loop = Loop(tmp_path, model=model)
        loop.checkpointer = lowdiff.Checkpointer(
            tmp_path / "run",
            staging=memory,
            compressor=TopK(0.1),
            snapshot="rolling",
            snapshot_every=800,
            batch_size=2,
            retention=None,
            backpressure="degrade",
        )
        loop.attach()
        writer = stager_of(loop).writer._process
        steps = loop.checkpointer.steps(100_000)
        for step in steps:
            loop.step(step)
            if step == 5:
                os.kill(writer.pid, signal.SIGSTOP)
            if loop.checkpointer.stats()["dropped_steps"]:
                break
        os.kill(writer.pid, signal.SIGCONT)
        next(steps)
        for step in steps:
            loop.step(step)
            if loop.checkpointer.stats()["snapshots"] > 1:
                break
        loop.checkpointer.close()
        state = lowdiff.recover(tmp_path / "run", staging=memory)
        assert same(dict(state.model_state_dict()), loop.weights())
        assert not [s for s in snapshots(tmp_path) if s.is_rolling]


def test_a_cycle_ends_where_staging_memory_is_the_least_that_attach_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_it(*_: object, **facts: object) -> None:
        raise AssertionError(f"training waits for ever: {facts}")

    monkeypatch.setattr("lowdiff.stager._NOTICE_SECONDS", 20.0)
    monkeypatch.setattr("lowdiff.stager.log_event", end_it)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60_000), nn.ReLU(), nn.Linear(60_000, 3))
    with tmpfs_or_skip(tmp_path / "memory", 28) as memory:
        # Slices and differentials of 3 MB each, in a log of 5.
        settings = {"snapshot": "rolling", "snapshot_every": 4, "batch_size": 1}
        loop = Loop(tmp_path, model, settings={"staging": memory, "compressor": Cast(), **settings})
        trained(loop, 6)
        loop.checkpointer.close()
    assert bases(tmp_path) == {0: 0, 4: 1, 6: 6}


@pytest.mark.slow
def test_a_full_disk_costs_a_cycle_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs_or_skip(tmp_path / "disk", 8) as disk:
        loop = Loop(tmp_path, model=nn.Sequential(nn.Linear(20, 3000), nn.Linear(3000, 3)))
        loop.checkpointer = lowdiff.Checkpointer(
            disk / "run",
            staging=tmp_path / "staging",
            compressor=TopK(0.01),
            snapshot="rolling",
            snapshot_every=8,
            batch_size=2,
            retention=None,
        )
        live = {loop.attach(): loop.weights()}
        steps = loop.checkpointer.steps(14)
        filler = disk / "filler"
        for step in steps:
            loop.step(step)
            live[step + 1] = loop.weights()
            if step == 3:
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            if step == 5:
                wait_until(
                    lambda: bool(poll(loop)) or "no rolling snapshot of step 8" in caplog.text
                )
                filler.unlink()
        loop.checkpointer.close()
        found = {s.step: s.first_base for s in scan(RunFolder(disk / "run")).snapshots}
        assert found[8] == 8, "an atomic one took its place"
        for step, weights in live.items():
            state = lowdiff.recover(disk / "run", step, staging=tmp_path / "staging")
            assert same(dict(state.model_state_dict()), weights)


def test_what_a_damaged_cycle_goes_back_to_is_not_collected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = rolling_loop(tmp_path)
    live = trained(loop, 14)
    wait_until(lambda: bases(tmp_path) == {0: 0, 6: 1, 12: 7})
    loop.die()
    shutil.rmtree(tmp_path / "staging")
    folder = RunFolder(tmp_path / "run")
    damaged = next(path for _, _, first, path in folder.segments() if first == 7)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    newest = lowdiff.recover(tmp_path / "run").step
    assert 6 <= newest < 12
    collect_run(tmp_path / "run", {"snapshots": 1}, [], dry_run=False, as_json=False)
    assert "a differential of its cycle, cannot be read" in caplog.text
    state = lowdiff.recover(tmp_path / "run")
    assert state.step == newest
    assert same(dict(state.model_state_dict()), live[newest])
