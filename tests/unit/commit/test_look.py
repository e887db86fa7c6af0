"""What a commit decides by a look that is a moment old is never worse than what a newer one would tell."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lowdiff.commit.protection import Protection
from lowdiff.commit.sinks import Ahead, Handed, Sink
from lowdiff.commit.staging import Staging
from lowdiff.commit.storage import Look, Storage, Trainer
from lowdiff.compressors import TopK
from lowdiff.errors import StorageError
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.protect.log.queue import LogQueue
from lowdiff.settings import Settings
from lowdiff.step.states import Sealed
from lowdiff.types import Differential, Payload, Section
from tests.unit.persistence.writers import log_of, settings_in

STEPS = 40


class Processes:
    """Stand for a rank's processes, whose writer has come so far."""

    batch_size = 1

    def __init__(self) -> None:
        self.status = WriterStatus(durable_step=0)
        self.writer = self

    def read_status(self) -> WriterStatus:
        return self.status

    def tend(self) -> None:
        """Have nothing to start."""


def sealed(step: int) -> Sealed:
    data = np.random.default_rng(step).integers(0, 2**32, 500, dtype=np.uint32)
    payload = Payload((Section("values/float32", "planes", data),))
    record = Differential(step, 0, 0, 1, (), (), (), payload, residual=None)
    return Sealed(record, frozenset(), ())


@pytest.mark.parametrize("is_durable", [True, False])
def test_steps_are_dropped_only_if_they_are_not_durable_by_then(
    tmp_path: Path, is_durable: bool
) -> None:
    of_writer, processes = settings_in(tmp_path), Processes()
    of_writer.staging.root.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        tmp_path / "run", TopK(0.1), snapshot_every=1000, batch_size=1, backpressure="degrade"
    )
    trainer = Trainer(of_writer.staging, settings, 0, 1)
    queue = LogQueue(log_of(of_writer, 1 << 13), trainer, cast(Storage, processes))
    for step in range(1, STEPS):
        before = queue.look()
        if is_durable:  # while the step is sealed
            processes.status = WriterStatus(durable_step=step - 1)
        queue.stage(Handed(sealed(step), before))
    counters = trainer.counters
    assert (counters.dropped_steps > 0) is not is_durable
    assert (counters.unprotected_steps > 0) is not is_durable
    assert queue.images.is_owed is not is_durable


def test_copies_have_what_an_optimizer_uses_though_the_queue_is_gone() -> None:
    seen: list[Ahead] = []

    class Gone(Sink):
        logs_steps, most_late = False, 0

        def stage_ahead(self, ahead: Ahead) -> None:
            raise StorageError("somebody removed it")

        def look(self) -> Look:
            return Look(WriterStatus(), is_gone=True)

        def is_gone(self, look: Look) -> bool:
            return look.is_gone

    class Copy(Sink):
        def stage_ahead(self, ahead: Ahead) -> None:
            seen.append(ahead)

    nothing: Any = SimpleNamespace()
    protection = Protection(nothing, cast(LogQueue, Gone()), [Copy()])
    trainer: Any = SimpleNamespace(turn=threading.Condition())
    live: Any = SimpleNamespace(attached=SimpleNamespace(device=torch.device("cpu")))
    staging = Staging(nothing, trainer, live, protection)
    reducer: Any = SimpleNamespace(payload=lambda: Payload(()))
    staging.stage_ahead(3, reducer, 0)
    assert [ahead.step for ahead in seen] == [3]
