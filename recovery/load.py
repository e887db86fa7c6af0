"""Reading a snapshot, or a share of it, into a state: checked before anything of it is believed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lowdiff.core.events import Code
from lowdiff.core.layout import flat, flat_like
from lowdiff.core.memory import byte_view
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.checked_copy import read_in_parallel
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import (
    OPTIMIZER,
    PARAMETER,
    RESIDUAL,
    SCALARS,
    ImageEntry,
    Manifest,
    check_shard,
    read_image_header,
    shard_file,
)
from lowdiff.persistence.format.values import decode, encode
from lowdiff.persistence.run.catalog import SnapshotSet
from lowdiff.persistence.run.frozen_parameters import check_constants
from lowdiff.recovery.images import DTYPES
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    STATEFUL_ITEM,
    TENSOR_ITEM,
    OptimizerState,
    RecoveredState,
    decode_item,
)
from lowdiff.types import Fence, ItemRef, ParameterSpec

#: Read at once; larger tensors are a batch of their own.
_BATCH_BYTES = 64 << 20
#: What reading tensors and scalars raises where they are not those of a snapshot.
_UNFIT = (LookupError, TypeError, ValueError, AttributeError, EOFError)


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a snapshot that one of the ranks that recover together reads.

    Attributes:
        parameters: Names of those that it reads, with their optimizer state and averages.
        items: The rank, of those that took the snapshot, whose item tensors it goes on with.
        residual: The one whose residual it goes on with; None if it takes part in the mean of all: then it
            reads what they owe of its parameters.
        frozen: Rank and name of the frozen parameters' shards that it reads beside these items.
    """

    parameters: frozenset[str]
    items: int
    residual: int | None
    frozen: frozenset[tuple[int, str]] = frozenset()

    def has(self, name: str, rank: int, parameters: Container[str]) -> bool:
        """Whether a tensor of a rank's image belongs to it."""
        if _is_item(name):
            return rank == self.items or (rank, name) in self.frozen
        if name.startswith(RESIDUAL):
            owner = parameter_of(name.removeprefix(RESIDUAL), parameters)
            is_mine = owner is None or owner in self.parameters
            return self.residual == rank or (self.residual is None and is_mine)
        return parameter_in(name, parameters) in self.parameters


@dataclass(frozen=True, slots=True)
class WeightsShare:
    """Part of a snapshot that some of the model's weights are made from.

    Attributes:
        parameters: Names of those that are read.
        items: Rank and name of the frozen parameters that are read.
        has_others: Whether the other items of rank 0 are read: buffers, and tensors of stateful objects.
        has_optimizers: Whether what optimizers and averages keep of the parameters is read: to replay steps.
        bytes: Memory that the share takes, about.
    """

    parameters: frozenset[str]
    items: frozenset[tuple[int, str]]
    has_others: bool
    has_optimizers: bool
    bytes: int

    def has(self, name: str, rank: int, parameters: Container[str]) -> bool:
        """Whether a tensor of a rank's image belongs to it."""
        if name.startswith(FROZEN_ITEM):
            return (rank, name) in self.items
        if _is_item(name):
            return self.has_others and rank == 0
        is_read = name.startswith(PARAMETER) or self.has_optimizers
        is_mine = not name.startswith(RESIDUAL) and is_read
        return is_mine and parameter_in(name, parameters) in self.parameters


