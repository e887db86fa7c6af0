"""Sums by Triton: one launch, whatever the number of tensors; see `lowdiff.core.sums`.

Tensors lie where the framework has put them, so the kernel goes by a table of addresses. A program sums a few rows of one
tensor, and adds what it has to the tensor's sum by an atomic of integers, whose order does not matter.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from lowdiff.core import devices
from lowdiff.core.operators import operator
from lowdiff.core.sums.plain import ROW, weights

_MOST_TABLES = 64
_KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@triton.jit
def _weight(place):
    """An output of splitmix64, made odd."""
    z = (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64)


@triton.jit(do_not_specialize=["NUM"], do_not_specialize_on_alignment=["sums", "columns", "table"])
def add_up_words(
    sums, columns, table, NUM,
    KIND: tl.constexpr, SIZE: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what some rows of a tensor sum up to; the table has places in units of ``SIZE`` bytes."""
    program = tl.program_id(0)
    number = tl.load(table + program)
    address = tl.load(table + NUM + program)
    first = tl.load(table + 2 * NUM + program)
    start = tl.load(table + 3 * NUM + program)
    end = tl.load(table + 4 * NUM + program)
    of_word: tl.constexpr = 4 // SIZE
    width: tl.constexpr = ROW * of_word
    row = first + tl.arange(0, ROWS)
    found = tl.zeros([ROWS, CHUNK], tl.int64)
    for begin in range(0, tl.minimum(end - first * width, width), CHUNK):
        column = begin + tl.arange(0, CHUNK)
        place = row[:, None] * width + column[None, :]
        inside = (place >= start) & (place < end)
        bits = tl.load(address.to(tl.pointer_type(KIND)) + place, inside, other=0).to(tl.int64)
        bits = (bits & ((1 << 8 * SIZE) - 1)) << (8 * SIZE * (column % of_word))[None, :]
        found += bits * tl.load(columns + column // of_word)[None, :]
    tl.atomic_add(sums + number, tl.sum(tl.sum(found, 1) * _weight(row + ROW), 0))


def _launch(sums, columns, table, size, rows, chunk) -> None:
    programs = table.shape[1]
    add_up_words[(programs,)](
        sums, columns, table, programs, KIND=_KINDS[size], SIZE=size, ROW=ROW, ROWS=rows, CHUNK=chunk, num_warps=4,
    )  # fmt: skip


_add_up_words = operator(
    "sum_words(Tensor(a!) sums, Tensor columns, Tensor table, int size, int rows, int chunk)",
    _launch,
)


@dataclass(slots=True, eq=False)
class TritonSums:
    """Sums by a kernel of Triton; see `lowdiff.core.sums.Sums`.

    Attributes:
        rows: Rows that one program sums.
        chunk: Units of each that it takes at once; both are powers of two.
    """

    rows: int = 8
    chunk: int = 512
    #: By stream and what is summed: tensors of a training stay where they are.
    _tables: dict[tuple[object, ...], dict[int, torch.Tensor]] = field(default_factory=dict)
    _columns: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def __call__(
        self, tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """See `Sums`."""
        device = tensors[0].device
        if device not in self._columns:
            self._columns[device] = weights(0, ROW, device)
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        for size, table in self._tables_of(tensors, starts or [0] * len(tensors)).items():
            _add_up_words(sums, self._columns[device], table, size, self.rows, self.chunk)
        return sums

    def _tables_of(
        self, tensors: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Bytes of a unit -> int64 ``[5, programs]``: tensor, address of place 0, first row, first place, end."""
        device = tensors[0].device
        parts = [(t.data_ptr(), t.numel(), t.element_size()) for t in tensors]
        key = (devices.queue_of(device), *parts, *starts)
        if key not in self._tables:
            rows: dict[int, list[tuple[int, ...]]] = {}
            for number, (address, count, size) in enumerate(parts):
                unit = min(size, 4)
                begin, end = (n * size // unit for n in (starts[number], starts[number] + count))
                width = ROW * 4 // unit
                for first in range(begin // width, -(-end // width) if count else 0, self.rows):
                    entry = number, address - begin * unit, first, begin, end
                    rows.setdefault(unit, []).append(entry)
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            self._tables[key] = {
                unit: torch.tensor(own, device="cpu").T.contiguous().to(device, non_blocking=True)
                for unit, own in rows.items()
            }
        return self._tables[key]
