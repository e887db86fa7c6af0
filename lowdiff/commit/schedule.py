"""When a rank takes full snapshots, and how much it writes at once: as told, or as the tuner decides.

`decide` is the schedule: a pure function of one `Situation`. `Cadence` holds the interval and the batch
size that are in force. Every rank looks at its own measurements and tells its wish with the news of a
step. At the next commit all ranks have heard the same wishes and follow them alike: the longest interval
and the largest batch that any rank asks for, because the slowest disk must keep up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.queue import Queue
from lowdiff.commit.storage import Look, Trainer
from lowdiff.core.events import Code, inform
from lowdiff.errors import ConfigError
from lowdiff.persistence.staging.measurements import Recorder, read_recorded, write_decisions
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.tuner.choice import Limits, Setting
from lowdiff.tuner.failures import estimate_rates
from lowdiff.tuner.measured import MeasuredIncarnation, Past, failures_of, measure
from lowdiff.tuner.policy import Levels, Move, move


class Why(Enum):
    """Why a full snapshot is taken."""

    UNREPLAYABLE = "the step's record cannot be replayed"
    INTERVAL = "the interval is over"
    KEPT = "retention keeps the step"
    RANKS_APART = "ranks were found not to be alike"
    OTHER_RANK = "another rank could log the step before only as a snapshot"
    STAGING_RENEWED = "staging was made anew"
    RING = "the gradients in memory lead on from too old an image"
    OWED = "an earlier one could not be taken"
    PREEMPTED = "the machine may go soon, and only an image outlives it"


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts that decide about a snapshot after a step.

    Attributes:
        rebases: Whether only a snapshot of the step can be recovered.
        is_due: Whether the interval is over, or retention keeps the step.
        is_kept: Whether retention keeps it.
        logs_steps: Whether steps become durable without a snapshot after them.
        makes_images: Whether another process takes the regular snapshots.
        asked: Why else one was asked for; None where nobody did.
        can_catch_up: Whether one is owed, and every rank can take it.
        is_last_chance: Whether the training was told, since the step before, to stop soon.
        needs_image: Whether this rank's memory needs an image, which need not become durable.
    """

    rebases: bool
    is_due: bool
    is_kept: bool
    logs_steps: bool
    makes_images: bool
    asked: Why | None
    can_catch_up: bool
    is_last_chance: bool
    needs_image: bool


def decide(now: Situation) -> Why | None:
    """Say why a full snapshot is taken after a step; None for no snapshot."""
    if now.rebases:
        return Why.UNREPLAYABLE
    if now.is_last_chance and not now.logs_steps:
        return Why.PREEMPTED
    if now.is_due and not now.makes_images:
        return Why.KEPT if now.is_kept else Why.INTERVAL
    if now.asked is not None:
        return now.asked
    if now.can_catch_up:
        return Why.OWED
    return Why.RING if now.needs_image else None


class Schedule:
    """Decides about snapshots, step by step, alike on all ranks.

    Args:
        cadence: The interval in force.
        queue: Takes the snapshots.
        is_alone: Whether there is one rank.
        audited_until: Up to this step frozen parameters are read whole at every commit.
    """

    def __init__(
        self, cadence: Cadence, queue: Queue, *, is_alone: bool, audited_until: float
    ) -> None:
        self.cadence = cadence
        self._queue = queue
        self._is_alone = is_alone
        self._audited_until = audited_until
        self._asked: Why | None = None
        self._tried_step = -1
        self._has_prepared = False

    def ask(self, why: Why) -> None:
        """Ask for a snapshot of the next step that is committed."""
        self._asked = self._asked or why

    def is_audited(self, step: int) -> bool:
        """Whether frozen parameters are read whole at a step: at the first ones, and for snapshots."""
        return step <= self._audited_until or self.cadence.is_due(step)

    def settle(
        self,
        step: int,
        heard: Sequence[RankNews],
        look: Look,
        *,
        rebases: bool,
        is_preempted: bool,
    ) -> Why | None:
        """Decide about a snapshot after a step, and count the interval from it.

        Args:
            step: The step.
            heard: What all ranks said after the step before.
            look: At storage.
            rebases: Whether only a snapshot makes it, or one before it, recoverable.
            is_preempted: Whether the training was told to stop soon.

        Returns:
            Why one is taken; None for no snapshot.
        """
        why = decide(
            Situation(
                rebases=rebases,
                is_due=self.cadence.is_due(step),
                is_kept=self.cadence.is_kept(step),
                logs_steps=self._queue.logs_steps,
                makes_images=self._queue.makes_images,
                asked=self._asked,
                can_catch_up=self._can_catch_up(step, heard, look),
                is_last_chance=is_preempted and not self._has_prepared,
                needs_image=self._queue.needs_image(step),
            )
        )
        self._asked = None
        if why not in (None, Why.UNREPLAYABLE, Why.RING):  # of which other ranks do not know yet
            self._has_prepared |= is_preempted
            self._tried_step = step
            self.cadence.snapshot_taken(step)
        return why

    def _can_catch_up(self, step: int, heard: Sequence[RankNews], look: Look) -> bool:
        """Whether to take a snapshot that a rank owes; it exists only with every rank's share."""
        if self._is_alone:
            queue = self._queue
            return queue.owes_snapshot(look) and queue.is_ready_for_snapshot(step, look)
        # The news are from before the last commit's snapshot, which may be the one owed.
        return (
            self._tried_step < step - 1
            and any(news.owes_snapshot for news in heard)
            and all(news.can_snapshot for news in heard)
        )


