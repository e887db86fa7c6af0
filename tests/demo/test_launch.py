from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.demo.launch import Launch, WorkersFailed, is_alive, torchrun_command

# Like torchrun and lowdiff: an agent, workers in sessions of their own, and a detached writer each.
AGENT = """
import subprocess, sys
workers = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1], f"{sys.argv[2]}/writer{rank}"],
                     start_new_session=True)
    for rank in range(2)
]
for worker in workers:
    worker.wait()
"""
WORKER = """
import pathlib, subprocess, sys, time
writer = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path(sys.argv[1] + ".partial").write_text(str(writer.pid))
pathlib.Path(sys.argv[1] + ".partial").rename(sys.argv[1])
time.sleep(60)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    writers = [tmp_path / "writer0", tmp_path / "writer1"]
    with Launch([sys.executable, "-c", AGENT, WORKER, str(tmp_path)], tmp_path / "logs") as launch:
        for writer in writers:
            wait_for(writer)
        yield launch
    for writer in writers:
        os.kill(int(writer.read_text()), signal.SIGKILL)


def test_the_workers_are_the_children_of_the_agent_and_nothing_below(launch: Launch) -> None:
    workers = launch.workers()
    assert len(workers) == 2
    assert all(is_alive(pid) for pid in workers)


def test_a_kill_ends_every_worker_and_spares_what_they_detached(
    launch: Launch, tmp_path: Path
) -> None:
    workers = launch.workers()
    assert launch.kill() == workers
    assert not any(is_alive(pid) for pid in workers)
    assert launch.workers() == []
    assert all(is_alive(int((tmp_path / f"writer{rank}").read_text())) for rank in range(2))


def test_leaving_the_context_leaves_no_worker(launch: Launch) -> None:
    workers = launch.workers()
    launch.close()
    launch.close()
    assert not any(is_alive(pid) for pid in workers)


def python(code: str, folder: Path) -> Launch:
    return Launch([sys.executable, "-c", code, str(folder)], folder)


def test_the_last_record_of_a_short_life_is_not_missed(tmp_path: Path) -> None:
    code = """if True:
        import pathlib, sys
        line = '{"event": "Attached", "completed": 5, "seconds": 0.1, "time": 2.0}\\n'
        pathlib.Path(sys.argv[1], "rank0.jsonl").write_text(line)
    """
    with python(code, tmp_path) as launch:
        assert len(list(launch.records())) == 1


def test_a_failure_shows_the_workers_own_words(tmp_path: Path) -> None:
    with (
        python("raise SystemExit('the disk is full')", tmp_path) as launch,
        pytest.raises(WorkersFailed, match=r"exit code 1(.|\n)*the disk is full"),
    ):
        list(launch.records())


def test_silence_is_a_failure(tmp_path: Path) -> None:
    with (
        python("import time; time.sleep(60)", tmp_path) as launch,
        pytest.raises(WorkersFailed, match="wrote nothing"),
    ):
        list(launch.records(silence_seconds=0.1))


def test_torchrun_takes_our_options_for_the_script_and_not_for_itself() -> None:
    from torch.distributed.run import parse_args

    options = ["--checkpoints=a", "--records=b", "--steps=3", "--seed=1", "--snapshot-every=2"]
    command = torchrun_command("lowdiff.demo.train", options, world_size=2)
    parsed = parse_args(command[3:])
    assert parsed.training_script == "lowdiff.demo.train"
    assert parsed.training_script_args == options
    assert parsed.nproc_per_node == "2"
