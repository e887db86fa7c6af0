"""The state of a run at one step, as recovery holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.layout import shaped
from lowdiff.errors import DamagedFile, RunMismatch
from lowdiff.persistence.format.values import BadEncoding, decode
from lowdiff.types import Differential, Fence, ItemRef

#: Prefixes of item names; the rest of the name is the buffer's or the object's.
BUFFER_ITEM, STATEFUL_ITEM, RNG_ITEM, FROZEN_ITEM = "buffer/", "stateful/", "rng/", "frozen/"
#: Large tensors inside stateful objects; and what averages follow, which is no item but replayed.
TENSOR_ITEM, AVERAGE_ITEM = "tensor/", "average/"
#: The stateful object that holds what modules of the model keep beside parameters and buffers, which
#: no keyword argument can name; and its item.
EXTRA_STATE = "model.get_extra_state()"
EXTRA_ITEM = STATEFUL_ITEM + EXTRA_STATE
#: Name, among the stateful objects, of what the training loop carries from step to step.
LOOP_STATE = "checkpointer.state"

#: State entries that may hold one number for the whole parameter, whatever the parameter's shape. Of
#: another class they may hold one for each element; see `is_scalar`.
SCALAR_STATE = {"step", "eta", "mu", "mu_product"}


@dataclass(slots=True, eq=False)
class OptimizerState:
    """One optimizer's state.

    Attributes:
        groups: Hyper-parameters of each group, without ``params``.
        state: Parameter name -> key -> value. Tensors shaped like the parameter are flat, in
            memory order; everything else is as the optimizer keeps it.
    """

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


@dataclass(slots=True, eq=False)
class RecoveredState:
    """Everything a run knew at a step.

    Attributes:
        step: Number of completed optimizer steps.
        fence: Describes the model and optimizers of the incarnation it belongs to.
        base_step: Step of the snapshot it was rebuilt from.
        parameters: Name -> flat tensor in memory order.
        optimizers: One per attached optimizer.
        items: Per rank: encoded buffers, RNG states and stateful objects by item name.
        held: Layout indices of parameters that held a gradient tensor at commit.
        residuals: Per rank: parameter name -> flat residual, as the base snapshot holds it; only
            right for this step when the step is the snapshot's.
        averages: Name of a stateful object that averages parameters -> parameter name -> flat
            average.
        compared: Parameter name -> step of the last checksum that what the optimizer keeps of it has met since
            the snapshot, whose bytes are checked as well.
    """

    step: int
    fence: Fence
    base_step: int
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: list[OptimizerState] = field(default_factory=list)
    items: list[dict[str, bytes]] = field(default_factory=list)
    held: tuple[int, ...] = ()
    residuals: list[dict[str, torch.Tensor]] = field(default_factory=list)
    averages: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)

    def move(self, device: torch.device) -> None:
        """Put parameters, averages and what optimizers keep of every element on a device."""
        for tensors in (self.parameters, *self.averages.values()):
            for name, values in tensors.items():
                tensors[name] = values.to(device)
        numels = {spec.name: spec.numel for spec in self.fence.layout.parameters}
        for optimizer in self.optimizers:
            for name, entries in optimizer.state.items():
                for key, value in entries.items():
                    # Numbers stay on the host; whoever builds the optimizer knows where it wants them.
                    if is_aligned(key, value, numels.get(name, 0)) or (
                        isinstance(value, torch.Tensor) and devices.may_look(device)
                    ):
                        entries[key] = value.to(device)

    def take(self, shards: Sequence[Differential]) -> None:
        """Become the state after a step, as far as that is no tensor.

        Args:
            shards: The step's records of the ranks whose items are here, in their order.
        """
        first = shards[0]
        self.step = first.step
        for optimizer, step in zip(self.optimizers, first.optimizers, strict=True):
            optimizer.groups = [dict(group) for group in step.after]
        for items, shard in zip(self.items, shards, strict=True):
            change_items(items, shard.items)
        self.held = tuple(sorted({i for shard in shards for i in shard.held}))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameter name -> tensor of its logical shape, sharing memory."""
        return {
            spec.name: shaped(self.parameters[spec.name], spec)
            for spec in self.fence.layout.parameters
        }

    def item(self, name: str, rank: int = 0) -> Any:
        """One decoded item of one rank.

        Raises:
            DamagedFile: If it is not there, or does not decode.
        """
        return self.resolved(name, self.items[rank])

    def resolved(self, name: str, items: Mapping[str, bytes]) -> Any:
        """One decoded item out of ``items``, with the tensors that are stored apart put in.

        Raises:
            DamagedFile: If it does not decode, or refers to what is not there.
        """
        if name not in items:
            raise DamagedFile(name, "there is no such item")
        return self._filled(name, decode_item(name, items[name]), items)

    def _filled(self, name: str, value: Any, items: Mapping[str, bytes]) -> Any:
        if isinstance(value, ItemRef):
            return self._referenced(name, value.name, items)
        if isinstance(value, dict):
            for key, part in value.items():
                value[key] = self._filled(name, part, items)
        elif isinstance(value, list):
            value[:] = (self._filled(name, part, items) for part in value)
        elif type(value) is tuple:
            return tuple(self._filled(name, part, items) for part in value)
        return value

    def _referenced(self, name: str, reference: str, items: Mapping[str, bytes]) -> torch.Tensor:
        prefix, _, rest = reference.partition("/")
        average, _, parameter = rest.partition("/")
        try:
            if prefix + "/" == AVERAGE_ITEM:
                values = self.averages[average][parameter]
                spec = next(p for p in self.fence.layout.parameters if p.name == parameter)
                return shaped(values, spec)
            tensor: torch.Tensor = decode_item(reference, items[reference])
        except KeyError as error:
            raise DamagedFile(name, f"it refers to {reference}, which is not there") from error
        return tensor

    def model_state_dict(self, rank: int = 0) -> dict[str, Any]:
        """Return ``model.state_dict()`` as it was, with the buffers and extra states of ``rank``.

        Under keys that end in ``_extra_state`` is what a module gave as ``get_extra_state()``, with its
        tensors on the CPU; all else is tensors.
        """
        parameters = self.tensors()

        def tensor_of(source: str) -> torch.Tensor:
            if source.startswith((BUFFER_ITEM, FROZEN_ITEM)):
                tensor: torch.Tensor = self.item(source, rank)
                return tensor
            return parameters[source]

        return named_as_model(self, tensor_of, rank)

    def _extra_states(self, rank: int) -> dict[str, Any]:
        """Key of the model's state dict -> what that module's ``get_extra_state()`` was."""
        if EXTRA_ITEM not in self.items[rank]:
            return {}  # none of its modules has one
        held = self.item(EXTRA_ITEM, rank)
        try:
            return {key: entry["value"] for key, entry in held.items()}
        except (AttributeError, TypeError, LookupError) as error:
            raise DamagedFile(EXTRA_ITEM, f"not the states of modules ({error!r})") from error

    def optimizer_state_dict(self, index: int = 0) -> dict[str, Any]:
        """Return ``optimizer.state_dict()`` as it was, for the ``index``-th attached optimizer."""
        spec = self.fence.optimizers[index]
        recovered = self.optimizers[index]
        if len(spec.groups) != len(recovered.groups):
            raise DamagedFile(
                f"optimizer {index}",
                f"{len(recovered.groups)} groups of hyper-parameters for {len(spec.groups)}",
            )
        shapes = {p.name: p for p in self.fence.layout.parameters}
        state: dict[int, dict[str, Any]] = {}
        groups = []
        number = 0
        for names, hyper in zip(spec.groups, recovered.groups, strict=True):
            groups.append({**hyper, "params": list(range(number, number + len(names)))})
            for name in names:
                if recovered.state.get(name):
                    state[number] = {
                        key: shaped(value, shapes[name])
                        if is_aligned(key, value, shapes[name].numel)
                        else value
                        for key, value in recovered.state[name].items()
                    }
                number += 1
        return {"state": state, "param_groups": groups}

    @property
    def stateful(self) -> dict[str, Any]:
        """Name -> ``state_dict()`` of every stateful object that was attached, of rank 0.

        ``checkpointer.state`` is among them if it holds anything.
        """
        found = {
            name.removeprefix(STATEFUL_ITEM): self.item(name)
            for name in self.items[0]
            if name.startswith(STATEFUL_ITEM) and name != EXTRA_ITEM
        }
        if not found.get(LOOP_STATE):
            found.pop(LOOP_STATE, None)
        return found


