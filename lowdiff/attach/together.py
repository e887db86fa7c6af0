"""What an incarnation starts from, and its recovery by all ranks together.

First the ranks decide alike: this run's history, weights of it or of another run, or nothing. Then each loads and
replays its share, and all exchange the result.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowdiff.attach.inherit import inherit_residual
from lowdiff.attach.restore import check_match, difference
from lowdiff.commit.meter import RecoveryClock
from lowdiff.core.events import Code
from lowdiff.errors import ConfigError, LowDiffError, StepNotFound
from lowdiff.model.binding import Attached
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.trust import shared_staging_root
from lowdiff.persistence.format.image import OPTIMIZER
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.run.fences import first_of_lineage
from lowdiff.recovery.damage import judge, refuse_unreadable_newest
from lowdiff.recovery.images import aligned_tensors, other_numbers
from lowdiff.recovery.load import add_numbers, parameter_in, place_of
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.sizing import local_ranks
from lowdiff.recovery.search import Search, plan_best
from lowdiff.recovery.state import RecoveredState
from lowdiff.settings import Settings
from lowdiff.types import Origin

#: A tensor beside those of a parameter's form is told with the numbers up to this size.
_MOST_GATHERED_BYTES = 4096
_RESTORE = ("all", "model", "none")


@dataclass(frozen=True, slots=True)
class Wish:
    """What `attach` was told to restore.

    Attributes:
        restore: ``"all"``, ``"model"`` or ``"none"``.
        step: Which step; None for the newest.
        run: Another run, whose weights are taken where this one has no history; None for no other.

    Raises:
        ConfigError: If these do not go together.
    """

    restore: str
    step: int | None = None
    run: Path | None = None

    def __post_init__(self) -> None:
        if self.restore not in _RESTORE:
            raise ConfigError(f"restore is one of {_RESTORE}, got {self.restore!r}")
        if self.restore == "none" and (self.step is not None or self.run is not None):
            useless = f"step={self.step}" if self.run is None else f"restore_from={self.run}"
            raise ConfigError(
                f'restore="none" starts afresh and has no use for {useless}; leave one of them out'
            )

    @property
    def own_step(self) -> int | None:
        """The step of this run that is asked for, if one is."""
        return self.step if self.run is None else None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the state comes from with which an incarnation starts.

    Attributes:
        settings: Those of the run, with the folder of the run that has the state.
        catalog: Of that run.
        restore: ``"all"``, ``"model"``, or ``"none"`` for what the script built.
        step: Which step; None for the newest.
        is_weights: Whether a history begins here that was told to begin with weights alone.
    """

    settings: Settings
    catalog: Catalog
    restore: str
    step: int | None
    is_weights: bool = False

    def origin(self, state: RecoveredState | None) -> Origin | None:
        """What a fence says of it."""
        if not self.is_weights:
            return None
        if state is None:
            return Origin()
        return Origin(self.catalog.run_id, state.fence.incarnation, state.step)


def source_of(
    settings: Settings, attached: Attached, catalog: Catalog, wish: Wish, *, is_alone: bool
) -> Source:
    """Decide what an incarnation starts from; every rank decides alike, because fences are shared.

    A launcher makes the same call at every restart. So a history that began with weights alone is resumed by the
    call that began it, and weights are taken where there is none, or none that goes with what is attached.

    Args:
        settings: Of the run.
        attached: What is to be trained.
        catalog: Of the run.
        wish: What the user asked for.
        is_alone: Whether there is one rank. Several may see different memory of another run, so its disk counts.

    Raises:
        NotARun: If the other run is none.
        StepNotFound: If it holds nothing.
    """
    if wish.restore == "none":
        return Source(settings, catalog, "none", None)
    if wish.run is not None:
        if has_history(catalog):
            return Source(settings, catalog, "all", None)
        other = replace(settings, run=wish.run)
        roots = dict.fromkeys((settings.staging_root, shared_staging_root()))
        theirs = scan(other.folder, [*roots] if is_alone else [])
        if not (theirs.incarnations or theirs.snapshots):
            raise StepNotFound(
                wish.run, wish.step, [], "it holds no step whose weights could be taken"
            )
        return Source(other, theirs, "model", wish.step, is_weights=True)
    if wish.restore == "all" or (wish.step is None and _has_begun_so(attached, catalog)):
        return Source(settings, catalog, "all", wish.step)
    return Source(settings, catalog, "model", wish.step, is_weights=True)


def _has_begun_so(attached: Attached, catalog: Catalog) -> bool:
    """Whether the newest history began with weights of this run alone, and goes on with what is attached.

    Raises:
        ConfigError: If that cannot be told.
    """
    fences = catalog.incarnations
    if not fences:
        return False
    first = first_of_lineage(fences)
    if first is None:
        raise ConfigError(
            'restore="model" resumes what it began and nothing else, and how this run began cannot be read: '
            f"its first fence in {catalog.root} is missing or damaged (`lowdiff verify` says more). "
            'restore="all" goes on with the run, step=N begins anew with the weights of that step'
        )
    origin = first.origin
    if origin is None or origin.run_id not in ("", catalog.run_id):
        return False
    return difference(attached, fences[max(fences)]) is None


def say_what_is_left(
    ranks: Ranks, catalog: Catalog, wish: Wish, step: int, *, continues: bool
) -> None:
    """Warn of the steps of this run that a start gives up on purpose, on rank 0.

    Args:
        ranks: All of them.
        catalog: Of the run.
        wish: What the user asked for.
        step: The step that the incarnation starts with.
        continues: Whether it goes on with the run's history.
    """
    if ranks.rank or (continues and wish.own_step is None):
        return
    try:
        newest = plan_best(catalog, None).step
    except LowDiffError:  # whoever starts afresh may do so because nothing can be recovered
        return
    if newest == (step if continues else 0):
        return
    call = f"step={step}"
    what = f"goes back: the {newest - step} step(s) after it, up to {newest}, are void"
    if not continues:
        call = f'restore="{wish.restore}"' + ("" if wish.step is None else f", step={wish.step}")
        what = f"begins a new history: the {newest} step(s) that this run had made are void"
        if wish.restore == "model":
            what += (
                "; in another run folder, restore_from=RUN takes the weights and leaves these steps"
            )
    Code.STEPS_LEFT_BEHIND.warn(f"attach({call}) {what}", step=newest)


def recover_together(
    source: Source, attached: Attached, ranks: Ranks, clock: RecoveryClock
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
    settings, catalog, step = source.settings, source.catalog, source.step
    restore = source.restore
    for finding in judge(settings.folder, catalog)[0]:
        Code.RUN_DAMAGED.warn(finding.message, rank=ranks.rank)
    if step is None and not any(ranks.gather(has_history(catalog))):
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


def has_history(catalog: Catalog) -> bool:
    """Whether anything was ever committed, readable or not: then it is not passed over."""
    return bool(catalog.incarnations or catalog.snapshots or catalog.damage) or any(
        records.num_differentials for records in catalog.records.values()
    )
