"""A model's weights as one safetensors file, recovered a few tensors at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from typing_extensions import Self

from lowdiff.core.events import Code
from lowdiff.core.layout import by_tensor, torch_dtype
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.durable import make_directory, replaced, unwritable
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import image_header, in_file_order, read_image_header
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.frozen_parameters import check_constants
from lowdiff.recovery.engine import recover_by
from lowdiff.recovery.images import DTYPES, holds, image_entry, pieces_of
from lowdiff.recovery.load import ImageReader, Share, WeightsShare, or_damaged
from lowdiff.recovery.plan import RecoveryPlan, bytes_of
from lowdiff.recovery.replay.optimizers import granularity
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.sizing import free_bytes
from lowdiff.recovery.reshard import first_holder, frozen_values, whole, whole_spec, whole_tensor
from lowdiff.recovery.search import Progress, load_and_replay
from lowdiff.recovery.sources.chooser import MemoryPlan
from lowdiff.recovery.state import FROZEN_ITEM, RecoveredState, named_as_model
from lowdiff.types import Fence, ParameterSpec

#: State that is recovered at once: so much at least, and no more groups than these.
_GROUP_BYTES, _MOST_GROUPS = 64 << 20, 32
#: Memory of a parameter that is replayed, in parameters: itself, and an Adam's state, which is there twice
#: where it begins with these steps.
_WITH_OPTIMIZER = 5


def recover_weights(
    run: str | Path,
    target: Path,
    step: int | None = None,
    *,
    staging: str | Path | None = None,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
) -> RecoveredState:
    """Recover the weights of a step straight into a file; most of the state is never in memory at once.

    Tensors are recovered in groups, with what optimizers keep of them where steps are replayed. The log
    is read once for each group, so a group is at least as large as the log, if a quarter of the free
    memory allows it. What is in a dead trainer's memory is taken whole, and so is what an optimizer
    steps that couples tensors.

    Args:
        run: See `recover`.
        target: The file, which is replaced.
        step: See `recover`.
        staging: See `recover`.
        options: How to replay.
        progress: Told about each window of steps.

    Returns:
        The state without any tensors of parameters.

    Raises:
        ConfigError: If the model has a dtype that the file cannot hold.
        StorageError: If it cannot be written.
        LowDiffError: As `recover`.
    """
    with opened(target) as file:
        return recover_by(
            partial(_write, file), run, step, staging, options or ReplayOptions(), progress
        )


@contextmanager
def opened(target: Path) -> Iterator[IO[bytes]]:
    """Open a file whose name appears only once its bytes are complete.

    Raises:
        StorageError: If it cannot be written.
    """
    try:
        make_directory(target.parent)
        with replaced(target) as file:
            yield file
    except OSError as error:
        raise unwritable(target, error) from error


class WeightsFile:
    """A safetensors file of a model's weights, whose tensors are written in any order.

    Args:
        file: Open for writing, and empty.
        named: The model's state dict, whose tensors need no values yet.
        step: Of the run.

    Raises:
        ConfigError: If a tensor has a dtype that the file cannot hold.
    """

    def __init__(self, file: IO[bytes], named: Mapping[str, Any], step: int) -> None:
        self._file = file
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        left_out = [name for name in named if name not in tensors]
        other = next((t.dtype for t in tensors.values() if not holds(t.dtype)), None)
        if other is not None:
            raise ConfigError(
                f"the model has no safetensors form, for it has {other}; give a name ending in .pt"
            )
        if left_out:
            Code.EXTRA_STATES_LEFT_OUT.warn(
                "a .safetensors file holds nothing but tensors, and lacks these extra states: "
                f"{', '.join(left_out)}; give a name ending in .pt to have them",
            )
        entries = in_file_order(image_entry(name, tensor) for name, tensor in tensors.items())
        header = image_header(entries, {"format": "pt", "lowdiff_step": str(step)})
        file.write(header)
        starts = accumulate((entry.nbytes for entry in entries), initial=len(header))
        self._starts = {entry.name: start for entry, start in zip(entries, starts, strict=False)}
        self.put({name: tensor for name, tensor in tensors.items() if not tensor.is_meta})

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors to their places."""
        for name, tensor in tensors.items():
            self._file.seek(self._starts[name])
            for piece in pieces_of(tensor):
                self._file.write(piece)


def _write(
    file: IO[bytes],
    catalog: Catalog,
    plan: MemoryPlan | RecoveryPlan,
    options: ReplayOptions,
    _share: Share | None,
) -> RecoveredState:
    """Carry a plan out into a file, from its beginning."""
    file.seek(0)
    file.truncate()
    if isinstance(plan, MemoryPlan):
        state = load_and_replay(catalog, plan, options, None)
        _drop_beside_parameters(state)
        state = whole(state)
        WeightsFile(file, state.model_state_dict(), state.step)
        return state
    fence = catalog.incarnations[plan.incarnation]
    shares = _shares(plan, fence)
    state = first = load_and_replay(catalog, plan, _reporting(options, plan, shares, 0), shares[0])
    shared = _Shared.of(RunFolder(catalog.root), fence)
    named = named_as_model(first, partial(_described, first, _forms(fence), shared.described))
    weights = WeightsFile(file, named, first.step)
    keys: dict[str, list[str]] = {}  # of what is yet to be written, by its name in the run
    for key, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            keys.setdefault(fence.names[key], []).append(key)
    del named
    for number, share in enumerate(shares):
        if number:
            own = _reporting(options, plan, shares, number)
            state = load_and_replay(catalog, plan, own, share)
        for source, tensor in _whole_tensors(state, share):
            weights.put(dict.fromkeys(keys.get(source, ()), tensor))
        del tensor
        state.parameters.clear()
        _drop_beside_parameters(state)
        del state
    for source, tensor in shared.tensors(keys, options.readers):
        weights.put(dict.fromkeys(keys[source], tensor))
    return first


