"""Reading of consumed gradients by Triton: as many launches as buckets, whatever the number of parameters.

Gradients lie where the framework has put them, so kernels go by a table of addresses.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from lowdiff.compressors.flat.kernels import kernel
from lowdiff.compressors.flat.sent import SentBucket, patterns
from lowdiff.core import devices
from lowdiff.core.operators import operator

_MOST_TABLES = 64
_LAUNCH: dict[str, Any] = {"num_warps": 4}


@triton.jit
def _entries(addresses, positions, table, NUM, STRIDE, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """Where a program's entries lie in their gradient, and among those of the bucket; and which there are."""
    part = tl.program_id(1)
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    address = tl.load(addresses + tl.load(table + part))
    first = tl.load(table + 2 * NUM + part)
    inside = (index < tl.load(table + 3 * NUM + part)) & (address != 0)
    own = positions + tl.program_id(2).to(tl.int64) * STRIDE + first + index
    position = tl.load(own, inside, other=0).to(tl.int64) - tl.load(table + NUM + part)
    return address.to(tl.pointer_type(KIND)) + position, first + index, inside


@kernel
def read(
    addresses, positions, patterns, table, NUM, STRIDE, SPAN, KIND: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Copy what gradients hold at some positions."""
    place, entry, inside = _entries(addresses, positions, table, NUM, STRIDE, KIND, CHUNK)
    out = patterns + tl.program_id(2).to(tl.int64) * SPAN + entry
    tl.store(out, tl.load(place, inside, other=0), inside)


@kernel
def clear(addresses, positions, table, NUM, STRIDE, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """Make gradients zero at some positions."""
    place, entry, inside = _entries(addresses, positions, table, NUM, STRIDE, KIND, CHUNK)
    tl.store(place, tl.zeros_like(entry).to(KIND), inside)


@kernel
def restore(
    addresses, positions, patterns, table, NUM, STRIDE, SPAN, KIND: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Undo `clear`. Ranks that sent the same position have read the same there."""
    place, entry, inside = _entries(addresses, positions, table, NUM, STRIDE, KIND, CHUNK)
    own = patterns + tl.program_id(2).to(tl.int64) * SPAN + entry
    tl.store(place, tl.load(own, inside, other=0), inside)


@kernel
def search(
    addresses, strange, table, NUM, KIND: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Tell whether any bit of a range is set."""
    block = tl.program_id(0)
    number = tl.load(table + block)
    address = tl.load(addresses + tl.load(table + NUM + block))
    first = tl.load(table + 2 * NUM + block)
    end = tl.load(table + 3 * NUM + block)
    found = tl.zeros([CHUNK], KIND)
    for begin in range(0, BLOCK, CHUNK):
        place = first + begin + tl.arange(0, CHUNK)
        inside = (place < end) & (address != 0)
        found |= tl.load(address.to(tl.pointer_type(KIND)) + place, inside, other=0)
    tl.atomic_or(strange + number, tl.max((found != 0).to(tl.int32), 0))


_KINDS = {2: tl.int16, 4: tl.int32}


def _per_entry(made: Any, *, has_values: bool) -> Any:
    def launch(*given: Any) -> None:
        addresses, positions, *values, table, most, width, chunk = given
        ranks, count = positions.shape
        sizes = (table.shape[1], positions.stride(0), *((count,) if has_values else ()))
        made[(-(-most // chunk), table.shape[1], ranks)](
            addresses, positions, *values, table, *sizes, KIND=_KINDS[width], CHUNK=chunk, **_LAUNCH
        )  # fmt: skip

    return launch


def _launch_search(
    addresses: Any, strange: Any, table: Any, width: int, block: int, chunk: int
) -> None:
    made = search[(table.shape[1],)]
    made(
        addresses, strange, table, table.shape[1], KIND=_KINDS[width], BLOCK=block, CHUNK=chunk, **_LAUNCH
    )  # fmt: skip


_read = operator(
    "consumed_read(Tensor addresses, Tensor positions, Tensor(a!) patterns, Tensor table, int most, int width, int chunk)",
    _per_entry(read, has_values=True),
)
_clear = operator(
    "consumed_clear(Tensor addresses, Tensor positions, Tensor table, int most, int width, int chunk)",
    _per_entry(clear, has_values=False),
)
_restore = operator(
    "consumed_restore(Tensor addresses, Tensor positions, Tensor patterns, Tensor table, int most, int width, int chunk)",
    _per_entry(restore, has_values=True),
)
_search = operator(
    "consumed_search(Tensor addresses, Tensor(a!) strange, Tensor table, int width, int block, int chunk)",
    _launch_search,
)


@dataclass(slots=True, eq=False)
class TritonReading:
    """Reading by kernels of Triton; see `lowdiff.compressors.flat.sent.Reading`.

    Attributes:
        block: Elements that one program searches.
        chunk: Elements or entries that it takes at once; a power of two that divides the block.
    """

    block: int = 8192
    chunk: int = 1024
    #: By stream and what is searched; few, as a training's parameters stay what they are.
    _tables: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def read(self, gradients: Mapping[int, torch.Tensor], sent: Sequence[SentBucket]) -> None:
        """See `Reading`."""
        addresses, dtype = _addresses(gradients, sent)
        queue = devices.queue_of(addresses.device)
        for one in sent:
            table, values = one.places.table(queue), patterns(one.room(dtype))
            numbers = one.places.most, dtype.itemsize, self.chunk
            _read(addresses, one.positions, values, table, *numbers)

    def strange(
        self,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[SentBucket],
        searched: Sequence[int],
    ) -> torch.Tensor:
        """See `Reading`."""
        addresses, dtype = _addresses(gradients, sent)
        queue, width = devices.queue_of(addresses.device), dtype.itemsize
        found = torch.zeros(len(searched), dtype=torch.int32, device=addresses.device)
        table = self._table([(i, gradients[i].numel()) for i in searched], addresses.device, queue)
        of_sent = [
            (one.positions, patterns(one.room(dtype)), one.places.table(queue), one.places.most)
            for one in sent
        ]
        try:
            for positions, _, own, most in of_sent:
                _clear(addresses, positions, own, most, width, self.chunk)
            _search(addresses, found, table, width, self.block, self.chunk)
        finally:
            for positions, values, own, most in of_sent:
                _restore(addresses, positions, values, own, most, width, self.chunk)
        return found != 0

    def _table(
        self, searched: Sequence[tuple[int, int]], device: torch.device, queue: int
    ) -> torch.Tensor:
        """int64 ``[4, blocks]``: number, layout index, first element and end, of parameters with so many elements."""
        key = (queue, *searched)
        if key not in self._tables:
            rows = [
                (number, i, first, size)
                for number, (i, size) in enumerate(searched)
                for first in range(0, size, self.block)
            ]
            columns = torch.tensor(rows, dtype=torch.int64, device="cpu").T.contiguous()
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            self._tables[key] = columns.to(device, non_blocking=True)
        return self._tables[key]


def _addresses(
    gradients: Mapping[int, torch.Tensor], sent: Sequence[SentBucket]
) -> tuple[torch.Tensor, torch.dtype]:
    """Return where gradients lie, by layout index, 0 where there is none; and what they are."""
    first = next(iter(gradients.values()))
    last = max(*gradients, *(part.parameter for one in sent for part in one.places.partial))
    found = [0] * (last + 1)
    for i, gradient in gradients.items():
        found[i] = gradient.data_ptr()
    there = torch.tensor(found, device="cpu").to(first.device, non_blocking=True)
    return there, first.dtype