def named_as_model(
    state: RecoveredState, tensor_of: Callable[[str], torch.Tensor], rank: int = 0
) -> dict[str, Any]:
    """Return what ``model.state_dict()`` held, under its keys.

    Args:
        state: Names its tensors, and has the items.
        tensor_of: Gives the tensor of a parameter, or of a buffer's or frozen parameter's item, by name;
            a ``KeyError`` says that there is none.
        rank: Whose buffers and extra states.
    """
    extra = state._extra_states(rank)
    result: dict[str, Any] = {}
    for key, source in state.fence.names.items():
        if source.startswith(EXTRA_ITEM + "/"):
            own_key = source.removeprefix(EXTRA_ITEM + "/")
            if own_key in extra:  # a later life's model may have another such module
                result[key] = extra[own_key]
            continue
        if source.startswith(BUFFER_ITEM) and source not in state.items[rank]:
            continue  # it was None
        try:
            result[key] = tensor_of(source)
        except KeyError as error:
            raise DamagedFile(key, f"it refers to {source}, which is not there") from error
    return result


def is_scalar(key: str, numel: int) -> bool:
    """Whether a state entry with as many elements as its parameter is one number all the same.

    With several elements it is none, whatever its name: third parties keep an average as ``mu``.
    """
    return numel == 1 and key in SCALAR_STATE


