"""The start of an incarnation: the recovered state, loaded into live objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lowdiff.attach.inherit import compressor_of
from lowdiff.attach.restore import (
    check_restored,
    load_gradients,
    load_model,
    load_optimizers,
    load_stateful,
    load_weights,
    unlike,
)
from lowdiff.core.events import Code, inform
from lowdiff.core.layout import by_tensor, in_a_row
from lowdiff.model.averages import followed_names
from lowdiff.model.binding import Attached
from lowdiff.model.built import dropped, mark_used, read_built, stored
from lowdiff.model.ranks import Ranks
from lowdiff.model.tracked import Given
from lowdiff.recovery.reshard import frozen_as, resharded, whole_trained
from lowdiff.recovery.state import (
    STATEFUL_ITEM,
    RecoveredState,
    inherit,
    is_same_class,
)
from lowdiff.settings import Settings
from lowdiff.types import Fence

#: Settings named in one warning.
_MOST_SAID = 8


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The step and the state that an incarnation begins with.

    Attributes:
        continues: Whether the run's history is part of its own.
        needs_snapshot: Whether the start must be made durable before training goes on.
        built: What the script built that the run goes on with; see `lowdiff.model.built`.
    """

    step: int
    continues: bool
    needs_snapshot: bool
    residual: list[torch.Tensor | None]
    items: Mapping[str, bytes]
    built: Mapping[str, str]


def load_start(
    settings: Settings,
    given: Given,
    ranks: Ranks,
    state: RecoveredState | None,
    restore: str,
) -> Start:
    """Load what is to be restored into the live objects, and only then ask these for their state.

    torchdata's node loader begins to iterate when it is asked, and ignores what it is given later.

    Raises:
        ConfigError: Naming an object whose state does not survive encoding.
        RunMismatch: If what is attached does not fit the run.
    """
    attached, stateful, tracker = given.attached, given.stateful, given.tracker
    built = read_built(attached.optimizers, stateful)
    if state is None:
        return Start(0, False, True, [], tracker.read_first(), _settled(given, built))
    moved = []
    items, frozen = (
        inherit(state.items, state.fence.draws, attached.draws, ranks.world_size)[ranks.rank],
        attached.frozen_shards,
    )
    if state.fence.frozen_shards != frozen.layout:
        items |= frozen_as(state, frozen.layout, ranks.rank, items)
        state.fence = replace(state.fence, frozen_shards=frozen.layout)
        moved = ["its frozen parameters are divided over the ranks in another way"]
    if state.fence.layout != attached.layout:
        state = _divided_as(attached, state, restore)
        moved = ["its parameters are divided over the ranks in another way"]
    # The generators of a rank that joins now start as its script seeded them.
    items = tracker.read_generators() | items
    if restore == "model":
        kept = load_weights(state, items, attached)
        if ranks.rank == 0 and kept:
            Code.WEIGHTS_NOT_IN_RUN.warn(
                f"these are not in step {state.step} of the run, and stay as the model was built: "
                f"{', '.join(kept)}",
            )
        return Start(0, False, True, [], tracker.read_first(), _settled(given, built))
    slots = settings.compressor.residual_layout(attached.exchanged).parameters
    residual = [state.residuals[0].get(spec.name) for spec in slots]
    reshaped = load_model(state, items, attached)
    load_optimizers(state, attached)
    load_gradients(state, attached)
    afresh, objects = _compare_objects(stateful, state.fence.stateful)
    restored = {name: thing for name, thing in stateful.items() if name not in afresh}
    load_stateful(state, items, restored)
    followed = {name: live for name, live in given.averages.items() if name in restored}
    check_restored(state, items, attached, followed)
    live = tracker.read_first()
    for name in unlike(state, items, restored):
        Code.OBJECT_NOT_RESTORED.warn(
            f"{name} does not hold what its load_state_dict() was given, and the run goes on with "
            "what it holds; see that state_dict() and load_state_dict() mirror each other",
            rank=ranks.rank,
        )
    averages = followed_names(given.averages, attached.layout)
    changes = moved + _changes(settings, state.fence, ranks, averages)
    after = read_built(attached.optimizers, stateful)
    left, built = dropped(state.fence.built, _settled(given, built), after)
    if ranks.rank == 0 and left:
        Code.BUILT_OTHERWISE.warn(
            f"resuming at step {state.step}, the run's history wins over what this script builds otherwise than before: "
            f"{'; '.join(left[:_MOST_SAID])}{' and more' if left[_MOST_SAID:] else ''}. To change a run on purpose, set "
            "these after attach (docs/your_loop.md)",
            step=state.step,
        )
    if ranks.rank == 0 and (said := [*changes, *objects, *reshaped]):
        text = f"resuming at step {state.step}: {'; '.join(said)}"
        if objects or reshaped:
            Code.RESUMED_WITH_CHANGES.warn(text)
        else:
            inform(text)
    items |= {STATEFUL_ITEM + name: live[STATEFUL_ITEM + name] for name in afresh}
    return Start(state.step, True, bool(changes or objects), residual, items, built)


def _settled(given: Given, built: Mapping[str, str]) -> dict[str, str]:
    """What a script built that goes on record; what is attached now is never taken for built again."""
    mark_used([*given.attached.optimizers, *given.stateful.values()])
    return stored(built, given.stateful)


def _divided_as(attached: Attached, state: RecoveredState, restore: str) -> RecoveredState:
    """Divide a recovered state over ranks as the attached model is.

    With ``restore="model"`` the model may train other tensors; those that fit are divided.
    """
    if restore == "all":
        return resharded(state, attached.layout, attached.specs)
    state = whole_trained(state)
    shapes = {spec.tensor: spec.whole_shape for spec in attached.layout.parameters}
    old = by_tensor(state.fence.layout)
    kept = [
        spec
        for spec in attached.layout.parameters
        if spec.tensor in old and old[spec.tensor][0].shape == spec.whole_shape
    ]
    others = [s for s in state.fence.layout.parameters if shapes.get(s.tensor) != s.whole_shape]
    return resharded(state, in_a_row((*kept, *others)), state.fence.optimizers)


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
    if settings.compressor != compressor_of(fence):
        found.append(f"compressor {compressor} instead of {dict(fence.compressor)}")
    if ranks.world_size != fence.world_size:
        found.append(f"{ranks.world_size} ranks instead of {fence.world_size}")
    if averages != fence.averages:
        found.append(
            f"averages of the parameters {sorted(averages)} instead of {sorted(fence.averages)}, "
            "or of other parameters"
        )
    return found