def load_snapshot(
    snapshot: SnapshotSet,
    fence: Fence,
    num_threads: int,
    share: Share | WeightsShare | None = None,
) -> RecoveredState:
    """Read and check a snapshot.

    Args:
        snapshot: Which one.
        fence: Fence of the incarnation that took it.
        num_threads: That read at once.
        share: What of it is wanted; None for all. Items that are no tensors always are. Frozen parameters
            that snapshots share are left out of weights.

    Raises:
        DamagedFile: If a shard is not what was written.
    """
    state = empty_state(snapshot.step, fence)
    is_all = not isinstance(share, WeightsShare)
    constants = load_constants(RunFolder(snapshot.run), fence) if is_all else {}
    for manifest in snapshot.manifests:
        merge(state, _checked(snapshot.folder, manifest, fence, num_threads, share))
    state.items = [{**constants, **items} for items in state.items]
    for name in fence.averages:
        counts = {_updates(STATEFUL_ITEM + name, items) for items in state.items}
        if len(counts - {None}) > 1:
            raise DamagedFile(
                snapshot.folder,
                f"its shards hold {name!r} after different numbers of updates; update an "
                "AveragedModel on every rank in the same steps",
            )
    wanted = {spec.name for spec in fence.layout.parameters} if share is None else share.parameters
    missing = sorted(wanted - set(state.parameters))
    if missing:
        raise DamagedFile(snapshot.folder, f"parameters {missing[:3]} are in no shard")
    return state


def _updates(item: str, items: Mapping[str, bytes]) -> int | None:
    """Return how often an average was updated; None where what says so is not here."""
    if item not in items:
        return None
    count = decode(items[item])["n_averaged"]
    if isinstance(count, ItemRef):  # it came from an accelerator, as an item of its own
        if count.name not in items:
            return None
        count = decode_item(count.name, items[count.name])
    return int(count)


def empty_state(step: int, fence: Fence) -> RecoveredState:
    """A state without tensors, to which shards are added."""
    return RecoveredState(
        step,
        fence,
        base_step=step,
        optimizers=[OptimizerState([], {}) for _ in fence.optimizers],
        averages={name: {} for name in fence.averages},
    )


def load_shard(path: Path, step: int, fence: Fence) -> RecoveredState:
    """Read one rank's image, without the frozen parameters that are stored apart.

    Raises:
        DamagedFile: If it is no image.
    """
    with or_damaged(path):
        return _read(path, step, fence)


def _checked(
    folder: Path,
    manifest: Manifest,
    fence: Fence,
    num_threads: int,
    share: Share | WeightsShare | None,
) -> RecoveredState:
    """A shard, or what is wanted of it, as it was written."""
    path = shard_file(folder, manifest.rank)
    try:
        return _read(path, manifest.step, fence, manifest, num_threads, share)
    except (*_UNFIT, OSError) as error:
        why = f"{error!r:.200}"
    # Not in the clause above, whose error holds on to what was read.
    check_shard(folder, manifest)  # says what is wrong with the bytes
    Code.FILE_MISREAD.warn(f"{path} was misread ({why}); reading it once more")
    with or_damaged(path):
        return _read(path, manifest.step, fence, manifest, num_threads, share)


@contextmanager
def or_damaged(path: Path) -> Iterator[None]:
    """Raise whatever reading an image raises as damage of its file.

    Raises:
        DamagedFile: Instead of that.
    """
    try:
        yield
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    except _UNFIT as error:
        raise DamagedFile(path, f"not a snapshot shard ({error!r:.200})") from error


def load_constants(folder: RunFolder, fence: Fence) -> dict[str, bytes]:
    """The frozen parameters that all snapshots of an incarnation share, as items."""
    if not fence.constants:
        return {}
    path = check_constants(folder, fence.constants)
    try:
        return {name: encode(tensor) for name, tensor in load_file(path).items()}
    except (SafetensorError, ValueError) as error:
        raise DamagedFile(path, f"not a file of tensors ({error!r})") from error