def is_aligned(key: str, value: Any, numel: int) -> bool:
    """Whether an optimizer's state entry has one element per element of its parameter."""
    is_full = isinstance(value, torch.Tensor) and value.numel() == numel
    return is_full and not is_scalar(key, numel)


def decode_item(name: str, data: bytes) -> Any:
    """Decode an item.

    Raises:
        DamagedFile: If the checksummed bytes still do not decode.
    """
    try:
        return decode(data)
    except BadEncoding as error:
        raise DamagedFile(name, f"the item does not decode ({error})") from error


def change_items(items: dict[str, bytes], changes: Mapping[str, bytes]) -> None:
    """Put the items of a step into those of the step before it, in place; empty ones are gone."""
    for name, data in changes.items():
        if data:
            items[name] = data
        else:
            items.pop(name, None)


def inherit(
    items: list[dict[str, bytes]], before: Sequence[int], after: Sequence[int], world_size: int
) -> list[dict[str, bytes]]:
    """Items of a new world: rank ``r`` starts from those of old rank ``r`` modulo the old size.

    Generators go by what ranks draw: those of tensor parallelism draw alike, and all start with those of one
    rank. A rank that draws as no old rank did gets none: it keeps its own as its script seeded them, else it
    would repeat the dropout masks and augmentations of another rank.

    Args:
        items: Of each old rank.
        before: How the old ranks drew; see `Fence.draws`.
        after: How the new ones do.
        world_size: How many new ones there are.
    """
    old_size = len(items)
    before, after = before or range(old_size), after or range(world_size)
    first = {number: rank for rank, number in reversed([*enumerate(before)])}
    found = []
    for rank, number in enumerate(after):
        own = items[rank % old_size]
        drawn = own if rank < old_size and before[rank] == number else items[first.get(number, 0)]
        generators = {n: data for n, data in drawn.items() if n.startswith(RNG_ITEM)}
        others = {n: data for n, data in own.items() if not n.startswith(RNG_ITEM)}
        found.append(others | generators if number in first else others)
    return found


def begin_life(state: RecoveredState, fence: Fence) -> None:
    """Go on with the items that an incarnation has from the one before it.

    An object that is new, or of another class, began afresh. What it held then is in the snapshot
    that its attach took; here it is missing until it changes.
    """
    state.items = inherit(state.items, state.fence.draws, fence.draws, fence.world_size)
    for items in state.items:
        for name in begun_afresh(state.fence, fence):
            items.pop(STATEFUL_ITEM + name, None)
    state.fence = fence


def begun_afresh(before: Fence, after: Fence) -> list[str]:
    """Stateful objects that an incarnation does not have from the one before it."""
    known = before.stateful
    return [n for n, kind in after.stateful.items() if not is_same_class(known.get(n, ""), kind)]


def is_same_class(one: str, other: str) -> bool:
    """Whether two names, each with its module, may be of one class.

    It is ``__main__.Warmup`` in a script and ``train.Warmup`` where that is imported, and a package
    may move it. Whether the state fits, ``load_state_dict`` tells; but those of torch's schedulers
    take anything, and a user's own is often named like one of them.
    """
    homes = {name.partition(".")[0] for name in (one, other)}
    may_be_one = len(homes) == 1 or "torch" not in homes
    return may_be_one and one.rpartition(".")[2] == other.rpartition(".")[2]


def refuse_lost_objects(state: RecoveredState, fences: Sequence[Fence]) -> None:
    """See that everything is known that incarnations on the way began with.

    Of generators that a joining rank had not drawn from it says only that they are unknown: what its
    script seeds is what they were.

    Args:
        state: Where the way led.
        fences: Of the incarnations on it, in order.

    Raises:
        RunMismatch: If an object has not changed since it began afresh.
    """
    for before, after in pairwise(fences):
        lost = [
            name
            for name in begun_afresh(before, after)
            if name in state.fence.stateful
            and any(STATEFUL_ITEM + name not in items for items in state.items)
        ]
        if lost:
            raise RunMismatch(
                f"what {lost} held after step {state.step} is lost: attached after step "
                f"{after.base_step} as new or of another class, they were stored in the snapshot "
                "that was taken then, and have not changed since; recover step "
                f"{after.base_step} or one before it, or one after the next snapshot"
            )
    generators = {name for items in state.items for name in items if name.startswith(RNG_ITEM)}
    unknown = [rank for rank, items in enumerate(state.items) if generators - items.keys()]
    if unknown:
        Code.GENERATORS_MISSING.warn(
            f"step {state.step} goes without some random generators of rank(s) "
            f"{', '.join(map(str, unknown))}, which joined after the snapshot that it is rebuilt "
            "from: they are those that the scripts seed",
        )
