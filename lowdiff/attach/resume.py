"""What an incarnation starts from: the recovered state, loaded into live objects."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lowdiff.attach.restore import (
    check_restored,
    load_gradients,
    load_model,
    load_optimizers,
    load_stateful,
    load_weights,
    unlike,
)
from lowdiff.compressors import from_settings
from lowdiff.core.events import printable
from lowdiff.core.layout import torch_dtype
from lowdiff.model.averages import followed_names
from lowdiff.model.ranks import Ranks
from lowdiff.model.tracked import Given
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.sections import max_payload_bytes
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.protocols import Compressor
from lowdiff.recovery.plan import spans_of
from lowdiff.recovery.state import (
    RNG_ITEM,
    STATEFUL_ITEM,
    RecoveredState,
    inherit,
    is_same_class,
)
from lowdiff.settings import Settings
from lowdiff.step.residual import read_residual
from lowdiff.types import Fence, Layout, ResidualMark

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where an incarnation begins.

    Attributes:
        continues: Whether the run's history is part of its own.
        needs_snapshot: Whether the start must be made durable before training goes on.
    """

    step: int
    continues: bool
    needs_snapshot: bool
    residual: list[torch.Tensor | None]
    items: Mapping[str, bytes]


def load_start(
    settings: Settings,
    given: Given,
    catalog: Catalog,
    ranks: Ranks,
    state: RecoveredState | None,
    restore: str,
) -> Start:
    """Load what is to be restored into the live objects."""
    attached, stateful, tracker = given.attached, given.stateful, given.tracker
    if state is None:
        return Start(0, False, True, [], tracker.read())
    items = inherit(state.items, ranks.world_size)[ranks.rank]
    # The generators of a rank that joins now start as its script seeded them.
    own = {name: data for name, data in tracker.read().items() if name.startswith(RNG_ITEM)}
    items = own | items
    if restore == "model":
        kept = load_weights(state, items, attached)
        if ranks.rank == 0 and kept:
            _logger.warning(
                "these are not in step %d of the run, and stay as the model was built: %s",
                state.step,
                printable(", ".join(kept)),
            )
        return Start(0, False, True, [], tracker.read())
    residual = _inherited_residual(settings, catalog, state, attached.layout, ranks)
    reshaped = load_model(state, items, attached)
    differences = load_optimizers(state, attached)
    load_gradients(state, attached)
    afresh, objects = _compare_objects(stateful, state.fence.stateful)
    restored = {name: thing for name, thing in stateful.items() if name not in afresh}
    load_stateful(state, items, restored)
    followed = {name: live for name, live in given.averages.items() if name in restored}
    check_restored(state, items, attached, followed)
    for name in unlike(state, items, restored):
        _logger.warning(
            "rank %d: %s does not hold what its load_state_dict() was given, and the run goes on "
            "with what it holds; see that state_dict() and load_state_dict() mirror each other",
            ranks.rank,
            name,
        )
    averages = followed_names(given.averages, attached.layout)
    changes = _changes(settings, state.fence, ranks, averages)
    if ranks.rank == 0 and (said := [*changes, *objects, *reshaped, *differences]):
        _logger.log(
            logging.WARNING if objects or reshaped else logging.INFO,
            "resuming at step %d: %s",
            state.step,
            "; ".join(said),
        )
    if afresh:
        live = {STATEFUL_ITEM + name for name in afresh}
        items |= {name: data for name, data in tracker.read().items() if name in live}
    return Start(state.step, True, bool(changes or objects), residual, items)