class Cadence:
    """The setting in force on this rank, the same on all at the same step."""

    def __init__(self, trainer: Trainer, writer: WriterProcess, recorder: Recorder) -> None:
        self.snapshot_every = trainer.settings.snapshot_every
        self._settings = trainer.settings
        self._trainer = trainer
        self._writer = writer
        self._recorder = recorder
        self._decisions: list[dict[str, Any]] = []
        self._lives: tuple[MeasuredIncarnation, ...] = ()
        self._base_step = 0
        self._levels = Levels.near(Setting(self.snapshot_every, writer.batch_size))
        self._wish = Move(self._levels, ())
        self._considered = 0

    @property
    def _limits(self) -> Limits:
        retention = self._settings.retention
        kept = None if retention is None else retention.snapshots
        return self._settings.tuning.limits.with_snapshots(kept)

    def begin(self, step: int, past: Past) -> None:
        """Start at a step, with the setting that the life before used last if one is to be found.

        Of a tuned batch no more than ``loss_steps`` allows: that limit needs no measurements, and the
        first look at them is steps away.
        """
        self._base_step = self._considered = step
        self._lives = past.incarnations
        used = self._levels if past.setting is None else Levels.near(past.setting)
        if self._settings.tunes_interval:
            self._levels = replace(self._levels, interval=used.interval)
        if self._settings.tunes_batch:
            loss_steps = self._limits.loss_steps
            most = used.batch if loss_steps is None else (loss_steps // 2).bit_length() - 1
            self._levels = replace(self._levels, batch=min(used.batch, most))
        self._wish = Move(self._levels, ())
        self._take_effect()

    def is_due(self, step: int) -> bool:
        """Whether a full snapshot is due at a step."""
        if not self._settings.tunes_interval:
            return self._settings.takes_snapshot_at(step)
        return self.is_kept(step) or step - self._base_step >= self.snapshot_every

    def is_kept(self, step: int) -> bool:
        """Whether retention keeps a step for ever."""
        return self._settings.keeps(step)

    def snapshot_taken(self, step: int) -> None:
        """Count the interval from here."""
        self._base_step = step

    def wish(self) -> tuple[int, int]:
        """This rank's wish for interval and batch, as levels plus one; 0 is no wish."""
        if not self._settings.is_tuned:
            return 0, 0
        wish = self._wish.levels
        return wish.interval + 1, wish.batch + 1

    def follow(self, step: int, heard: Sequence[RankNews]) -> None:
        """Follow the wishes of all ranks; at each commit, before the next step begins.

        Args:
            step: The step that is committed.
            heard: What all ranks said, in their order; nothing of a single process.
        """
        if not self._settings.is_tuned:
            return
        if not heard:
            self._follow(step, [self._wish.levels])
        elif all(news.interval and news.batch for news in heard):
            self._follow(step, [Levels(n.interval - 1, n.batch - 1) for n in heard])
        if step - self._considered >= self._settings.tuning.every_steps:
            self._considered = step
            self._consider()

    def _follow(self, step: int, known: Sequence[Levels]) -> None:
        agreed = Levels(max(w.interval for w in known), max(w.batch for w in known))
        if agreed == self._levels:
            return
        before = Setting(self.snapshot_every, self._writer.batch_size)
        self._levels = agreed
        self._take_effect()
        reasons = list(self._wish.reasons) if self._wish.levels == agreed else []
        if not reasons:
            reasons = [
                f"rank {rank} asks for it"
                for rank, wish in enumerate(known)
                if wish.interval == agreed.interval or wish.batch == agreed.batch
            ][:1]
        text = (
            f"from step {step + 1} on, a snapshot every {self.snapshot_every} steps instead of "
            f"{before.snapshot_every} and {self._writer.batch_size} steps per durable write instead of "
            f"{before.batch_size}"
        )
        if self._trainer.rank == 0:
            inform(text, event="tuned", step=step)
        self._decisions.append(
            {
                "step": step,
                "unix_seconds": time.time(),
                "snapshot_every": self.snapshot_every,
                "batch_size": self._writer.batch_size,
                "snapshot_every_before": before.snapshot_every,
                "batch_size_before": before.batch_size,
                "reasons": reasons,
            }
        )
        try:
            write_decisions(self._trainer.folder.decisions, self._decisions)
        except OSError as error:  # no memory is left for it: training needs none of this
            Code.MEASUREMENTS_INCOMPLETE.warn(
                f"measurements are incomplete: a decision of the tuner is not kept: {error}",
                rank=self._trainer.rank,
            )

    def _take_effect(self) -> None:
        setting = self._levels.setting
        if self._settings.tunes_interval:
            self.snapshot_every = setting.snapshot_every
        if self._settings.tunes_batch and self._writer.batch_size != setting.batch_size:
            self._writer.set_batch_size(setting.batch_size)
        self._recorder.set_facts(
            snapshot_every=float(self.snapshot_every),
            batch_size=float(self._writer.batch_size),
            world_size=float(self._trainer.world_size),  # shards of another number of ranks differ
        )
        self._recorder.publish()

    def _consider(self) -> None:
        """Form a wish for the next steps; the same one while nothing better pays."""
        samples, facts = read_recorded(self._trainer.folder.measured_by_writer)
        here = MeasuredIncarnation(
            self._trainer.folder.incarnation,
            {**self._recorder.samples(), **samples},
            {**self._recorder.facts(), **facts},
        )
        lives = [*self._lives, here]
        try:
            measured = measure(lives, world_size=self._trainer.world_size)
        except ConfigError:
            return  # nothing is measured yet
        tuning = self._settings.tuning
        tunes = (self._settings.tunes_interval, self._settings.tunes_batch)
        rates = estimate_rates(failures_of(lives), tuning.prior)
        better = move(self._levels, measured.costs, rates, self._limits, tunes=tunes)
        self._wish = better or Move(self._levels, ())