def _shares(plan: RecoveryPlan, fence: Fence) -> list[WeightsShare]:
    """Divide trained parameters, and frozen ones that are sharded, into groups of tensors."""
    trained, frozen = by_tensor(fence.layout), by_tensor(fence.frozen_shards)
    trained_bytes = max(1, _bytes_of(trained))
    scale = max(_WITH_OPTIMIZER, plan.base.bytes / trained_bytes) if plan.steps else 1
    state_bytes = int(scale * trained_bytes)
    limit = max(_GROUP_BYTES, state_bytes // _MOST_GROUPS, bytes_of(plan.steps))
    limit = min(limit, free_bytes() // 4)
    if plan.steps and any(granularity(spec) == "whole" for spec in fence.optimizers):
        limit = state_bytes
    sized = [(parts, scale, False) for parts in trained.values()]
    sized += [(parts, 1, True) for parts in frozen.values()]
    # What is frozen and not sharded is in an image only if it was written, or ranks differ in it.
    whole_names = set(fence.names.values()) - {FROZEN_ITEM + tensor for tensor in frozen}
    alone = {(0, name) for name in whole_names if name.startswith(FROZEN_ITEM)}
    shares: list[WeightsShare] = []
    for parts, per_byte, is_frozen in sized:
        size = int(per_byte * sum(part.nbytes for part in parts))
        items = {(first_holder(part), FROZEN_ITEM + part.tensor) for part in parts}
        own = WeightsShare(
            parameters=frozenset() if is_frozen else frozenset(part.name for part in parts),
            items=frozenset(items if is_frozen else ()) | (alone if not shares else set()),
            has_others=not shares,
            has_optimizers=bool(plan.steps),
            bytes=size,
        )
        if shares and shares[-1].bytes + size <= limit:
            last = shares.pop()
            own = replace(
                last,
                parameters=last.parameters | own.parameters,
                items=last.items | own.items,
                bytes=last.bytes + size,
            )
        shares.append(own)
    return shares


def _bytes_of(tensors: Mapping[str, Sequence[ParameterSpec]]) -> int:
    return sum(part.nbytes for parts in tensors.values() for part in parts)


def _reporting(
    options: ReplayOptions, plan: RecoveryPlan, shares: Sequence[WeightsShare], number: int
) -> ReplayOptions:
    """Options of one group: what is told of its steps is its part of the way."""
    told, total = options.progress, len(plan.steps)
    if told is None:
        return options
    return replace(options, progress=lambda done: told((number * total + done) // len(shares)))


def _forms(fence: Fence) -> dict[str, torch.Tensor]:
    """Return the whole tensors that are put together of parts, by their names in the run, without values."""
    layouts = {"": fence.layout, FROZEN_ITEM: fence.frozen_shards}
    specs = {
        prefix + tensor: whole_spec(parts[0])
        for prefix, layout in layouts.items()
        for tensor, parts in by_tensor(layout).items()
    }
    return {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in specs.items()
    }


def _described(
    state: RecoveredState,
    forms: Mapping[str, torch.Tensor],
    shared: Mapping[str, torch.Tensor],
    source: str,
) -> torch.Tensor:
    """Return a buffer or a frozen parameter that a state has, and of other tensors the form.

    Raises:
        KeyError: If there is none of that name.
    """
    if source in forms:
        return forms[source]
    if source in state.items[0]:
        tensor: torch.Tensor = state.item(source)
        return tensor
    return shared[source]


def _whole_tensors(
    state: RecoveredState, share: WeightsShare
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a group by their names in the run."""
    for tensor, parts in by_tensor(state.fence.layout).items():
        if parts[0].name in share.parameters:
            yield tensor, whole_tensor(parts, state.parameters)
    for tensor, parts in by_tensor(state.fence.frozen_shards).items():
        if (first_holder(parts[0]), FROZEN_ITEM + tensor) in share.items:
            yield FROZEN_ITEM + tensor, whole_tensor(parts, frozen_values(state, parts))


def _drop_beside_parameters(state: RecoveredState) -> None:
    """Let go of what optimizers and averages keep of parameters."""
    for optimizer in state.optimizers:
        optimizer.state.clear()
    for followed in state.averages.values():
        followed.clear()


@dataclass(frozen=True, slots=True)
class _Shared:
    """Frozen parameters that all snapshots share.

    Attributes:
        path: Their file; None if there is none.
        described: Item name -> form.
    """

    path: Path | None
    described: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, folder: RunFolder, fence: Fence) -> Self:
        """Check the file, and read its header."""
        if not fence.constants:
            return cls(None, {})
        path = check_constants(folder, fence.constants)
        with or_damaged(path), path.open("rb", buffering=0) as file:
            entries = read_image_header(file.fileno()).entries
            return cls(
                path,
                {
                    e.name: torch.empty(e.shape, dtype=DTYPES[e.dtype], device="meta")
                    for e in entries
                },
            )

    def tensors(
        self, wanted: Container[str], num_threads: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of the tensors that are wanted, few of which are in memory at once."""
        if self.path is None:
            return

        def is_wanted(name: str) -> bool:
            return name in wanted

        with or_damaged(self.path), self.path.open("rb", buffering=0) as file:
            yield from ImageReader(file.fileno(), num_threads, first=is_wanted, wanted=is_wanted)
