"""A lease is held by who renews it; nobody takes it from the living, and a sleeper finds out."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lowdiff.persistence.files.lease import Lease, this_machine

PATIENCE_SECONDS = 20.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: a disk may take longer for one fsync than these leases last."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def lease(folder: Path, machine: str, seconds: float = 0.5) -> Lease:
    return Lease(folder / "lease", seconds=seconds, machine=machine)


def fall_asleep(held: Lease) -> None:
    """Stop renewing, as a machine that died or is suspended does."""
    held.beat = lambda: None  # type: ignore[method-assign]
    held.is_lost(look=True)  # a beat that had begun has ended


def wake_up(held: Lease) -> None:
    del held.beat


def test_a_holder_elsewhere_keeps_it_as_long_as_it_renews_it(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.acquire("first", timeout_seconds=0.0)
    assert not second.acquire("second", timeout_seconds=1.5)  # three lives of a lease
    assert second.holder() == "first"
    assert not first.is_lost()
    first.release()
    assert second.acquire("second", timeout_seconds=0.0)
    second.release()
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_from_a_dead_machine_it_is_taken_after_its_time(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.acquire("first", timeout_seconds=0.0)
    fall_asleep(first)
    assert not lease(tmp_path, "b", seconds=100.0).acquire("too hasty", timeout_seconds=0.2)
    assert second.acquire("second", timeout_seconds=PATIENCE_SECONDS)
    # The sleeper has lost, and giving it back does not take it from the other.
    wake_up(first)
    assert first.is_lost(look=True)
    first.release()
    assert second.holder() == "second"
    assert not second.is_lost(look=True)
    second.release()


def test_a_sleeper_cannot_write_over_its_successor(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.acquire("first", timeout_seconds=0.0)
    with first.path.open("r+b") as opened:
        fall_asleep(first)
        line = os.pread(opened.fileno(), 1000, 0)
        assert second.acquire("second", timeout_seconds=PATIENCE_SECONDS)
        os.pwrite(opened.fileno(), line, 0)  # it had looked before it fell asleep, and writes now
    assert second.holder() == "second"
    first.release()
    second.release()


def test_on_the_same_machine_the_lock_has_decided(tmp_path: Path) -> None:
    first = lease(tmp_path, this_machine(), seconds=1000.0)
    assert first.acquire("first", timeout_seconds=0.0)
    fall_asleep(first)
    second = lease(tmp_path, "", seconds=1000.0)
    assert second.acquire("second", timeout_seconds=0.0)
    assert second.holder() == "second"
    first.release()
    assert second.holder() == "second"
    second.release()


def test_a_folder_that_is_away_for_a_while_costs_nothing(tmp_path: Path) -> None:
    folder, away = tmp_path / "folder", tmp_path / "away"
    folder.mkdir()
    held = lease(folder, "a")
    assert held.acquire("holder", timeout_seconds=0.0)
    folder.rename(away)
    time.sleep(2 * held.seconds)
    assert not held.is_lost(look=True)
    shutil.copytree(away, folder)  # another file with the same line
    assert not held.is_lost(look=True)
    assert not lease(folder, "b").acquire("impatient", timeout_seconds=3 * held.seconds)
    folder.rename(tmp_path / "gone")
    folder.mkdir()
    assert not held.is_lost(look=True)
    assert held.holder() == "holder"  # it is there again
    held.release()


def test_a_line_that_is_being_copied_back_is_nobody_elses(tmp_path: Path) -> None:
    held = lease(tmp_path, "a")
    assert held.acquire("holder", timeout_seconds=0.0)
    with held.path.open("wb"):  # as a copy begins: a file without a line
        assert not held.is_lost(look=True)
    assert held.holder() == "holder"
    held.release()


def test_a_look_is_not_answered_by_one_that_had_begun_before(tmp_path: Path) -> None:
    held = lease(tmp_path, "a")
    assert held.acquire("holder", timeout_seconds=0.0)
    begun, go_on, beat = threading.Event(), threading.Event(), held.beat

    def slow_beat() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)

    held.beat = slow_beat  # type: ignore[method-assign]
    assert begun.wait(PATIENCE_SECONDS)
    held.path.write_bytes(b"other\tb\t1\tanother\n")
    held.beat = beat  # type: ignore[method-assign]
    threading.Timer(0.1, go_on.set).start()
    assert held.is_lost(look=True)
    held.release()


def test_a_file_system_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    held = lease(tmp_path, "a")
    assert held.acquire("holder", timeout_seconds=0.0)
    held.path.unlink()
    os.mkfifo(held.path)  # opening it waits for ever
    started = time.monotonic()
    for _ in range(100):
        assert not held.is_lost()
    assert not held.is_lost(look=True)
    held.release()
    assert time.monotonic() - started < PATIENCE_SECONDS
    held.path.write_bytes(b"other\tb\t1\tanother\n")  # lets the thread go


def test_what_cannot_be_read_can_be_given_back(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    held = lease(tmp_path / "locks", "a")
    assert held.acquire("holder", timeout_seconds=0.0)
    (tmp_path / "locks").rename(tmp_path / "gone")
    (tmp_path / "locks").write_bytes(b"no folder")
    assert not held.is_lost(look=True)
    assert held.holder() == "an unknown process"
    held.release()
    held.release()


@pytest.mark.cases(1)
@pytest.mark.parametrize("expired", [False, True])
def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path, *, expired: bool) -> None:
    dead = lease(tmp_path, "dead")
    if expired:
        assert dead.acquire("dead", timeout_seconds=0.0)
        fall_asleep(dead)
    # The thread of the dead one stays until the test ends, as a suspended machine's would.
    leases = [lease(tmp_path, f"machine {i}", seconds=1.0) for i in range(8)]
    got: list[int] = []

    def come(index: int) -> None:
        if leases[index].acquire(f"number {index}", timeout_seconds=2.5):
            got.append(index)

    threads = [threading.Thread(target=come, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = got
    assert leases[holder].holder() == f"number {holder}"
    for held in [dead, *leases]:
        held.release()


@pytest.mark.parametrize("content", [b"\x00\xff" * 500, b"x", b"\t\t\t\t\n"])
def test_a_line_that_nobody_renews_is_nobodys(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lease").write_bytes(content)
    mine = lease(tmp_path, "a", seconds=0.3)
    assert mine.acquire("me", timeout_seconds=PATIENCE_SECONDS)
    assert mine.holder() == "me"
    mine.release()
