"""Measurements of the training thread by itself, for the tuner: a few numbers per step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.measurements import BYTES, SECONDS, STEPS, Histogram, Recorder
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.recovery.state import RecoveredState


@dataclass(slots=True)
class Seconds:
    """Time that a kind of work has taken."""

    total: float = 0.0


@dataclass(slots=True)
class Counters:
    """Since ``attach``; times are of the training thread. A step costs the same at any age.

    Attributes:
        stall_seconds: Per step, all that lowdiff took: hooks, commit, snapshot and waiting.
        step_bytes: Per step, what was staged.
        lag_steps: At each commit, how many steps were committed but not yet durable here.
    """

    steps: int = 0
    snapshots: int = 0
    staged_bytes: int = 0
    training_thread_seconds: Seconds = field(default_factory=Seconds)
    snapshot_seconds: Seconds = field(default_factory=Seconds)
    waiting_seconds: float = 0.0
    unprotected_steps: int = 0
    dropped_steps: int = 0
    stall_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    step_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    lag_steps: Histogram = field(default_factory=lambda: Histogram(STEPS))

    def timed(self, spent: Seconds) -> Timed:
        """Add the time spent inside a ``with`` block, without waiting, to one of the counters."""
        return Timed(self, spent)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside a ``with`` block as waiting."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_seconds += time.perf_counter() - started

    def document(self) -> dict[str, Any]:
        """As plain values, under the names of ``Checkpointer.stats()``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items()}


def _plain(value: float | Seconds | Histogram) -> Any:
    if isinstance(value, Seconds):
        return value.total
    return value.value().document() if isinstance(value, Histogram) else value


class Timed:
    """Measures a block of the training thread; see `Counters.timed`."""

    __slots__ = ("_counters", "_spent", "_started")

    def __init__(self, counters: Counters, spent: Seconds) -> None:
        self._counters, self._spent = counters, spent

    def __enter__(self) -> None:
        self._started = time.perf_counter() - self._counters.waiting_seconds

    def __exit__(self, *_: object) -> None:
        self._spent.total += time.perf_counter() - self._counters.waiting_seconds - self._started


def writer_document(status: WriterStatus) -> dict[str, Any]:
    """The writer's counters, under the names of ``Checkpointer.stats()``."""
    return {
        "durable_step": status.durable_step,
        "durable_snapshot": status.durable_snapshot,
        "durable_bytes": status.segment_bytes,
        "snapshot_bytes": status.snapshot_bytes,
        "batches": status.batches,
        "batch_seconds": status.batch_seconds.document(),
        "retries": status.retries,
        "writer_error": status.error,
        "remote_step": status.remote_step,
        "remote_bytes": status.remote_bytes,
        "remote_retries": status.remote_retries,
        "remote_error": status.remote_error,
    }


class Meter:
    """Samples of one rank's steps, for its counters and the tuner."""

    def __init__(self, folder: StagingFolder, counters: Counters) -> None:
        self.recorder = Recorder(folder.measured_by_trainer)
        self._counters = counters
        self._last = (0.0, 0.0, 0.0, 0, 0)
        self._ended_at: float | None = None

    def note(self, facts: Mapping[str, float | str]) -> None:
        """Add facts about this life and publish them."""
        self.recorder.set_facts(**facts)
        self.recorder.publish()

    def step_done(self, lag_steps: int) -> None:
        """Take the samples of a step that was just committed: all since the one before."""
        counters = self._counters
        now = time.perf_counter()
        totals = (
            counters.training_thread_seconds.total,
            counters.snapshot_seconds.total,
            counters.waiting_seconds,
            counters.staged_bytes,
            counters.snapshots,
        )
        differential, snapshot, waited, staged, made = (
            total - before for total, before in zip(totals, self._last, strict=True)
        )
        counters.steps += 1
        counters.stall_seconds.observe(differential + snapshot + waited)
        counters.step_bytes.observe(staged)
        counters.lag_steps.observe(lag_steps)
        if self._ended_at is not None:
            own = now - self._ended_at - differential - snapshot - waited
            self.recorder.observe("iteration_seconds", max(0.0, own))
        self.recorder.observe("differential_seconds", differential)
        self.recorder.observe("step_bytes", staged)
        if made and snapshot:
            # Two in the first step: that of `attach`, and one after each step.
            self.recorder.observe("snapshot_seconds", snapshot / made)
        self._last, self._ended_at = totals, now
        self._publish()

    def end(self, how: str) -> None:
        """Say that nothing more comes, and that this life was not cut short."""
        self._publish(ended=how)

    def _publish(self, **facts: str) -> None:
        self.note(
            {
                "seen_unix_seconds": time.time(),
                "steps": float(self._counters.steps),
                "waiting_seconds": self._counters.waiting_seconds,
                **facts,
            }
        )


class RecoveryClock:
    """Times a recovery: all of it, and replay where its progress tells it from loading."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._marks: list[tuple[float, int]] = []

    def progress(self, steps: int) -> None:
        """So many steps are replayed."""
        self._marks.append((time.perf_counter(), steps))

    def facts(self, state: RecoveredState | None) -> dict[str, float]:
        """Return the findings once the recovery is over; none if nothing was to be recovered."""
        if state is None:
            return {}
        replayed_steps = state.step - state.base_step
        found = {
            "recovery_seconds": time.perf_counter() - self._began,
            "replayed_steps": float(replayed_steps),
        }
        if len(self._marks) > 1:
            (start, first), (end, last) = self._marks[0], self._marks[-1]
            if last > first:
                found["replay_seconds"] = (end - start) / (last - first) * replayed_steps
        return found
