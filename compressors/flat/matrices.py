"""Where each matrix of a bucket lies, and the tiles that kernels work on; and the selection's counterpart for PowerSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, slots=True)
class Matrix:
    """One parameter's part of a bucket, as a matrix with contiguous rows.

    Attributes:
        parameter: Layout index.
        start: Its first element's place in the bucket.
        owed: Likewise in the residual.
        rows: Its rows.
        columns: Its columns.
        kept: Place of its Q, in float32 elements.
    """

    parameter: int
    start: int
    owed: int
    rows: int
    columns: int
    kept: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """How work is divided.

    Attributes:
        rows: Rows of a tile.
        columns: Columns of a tile.
        split: Rows whose product with P one program adds up.
        elements: Elements of an expanded gradient that one program makes.
        length: Columns of P or Q that one program takes at once where it works on all of a matrix.
    """

    rows: int = 16
    columns: int = 64
    length: int = 256
    split: int = 1024
    elements: int = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Matrices as kernels read them; places in elements.

    Attributes:
        matrices: In the order of their factors.
        values: int64 ``[10, matrices]``: `Matrix`'s ``start``, ``owed``, ``rows`` and ``columns``; place of P and of Q
            among those of all matrices, and of both in the factors; ``kept``; place of the partial products, and their number.
        by_rows: int64 ``[2, tiles]``: matrix and first row.
        by_splits: int64 ``[3, tiles]``: matrix, first column, and which range of rows.
        by_columns: int64 ``[2, tiles]``: matrix and first column.
        drawn: float32: Q as it starts where there is none, one after the other.
        left: Elements of all P.
        right: Elements of all Q.
        parts: Elements of all partial products.
    """

    matrices: tuple[Matrix, ...]
    values: torch.Tensor
    by_rows: torch.Tensor
    by_splits: torch.Tensor
    by_columns: torch.Tensor
    drawn: torch.Tensor
    left: int
    right: int
    parts: int

    @property
    def counts(self) -> list[int]:
        """Elements of P and Q of each matrix."""
        rank = self.left // sum(matrix.rows for matrix in self.matrices)
        return [rank * (matrix.rows + matrix.columns) for matrix in self.matrices]


def matrices_of(
    matrices: Sequence[Matrix],
    rank: int,
    drawn: Sequence[torch.Tensor],
    tiling: Tiling,
    device: torch.device,
) -> Matrices:
    """Make the table of some matrices, in a few small copies to the device.

    Args:
        matrices: In the order of their factors.
        rank: Of the approximation.
        drawn: Per matrix: Q as it starts where there is none, ``[rank, columns]``, on the CPU.
        tiling: How work is divided.
        device: Where the bucket is.
    """
    left = [0, *accumulate(rank * matrix.rows for matrix in matrices)]
    right = [0, *accumulate(rank * matrix.columns for matrix in matrices)]
    splits = [-(-matrix.rows // tiling.split) for matrix in matrices]
    parts = [
        0,
        *accumulate(n * rank * m.columns for n, m in zip(splits, matrices, strict=True)),
    ]
    rows = [
        [matrix.start for matrix in matrices],
        [matrix.owed for matrix in matrices],
        [matrix.rows for matrix in matrices],
        [matrix.columns for matrix in matrices],
        left[:-1],
        right[:-1],
        [a + b for a, b in zip(left[:-1], right[:-1], strict=True)],
        [matrix.kept for matrix in matrices],
        parts[:-1],
        splits,
    ]
    numbered = list(enumerate(matrices))
    by_rows = [(i, row) for i, m in numbered for row in range(0, m.rows, tiling.rows)]
    columns = [(i, column) for i, m in numbered for column in range(0, m.columns, tiling.columns)]
    by_splits = [(i, column, number) for i, column in columns for number in range(splits[i])]

    def there(values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, device="cpu").to(device, non_blocking=True)

    return Matrices(
        tuple(matrices),
        there(rows),
        there(list(zip(*by_rows, strict=True))),
        there(list(zip(*by_splits, strict=True))),
        there(list(zip(*columns, strict=True))),
        torch.cat([q.flatten() for q in drawn]).to(device, non_blocking=True),
        left[-1],
        right[-1],
        parts[-1],
    )
