from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benches.peers.arm import Task
from benches.peers.cells import Plan, Settings, is_done, plan_cells
from benches.peers.environments import REQUIREMENTS, CannotRun, last_error, python_of
from benches.peers.figures import figures
from benches.peers.full_state import newest_that_loads, remove_old
from benches.peers.processes import Cell
from benches.peers.systems import QUICK, SYSTEMS
from benches.peers.tables import of_peers

SETTINGS = Settings(
    seed=0, block_steps=2, rounds=2, kills=2, last_kill=4, history=(10,), timeout_seconds=60.0
)


def restored(step: int, difference: float | None = 0.0) -> dict[str, Any]:
    compared = {"bit_identical": difference == 0, "largest_difference": difference}
    return {
        "restore_seconds": 1.0,
        "first_step_seconds": 0.5,
        "bytes_read": 100,
        "step": step,
        **(compared if difference is not None else {}),
    }


def samples(**changes: Any) -> dict[str, Any]:
    """Steps of 1 s; saving makes them 1.5 s, and a block's drain takes 1 s."""
    return {
        "overhead": {
            "pairs": [(4.0, 2.0), (4.0, 2.0), (4.0, 2.2), (4.0, 2.0)],
            "plain_seconds": [[1.0, 1.0], [1.0, 1.0], [1.1, 1.1], [1.0, 1.0]],
            "saved_seconds": [[1.5, 1.5]] * 4,
            "call_seconds": [[0.5, 0.5]] * 4,
            "written_bytes": [200] * 4,
            "times": {"ready": 10.0, "opened": 11.0, "warm": 12.0, "done": 20.0},
            "memory": [(9.0, 1000), (11.5, 9999), (15.0, 1600), (19.0, 1500), (21.0, 8888)],
        },
        "restore": [restored(10)],
        "kills": [{"completed": 7, "restored": 5}, {"completed": 6, "restored": 7}],
        "recoveries": {"10": {"ranks": [restored(10), restored(10)]}},
        **changes,
    }


def test_the_drain_counts_and_the_noise_is_told() -> None:
    found = figures(samples())
    assert found["ratio"] == pytest.approx(2.0)
    assert found["ratio_without_drain"] == pytest.approx(1.5)
    assert found["null_ratio"] == pytest.approx(1.1), "the first block after a round's last"
    assert found["stall_p50_seconds"] == pytest.approx(0.5)
    assert found["bytes_per_step"] == 100
    assert found["bytes_per_day"] == pytest.approx(100 * 86_400 / 2.0)


def test_memory_is_that_of_the_measured_blocks_less_what_there_was_before() -> None:
    assert figures(samples())["added_memory_bytes"] == 600


def test_steps_are_lost_only_if_they_had_been_completed() -> None:
    found = figures(samples())
    assert (found["steps_lost_mean"], found["steps_lost_high"]) == (1.0, 2)


def test_bytes_are_those_of_all_ranks_and_seconds_those_of_the_slowest() -> None:
    found = figures(samples())
    assert found["after_10/bytes_read"] == 200
    assert found["after_10/first_step_seconds"] == 1.5
    assert found["bit_identical"] is True


@pytest.mark.parametrize("other", [restored(10, 1e-3), restored(9, None)])
def test_other_bits_or_an_earlier_step_are_not_identical(other: dict[str, Any]) -> None:
    found = figures(samples(restore=[other]))
    assert found["bit_identical"] is False


def test_a_cell_is_done_only_if_it_ran_under_the_same_settings() -> None:
    settings = {**asdict(SETTINGS), "history": [10]}
    assert is_done({"settings": settings, "summary": {"ratio": 1.0}}, SETTINGS)
    assert not is_done({"settings": settings, "summary": {}}, SETTINGS), "it could not run"
    assert not is_done({"settings": {**settings, "seed": 1}, "summary": {"ratio": 1.0}}, SETTINGS)
    assert not is_done(None, SETTINGS)


def test_cells_that_are_compared_lie_together() -> None:
    names = [plan.name for plan in plan_cells(["a", "b"], ["10M"], [1, 2])]
    assert names == ["10Mx1/a", "10Mx1/b", "10Mx2/a", "10Mx2/b"]


def test_the_quick_systems_need_no_environment_and_the_others_one_that_is_pinned() -> None:
    assert all(SYSTEMS[name].environment == "" for name in QUICK)
    used = {system.environment for system in SYSTEMS.values()} - {""}
    assert used == REQUIREMENTS.keys()
    assert all("==" in text for texts in REQUIREMENTS.values() for text in texts)


def test_an_environment_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benches.peers.environments.sys.executable", str(tmp_path / "none"))
    (tmp_path / "none").write_text("#!/bin/sh\necho 'ERROR: no such thing' >&2; exit 3\n")
    (tmp_path / "none").chmod(0o755)
    with pytest.raises(CannotRun, match="ERROR: no such thing"):
        python_of("orbax", tmp_path)


def test_a_task_comes_back_from_its_text(tmp_path: Path) -> None:
    task = Task("train", "orbax", "10M", 2, 3, tmp_path, tmp_path / "memory", tmp_path, 4, 8, 5)
    assert Task.from_json(task.to_json()) == task


def test_what_a_cell_left_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWDIFF_BENCH_CELL", tmp_path.name)
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    monkeypatch.delenv("LOWDIFF_BENCH_CELL")
    other = subprocess.Popen(["sleep", "600"])
    cell = Cell(Path(sys.executable), tmp_path.name, timeout_seconds=1.0)
    waiting = threading.Thread(target=left.wait)  # else its remains would be a member for ever
    waiting.start()
    try:
        while not cell.members():  # in the midst of exec, a process has no environment in /proc
            time.sleep(0.01)
        assert cell.members() == [left.pid]
        cell.clean_up()
        waiting.join(5)
        assert (left.poll(), other.poll()) == (-signal.SIGKILL, None)
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_the_telling_line_of_an_output_is_its_last_error() -> None:
    assert last_error("Traceback:\nValueError: no\nwarning: leaked\n") == "ValueError: no"
    assert last_error("one\ntwo\n") == "two"


def test_a_torn_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    loaded = []

    def load(path: Path) -> None:
        if path.name == "step-00000003":
            raise EOFError("cut off")
        loaded.append(path.name)

    saved = [(step, tmp_path / f"step-{step:08d}") for step in (3, 2, 1)]
    assert newest_that_loads(saved, load, (EOFError,)) == 2
    assert loaded == ["step-00000002"]
    assert newest_that_loads(saved[:1], load, (EOFError,)) == 0


def test_old_checkpoints_are_removed_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("step-00000009.pt", "step-00000010.pt", "2", "11"):
        path = tmp_path / name
        path.mkdir() if name.isdigit() else path.touch()
    (tmp_path / "latest").touch()
    remove_old(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000010.pt", "11", "latest"}


def test_a_system_that_cannot_run_is_told_with_its_reason() -> None:
    plan = asdict(Plan("orbax", "10M", 2))
    cells = {
        "a": {"plan": plan, "samples": samples(), "summary": figures(samples())},
        "b": {"plan": plan, "summary": {}, "cannot_run": "no wheel"},
    }
    systems = {"orbax": {"label": "Orbax"}}
    text = of_peers({"settings": {"systems": systems}, "samples": cells})
    assert "**10M parameters, 2 ranks**" in text
    assert "| Orbax | +100.0 % |" in text
    assert "Orbax: cannot run here: `no wheel`" in text
