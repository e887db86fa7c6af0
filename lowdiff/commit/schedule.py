"""How often this life snapshots and how much it writes at once: as told, or as the tuner decides.

Every rank looks at its own measurements and tells its wish with the news of a step. At the next
commit all ranks have heard the same wishes and follow them alike: the longest interval and the largest
batch that any rank asks for, because the slowest disk must keep up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lowdiff.commit.news import RankNews
from lowdiff.core.events import log_event
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.measurements import Recorder, read_recorded, write_decisions
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.settings import Settings
from lowdiff.tuner.choice import Setting
from lowdiff.tuner.failures import estimate_rates
from lowdiff.tuner.measured import MeasuredIncarnation, Past, failures_of, measure
from lowdiff.tuner.policy import Levels, Move, move

_logger = logging.getLogger(__name__)


class Cadence:
    """The setting in force on this rank, the same on all at the same step."""

    def __init__(
        self,
        settings: Settings,
        folder: StagingFolder,
        writer: WriterProcess,
        recorder: Recorder,
        ranks: tuple[int, int],
    ) -> None:
        self.snapshot_every = settings.snapshot_every
        self.batch_size = settings.batch_size
        self._settings = settings
        retention = settings.retention
        self._limits = settings.tuning.limits.with_snapshots(
            None if retention is None else retention.snapshots
        )
        self._folder = folder
        self._writer = writer
        self._recorder = recorder
        self._rank, self._world_size = ranks
        self._decisions: list[dict[str, Any]] = []
        self._lives: tuple[MeasuredIncarnation, ...] = ()
        self._base_step = 0
        self._levels = Levels.near(Setting(self.snapshot_every, self.batch_size))
        self._wish = Move(self._levels, ())
        self._considered = 0

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
        kept = self._settings.keeps(step)
        return kept or step - self._base_step >= self.snapshot_every

    def snapshot_taken(self, step: int) -> None:
        """Count the interval from here."""
        self._base_step = step

    def wish(self) -> tuple[int, int]:
        """This rank's wish for interval and batch, as levels plus one; 0 is no wish."""
        if not self._settings.is_tuned:
            return 0, 0
        wish = self._wish.levels
        return wish.interval + 1, wish.batch + 1

    def heed(self, step: int, heard: Sequence[RankNews]) -> None:
        """Follow the wishes of all ranks; at each commit, before the next step begins.

        Args:
            step: The step that is committed.
            heard: What all ranks said, in their order.
        """
        if not self._settings.is_tuned:
            return
        if heard and all(news.interval and news.batch for news in heard):
            self._follow(step, [Levels(n.interval - 1, n.batch - 1) for n in heard])
        if step - self._considered >= self._settings.tuning.every_steps:
            self._considered = step
            self._consider()

    def _follow(self, step: int, known: Sequence[Levels]) -> None:
        agreed = Levels(max(w.interval for w in known), max(w.batch for w in known))
        if agreed == self._levels:
            return
        before = Setting(self.snapshot_every, self.batch_size)
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
            f"{before.snapshot_every} and {self.batch_size} steps per durable write instead of "
            f"{before.batch_size}"
        )
        if self._rank == 0:
            log_event(_logger, logging.INFO, "tuned", text, step=step)
        self._decisions.append(
            {
                "step": step,
                "unix_seconds": time.time(),
                "snapshot_every": self.snapshot_every,
                "batch_size": self.batch_size,
                "snapshot_every_before": before.snapshot_every,
                "batch_size_before": before.batch_size,
                "reasons": reasons,
            }
        )
        try:
            write_decisions(self._folder.decisions, self._decisions)
        except OSError as error:  # no memory is left for it: training needs none of this
            text = "rank %d: measurements are incomplete: a decision of the tuner is not kept: %s"
            _logger.warning(text, self._rank, error)

    def _take_effect(self) -> None:
        setting = self._levels.setting
        if self._settings.tunes_interval:
            self.snapshot_every = setting.snapshot_every
        if self._settings.tunes_batch and self.batch_size != setting.batch_size:
            self.batch_size = setting.batch_size
            self._writer.set_batch_size(self.batch_size)
        self._recorder.set_facts(
            snapshot_every=float(self.snapshot_every),
            batch_size=float(self.batch_size),
            world_size=float(self._world_size),  # shards of another number of ranks differ
        )
        self._recorder.publish()

    def _consider(self) -> None:
        """Form a wish for the next steps; the same one while nothing better pays."""
        samples, facts = read_recorded(self._folder.measured_by_writer)
        here = MeasuredIncarnation(
            self._folder.incarnation,
            {**self._recorder.samples(), **samples},
            {**self._recorder.facts(), **facts},
        )
        lives = [*self._lives, here]
        try:
            measured = measure(lives, world_size=self._world_size)
        except ConfigError:
            return  # nothing is measured yet
        tuning = self._settings.tuning
        tunes = (self._settings.tunes_interval, self._settings.tunes_batch)
        rates = estimate_rates(failures_of(lives), tuning.prior)
        better = move(self._levels, measured.costs, rates, self._limits, tunes=tunes)
        self._wish = better or Move(self._levels, ())
