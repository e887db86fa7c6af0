"""Recovery by all ranks together: each loads and replays its share, then all exchange the result."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from lowdiff.attach.inherit import inherit_residual
from lowdiff.attach.restore import check_match
from lowdiff.commit.meter import RecoveryClock
from lowdiff.core.events import Code
from lowdiff.model.binding import Attached
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.format.image import OPTIMIZER
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery.damage import judge, refuse_unreadable_newest
from lowdiff.recovery.images import aligned_tensors, other_numbers
from lowdiff.recovery.load import add_numbers, parameter_in, place_of
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.sizing import local_ranks
from lowdiff.recovery.search import Search
from lowdiff.recovery.state import RecoveredState
from lowdiff.settings import Settings

#: A tensor beside those of a parameter's form is told with the numbers up to this size.
_MOST_GATHERED_BYTES = 4096


def recover_together(
    settings: Settings,
    attached: Attached,
    catalog: Catalog,
    ranks: Ranks,
    step: int | None,
    clock: RecoveryClock,
    *,
    restore: str,
) -> RecoveredState | None:
    """The state to start from; None for a run without history.

    Parameters, optimizer state and averages are the same on every rank. Of items that are tensors, and
    of residuals, a rank has only what it goes on with itself.

    No run is stuck behind a step that does not replay, or behind a snapshot that is damaged: where the
    newest step is asked for, all ranks go back together to the newest that every one of them reaches.

    Raises:
        StepNotFound: If nothing leads to the step that was asked for.
        ReplayMismatch: If a step does not replay, and it was asked for or ``on_error="raise"``.
        DamagedFile: If the newest step is asked for, and the newest incarnation cannot be read.
    """
    for finding in judge(settings.folder, catalog)[0]:
        Code.RUN_DAMAGED.warn(finding.message, rank=ranks.rank)
    if step is None and not any(ranks.gather(_has_history(catalog))):
        return None  # new, or its only trainer died before its first snapshot was durable
    with ranks.together():
        if step is None:
            refuse_unreadable_newest(catalog)
        if restore == "all" and catalog.incarnations:
            check_match(attached, catalog.incarnations[max(catalog.incarnations)])
    here = local_ranks(ranks.gather)
    options = ReplayOptions(
        num_workers=max(1, len(os.sched_getaffinity(0)) // here.count),  # they share its cores
        progress=clock.progress,
        device=attached.device,
        here=here,
    )
    goes_back = step is None and settings.on_error == "warn"
    search = Search(catalog, step, goes_back=goes_back, frozen=attached.frozen_shards.layout)
    state = search.run(options, ranks)
    # Of a model that is sharded as it was, a rank takes no more than it trains.
    own = [attached.layout.parameters[i].name for i in attached.parameters]
    same = restore == "all" and state.fence.layout == attached.layout
    exchange(state, ranks, set(own) if same else None)
    if restore == "all":
        inherit_residual(settings, catalog, state, attached, ranks)
    return state


def exchange(state: RecoveredState, ranks: Ranks, wanted: Collection[str] | None = None) -> None:
    """Complete every rank's state with what other ranks loaded and replayed.

    Args:
        state: Of this rank.
        ranks: All of them.
        wanted: Parameters that this rank needs; None for all.
    """
    if ranks.world_size == 1:
        return
    own = {name: values for name, _, values in aligned_tensors(state)}
    numbers = other_numbers(state)
    for index, by_name in enumerate(numbers):
        for name, entries in by_name.items():
            for key in [key for key, value in entries.items() if _is_large(key, value)]:
                own[f"{OPTIMIZER}{index}/{name}/{key}"] = entries.pop(key)
    names = {spec.name for spec in state.fence.layout.parameters}

    def is_wanted(full_name: str) -> bool:
        return wanted is None or parameter_in(full_name, names) in wanted

    for full_name, values in ranks.spread(own, is_wanted).items():
        home, key, _ = place_of(state, full_name, names)
        home[key] = values
    for others in ranks.gather(numbers):
        add_numbers(state, [optimizer.groups for optimizer in state.optimizers], others)


def _is_large(key: object, value: object) -> bool:
    """Whether an entry beside those of its parameter's form is no number: a preconditioner, say."""
    if not (isinstance(key, str) and isinstance(value, torch.Tensor)):
        return False
    return value.nbytes > _MOST_GATHERED_BYTES


def _has_history(catalog: Catalog) -> bool:
    """Whether anything was ever committed, readable or not: then it is not passed over."""
    return bool(catalog.incarnations or catalog.snapshots or catalog.damage) or any(
        records.num_differentials for records in catalog.records.values()
    )
