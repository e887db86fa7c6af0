"""What replicas left in memory (LowDiff+) is part of plans and listings, as it is of recovery."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lowdiff.errors import StepNotFound
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import same
from lowdiff.recovery import recover, search
from lowdiff.recovery.inspect.inspection import StepRange, forecast, inspect
from lowdiff.recovery.inspect.verify import verify
from tests.unit.cli.commands import Command, command
from tests.unit.loops import Loop, wait_until

__all__ = ["command"]  # fixtures

#: The replica holds the first of these; the rest is in its queue, and of the first steps nothing is.
HELD, STEPS = 24, 27


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run without a compressor whose trainer and replica died, and its weights by then.

    Only its base is on disk.
    """
    folder = tmp_path_factory.mktemp("killed")
    model = nn.Sequential(nn.Linear(20, 8000), nn.Linear(8000, 3))
    loop = Loop(folder, model, settings={"compressor": None, "snapshot_every": 1000})
    loop.attach()
    for number in range(STEPS):
        if number == HELD:
            wait_until(lambda: loop.checkpointer.stats()["replica_step"] == HELD)
            os.kill(loop.checkpointer.stats()["replica_pid"], signal.SIGSTOP)
        loop.step(number)
        loop.checkpointer.commit()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    loop.die()
    return folder, weights


def test_inspect_lists_the_steps_in_memory(killed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, weights = killed
    found = inspect(folder / "run", folder / "staging")
    assert found.in_memory == found.recoverable == StepRange(HELD, STEPS)
    assert found.recoverable_ranges == (StepRange(0, 0), StepRange(HELD, STEPS))
    for step in range(HELD, STEPS + 1):
        state = recover(folder / "run", step, staging=folder / "staging")
        assert state.step == step
    assert same(dict(state.model_state_dict()), weights)
    without = inspect(folder / "run", folder / "nowhere")
    assert (without.in_memory, without.recoverable) == (None, StepRange(0, 0))


def test_a_plan_begins_where_recovery_would(killed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = killed
    found = forecast(folder / "run", None, folder / "staging")
    assert (found.step, found.base, found.in_memory) == (STEPS, HELD, True)
    assert found.differentials == STEPS - HELD
    assert found.base_path.startswith(str(folder / "staging"))
    assert found.snapshot_bytes > 0
    base = forecast(folder / "run", 0, folder / "staging")
    assert (base.step, base.in_memory) == (0, False)
    with pytest.raises(StepNotFound, match=r"recoverable steps: 0$"):
        forecast(folder / "run", HELD - 1, folder / "staging")


def test_the_commands_say_that_it_is_in_memory(
    command: Command, killed: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, _ = killed
    asked = [folder / "run", "--staging", folder / "staging"]
    rows = [" ".join(line.split()) for line in command("inspect", *asked).out.splitlines()]
    held = f"{HELD} to {STEPS}"
    assert f"recoverable steps 0, {held} ({held}: in memory, until a reboot)" in rows
    document = json.loads(command("inspect", *asked, "--json").out)
    assert document["in_memory"] == {"first": HELD, "last": STEPS}
    planned = command("recover", *asked, "--plan").out
    assert planned.startswith(f"Step {STEPS} of ")
    assert f"base         step {HELD} in memory, which a reboot ends" in planned
    verified = command("verify", *asked)
    assert verified.code == 0
    assert f"Rebuilt {held} from memory, which a reboot ends" in verified.out
    assert verified.out.endswith(f"The run is whole; recoverable steps: 0, {held}\n")


def test_verify_rebuilds_what_is_in_memory(
    killed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, _ = killed
    report = verify(folder / "run", folder / "staging")
    assert report.ok
    assert report.in_memory == (HELD, STEPS)
    assert report.recoverable == ((0, 0), (HELD, STEPS))

    shutil.copytree(folder, tmp_path / "copy")
    (state,) = (tmp_path / "copy/staging").rglob("replica-????????")
    data = bytearray(state.read_bytes())
    data[data.index(b"places") + 1] ^= 1
    state.write_bytes(data)
    damaged = verify(tmp_path / "copy/run", tmp_path / "copy/staging")
    assert damaged.in_memory is None
    assert damaged.recoverable == ((0, 0),)


def test_memory_that_cannot_be_used_is_a_failure(
    killed: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = killed

    def shares_joined(*_: object) -> None:
        raise ValueError("does not fit")

    monkeypatch.setattr(search, "shares_joined", shares_joined)
    report = verify(folder / "run", folder / "staging")
    assert report.in_memory is None
    (failure,) = report.failures
    assert failure.message.startswith("what replicas left in memory cannot be used: ")
    assert "does not fit" in failure.message


def test_memory_that_somebody_keeps_is_not_read(
    killed: tuple[Path, dict[str, torch.Tensor]],
    limits: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, _ = killed
    limits(memory_patience_seconds=0.1)
    (path,) = (folder / "staging").rglob("replica-????????")
    lock = FileLock(StagingFolder(path.parent, 0, 0).replica_lock)
    assert lock.acquire("somebody")
    try:
        report = verify(folder / "run", folder / "staging")
        found = inspect(folder / "run", folder / "staging")
    finally:
        lock.release()
    assert report.ok
    assert report.in_memory is None
    assert "in use by somebody" in report.notes[0].message
    assert (found.in_memory, found.recoverable) == (None, StepRange(0, 0))
    assert "in use by somebody" in caplog.text


def test_a_live_trainer_keeps_its_memory_to_itself(tmp_path: Path) -> None:
    loop = Loop(tmp_path, nn.Linear(20, 3), settings={"compressor": None, "snapshot_every": 100})
    loop.attach()
    for number in loop.checkpointer.steps(4):
        loop.step(number)
        assert inspect(tmp_path / "run", tmp_path / "staging").in_memory is None
    loop.checkpointer.close()
    found = inspect(tmp_path / "run", tmp_path / "staging")
    assert (found.in_memory, found.recoverable) == (None, StepRange(4, 4))
