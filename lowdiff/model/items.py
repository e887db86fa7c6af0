"""State of a training beside parameters and optimizers, and which of it changed in a step."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from lowdiff.core import devices
from lowdiff.core.events import Code, inform
from lowdiff.core.layout import dtype_name, own_name
from lowdiff.core.nested import each_tensor
from lowdiff.errors import ConfigError
from lowdiff.model.item_tensors import Changes, Departed, ItemTensors
from lowdiff.persistence.format.values import decode, encode, same
from lowdiff.recovery.state import (
    BUFFER_ITEM,
    EXTRA_STATE,
    FROZEN_ITEM,
    RNG_ITEM,
    STATEFUL_ITEM,
    TENSOR_ITEM,
)
from lowdiff.types import ITEM_BYTES, ItemRef

#: Prefix of the name of a buffer that held a tensor once and is None now.
ABSENT_ITEM = "absent/"
_ABSENT = encode(None)
_PYTHON_RNG, _NUMPY_RNG = RNG_ITEM + "python", RNG_ITEM + "numpy"
#: Of a list of names; there is no such item in a step without frozen ones.
LAYERS_ITEM = "loop/frozen"
_MOST_SAID = 3
#: An item of more than this in one step is named to the user.
LARGE_ITEM_BYTES = 1 << 20
#: Tensors in stateful objects from this size on are logged apart, and only when they changed; an accelerator's all.
_APART_BYTES = 4096
_APART_DTYPES = frozenset({*ITEM_BYTES, "int64", "int32", "int16", "int8", "uint8", "bool"})


@runtime_checkable
class Stateful(Protocol):
    """PyTorch's own protocol for objects that checkpoint themselves."""

    def state_dict(self) -> dict[str, Any]:
        """State as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state back."""
        ...


@runtime_checkable
class Adapting(Stateful, Protocol):
    """An object that fits the state it is given to settings of its own, and may return another one."""

    def holds(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether the object is where the state says, as far as its settings allow."""
        ...


def random_generators(
    device: torch.device,
) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Item name -> what reads and what sets each global random generator."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        _PYTHON_RNG: (random.getstate, random.setstate),
        _NUMPY_RNG: (lambda: np.random.get_state(legacy=False), np.random.set_state),
        RNG_ITEM + "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    generator = devices.generator_of(device)
    if generator is not None:
        found[RNG_ITEM + "cuda"] = generator
    return found


def restore_random_states(items: Mapping[str, bytes], device: torch.device) -> None:
    """Set every global random generator that the items hold."""
    for name, (_, write) in random_generators(device).items():
        if name in items:
            write(decode(items[name]))


def is_unmoved(before: Any, now: Any) -> bool:
    """Whether two states of one generator are equal: Python's, NumPy's or torch's."""
    if isinstance(now, torch.Tensor):
        return torch.equal(before, now)
    # Python's is a tuple of numbers, NumPy's a dict that depends on its bit generator.
    return bool(before == now) if isinstance(now, tuple) else same(before, now)


#: NumPy before 1.24 has one global generator for life, and no function that returns it.
_numpy_generator: Callable[[], Any] = getattr(np.random, "get_bit_generator", lambda: None)


def _numpy_words() -> bytes | None:
    """NumPy's global generator as it lies in memory, if that is a Mersenne twister: key and position.

    Asking for its state takes a tenth of a millisecond, because NumPy makes 624 numbers one by one.
    """
    generator = _numpy_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, 4 * 625)


def _tell_all(words: bytes | None, state: Mapping[str, Any]) -> bool:
    """Whether equal words mean an equal state: NumPy may keep a normal number that it has drawn already."""
    twister = state["state"]
    return (
        words is not None
        and not state["has_gauss"]
        and words == twister["key"].tobytes() + int(twister["pos"]).to_bytes(4, sys.byteorder)
    )


