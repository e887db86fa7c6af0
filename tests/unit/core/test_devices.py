"""Copies beside what a device does next: in pieces, at half the rate, and all at once before anything is overwritten."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch

from lowdiff import testing
from lowdiff.core import devices
from lowdiff.errors import StorageError
from tests.unit.loops import wait_until

SECONDS = 0.1


class Made(devices.Copy):
    """A copy whose making, holding and end are noted."""

    log: list[tuple[str, int, float]]
    #: How long one takes.
    seconds = SECONDS

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: torch.Event | None = None,
    ) -> None:
        super().__init__(targets, sources, after)
        self._bytes = sum(source.nbytes for source in sources)
        self._note("begun")

    def _note(self, what: str) -> None:
        self.log.append((what, self._bytes, time.monotonic()))

    def hold(self) -> None:
        self._note("held")

    def finish(self) -> None:
        time.sleep(self.seconds)
        self._note("done")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, float]]]:
    noted: list[tuple[str, int, float]] = []
    monkeypatch.setattr(Made, "log", noted, raising=False)
    monkeypatch.setattr(devices, "copy", Made)
    with testing.limits(device_piece_bytes=64):
        yield noted


def several() -> list[torch.Tensor]:
    """Parts of a piece, more than a piece, another width, and another memory order."""
    drawn = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, generator=drawn),
        torch.randn(5, 8, generator=drawn),
        torch.randn(7, generator=drawn).double(),
        torch.randn(2, 3, 2, 2, generator=drawn).to(memory_format=torch.channels_last),
        torch.arange(5, dtype=torch.uint8),
    ]


def of(log: list[tuple[str, int, float]], what: str) -> list[int]:
    return [size for kind, size, _ in log if kind == what]


def test_nothing_is_copied_before_somebody_waits_or_holds(
    log: list[tuple[str, int, float]],
) -> None:
    devices.Trail(several())
    assert not log


def test_a_trail_that_nobody_holds_is_copied_piece_by_piece_with_pauses(
    log: list[tuple[str, int, float]],
) -> None:
    tensors = several()
    arrived = devices.Trail(tensors).arrived()
    assert all(map(torch.equal, arrived, tensors))
    assert [one.stride() for one in arrived] == [one.stride() for one in tensors]
    assert sum(of(log, "begun")) == sum(tensor.nbytes for tensor in tensors)
    assert max(of(log, "begun")) <= 64
    assert [kind for kind, _, _ in log] == ["begun", "done"] * (len(log) // 2)
    assert not of(log, "held")
    pauses = [log[i + 1][2] - log[i][2] for i in range(1, len(log) - 1, 2)]
    assert min(pauses) >= 0.9 * SECONDS


def test_who_holds_it_has_the_rest_copied_at_once_and_waits_for_nothing(
    log: list[tuple[str, int, float]],
) -> None:
    tensors = several()
    trail = devices.Trail(tensors)
    arrived: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: arrived.append(trail.arrived()))
    thread.start()
    time.sleep(SECONDS / 2)  # the first piece is on its way
    began = time.monotonic()
    trail.hold()
    assert time.monotonic() - began < SECONDS / 2
    assert [kind for kind, _, _ in log] == ["begun", "begun", "held", "held"]
    assert sum(of(log, "begun")) == sum(tensor.nbytes for tensor in tensors)
    trail.hold()  # another optimizer, perhaps on another stream
    thread.join()
    assert len(of(log, "begun")) == 2
    assert all(map(torch.equal, arrived[0], tensors))


def test_a_pause_ends_when_somebody_holds_it(
    log: list[tuple[str, int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Made, "seconds", 6 * SECONDS)
    trail = devices.Trail(several())
    thread = threading.Thread(target=trail.arrived)
    thread.start()
    wait_until(lambda: of(log, "done"))
    monkeypatch.setattr(Made, "seconds", 0.0)
    began = time.monotonic()
    trail.hold()
    thread.join()
    assert time.monotonic() - began < 3 * SECONDS
    assert len(of(log, "begun")) == 2


@pytest.mark.parametrize("holds", [False, True])
def test_a_device_that_fails_is_said_to_who_waits_and_not_to_who_holds(
    monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    def failing(*_: object) -> devices.Copy:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(devices, "copy", failing)
    trail = devices.Trail(several())
    if holds:
        trail.hold()
    with pytest.raises(StorageError, match="illegal memory access"):
        trail.arrived()


@pytest.mark.parametrize("holds", [False, True])
def test_what_is_written_meanwhile_is_copied_unless_it_is_held_before(holds: bool) -> None:
    """The copies of tests show a `hold` that is missing."""
    tensors = several()
    before = [tensor.clone() for tensor in tensors]
    with ExitStack() as late:
        late.enter_context(testing.limits(device_piece_bytes=64))
        late.enter_context(testing.late_copies(least_seconds=SECONDS, most_seconds=SECONDS))
        trail = devices.Trail(tensors)
        if holds:
            trail.hold()
        for tensor in tensors:
            tensor.add_(1)
        arrived = trail.arrived()
    expected = before if holds else tensors
    assert all(map(torch.equal, arrived, expected))


class Queue:
    """Stands for a stream of an accelerator: knows behind which others it runs."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.behind: list[object] = []

    def record_event(self) -> Queue:
        return self

    def wait_event(self, event: object) -> None:
        self.behind.append(event)


def test_a_body_on_a_stream_of_its_own_runs_behind_what_a_commit_has_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_commit, of_body = Queue(), Queue()
    monkeypatch.setattr(devices, "stream_of", lambda device: of_commit)
    devices.go_first(cast(Any, of_body))
    assert of_body.behind == [of_commit]
    devices.go_first(cast(Any, of_commit))  # one stream has an order of its own
    devices.go_first(None)
    assert not of_commit.behind