def _read(
    path: Path,
    step: int,
    fence: Fence,
    manifest: Manifest | None = None,
    num_threads: int = 1,
    share: Share | WeightsShare | None = None,
) -> RecoveredState:
    """Read what one rank's image holds.

    Args:
        path: The image's file.
        step: Whose state it is.
        fence: Of the incarnation that it is of.
        manifest: What it must be; None if that is known already.
        num_threads: That read at once.
        share: What of it is wanted; None for all.
    """
    state = empty_state(step, fence)
    specs = {spec.name: spec for spec in fence.layout.parameters}
    items: dict[str, bytes] = {}
    residual: dict[str, torch.Tensor] = {}
    encoded = b""
    with path.open("rb", buffering=0) as file:
        # The length first, by which memory was found to suffice.
        if manifest is not None and os.fstat(file.fileno()).st_size != manifest.bytes:
            raise ValueError("another length than was written")

        def is_wanted(name: str) -> bool:
            return (
                share is None
                or manifest is None
                or name == SCALARS
                or share.has(name, manifest.rank, specs)
            )

        # Encoding takes copies: items while nothing else is there.
        parts = None if manifest is None else manifest.parts
        for name, tensor in ImageReader(
            file.fileno(), num_threads, first=_is_item, wanted=is_wanted, parts=parts
        ):
            if _is_item(name):
                items[name] = encode(tensor)
            elif name == SCALARS:
                encoded = bytes(byte_view(tensor))
            elif name.startswith(RESIDUAL):
                # A compressor may keep state of its own beside the parameters' residuals.
                own = name.removeprefix(RESIDUAL)
                residual[own] = _flat(tensor, specs[own]) if own in specs else flat(tensor)
            else:
                home, key, parameter = place_of(state, name, specs)
                home[key] = _flat(tensor, specs[parameter])
            del tensor  # the next ones are read before it is bound to another
    scalars = decode(encoded)
    state.held = tuple(scalars["held"])
    numbers = scalars["state"]
    if share is not None:
        numbers = [{n: v for n, v in own.items() if n in share.parameters} for own in numbers]
    add_numbers(state, scalars["groups"], numbers)
    state.items, state.residuals = [scalars["items"] | items], [residual]
    return state


class ImageReader:
    """Reads an image, or those of its tensors that are wanted, once and by several threads."""

    def __init__(
        self,
        descriptor: int,
        num_threads: int,
        *,
        first: Callable[[str], bool],
        wanted: Callable[[str], bool] = lambda _: True,
        parts: Sequence[int] | None = None,
    ) -> None:
        """Read the header.

        Args:
            descriptor: Of the open file.
            num_threads: That read at once.
            first: Whether a tensor of that name is to come before those that are not.
            wanted: Whether a tensor of that name is read at all.
            parts: What a manifest says of header and tensors; None if nothing does.

        Raises:
            OSError: If the file cannot be read.
            EOFError, ValueError, LookupError, TypeError: If it is no image, or another one.
        """
        self._header = read_image_header(descriptor)
        self._descriptor = descriptor
        self._num_threads = num_threads
        self._is_first, self._is_wanted = first, wanted
        self._sums: Mapping[str, int] = {}
        if parts is not None:
            self._compare(parts[:1], [self._header.checksum])
            names = (entry.name for entry in self._header.entries)
            self._sums = dict(zip(names, parts[1:], strict=True))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, each in memory of its own, and few of them before they are asked for.

        Raises:
            OSError: If the file cannot be read.
            EOFError, LookupError, ValueError: If it is no image, or another one.
        """
        for is_first in (True, False):
            offset = self._header.bytes
            batch: list[ImageEntry] = []
            batch_bytes = 0
            for entry in self._header.entries:
                is_wanted = self._is_wanted(entry.name) and self._is_first(entry.name) == is_first
                if not is_wanted or batch_bytes + entry.nbytes > _BATCH_BYTES:
                    yield from self._read(batch, offset - batch_bytes)
                    batch, batch_bytes = [], 0
                if is_wanted:
                    batch.append(entry)
                    batch_bytes += entry.nbytes
                offset += entry.nbytes
            yield from self._read(batch, offset - batch_bytes)

    def _read(self, batch: Sequence[ImageEntry], offset: int) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = deque(torch.empty(e.shape, dtype=DTYPES[e.dtype], device="cpu") for e in batch)
        parts = [byte_view(tensor) for tensor in tensors]
        found = read_in_parallel(self._descriptor, offset, parts, self._num_threads)
        del parts
        if self._sums:
            self._compare([self._sums[entry.name] for entry in batch], found)
        for entry in batch:
            yield entry.name, tensors.popleft()

    @staticmethod
    def _compare(told: Sequence[int], found: Sequence[int]) -> None:
        if list(told) != list(found):
            raise ValueError("other bytes than were written")


def merge(state: RecoveredState, share: RecoveredState) -> None:
    """Add what one rank holds to a state. Its tensors become the state's."""
    state.parameters |= share.parameters
    for optimizer, own in zip(state.optimizers, share.optimizers, strict=True):
        optimizer.groups = own.groups
        for name, entries in own.state.items():
            optimizer.state.setdefault(name, {}).update(entries)
    for name, followed in share.averages.items():
        state.averages[name] |= followed
    state.items += share.items
    state.residuals += share.residuals
    state.held = tuple(sorted({*state.held, *share.held}))  # ranks may train different shards


