"""Tensors among the items: buffers, frozen parameters, large tensors of objects; which of them changed in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from crc32c import crc32c

from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.layout import INT_OF_BYTES, flat, is_dense
from lowdiff.core.memory import byte_view, in_memory_order
from lowdiff.persistence.format.values import encode
from lowdiff.recovery.state import FROZEN_ITEM

#: Elements of each, at least, if it has so many: reading them in every step must cost little.
_NUM_ELEMENTS = 8
_INTEGERS = {1: torch.int8, **INT_OF_BYTES}
#: Of tensors that are copied off an accelerator together: the host has memory for all of them at a time.
_BATCH_BYTES = 16 << 20
#: Of what departs with one step: the accelerator has memory for as much again. The host waits for what is beyond.
LATE_BYTES = 64 << 20

#: Version counter and address of a frozen parameter; None where it has no counter.
Version = tuple[int, int] | None


class FrozenSamples:
    """A few elements of each frozen parameter as they were when it was last read whole.

    A target network or a momentum encoder that is written through ``.data`` changes everywhere, so
    these tell. A write to a part may pass between them.
    """

    def __init__(self) -> None:
        #: By name: some elements, in the parameter's memory, and a copy of them.
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Where those of the last `note_all` were.
        self._places: list[tuple[int, tuple[int, ...]]] = []

    def note(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter is being read whole."""
        live = sampled(parameter)
        self.pairs[name] = live, live.clone()

    def note_all(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """All of the parameters are noted, as every time, and most lie where they did the time before."""
        places = [(p.data_ptr(), p.stride()) for p in parameters.values()]
        if places != self._places:
            self._places = places
            for name, parameter in parameters.items():
                self.note(name, parameter)
        elif places:
            pairs = [self.pairs[name] for name in parameters]
            torch._foreach_copy_([seen for _, seen in pairs], [live for live, _ in pairs])

    def have_moved(self, names: Iterable[str]) -> bool:
        """Whether any of these is not as it was noted; their memory must be where it was."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name in names:
            by_device.setdefault(self.pairs[name][0].device, []).append(self.pairs[name])
        # Joined, because an accelerator is waited for at each comparison.
        joined = (map(torch.cat, zip(*pairs, strict=True)) for pairs in by_device.values())
        return any(not torch.equal(live, seen) for live, seen in joined)


def sampled(parameter: torch.Tensor) -> torch.Tensor:
    """Some of its elements, as integers of their bits; shares its memory."""
    # Where there are holes in its memory, only rows of it are known to be within.
    line = (
        flat(parameter) if is_dense(parameter) else parameter.detach()[(0,) * (parameter.dim() - 1)]
    )
    # An odd step, because rows are often a power of two long: else all would be of one column.
    picked = line[:: line.numel() // _NUM_ELEMENTS | 1]
    return picked.view(_INTEGERS[parameter.element_size()])


@dataclass(frozen=True, slots=True, eq=False)
class Departed:
    """The tensors of a step on their way from an accelerator.

    Attributes:
        names: Of all tensors there are.
        doubted: Name of each that is read -> whether nothing says that it was written.
        versions: Of the frozen parameters that are read.
        shapes: Of the tensors that were fetched.
        read: Name of a tensor for which the host waited -> checksum, and the values unless the checksum was known.
        samples: Frozen parameter -> some of its elements, in its memory.
        fetch: The tensors of `shapes`, then the elements.
    """

    names: AbstractSet[str]
    doubted: Mapping[str, bool]
    versions: Mapping[str, Version]
    shapes: Mapping[str, torch.Size]
    read: Mapping[str, tuple[int, torch.Tensor | None]]
    samples: Mapping[str, torch.Tensor]
    fetch: devices.Fetch


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What the tensors of a step differ in from those of the step before.

    Attributes:
        tensors: Those that changed, on the host.
        gone: Those that are no more.
        lost: Frozen parameters that changed, and whose values nobody has read.
        unread: Frozen parameters that nobody has read either, in a step with a lost one.
        checksums: Of those that changed.
        versions: Of the frozen parameters that were read.
        samples: Frozen parameter that was read -> some elements, in its memory, and a copy of them.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    checksums: dict[str, int] = field(default_factory=dict)
    versions: dict[str, Version] = field(default_factory=dict)
    samples: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def are_none(self) -> bool:
        """Whether no tensor that is there changed."""
        return not (self.tensors or self.lost)

    def items(self) -> dict[str, bytes]:
        """Return them as a record has them: no bytes for one that is gone."""
        changed = {name: encode(tensor, name=name) for name, tensor in self.tensors.items()}
        return changed | dict.fromkeys(self.gone, b"")


class ItemTensors:
    """Finds which tensors changed, by their checksums; reading tells nothing new until it is noted.

    On an accelerator a step's tensors depart, and are compared when they are here, perhaps by another thread while
    training has the next ones depart: so departing changes nothing, and comparing reads nothing that lives.

    Attributes:
        checksums: Of the tensors as noted last, by item name.
    """

    def __init__(self, device: torch.device) -> None:
        self.checksums: dict[str, int] = {}
        self._device = device
        self._versions: dict[str, Version] = {}
        self._trusts_versions = True
        self._samples = FrozenSamples()
        self._unread: set[str] = set()

    @property
    def come_late(self) -> bool:
        """Whether they depart, and are here later."""
        return devices.comes_late(self._device)

    def is_at(self, name: str, checksum: int) -> bool:
        """Whether a tensor was found to have a checksum."""
        return self.checksums.get(name) == checksum and name not in self._unread

    def compared(self, tensors: Mapping[str, torch.Tensor], *, thorough: bool = True) -> Changes:
        """Compare tensors with those noted last; waits for an accelerator.

        Args:
            tensors: All there are, by item name.
            thorough: Whether to read frozen parameters whole that neither a version counter nor a few of their
                elements say were written.
        """
        if self.come_late:
            return self.arrived(self.depart(tensors, thorough=thorough))
        doubted, trusted, versions = self._divided(tensors, thorough=thorough)
        samples = {name: sampled(tensors[name]) for name, version in versions.items() if version}
        changes = Changes(
            gone=self._gone(tensors.keys()),
            versions=versions,
            samples={name: (live, live.clone()) for name, live in samples.items()},
        )
        trusts = self._trusts_versions
        for name, host in _on_host({name: tensors[name] for name in doubted}):
            self._compare(name, host, changes, is_trusted=doubted[name])
        if self._samples.have_moved(trusted) or trusts is not self._trusts_versions:
            for name, host in _on_host({name: tensors[name] for name in trusted}):
                self._compare(name, host, changes, is_trusted=True)
        return changes

    def depart(self, tensors: Mapping[str, torch.Tensor], *, thorough: bool = True) -> Departed:
        """Have tensors depart to the host, which waits only for what is beyond `LATE_BYTES`; see `compared`."""
        doubted, trusted, versions = self._divided(tensors, thorough=thorough)
        late: dict[str, torch.Tensor] = {}
        early: dict[str, torch.Tensor] = {}
        size = 0
        for name in sorted(doubted, key=lambda name: name.startswith(FROZEN_ITEM)):  # these last
            size += tensors[name].nbytes
            (late if size <= LATE_BYTES else early)[name] = tensors[name]
        read: dict[str, tuple[int, torch.Tensor | None]] = {}
        for name, host in _on_host(early):
            checksum = _checksum(host)
            is_known = self.checksums.get(name) == checksum
            read[name] = checksum, None if is_known else host.clone()  # it may be the live one
        samples = {name: sampled(tensors[name]) for name, version in versions.items() if version}
        samples |= {name: self._samples.pairs[name][0] for name in trusted}
        flat_ones = [tensor.detach().reshape(-1) for tensor in late.values()]
        return Departed(
            names=frozenset(tensors),
            doubted=doubted,
            versions=versions,
            shapes={name: tensor.shape for name, tensor in late.items()},
            read=read,
            samples=samples,
            fetch=devices.fetch([*flat_ones, *samples.values()]),
        )

    def arrived(self, departed: Departed) -> Changes:
        """Compare tensors that departed, once they are here, with those noted last; for any thread."""
        changes = Changes(gone=self._gone(departed.names), versions=dict(departed.versions))
        values = iter(departed.fetch.arrived())
        for name, shape in departed.shapes.items():
            host = next(values).view(shape)
            self._compare(name, host, changes, is_trusted=departed.doubted[name])
        for name, (checksum, read) in departed.read.items():
            if read is not None:
                self._compare(name, read, changes, is_trusted=departed.doubted[name])
            elif self.checksums.get(name) != checksum:  # the step before came to be known meanwhile
                changes.lost.append(name)
        for name, live in departed.samples.items():
            seen = next(values).clone()  # else it would keep the memory of all
            if name in departed.versions:
                changes.samples[name] = live, seen
            elif not torch.equal(seen, self._samples.pairs[name][1]):
                self._distrust_versions(name)
                changes.lost.append(name)
        if changes.lost:
            changes.unread.update(departed.samples.keys() - departed.versions.keys())
        return changes

    def note(self, changes: Changes) -> None:
        """Take the changes of a step for known; one step after the other, for any thread."""
        self.checksums |= changes.checksums
        for name in (*changes.gone, *changes.lost):
            self.checksums.pop(name, None)
        self._unread = (self._unread | changes.unread) - changes.versions.keys()
        self._samples.pairs |= changes.samples
        self._versions |= changes.versions  # last: training trusts what has them

    def _gone(self, names: AbstractSet[str]) -> list[str]:
        return [name for name in self.checksums if name not in names]

    def _divided(
        self, tensors: Mapping[str, torch.Tensor], *, thorough: bool
    ) -> tuple[dict[str, bool], list[str], dict[str, Version]]:
        """Return what to read, each with whether nothing says that it was written; what not to; versions of the former."""
        doubted: dict[str, bool] = {}
        trusted: list[str] = []
        versions: dict[str, Version] = {}
        for name, tensor in tensors.items():
            # Version counters are right for frozen parameters, which only in-place operations
            # write, but not for buffers: batch norm updates its statistics behind their back.
            if not name.startswith(FROZEN_ITEM):
                doubted[name] = False
                continue
            version = None if tensor.is_inference() else (tensor._version, tensor.data_ptr())
            is_known = version is not None and self._versions.get(name) == version
            if not is_known or thorough or not self._trusts_versions:
                versions[name] = version
                doubted[name] = is_known
            else:
                trusted.append(name)
        return doubted, trusted, versions

    def _compare(
        self, name: str, host: torch.Tensor, changes: Changes, *, is_trusted: bool
    ) -> None:
        """Add a tensor to the changes if it differs from what is noted.

        Args:
            name: Of the item.
            host: The tensor on the host.
            changes: Of the step.
            is_trusted: Whether nothing says that it was written.
        """
        checksum = _checksum(host)
        if self.checksums.get(name) != checksum:
            if is_trusted:
                self._distrust_versions(name)
            changes.checksums[name] = checksum
            changes.tensors[name] = host

    def _distrust_versions(self, name: str) -> None:
        """A frozen parameter was written through ``.data``, as momentum encoders are."""
        if self._trusts_versions:
            Code.FROZEN_WRITTEN.warn(
                f"{name} is frozen but was written through .data; from now on every frozen "
                "parameter is read at every step; write it under torch.no_grad() instead, or "
                "attach an AveragedModel, which is replayed",
            )
        self._trusts_versions = False


def _checksum(host: torch.Tensor) -> int:
    """Checksum of a tensor with its form: another shape of the same bytes is another value."""
    form = crc32c(f"{host.dtype}{tuple(host.shape)}".encode())
    return crc32c(byte_view(host), form) if host.numel() else form


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors on the host in memory order; an accelerator is waited for once for many small ones."""
    names, first, size = [*tensors], 0, 0
    for stop, name in enumerate(names, 1):
        size += tensors[name].nbytes
        if stop == len(names) or size >= _BATCH_BYTES:
            batch = names[first:stop]
            for own, host in zip(batch, devices.on_host([tensors[n] for n in batch]), strict=True):
                yield own, in_memory_order(host)
            first, size = stop, 0
