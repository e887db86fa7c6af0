"""One incarnation of a run while it lives: from the optimizer's hooks to the staging log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowdiff.attached import Attached, hyper_parameters
from lowdiff.capture import ItemTracker, restore_random_states
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.digests import Digester
from lowdiff.errors import UsageError, WriterFailed
from lowdiff.persistence.differentials import encode_scalars
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.snapshots import encode_mark, stage_image
from lowdiff.persistence.staging import StagingLog
from lowdiff.persistence.status import WriterStatus
from lowdiff.persistence.values import same
from lowdiff.persistence.writer_process import WriterProcess
from lowdiff.protocols import Reducer
from lowdiff.settings import Settings
from lowdiff.snapshot import shard_tensors
from lowdiff.types import Differential, Digest, OptimizerStep, Payload

_logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.001
_NOTICE_SECONDS = 30.0


@dataclass(slots=True)
class Counters:
    """What this rank has done since ``attach``; times are of the training thread."""

    steps: int = 0
    snapshots: int = 0
    staged_bytes: int = 0
    differential_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    waiting_seconds: float = 0.0


class Session:
    """Captures every step of one rank and stages it."""

    def __init__(
        self,
        *,
        attached: Attached,
        settings: Settings,
        incarnation: int,
        rank: int,
        world_size: int,
        step: int,
        reducer: Reducer,
        residual: RotatingResidual,
        tracker: ItemTracker,
        items: Mapping[str, bytes],
        log: StagingLog,
        writer: WriterProcess,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.step = step
        self.counters = Counters()
        self._attached = attached
        self._settings = settings
        self._incarnation = incarnation
        self._rank, self._world_size = rank, world_size
        self.reducer = reducer
        self._residual = residual
        self._tracker = tracker
        self._log = log
        self._writer = writer
        self._digester = Digester(attached.layout)
        self._scaler = scaler
        self._scale = self._loss_scale()
        self._snapshot_step = -1
        self._committed_versions = self._versions()
        self._warned = ""
        self._stepped: dict[int, OptimizerStep] = {}
        self._absent: set[int] = set()
        tracker.start(items)
        self._stage_base()
        self._begin()
        self._handles = [
            handle
            for index, optimizer in enumerate(attached.optimizers)
            for handle in (
                optimizer.register_step_pre_hook(self._pre_hook(index)),
                optimizer.register_step_post_hook(self._post_hook(index)),
            )
        ]
        self._finished: set[int] = set()

    # What happens inside a step

    def _pre_hook(self, index: int) -> Callable[..., None]:
        def before_step(
            optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
        ) -> None:
            with self._timed("differential_seconds"):
                self._consume(index, optimizer)

        return before_step

    def _post_hook(self, index: int) -> Callable[..., None]:
        def after_step(*_: object) -> None:
            self._finished.add(index)

        return after_step

    def _consume(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        """Read what the optimizer is about to use: unscaled and clipped by now."""
        if index in self._stepped:
            raise UsageError(
                f"the optimizer stepped twice between commits of step {self.step + 1}; call "
                "checkpointer.commit() after each optimizer.step(), or loop over "
                "checkpointer.steps(...)"
            )
        gradients = self._attached.gradients(index)
        if self._attached.ddp is None:
            self._compress_in_place(gradients)
        self.reducer.consume(gradients)
        self._absent.update(self._attached.absent(index))
        self._stepped[index] = OptimizerStep(
            stepped=True,
            consumed=_copied(hyper_parameters(optimizer)),
            grad_scale=_number(getattr(optimizer, "grad_scale", None)),
            found_inf=_number(getattr(optimizer, "found_inf", None)),
        )

    def _compress_in_place(self, gradients: list[torch.Tensor | None]) -> None:
        """Without DDP there is no communication hook: compress what backward left."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self.reducer.reduce([i], [gradient], gradient).wait()
            live = self._attached.parameters[i].grad
            assert live is not None
            if live.data_ptr() != gradient.data_ptr():
                spec = self._attached.layout.parameters[i]
                live.copy_(gradient.as_strided(spec.shape, spec.strides))

    # What happens between steps

    @property
    def has_finished_step(self) -> bool:
        """Whether an optimizer stepped since the last commit."""
        return bool(self._finished)

    def commit(self) -> None:
        """Stage the step that just ended.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            StorageError: If staging memory is exhausted.
        """
        with self._timed("differential_seconds"):
            differential = self._differential()
            self._append(
                RecordKind.DIFFERENTIAL,
                differential.step,
                encode_scalars(differential),
                differential.payload,
            )
            self.step += 1
            self.counters.steps += 1
            self._committed_versions = self._versions()
            self._begin()
        if self.step % self._settings.snapshot_every == 0:
            self.snapshot()

    def _differential(self) -> Differential:
        after = [hyper_parameters(o) for o in self._attached.optimizers]
        steps = []
        for index, groups in enumerate(after):
            done = self._stepped.get(index)
            if done is None:
                steps.append(OptimizerStep(stepped=False, consumed=_copied(groups)))
            elif same(list(done.consumed), list(groups)):
                steps.append(done)
            else:
                steps.append(replace(done, committed=_copied(groups)))
        old_scale, self._scale = self._scale, self._loss_scale()
        self._residual.advance(
            stepped=any(s.stepped and not s.found_inf for s in steps),
            scale_ratio=self._scale / old_scale,
        )
        step = self.step + 1
        return Differential(
            step=step,
            incarnation=self._incarnation,
            rank=self._rank,
            world_size=self._world_size,
            optimizers=tuple(steps),
            absent=tuple(sorted(self._absent)),
            held=tuple(self._attached.held()),
            payload=self.reducer.payload(),
            items=self._tracker.changed(),
            residual=self._residual.mark(),
            digest=self._digest(step),
        )

    def _loss_scale(self) -> float:
        """Scale of the gradients that the hook will see; the residual is in its units."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _digest(self, step: int) -> Digest | None:
        if self._attached.device.type != "cpu":
            return None  # reading parameters back would stop the GPU at every step
        return self._digester.digest(
            self._attached.flat_parameters(), step, self._rank, self._world_size
        )

    def _begin(self) -> None:
        self._stepped.clear()
        self._absent.clear()
        self._finished = set()
        self.reducer.begin(self._incarnation << 40 | (self.step + 1))

    def snapshot(self) -> None:
        """Stage a full snapshot of the current step; the writer makes it durable."""
        if self._snapshot_step == self.step:
            return
        self._wait_until(
            lambda status: status.durable_snapshot >= self._snapshot_step,
            f"the snapshot of step {self._snapshot_step} to be durable",
        )
        with self._timed("snapshot_seconds"):
            tensors = shard_tensors(
                self._attached,
                self._tracker,
                self._residual.current(),
                rank=self._rank,
                world_size=self._world_size,
            )
            size, checksum = stage_image(self._log.folder.snapshot, tensors)
            self._append(RecordKind.SNAPSHOT, self.step, encode_mark(size, checksum), Payload(()))
            self._snapshot_step = self.step
            self.counters.snapshots += 1

    def is_as_committed(self) -> bool:
        """Whether the live state is still that of the last commit."""
        return (
            not self._stepped
            and self._versions() == self._committed_versions
            and not self._tracker.changed_tensors()
        )

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._attached.parameters]

    def wait_for_snapshot(self) -> None:
        """Wait until the last staged snapshot is durable."""
        self._wait_until(
            lambda status: status.durable_snapshot >= self._snapshot_step,
            f"the snapshot of step {self._snapshot_step} to be durable",
        )

    def restore_random_states(self, items: Mapping[str, bytes]) -> None:
        """Set the random generators as they were at this session's first step."""
        restore_random_states(items, self._attached.device)

    def writer_status(self) -> WriterStatus:
        """How far the writer is."""
        return self._writer.status()

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._writer.pid

    def detach(self) -> None:
        """Remove the optimizer hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self, timeout_seconds: float) -> WriterStatus:
        """Wait until everything staged is durable, and end the writer."""
        return self._writer.finish(timeout_seconds)

    # Staging

    def _stage_base(self) -> None:
        """Name the residual this incarnation starts from, should it die in its first step."""
        base = Differential(
            step=self.step,
            incarnation=self._incarnation,
            rank=self._rank,
            world_size=self._world_size,
            optimizers=(),
            absent=(),
            held=(),
            payload=Payload(()),
            residual=self._residual.mark(),
        )
        self._append(RecordKind.BASE, self.step, encode_scalars(base), base.payload)

    def _append(self, kind: RecordKind, step: int, meta: bytes, payload: Payload) -> None:
        """Stage a record, as soon as at most ``2 b`` steps are at risk and memory is free."""
        if kind is RecordKind.DIFFERENTIAL:
            limit = step - 2 * self._settings.batch_size
            self._wait_until(
                lambda status: status.durable_step >= limit, f"step {limit} to be durable"
            )
        written: list[int] = []

        def fits(status: WriterStatus) -> bool:
            size = self._log.append(
                kind, step, meta, payload.sections, durable_step=status.durable_step
            )
            if size is not None:
                written.append(size)
            return size is not None

        self._wait_until(fits, "staging memory")
        self.counters.staged_bytes += written[0]

    def _wait_until(self, condition: Callable[[WriterStatus], bool], what: str) -> None:
        status = self._checked_status()
        if condition(status):
            return
        started = noticed = time.perf_counter()
        while not condition(self._checked_status()):
            time.sleep(_WAIT_SECONDS)
            now = time.perf_counter()
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                _logger.warning(
                    "rank %d: training has waited %.0f s for %s", self._rank, now - started, what
                )
        self.counters.waiting_seconds += time.perf_counter() - started

    def _checked_status(self) -> WriterStatus:
        status = self._writer.status()
        if status.error and status.error != self._warned:
            if self._settings.on_error == "raise":
                raise WriterFailed(f"the writer of rank {self._rank} reports: {status.error}")
            _logger.warning(
                "rank %d: checkpoints are not durable now: %s; training goes on, and waits once "
                "%d steps are at risk",
                self._rank,
                status.error,
                2 * self._settings.batch_size,
            )
        self._warned = status.error
        return status

    @contextmanager
    def _timed(self, counter: str) -> Iterator[None]:
        started = time.perf_counter()
        waited = self.counters.waiting_seconds
        try:
            yield
        finally:
            spent = time.perf_counter() - started - (self.counters.waiting_seconds - waited)
            setattr(self.counters, counter, getattr(self.counters, counter) + spent)


def _copied(groups: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Groups as they are now: schedulers write into tensors and lists in place."""
    return tuple(
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
        }
        for group in groups
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
