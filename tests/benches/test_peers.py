from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benches.bench_peers import is_inexact
from benches.peers.arm import Place, Task
from benches.peers.cells import Plan, Settings, is_done, plan_cells, settled
from benches.peers.environments import REQUIREMENTS, CannotRun, last_error, python_of
from benches.peers.figures import figures, slowest
from benches.peers.full_state import newest_that_loads, remove_old
from benches.peers.gemini import Gemini, shares_of
from benches.peers.histories import INSTANT
from benches.peers.processes import Cell
from benches.peers.restoring import differences
from benches.peers.systems import QUICK, SYSTEMS
from benches.peers.tables import of_peers
from benches.peers.training import MODELS, Training
from tests.crash.pool import Pool
from tests.unit.loops import wait_until

pytestmark = pytest.mark.slow

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


def timed(pairs: list[list[float]], steps: list[float]) -> dict[str, Any]:
    return {
        "pairs": pairs,
        "dense_blocks": [],
        "sync_seconds": [0.0],
        "saved_seconds": [steps],
        "loop_seconds": [sum(steps)],
    }


def killed(completed: int, step: int, *, while_saving: bool = False) -> dict[str, Any]:
    return {"completed": completed, "while_saving": while_saving, "ranks": [restored(step)]}


def samples(**changes: Any) -> dict[str, Any]:
    """Steps of 1 s; saving makes them 1.5 s, and a block's drain takes 1 s."""
    return {
        "overhead": {
            "pairs": [(4.0, 2.0), (4.0, 2.0), (4.0, 2.2), (4.0, 2.0)],
            "plain_seconds": [[1.0, 1.0], [1.0, 1.0], [1.1, 1.1], [1.0, 1.0]],
            "saved_seconds": [[1.5, 1.5]] * 4,
            "loop_seconds": [3.0] * 4,
            "call_seconds": [[0.5, 0.5]] * 4,
            "sync_seconds": [1.0] * 4,
            "num_saved": [2, 2, 1, 2],
            "written_bytes": [200] * 4,
            "dense_blocks": [1.0, 2.0],
            "num_steps": 10,
            "times": {"begun": 8.5, "ready": 10.0, "opened": 11.0, "warm": 12.0, "done": 20.0},
            "memory": [
                *((8.0, 7777), (8.6, 900), (9.0, 1000), (9.5, 800)),
                *((11.5, 9999), (15.0, 1600), (19.0, 1500), (21.0, 8888)),
            ],
        },
        "restore": [restored(10)],
        "restore_from_files": [restored(8, None)],
        "kills": [killed(7, 5), killed(6, 7, while_saving=True)],
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
    assert found["ratio_all_paid"] == pytest.approx((16.0 + 4.0) / 8.2)


def test_what_compression_costs_is_told_where_there_is_any() -> None:
    assert figures(samples())["ratio_over_dense"] == pytest.approx((16.0 + 4.0) / (2 * 3.0))
    dense = {**samples()["overhead"], "dense_blocks": []}
    assert "ratio_over_dense" not in figures(samples(overhead=dense))


def test_steps_that_were_left_out_are_told() -> None:
    assert figures(samples())["share_saved"] == 7 / 8


def test_several_ranks_are_as_slow_as_the_slowest_of_each_block() -> None:
    ranks = [
        timed([[2.0, 1.0], [2.0, 1.5]], steps=[1.0, 1.1]),
        timed([[3.0, 1.0], [1.0, 1.0]], steps=[1.2, 0.9]),
    ]
    found = slowest(ranks)
    assert found["pairs"] == [[3.0, 1.0], [2.0, 1.5]]
    assert found["loop_seconds"] == [2.1]
    assert found["saved_seconds"] == [[1.0, 1.1]], "a stall that others wait for counts once"


def test_bytes_alone_are_those_of_the_steps_that_were_saved() -> None:
    found = {"written_bytes": 600, "num_saved": 6}
    assert figures({"bytes_only": found}) == {"bytes_per_step": 100.0}


def test_memory_is_that_of_the_measured_blocks_less_what_there_was_before() -> None:
    assert figures(samples())["added_memory_bytes"] == 600


def test_steps_are_lost_only_if_they_had_been_completed() -> None:
    found = figures(samples())
    assert (found["steps_lost_mean"], found["steps_lost_high"]) == (1.0, 2)
    assert (found["made_steps_lost_mean"], found["made_steps_lost_high"]) == (1.0, 2)
    saving = figures(samples(kills=[killed(7, 7, while_saving=True)]))
    assert (saving["steps_lost_high"], saving["made_steps_lost_high"]) == (0, 1)
    assert (found["kills"], found["kills_while_saving"]) == (2, 1)
    assert found["steps_lost_with_memory"] == 2
    assert found["bit_identical_from_files"] is False, "an earlier step was not compared"


def test_bytes_are_those_of_all_ranks_and_seconds_those_of_the_slowest() -> None:
    found = figures(samples())
    assert found["after_10/bytes_read"] == 200
    assert found["after_10/first_step_seconds"] == 1.5
    assert found["bit_identical"] is True


@pytest.mark.parametrize("other", [restored(10, 1e-3), restored(9, None)])
def test_other_bits_or_an_earlier_step_are_not_identical(other: dict[str, Any]) -> None:
    assert figures(samples(restore=[other]))["bit_identical"] is False


def test_other_bits_after_a_kill_are_not_identical() -> None:
    torn = {**killed(7, 7), "ranks": [restored(7), restored(7, 1e-3)]}
    found = figures(samples(kills=[torn]))
    assert (found["bit_identical"], found["bit_identical_after_kills"]) == (False, False)


def test_where_nothing_came_back_there_are_no_other_bits() -> None:
    nothing = {**killed(7, 0), "ranks": [restored(0, None)]}
    found = figures(samples(kills=[nothing, killed(7, 7)]))
    assert (found["steps_lost_high"], found["bit_identical_after_kills"]) == (7, True)
    assert found["bit_identical"] is False


@pytest.mark.parametrize(
    ("system", "is_wrong"), [("lowdiff_topk", True), ("dlrover_memory", False)]
)
def test_only_lowdiffs_other_bits_are_the_benchs_failure(system: str, is_wrong: bool) -> None:
    plan = asdict(Plan(system, "10M", 2))
    assert is_inexact({"plan": plan, "summary": {"bit_identical": False}}) is is_wrong
    assert not is_inexact({"plan": plan, "summary": {"bit_identical": True}})
    assert not is_inexact({"plan": plan, "summary": {}}), "bytes only, or it cannot run"


def test_what_a_kill_left_is_told_apart_from_what_a_history_lacks() -> None:
    found = figures(samples(restore=[restored(9, None)]))
    assert (found["bit_identical"], found["bit_identical_after_kills"]) == (False, True)


def test_a_cell_is_done_only_if_it_ran_here_under_the_same_settings() -> None:
    settings = {**asdict(SETTINGS), "history": [10]}
    ran = {"settings": settings, "machine": {"processor": "this"}, "summary": {"ratio": 1.0}}
    assert is_done(ran, SETTINGS, "this")
    assert not is_done(ran, SETTINGS, "another")
    assert not is_done({**ran, "summary": {}}, SETTINGS, "this"), "it could not run"
    assert not is_done({**ran, "settings": {**settings, "seed": 1}}, SETTINGS, "this")
    assert not is_done(None, SETTINGS, "this")


def test_a_cell_measures_what_its_size_and_its_ranks_can_afford() -> None:
    left_to_it = replace(SETTINGS, rounds=0, history=())
    one, two = (settled(left_to_it, Plan("orbax", "10M", ranks)) for ranks in (1, 2))
    assert (one.rounds, one.history) == (5, (10, 100, 1000))
    assert two.history == (10, 100)
    assert settled(SETTINGS, Plan("orbax", "10M", 1)) == SETTINGS


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


#: Takes the place of an interpreter, and is told by its arguments what that would run.
DIARIST = f"""#!{sys.executable}
import pathlib, struct, sys, time
diary = open(pathlib.Path(sys.argv[3]).parent / "diary-0", "wb", buffering=0)
while True:
    time.sleep(0.2)
    diary.write(struct.pack("<d", time.monotonic()))
    time.sleep(1.0)  # of which 0.16 are left when the kill comes
    diary.write(struct.pack("<d", time.monotonic()))
"""


@pytest.mark.parametrize("while_saving", [True, False])
def test_a_kill_strikes_in_the_call_if_it_is_to(tmp_path: Path, while_saving: bool) -> None:
    task = Task("kill", "orbax", "10M", 1, 3, tmp_path, tmp_path / "memory", tmp_path, 4, 8, 5)
    diarist = tmp_path / "diarist"
    diarist.write_text(DIARIST)
    diarist.chmod(0o755)
    cell = Cell(diarist, tmp_path.name, timeout_seconds=60.0)
    found = cell.kill_midway(task, random.Random(0), least_steps=3, while_saving=while_saving)
    entries = task.diary(0).stat().st_size // INSTANT.size
    wait_until(lambda: not cell.members())
    assert (found.completed, found.while_saving) == (8 + entries // 2, entries % 2 == 1)
    assert found.completed in (8 + 3, 8 + 4)
    assert found.while_saving or not while_saving


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


def same_on_all_ranks() -> Training:
    return Training(MODELS["tiny"], seed=0, rank=0, num_ranks=1, is_sketch=True)


def gemini(folder: Path, rank: int, num_ranks: int) -> Gemini:
    return Gemini(Place(folder, folder / "memory", rank, num_ranks, 1, 1))


def keep_steps(rank: int, num_ranks: int, folder: Path, last: int) -> None:
    """A pool's job: train, keep every step by Gemini, and leave what must come back."""
    (folder / "memory").mkdir(exist_ok=True)
    training = same_on_all_ranks()
    arm = gemini(folder, rank, num_ranks)
    arm.open(training)
    for step in range(1, last + 1):
        training.step(step)
        assert arm.after_step(step)
        if rank == 0:
            torch.save(training.state(), folder / f"{step}.pt")
    arm.drain()
    dist.barrier()  # else connections end from which another rank still reads


def step_back(training: Training, folder: Path, num_ranks: int) -> int:
    """The step to which Gemini restores; each bit of it must be there."""
    step = gemini(folder, 0, num_ranks).restore(training)
    if step:
        expected = torch.load(folder / f"{step}.pt", weights_only=True)
        assert differences(training.state(), expected)["bit_identical"]
    return step


def mark_of(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), sys.byteorder)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gemini_goes_back_to_the_newest_step_that_is_whole_in_some_memory(
    pool: Pool, tmp_path: Path, num_ranks: int
) -> None:
    pool.run(keep_steps, num_ranks, tmp_path, 3)
    memory = tmp_path / "memory"
    assert sorted(map(mark_of, memory.iterdir())) == sorted([2, 3] * 2 * num_ranks)
    assert step_back(same_on_all_ranks(), tmp_path, num_ranks) == 3

    for path in memory.glob("share-*-at-1-*"):  # the machine of rank 1 is lost
        path.unlink()
    assert step_back(same_on_all_ranks(), tmp_path, num_ranks) == 3

    with max(memory.glob("share-0-at-0-*"), key=mark_of).open("r+b") as file:
        file.write(bytes(8))  # as a kill in the midst of step 3 leaves it
    assert step_back(same_on_all_ranks(), tmp_path, num_ranks) == 2

    for path in memory.glob("share-1-*"):
        path.unlink()
    assert step_back(same_on_all_ranks(), tmp_path, num_ranks) == 0


def test_gemini_restores_into_an_optimizer_that_has_not_stepped(pool: Pool, tmp_path: Path) -> None:
    pool.run(keep_steps, 1, tmp_path, 2)
    training = same_on_all_ranks()
    training.optimizer.zero_grad()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    assert step_back(training, tmp_path, 1) == 2


def test_geminis_shares_are_live_and_hold_every_byte_once() -> None:
    weight, ids, count = torch.arange(1.0, 8.0), torch.tensor([1, 2, 3]), torch.tensor(3.0)
    optimizer = {"state": {0: {"step": count, "name": "x"}}, "param_groups": [{"lr": 0.1}]}
    shares = shares_of({"model": {"weight": weight, "ids": ids}, "optimizer": optimizer}, 3)
    assert [sum(map(len, share)) for share in shares] == [18, 19, 19]
    held = b"".join(part.numpy().tobytes() for share in shares for part in share)
    assert held == b"".join(t.numpy().tobytes() for t in (weight, ids, count))
    for share in shares:
        for part in share:
            part.zero_()
    assert not any(t.any() for t in (weight, ids, count))


def test_a_system_that_cannot_run_is_told_with_its_reason() -> None:
    plan = asdict(Plan("orbax", "10M", 2))
    facts = [
        {
            "plan": plan,
            "commit": commit,
            "machine": {"processor": processor, "load_average_before": [load, 9.0, 9.0]},
        }
        for commit, load, processor in (("abc", 1.5, "One"), ("def", 0.5, "One"), ("abc", 1, "Two"))
    ]
    cells = {
        "a": {**facts[0], "samples": samples(), "summary": figures(samples())},
        "b": {**facts[1], "summary": {}, "cannot_run": "no wheel"},
        "c": {**facts[2], "summary": {}, "cannot_run": "no disk"},
    }
    systems = {"orbax": {"label": "Orbax"}}
    text = of_peers({"settings": {"systems": systems}, "samples": cells})
    one, other = text.split("**10M parameters, 2 ranks, Two**")
    assert one.startswith("**10M parameters, 2 ranks, One**")
    assert "no disk" not in one
    assert "no disk" in other
    assert "| 2 (1) | 1.0 (2) | 1.0 (2) | 2, without error feedback |" in text
    assert "At commits abc, def; load average before a cell 0.5 to 1.5." in text
    assert "| Orbax | 1.000 s | +100.0 % | +81.8 to +100.0 % |" in text
    assert "Orbax: cannot run here: `no wheel`" in text