def _compare_objects(
    stateful: Mapping[str, object], before: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Return which stateful objects start afresh, and what the user is told of those that differ.

    Args:
        stateful: What is attached, by name.
        before: Name -> class of what the run had.
    """
    afresh, said = set(), []
    for name, thing in stateful.items():
        if name not in before:
            said.append(f"{name} is new and starts afresh")
        elif not is_same_class(before[name], class_of(thing)):
            said.append(f"{name} is {class_of(thing)} instead of {before[name]} and starts afresh")
        else:
            continue
        afresh.add(name)
    gone = [name for name in before if name not in stateful]
    said += [f"{name} was not attached again, and its state is left out" for name in gone]
    return afresh, said


def class_of(thing: object) -> str:
    """Qualified name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _changes(
    settings: Settings, fence: Fence, ranks: Ranks, averages: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """What the user chose otherwise than last time; welcome, and said."""
    compressor = {
        "name": settings.compressor.name,
        "settings": dict(settings.compressor.settings()),
    }
    found = []
    if settings.compressor != _compressor(fence):
        found.append(f"compressor {compressor} instead of {dict(fence.compressor)}")
    if ranks.world_size != fence.world_size:
        found.append(f"{ranks.world_size} ranks instead of {fence.world_size}")
    if averages != fence.averages:
        found.append(
            f"averages of the parameters {sorted(averages)} instead of {sorted(fence.averages)}, "
            "or of other parameters"
        )
    return found


def _residual_of(
    settings: Settings, catalog: Catalog, state: RecoveredState, rank: int
) -> dict[str, torch.Tensor]:
    """One old rank's residual at the state's step, by name: from staging or its snapshot.

    After the loss of staging, or where a life kept none there, it is the snapshot's, which is
    older; training then continues from the exact state with a slightly different error feedback,
    and says so.
    """
    had_one = any(state.residuals) or bool(_kept(state.fence).parameters)
    # A life that begins takes the residual over, and the memory of the one before it goes; if it
    # dies in attach, it may have none yet. So it may be any of those that begin at this step.
    lives = [span for span in spans_of(catalog) if span.holds(state.step)]
    for life in reversed([span for span in lives if span.incarnation >= state.fence.incarnation]):
        # With another number of ranks it began with the mean, the same on each.
        number, holder = life.incarnation, rank % life.world_size
        kept = _kept(catalog.incarnations[number])
        step, mark = _newest_mark(catalog, number, holder, state) if kept.parameters else (0, None)
        if mark is None:
            continue
        staging = StagingFolder.of(settings.staging_root, catalog.run_id, number, holder)
        found = read_residual(staging.residual, kept, mark)
        if found is not None:
            if step < state.step:
                _logger.warning(
                    "rank %d: an accelerator's error-feedback residual is copied every few steps; "
                    "step %d goes on with that of step %d: the state is exact, the continuation is "
                    "not bit-identical",
                    rank,
                    state.step,
                    step,
                )
            return {s.name: r for s, r in zip(kept.parameters, found, strict=True)}
    if state.base_step != state.step and had_one:
        _logger.warning(
            "rank %d: the error-feedback residual of step %d is not in staging memory; using that "
            "of snapshot %d: the state is exact, the continuation is not bit-identical",
            rank,
            state.step,
            state.base_step,
        )
    return _residual_of_base(state, rank)


def _residual_of_base(state: RecoveredState, rank: int) -> dict[str, torch.Tensor]:
    """One old rank's residual as the snapshot holds it, by name.

    Where a life with another number of ranks was replayed without its first snapshot, the base is of
    the life before it, and with the mean of that every rank began.
    """
    if len(state.residuals) == len(state.items):
        return state.residuals[rank]
    names = dict.fromkeys(name for residual in state.residuals for name in residual)
    return {
        name: _mean([r[name] for r in state.residuals if name in r], len(state.residuals))
        for name in names
    }


def _newest_mark(
    catalog: Catalog, number: int, rank: int, state: RecoveredState
) -> tuple[int, ResidualMark | None]:
    """The residual that a record of the state's step names, and the step.

    An accelerator's records do not all name one: then the newest before it that does, unless that
    is older than the snapshot's.
    """
    records = catalog.of(number, rank)
    fence = catalog.incarnations[number]
    codec = Codec(max_payload_bytes=max_payload_bytes(fence.layout))
    step, oldest = state.step, min(state.step, state.base_step + 1)
    mark = None
    while mark is None and step >= oldest and step in records:
        mark = read_differential(records[step], codec).residual
        step -= 1
    return step + 1, mark


def _kept(fence: Fence) -> Layout:
    """What the reducers of an incarnation kept in their residual."""
    return _compressor(fence).residual_layout(fence.layout)


def _compressor(fence: Fence) -> Compressor:
    return from_settings(fence.compressor["name"], fence.compressor["settings"])


def _inherited_residual(
    settings: Settings, catalog: Catalog, state: RecoveredState, layout: Layout, ranks: Ranks
) -> list[torch.Tensor | None]:
    """This rank's residual; with another world size, the mean over the old ranks.

    What another compressor left is taken over where its name and size fit.
    """
    old_ranks = len(state.items)  # not those of the snapshot, which may be of an earlier life
    sources = [ranks.rank] if old_ranks == ranks.world_size else list(range(old_ranks))
    found = [_residual_of(settings, catalog, state, rank) for rank in sources]
    means: list[torch.Tensor | None] = []
    for spec in settings.compressor.residual_layout(layout).parameters:
        own = [r for r in (residual.get(spec.name) for residual in found) if r is not None]
        if any(r.numel() != spec.numel or r.dtype != torch_dtype(spec.dtype) for r in own):
            own = []
        mean = _mean(own, len(sources)) if len(sources) > 1 and own else None
        means.append(mean if len(sources) > 1 else next(iter(own), None))
    return means


def _mean(residuals: list[torch.Tensor], num_ranks: int) -> torch.Tensor:
    """What each rank owes after a change of world size; some of the old ones may owe nothing.

    Averaged gradients divide by the world size, so the mean keeps what is owed in total.
    """
    return torch.stack(residuals).sum(0) / num_ranks
