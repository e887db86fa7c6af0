"""What one rank's training thread has done and what it cost, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lowdiff.persistence.histogram import BYTES, SECONDS, STEPS, Histogram
from lowdiff.persistence.status import WriterStatus


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
    differential_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    waiting_seconds: float = 0.0
    unprotected_steps: int = 0
    dropped_steps: int = 0
    stall_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    step_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    lag_steps: Histogram = field(default_factory=lambda: Histogram(STEPS))

    def document(self) -> dict[str, Any]:
        """As plain values, under the names of ``Checkpointer.stats()``."""
        return {
            "steps": self.steps,
            "snapshots": self.snapshots,
            "staged_bytes": self.staged_bytes,
            "training_thread_seconds": self.differential_seconds,
            "snapshot_seconds": self.snapshot_seconds,
            "waiting_seconds": self.waiting_seconds,
            "unprotected_steps": self.unprotected_steps,
            "dropped_steps": self.dropped_steps,
            "stall_seconds": self.stall_seconds.value().document(),
            "step_bytes": self.step_bytes.value().document(),
            "lag_steps": self.lag_steps.value().document(),
        }


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
