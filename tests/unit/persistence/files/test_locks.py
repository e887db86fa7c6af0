"""A lock ends with the process that took it, whatever children that process had."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.files.locks import FileLock

ROOT = Path(__file__).parents[4]

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from lowdiff.persistence.files.locks import FileLock

lock = FileLock(Path(sys.argv[1]))
assert lock.acquire("the holder")
child = 0
if sys.argv[2] == "fork":
    child = os.fork()
if sys.argv[2] == "exec":
    child = subprocess.Popen(["sleep", "60"], close_fds=False).pid
if child or sys.argv[2] == "alone":
    print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def holder(path: Path, kind: str = "alone") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and perhaps has a child that outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.lock"


def test_only_one_holds_it_until_it_is_released(path: Path) -> None:
    first, second = FileLock(path), FileLock(path)
    assert first.acquire("first")
    assert not second.acquire("second")
    first.release()
    assert second.acquire("second")
    second.release()


def test_releasing_a_lock_that_is_not_held_does_nothing(path: Path) -> None:
    lock = FileLock(path)
    lock.release()
    assert lock.acquire("again")
    lock.release()
    lock.release()


def test_whoever_waits_is_told_who_holds_it(path: Path) -> None:
    lock = FileLock(path)
    assert lock.holder() == "an unknown process"
    assert lock.acquire("process 41 on some-host (rank 0), a rather long description")
    lock.release()
    assert lock.acquire("process 42")
    assert FileLock(path).holder() == "process 42"
    assert not FileLock(path).acquire("a waiter does not change it")
    assert FileLock(path).holder() == "process 42"
    lock.release()


def test_whether_a_guest_holds_it_is_no_part_of_the_description(path: Path) -> None:
    lock = FileLock(path)
    assert lock.has_guest()  # nobody has said anything
    assert lock.acquire("process 41", is_guest=True)
    assert FileLock(path).has_guest()
    assert FileLock(path).holder() == "process 41"
    lock.release()
    assert lock.acquire("process 41")
    assert not FileLock(path).has_guest()
    assert path.read_text() == "process 41"  # as all versions write and read it
    lock.release()
    assert lock.acquire("process 41, clearing staging memory")  # by an earlier version
    assert FileLock(path).has_guest()
    lock.release()


def test_a_waiter_gets_it_when_it_is_released_in_time(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire("first")
    timer = threading.Timer(0.1, lock.release)
    started = time.monotonic()
    timer.start()
    waiter = FileLock(path)
    assert waiter.acquire("second", timeout_seconds=20)
    assert 0.05 < time.monotonic() - started < 10
    timer.join()
    waiter.release()


def open_files() -> list[Path]:
    """What this process has open; other files may be closed meanwhile, by whoever collects garbage."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found.append(descriptor.readlink())
    return found


def test_a_waiter_gives_up_in_time_and_leaves_no_descriptor(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire("first")
    started = time.monotonic()
    assert not FileLock(path).acquire("second", timeout_seconds=0.1)
    assert 0.1 <= time.monotonic() - started < 5
    assert open_files().count(path) == 1, "that of the first"
    lock.release()


def test_another_process_holds_it_until_it_is_killed(path: Path) -> None:
    with holder(path) as process:
        assert not FileLock(path).acquire("tester")
        assert FileLock(path).holder() == "the holder"
        process.kill()
        lock = FileLock(path)
        assert lock.acquire("tester", timeout_seconds=10)
        lock.release()


@pytest.mark.parametrize("kind", ["fork", "exec"])
def test_children_that_outlive_a_killed_holder_do_not_hold_it(path: Path, kind: str) -> None:
    with holder(path, kind) as process:
        assert not FileLock(path).acquire("tester")
        process.kill()
        process.wait()
        lock = FileLock(path)
        assert lock.acquire("tester", timeout_seconds=1)
        lock.release()


def test_a_full_disk_keeps_nobody_from_locking(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = FileLock(path)
    assert lock.acquire("first")
    assert not FileLock(path).acquire("second")
    lock.release()
    assert lock.acquire("first")
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def missing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(StorageError, match=r"some\.lock cannot be locked: .*mount it with flock"):
        FileLock(path).acquire("somebody")
    assert path not in open_files()


def test_locks_that_come_and_go_leave_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is registered there stays for ever, and runs in every forked child.
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: registered.append(hook))
    for _ in range(3):
        lock = FileLock(path)
        assert lock.acquire("somebody")
        lock.release()
    assert not registered


FORKING = """
import os, sys
from pathlib import Path
from lowdiff.persistence.files.locks import FileLock

locks = [FileLock(Path(sys.argv[1]) / f"{number}.lock") for number in range(3)]
for lock in locks:
    assert lock.acquire("the parent")
locks[1].release()
before = len(os.listdir("/proc/self/fd"))
if not os.fork():
    os._exit(before - len(os.listdir("/proc/self/fd")))
_, status = os.wait()
assert not FileLock(locks[0].path).acquire("nobody")
for lock in locks:
    lock.release()
    assert lock.acquire("the parent again")
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_closes_every_lock_that_is_held(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert found.stdout == b"2\n"
