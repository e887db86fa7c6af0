from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.demo.launch import Launch, WorkersFailed, child_processes, torchrun_command
from tests.processes import is_alive
from tests.unit.loops import wait_until

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
writer = subprocess.Popen(["sleep", "60"], start_new_session=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # as lowdiff's
pathlib.Path(sys.argv[1] + ".partial").write_text(str(writer.pid))
pathlib.Path(sys.argv[1] + ".partial").rename(sys.argv[1])
time.sleep(60)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def start(code: str, folder: Path, *arguments: str) -> Launch:
    return Launch([sys.executable, "-c", code, *arguments], folder / "logs" / "life.txt")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    writers = [tmp_path / "writer0", tmp_path / "writer1"]
    with start(AGENT, tmp_path, WORKER, str(tmp_path)) as launch:
        for writer in writers:
            wait_for(writer)
        yield launch
    for writer in writers:
        os.kill(int(writer.read_text()), signal.SIGKILL)


def test_a_kill_ends_every_worker_and_spares_what_they_detached(
    launch: Launch, tmp_path: Path
) -> None:
    workers = launch.kill()
    assert len(workers) == 2
    assert list(launch.lines()) == [], "it waits until nothing of them is left to print"
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(is_alive(int((tmp_path / f"writer{rank}").read_text())) for rank in range(2))


def test_leaving_the_context_leaves_no_worker(tmp_path: Path) -> None:
    code = """if True:
        import subprocess, sys
        worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(worker.pid, flush=True)
        worker.wait()
    """
    with start(code, tmp_path) as launch:
        worker = int(next(launch.lines()))
        assert is_alive(worker)
    wait_until(lambda: not is_alive(worker))


def test_children_are_the_direct_ones_that_still_run() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in child_processes(os.getpid())
        assert child.pid not in child_processes(os.getppid())
        child.kill()
        while is_alive(child.pid):  # until it is waited for it is a zombie
            time.sleep(0.01)
        assert child.pid not in child_processes(os.getpid())


def test_every_line_is_heard_and_kept(tmp_path: Path) -> None:
    code = "import sys; print('one'); print('two', file=sys.stderr, flush=True); print('three')"
    with start(code, tmp_path) as launch:
        heard = sorted(launch.lines())
    assert heard == ["one\n", "three\n", "two\n"]
    assert sorted((tmp_path / "logs/life.txt").read_text().splitlines(keepends=True)) == heard


def test_a_failure_shows_the_workers_own_words(tmp_path: Path) -> None:
    with (
        start("raise SystemExit('the disk is full')", tmp_path) as launch,
        pytest.raises(WorkersFailed, match=r"exit code 1(.|\n)*the disk is full(.|\n)*life.txt"),
    ):
        list(launch.lines())


def test_torchrun_takes_our_options_for_the_script_and_not_for_itself() -> None:
    from torch.distributed.run import parse_args

    options = ["runs/whole", "--staging=b", "--steps=3", "--seed=1"]
    command = torchrun_command("lowdiff.examples.ddp_gpt", options, world_size=2)
    parsed = parse_args(command[3:])
    assert parsed.training_script == "lowdiff.examples.ddp_gpt"
    assert parsed.training_script_args == options
    assert parsed.nproc_per_node == "2"
