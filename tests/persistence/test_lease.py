"""A lease is held by who renews it; nobody takes it from the living, and a sleeper finds out."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lowdiff.persistence.lease import Lease, this_machine

PATIENCE_SECONDS = 20.0


def lease(folder: Path, machine: str, seconds: float = 0.5) -> Lease:
    return Lease(folder / "lease", seconds=seconds, machine=machine)


def fall_asleep(held: Lease) -> None:
    """Stop renewing, as a machine that died or is suspended does."""
    held._end.set()
    assert held._thread is not None
    held._thread.join()


def test_a_holder_elsewhere_keeps_it_as_long_as_it_renews_it(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.acquire("first", timeout_seconds=0.0)
    assert not second.acquire("second", timeout_seconds=1.5)  # three lives of a lease
    assert second.holder() == "first"
    assert not first.is_lost
    first.release()
    assert second.acquire("second", timeout_seconds=0.0)
    second.release()
    assert not list(tmp_path.iterdir())


def test_from_a_dead_machine_it_is_taken_after_its_time(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.acquire("first", timeout_seconds=0.0)
    fall_asleep(first)
    assert not lease(tmp_path, "b").acquire("too hasty", timeout_seconds=0.2)
    assert second.acquire("second", timeout_seconds=PATIENCE_SECONDS)
    # The sleeper wakes up: it has lost, and giving it back does not take it from the other.
    first._renewed = 0.0
    assert first.is_lost
    first.release()
    assert second.holder() == "second"
    assert not second.is_lost
    second.release()


def test_a_sleeper_cannot_write_over_its_successor(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.acquire("first", timeout_seconds=0.0)
    fall_asleep(first)
    assert second.acquire("second", timeout_seconds=PATIENCE_SECONDS)
    first._write()  # it had looked before it fell asleep, and writes now
    assert second.holder() == "second"
    second.release()


def test_on_the_same_machine_the_lock_has_decided(tmp_path: Path) -> None:
    first = lease(tmp_path, this_machine(), seconds=1000.0)
    assert first.acquire("first", timeout_seconds=0.0)
    fall_asleep(first)
    second = lease(tmp_path, "", seconds=1000.0)
    assert second.acquire("second", timeout_seconds=0.0)
    assert second.holder() == "second"
    second.release()


@pytest.mark.parametrize("expired", [False, True])
def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path, *, expired: bool) -> None:
    if expired:
        dead = lease(tmp_path, "dead")
        assert dead.acquire("dead", timeout_seconds=0.0)
        fall_asleep(dead)
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
    time.sleep(0.3)  # whoever lost it would know by the next beat
    holders = [index for index in got if not leases[index].is_lost]
    assert len(holders) == 1
    assert leases[holders[0]].holder() == f"number {holders[0]}"
    for held in leases:
        held.release()


@pytest.mark.parametrize("content", [b"\x00\xff" * 500, b"x", b"\t\t\t\t\n"])
def test_a_line_that_nobody_renews_is_nobodys(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lease").write_bytes(content)
    mine = lease(tmp_path, "a", seconds=0.3)
    assert mine.acquire("me", timeout_seconds=PATIENCE_SECONDS)
    assert mine.holder() == "me"
    mine.release()