def add_numbers(
    state: RecoveredState,
    groups: Sequence[Sequence[dict[str, Any]]],
    numbers: Sequence[Mapping[str, Mapping[str, Any]]],
) -> None:
    """Give optimizers their groups, and what they keep beside tensors of a parameter's form."""
    for optimizer, own, entries in zip(state.optimizers, groups, numbers, strict=True):
        optimizer.groups = list(own)
        for name, values in entries.items():
            optimizer.state[name] = {**values, **optimizer.state.get(name, {})}


def place_of(
    state: RecoveredState, full_name: str, parameters: Container[str]
) -> tuple[dict[str, Any], str, str]:
    """Return the place of an image's tensor in a state: the mapping, its key, and the parameter.

    Raises:
        KeyError: If there is no such place.
    """
    prefix, _, name = full_name.partition("/")
    if prefix + "/" == PARAMETER:
        return state.parameters, name, name
    if prefix + "/" == OPTIMIZER:
        index, parameter, key = entry_of(name, parameters)
        return state.optimizers[index].state.setdefault(parameter, {}), key, parameter
    if prefix + "/" == AVERAGE_ITEM:
        average, _, parameter = name.partition("/")
        return state.averages[average], parameter, parameter
    raise KeyError(full_name)


def parameter_in(name: str, parameters: Container[str]) -> str:
    """Return of which parameter a tensor of an image is: itself, optimizer state or an average."""
    prefix, _, rest = name.partition("/")
    if prefix + "/" == OPTIMIZER:
        return entry_of(rest, parameters)[1]
    if prefix + "/" == AVERAGE_ITEM:
        return rest.partition("/")[2]
    return rest


def _is_item(name: str) -> bool:
    return name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM))


def entry_of(name: str, parameters: Container[str]) -> tuple[int, str, str]:
    """Parse ``INDEX/PARAMETER/KEY``: which optimizer, and which entry of a parameter's state.

    Parameters and keys may have slashes in their names; of two ways to read one, the longer name of a
    parameter counts.

    Raises:
        KeyError: If it names none of the parameters.
    """
    index, _, rest = name.partition("/")
    parameter = parameter_of(rest.rpartition("/")[0], parameters)
    if parameter is None:
        raise KeyError(name)
    return int(index), parameter, rest[len(parameter) + 1 :]


def parameter_of(name: str, parameters: Container[str]) -> str | None:
    """Return the parameter that ``PARAMETER`` or ``PARAMETER/MORE`` is of; None if none."""
    while name and name not in parameters:
        name, _, _ = name.rpartition("/")
    return name or None


def _flat(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{spec.name} has shape {tuple(tensor.shape)} instead of {spec.shape}")
    return flat_like(tensor, spec)
