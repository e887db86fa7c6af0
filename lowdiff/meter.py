"""What the training thread measures of itself, for the tuner: a few numbers per step."""

from __future__ import annotations

import time
from collections.abc import Mapping

from lowdiff.counters import Counters
from lowdiff.persistence.measurements import Recorder
from lowdiff.persistence.paths import StagingFolder
from lowdiff.recovery.state import RecoveredState


class Meter:
    """Samples of one rank's steps, for its counters and the tuner."""

    def __init__(self, folder: StagingFolder, counters: Counters) -> None:
        self.recorder = Recorder(folder.measured_by_trainer)
        self._counters = counters
        self._last = (0.0, 0.0, 0.0, 0, 0)
        self._ended_at: float | None = None

    def note(self, facts: Mapping[str, float | str]) -> None:
        """Add facts about this life and publish them."""
        self.recorder.note(**facts)
        self.recorder.publish()

    def step_done(self, lag_steps: int) -> None:
        """Take the samples of a step that was just committed: all since the one before."""
        counters = self._counters
        now = time.perf_counter()
        totals = (
            counters.differential_seconds,
            counters.snapshot_seconds,
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
        self.recorder.note(ended=how)
        self._publish()

    def _publish(self) -> None:
        self.recorder.note(
            seen_unix_seconds=time.time(),
            steps=float(self._counters.steps),
            waiting_seconds=self._counters.waiting_seconds,
        )
        self.recorder.publish()


class RecoveryClock:
    """Times a recovery: all of it, and replay where its progress tells it from loading."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._marks: list[tuple[float, int]] = []

    def progress(self, steps: int) -> None:
        """So many steps are replayed."""
        self._marks.append((time.perf_counter(), steps))

    def facts(self, state: RecoveredState | None) -> dict[str, float]:
        """What it found, now that the recovery is over; nothing if nothing was to be recovered."""
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