class FrozenLayers:
    """Reads which parameters are frozen at the end of a step: a part of it that scripts set by hand.

    Layers may be attached while they train and frozen afterwards, for some steps or for good. A script that does so by
    the step's number does it in a resumed run as well. One that freezes when it starts, and thaws when an epoch
    begins, does not: the first resumed step then trains other layers than the step before, which is said.

    Args:
        parameters: By name, of what this rank trains.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: bytes | None = None

    def read(self) -> dict[str, bytes]:
        """The item as it is now; empty if none is frozen."""
        names = [name for name, p in self._parameters.items() if not p.requires_grad]
        return {LAYERS_ITEM: encode(names)} if names else {}

    def expect(self, items: Mapping[str, bytes]) -> None:
        """The first step from now on follows one with these items."""
        self._before = items.get(LAYERS_ITEM, b"")

    def compare(self, items: Mapping[str, bytes]) -> None:
        """Say once if the first step of a resumed run froze other parameters than the step before.

        Args:
            items: Of that first step.
        """
        before, self._before = self._before, None
        now = items.get(LAYERS_ITEM, b"")
        if before is None or before == now:
            return
        then, here = ({*decode(data)} if data else set() for data in (before, now))
        changes = [
            f"{what}: {', '.join(names[:_MOST_SAID])}{' and more' if names[_MOST_SAID:] else ''}"
            for what, names in (
                ("trained before and frozen now", sorted(here - then)),
                ("frozen before and trained now", sorted(then - here)),
            )
            if names
        ]
        Code.FROZEN_OTHERWISE.warn(
            f"the first step after attach did not train the same parameters as the step before it; {'; '.join(changes)}. "
            "If the script freezes or thaws in this very step, all is well. Else an uninterrupted run had trained "
            "on as before: freeze and thaw by the step's number, module.requires_grad_(step >= 1000)"
        )


class ItemTracker:
    """Finds which items changed since they were last asked for.

    Large because each kind of item shows its changes otherwise: by bytes, checksum, version or sample.
    """

    def __init__(
        self,
        constants: Callable[[], Mapping[str, torch.Tensor]],
        stateful: Mapping[str, Callable[[], Any]],
        device: torch.device,
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> None:
        """Watch the tensors that ``constants`` looks up, what ``stateful`` reads by name, and which parameters are frozen.

        No object is asked for its state yet: some ignore what they are given once they were asked.
        """
        self._constants = constants
        self._random = random_generators(device)
        self._layers = FrozenLayers(parameters)
        self._stateful = dict(stateful)
        self._tensors = ItemTensors(device)
        self._committed: dict[str, bytes] = {}
        #: Item name of a generator -> its state, and the same encoded.
        self._seen_random: dict[str, tuple[Any, bytes]] = {}
        #: NumPy's generator in memory, while that tells its state; else None.
        self._seen_words: bytes | None = None
        self._apart: dict[str, torch.Tensor] = {}
        self._frozen_at_start: dict[str, int] = {}
        self._buffers = {name for name in constants() if name.startswith(BUFFER_ITEM)}
        self._absent: frozenset[str] = frozenset()
        #: Item name -> most bytes that one step logged of it, of those over `LARGE_ITEM_BYTES`.
        self.large_items: dict[str, int] = {}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Buffers, frozen parameters and large tensors of stateful objects, by item name."""
        return {**self._constants(), **self._apart}

    def sizes(self) -> dict[str, int]:
        """Bytes that a step logs of each item if it changes it; but of frozen parameters."""
        tensors = {n: t.nbytes for n, t in self.tensors.items() if not n.startswith(FROZEN_ITEM)}
        return tensors | {name: len(data) for name, data in self._committed.items()}

    def is_as_started(self, name: str) -> bool:
        """Whether a frozen parameter still is what it was at `start`."""
        return name in self._frozen_at_start and self._tensors.is_at(
            name, self._frozen_at_start[name]
        )

    @property
    def committed(self) -> Mapping[str, bytes]:
        """Every item but the tensors, as of the last ``start`` or ``changed``."""
        return self._committed | {ABSENT_ITEM + name: _ABSENT for name in self._absent}

    def read(self) -> dict[str, bytes]:
        """Every item but the tensors, as it is now."""
        found = self.read_generators() | self._layers.read()
        for name, outline in self._outlines().items():
            found[STATEFUL_ITEM + name] = encode(outline, name=name)
        return found

    def read_generators(self) -> dict[str, bytes]:
        """Return the items of the random generators as they are now; no object is asked for its state."""
        return {name: self._generator(name) for name in self._random}

    def read_first(self) -> dict[str, bytes]:
        """Return what `read` does, for the first time: after every object was given its state.

        Raises:
            ConfigError: Naming an object whose state does not survive encoding.
        """
        found = {}
        for name, outline in self._outlines().items():
            data = found[STATEFUL_ITEM + name] = encode(outline, name=name)
            if not same(decode(data), outline):
                raise ConfigError(
                    f"{name} does not survive encoding; return plain values and tensors from "
                    "state_dict()"
                )
        # Behind the objects: a loader that is asked may draw the seed of its workers.
        return found | self.read_generators() | self._layers.read()

    def _generator(self, name: str) -> bytes:
        """The state of a random generator now."""
        seen = self._seen_random.get(name)
        words = _numpy_words() if name == _NUMPY_RNG else None
        if seen is not None and words is not None and words == self._seen_words:
            return seen[1]
        raw = self._random[name][0]()
        # Generators seldom move, and comparing is cheaper than encoding so many numbers.
        if seen is None or not is_unmoved(seen[0], raw):
            seen = self._seen_random[name] = raw, encode(raw, name=name)
        if name == _NUMPY_RNG:
            self._seen_words = words if _tell_all(words, raw) else None
        return seen[1]

    def _outlines(self) -> dict[str, Any]:
        """The state of every stateful object now, without its large tensors, which `tensors` has then."""
        found = {}
        self._apart = {}
        for name, read in self._stateful.items():
            found[name], apart = outlined(name, read())
            self._apart |= apart
        return found

    def peek(self, names: AbstractSet[str]) -> dict[str, bytes]:
        """Return some items as they are now; the next `changed` tells the same as without this call.

        Args:
            names: Of generators and tensors. Generators that moved and stateful objects are added: one
                rank may have changed one for the first time.
        """
        found = self.read_generators() | self._layers.read()
        found = {n: d for n, d in found.items() if n in names or self._committed.get(n) != d}
        for name, outline in self._outlines().items():
            found[STATEFUL_ITEM + name] = encode(outline, name=name)
        if names - found.keys():  # to look for tensors, modules are walked through
            tensors = self.tensors
            for name in names & tensors.keys():
                found[name] = encode(tensors[name].detach().cpu().contiguous(), name=name)
        return found

    def is_as_committed(self) -> bool:
        """Whether buffers and frozen parameters are those of the last call.

        Generators and stateful objects are left out: of these a snapshot holds what was committed,
        and a data loader moves on when its epoch ends, after the last commit.
        """
        tensors = self.tensors
        is_same = self._tensors.compared(tensors).are_none
        return is_same and self._now_absent(tensors) == self._absent

    def start(self, items: Mapping[str, bytes], *, is_under_way: bool) -> None:
        """Begin with what recovery knows, whatever the generators hold at the moment.

        Args:
            items: Of the step that is there.
            is_under_way: Whether the run has steps, and this rank says what it resumes otherwise.
        """
        if is_under_way:
            self._layers.expect(items)
        names = [*self._random, LAYERS_ITEM, *(STATEFUL_ITEM + name for name in self._stateful)]
        self._committed = {name: items[name] for name in names if name in items}
        self.read()
        tensors = self.tensors
        self._tensors.note(self._tensors.compared(tensors))
        self._buffers |= {
            name.removeprefix(ABSENT_ITEM)
            for name in items
            if name.startswith((ABSENT_ITEM, BUFFER_ITEM))
        }
        self._absent = self._now_absent(tensors)
        for name, tensor in self._apart.items():
            # What no record holds is logged with the first step: an object may be new, or may not
            # have taken its tensor back.
            if items.get(name) != encode(tensor.detach().cpu().contiguous(), name=name):
                self._tensors.checksums.pop(name, None)
        self._frozen_at_start = {
            name: checksum
            for name, checksum in self._tensors.checksums.items()
            if name.startswith(FROZEN_ITEM)
        }

    def changed(self, *, thorough: bool = True) -> tuple[dict[str, bytes], Departed | None]:
        """Items whose bytes differ from those of the last call; no bytes for one that is gone.

        Args:
            thorough: Whether to read frozen parameters whole that neither a version counter nor
                a few of their elements say were written.

        Returns:
            The items; on an accelerator those of tensors follow with `arrived`, and what it takes is the second value.
        """
        items = self.read()
        self._layers.compare(items)
        found = {name: data for name, data in items.items() if self._committed.get(name) != data}
        gone = self._committed.keys() - items.keys()
        tensors = self.tensors
        absent = self._now_absent(tensors)
        departed, changes, of_tensors = None, None, {}
        if self._tensors.come_late:
            departed = self._tensors.depart(tensors, thorough=thorough)
        else:
            changes = self._tensors.compared(tensors, thorough=thorough)
            of_tensors = changes.items()
        # Only now: whoever calls again after an error, of the user's object perhaps, finds it all.
        self._committed.update(found)
        for name in gone:
            del self._committed[name]
            found[name] = b""
        found |= {ABSENT_ITEM + name: _ABSENT for name in absent - self._absent}
        found |= {ABSENT_ITEM + name: b"" for name in self._absent - absent}
        self._absent = absent
        self._note_sizes(found)
        if changes is not None:
            self.note(changes, of_tensors)
        return found | of_tensors, departed

    def arrived(self, departed: Departed) -> Changes:
        """Compare the tensors of a step, once they are here, with those of the step before; for any thread."""
        return self._tensors.arrived(departed)

    def note(self, changes: Changes, items: Mapping[str, bytes]) -> None:
        """Take the tensors of a step for known, which are these items; one step after the other, for any thread."""
        self._tensors.note(changes)
        self._note_sizes(items)

    def _note_sizes(self, items: Mapping[str, bytes]) -> None:
        for name, data in items.items():
            if len(data) > max(LARGE_ITEM_BYTES, self.large_items.get(name, 0)):
                # Another one: training may read what it was.
                self.large_items = self.large_items | {name: len(data)}

    def _now_absent(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Buffers that held a tensor once and are not among ``tensors``, which it learns."""
        self._buffers.update(name for name in tensors if name.startswith(BUFFER_ITEM))
        return frozenset(self._buffers.difference(tensors))


def name_large_items(tracker: ItemTracker) -> None:
    """Tell the user what costs much in every step that changes it."""
    large = {name: size for name, size in tracker.sizes().items() if size > LARGE_ITEM_BYTES}
    if large:
        sizes = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in large.items())
        inform(f"a step logs these whole if it changes them: {sizes}")


def outlined(name: str, state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A stateful object's state with references in place of large tensors, and these by item name.

    Args:
        name: Name of the object.
        state: What its ``state_dict`` returned; left as it is.
    """
    apart: dict[str, torch.Tensor] = {}

    def refer(path: str, tensor: torch.Tensor) -> object:
        if type(tensor) is not torch.Tensor or path in apart or not _is_worth_it(tensor):
            return tensor
        apart[path] = tensor.detach()
        return ItemRef(path)

    return each_tensor(state, refer, TENSOR_ITEM + name), apart


def _is_worth_it(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided  # asked first: a sparse tensor has no nbytes
        # Apart it departs with the others; to encode it where it stands, the host would wait.
        and (tensor.nbytes >= _APART_BYTES or devices.comes_late(tensor))
        and dtype_name(tensor.dtype) in _APART_DTYPES
    )


#: What torch appends to a module's prefix in a state dict.
_SUFFIX = "_extra_state"


class ExtraStates:
    """The extra state of all modules of a model, as one stateful object."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        """Speak for the modules in ``module``, whose parameters are on ``device``.

        Raises:
            ConfigError: If one could not take its state back.
        """
        self._device = device
        self._modules: dict[str, torch.nn.Module] = {}
        for part, (key, *_) in extra_state_keys(module).items():
            if type(part).set_extra_state is torch.nn.Module.set_extra_state:
                raise ConfigError(
                    f"{type(part).__name__} has get_extra_state() and no set_extra_state(), so that "
                    f"{key} could not be restored; define both"
                )
            self._modules[key] = part

    def state_dict(self) -> dict[str, Any]:
        """Key in the model's state dict -> the state, and which of its tensors are on a device."""
        found = {}
        for key, part in self._modules.items():
            value = part.get_extra_state()
            found[key] = {"value": value, "on_device": _on_device(value)}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every module its own; who has none keeps what it was built with, and is named."""
        for key, part in self._modules.items():
            if key in state:
                part.set_extra_state(self._placed(**state[key]))
        new = [key for key in self._modules if key not in state]
        gone = [key for key in state if key not in self._modules]
        if new:
            Code.MODULE_STATE_MISSING.warn(
                "the run has no state of these modules, which keep what they were built with: "
                f"{', '.join(new)}",
            )
        if gone:
            Code.MODULE_STATE_LEFT_OUT.warn(
                "no module of the model takes these states of the run, which are left out: "
                f"{', '.join(gone)}",
            )

    def _placed(self, value: Any, on_device: list[bool]) -> Any:
        """``value`` with its tensors where they were: modules may keep them as they get them."""
        marks = iter(on_device)
        return each_tensor(value, lambda _, t: t.to(self._device) if next(marks) else t)


def with_extra_states(
    stateful: Mapping[str, Stateful], module: torch.nn.Module, device: torch.device
) -> dict[str, Stateful]:
    """Return the objects attached by name, and the model's extra states if its modules have any.

    Args:
        stateful: What was attached by name.
        module: The user's own model.
        device: Where its parameters live.

    Raises:
        ConfigError: If their name is taken, or a module could not take its state back.
    """
    if EXTRA_STATE in stateful:
        raise ConfigError(
            f"{EXTRA_STATE!r} is the name of what the model's modules keep; attach the object by "
            "another one"
        )
    if not extra_state_keys(module):
        return dict(stateful)
    return {**stateful, EXTRA_STATE: ExtraStates(module, device)}


def extra_state_keys(module: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every module that has extra state -> its keys in the state dict, as parameters are named."""
    found: dict[torch.nn.Module, list[str]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            key = f"{prefix}.{_SUFFIX}" if prefix else _SUFFIX
            found.setdefault(part, []).append(own_name(key))
    return found


def _on_device(value: Any) -> list[bool]:
    """Say of each tensor in ``value`` whether it is on an accelerator."""
    found: list[bool] = []
    each_tensor(value, lambda _, tensor: found.append(not devices.may_look(tensor)))
    return found
