"""How the lives before this one ended, as far as this run's measurements and memory tell."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

import torch

from lowdiff.core.events import Code
from lowdiff.core.numerics import environment_of
from lowdiff.errors import LowDiffError
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.run.fences import read_fence
from lowdiff.persistence.staging.measurements import (
    Measurements,
    gather_measurements,
    read_all_measurements,
    write_measurements,
)
from lowdiff.settings import Settings
from lowdiff.tuner.choice import Setting
from lowdiff.tuner.measured import MeasuredIncarnation, Past, number

#: How a life may have ended, the worst first. A rank that is new, or whose machine has nothing of the
#: run, knows least.
_ENDINGS = ("node", "process", "unknown", "closed", "none")


def past_of(settings: Settings, ranks: Ranks, run_id: str, stages: Sequence[StagingFolder]) -> Past:
    """Read the history and agree on why the last life ended; on all ranks together."""
    with ranks.together():
        _keep_what_died(settings.folder, run_id, ranks.rank, stages)
        lives = read_all_measurements(settings.folder, run_id, ranks.rank)
        newest = max((number for number, *_ in settings.folder.fences()), default=None)
        mine = _ending(lives, newest, ranks.rank, stages)
    worst = min(ranks.gather(mine), key=_ENDINGS.index)
    restart = "" if worst in ("closed", "none") else worst
    now = time.time()
    facts: dict[str, float | str] = {
        "began_unix_seconds": now,
        "seen_unix_seconds": now,
        "restart": restart,
        "host": socket.gethostname(),
        "processor": environment_of(torch.device("cpu")).processor[:60],
        "cores": float(len(os.sched_getaffinity(0))),
    }
    # A node takes the measurements of a short life with it; those before say nothing of its end.
    is_known = bool(lives) and lives[-1].incarnation == newest
    seen = number(lives[-1].facts, "seen_unix_seconds") if is_known else 0.0
    if restart and seen:
        facts["gap_seconds"] = max(0.0, now - seen)
    last = lives[-1].facts if lives else {}
    used = [number(last, "snapshot_every"), number(last, "batch_size")]
    every, batch = ranks.gather(used)[0]
    setting = Setting(round(every), round(batch)) if every >= 1 and batch >= 1 else None
    return Past(
        tuple(MeasuredIncarnation(m.incarnation, m.samples, m.facts) for m in lives), facts, setting
    )


def _keep_what_died(
    folder: RunFolder, run_id: str, rank: int, stages: Sequence[StagingFolder]
) -> None:
    """Keep the pages of a life whose writer died as well, as it would have done at its end."""
    kept = {life.incarnation: life.ended for life in read_all_measurements(folder, run_id, rank)}
    for stage in stages:
        fence = folder.fence(stage.incarnation, rank)
        if stage.rank == rank and not kept.get(stage.incarnation) and fence.is_file():
            try:
                world_size = read_fence(fence).world_size
                measured = gather_measurements(stage, run_id, world_size, ended="died")
                write_measurements(folder, measured)
            except (LowDiffError, OSError) as error:
                Code.MEASUREMENTS_INCOMPLETE.warn(f"measurements are lost: {error}")


def _ending(
    lives: Sequence[Measurements], newest: int | None, rank: int, stages: Sequence[StagingFolder]
) -> str:
    """What one rank knows: ``"none"`` without a life before, ``"closed"``, or a kind of failure."""
    if newest is None:
        return "none"
    told = next((life for life in lives if life.incarnation == newest), None)
    if told is not None and told.ended == "closed":
        return "closed"
    if any((stage.incarnation, stage.rank) == (newest, rank) for stage in stages):
        return "process"
    return "unknown" if told is None else "node"
