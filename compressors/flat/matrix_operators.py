"""The kernels of PowerSGD as operators of PyTorch: each is one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

from lowdiff.compressors.flat import matrix_kernels as kernels
from lowdiff.compressors.flat.matrices import Matrices, Tiling
from lowdiff.core.operators import operator

#: As of the selection's; products and sums that are to be one operation say so.
_LAUNCH: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PATTERNS = {2: tl.int16, 4: tl.int32}


def _padded(rank: int) -> int:
    """Return the next power of two, at least 2."""
    return 1 << max(1, (rank - 1).bit_length())


def _per_matrix(kernel: Any) -> Callable[..., None]:
    def launch(*given: Any) -> None:
        *tensors, table, rank, columns = given
        kernel[(table.shape[1],)](
            *tensors, table, table.shape[1],
            RANK=rank, R=_padded(rank), COLUMNS=columns, **_LAUNCH,
        )  # fmt: skip

    return launch


def _per_tile(kernel: Any, *names: str) -> Callable[..., None]:
    """Launch a kernel per tile; its constants are the rank, and those of these names."""

    def launch(*given: Any) -> None:
        constants = given[len(given) - len(names) :]
        *tensors, table, tiles, rank = given[: len(given) - len(names)]
        chosen = dict(zip(names, constants, strict=True))
        if "R" in kernel.arg_names:
            chosen["R"] = _padded(rank)
        kernel[(tiles.shape[1],)](
            *tensors, table, table.shape[1], tiles, tiles.shape[1], RANK=rank, **chosen, **_LAUNCH
        )

    return launch


def _launch_expand(
    factors: Any, out: Any, first: int, height: int, width: int, rank: int, elements: int
) -> None:
    count = out.numel()
    kernels.expand[(-(-count // elements),)](
        factors, out, first, count, height, width, RANK=rank, ELEMENTS=elements, **_LAUNCH
    )


def _launch_compare(
    addresses: Any,
    factors: Any,
    by: Any,
    differs: Any,
    table: Any,
    tiles: Any,
    kind: Any,
    *numbers: int,
) -> None:
    rank, rows, columns = numbers
    kernels.compare[(tiles.shape[1],)](
        addresses, factors, by, by.numel(), differs, table, table.shape[1], tiles, tiles.shape[1],
        KIND=_KINDS[kind], PATTERN=_PATTERNS[kind.itemsize], RANK=rank, ROWS=rows, COLUMNS=columns, **_LAUNCH,
    )  # fmt: skip


_normalise = operator(
    "powersgd_normalise(Tensor last, Tensor drawn, Tensor(a!) start, Tensor table, int rank, int columns)",
    _per_matrix(kernels.normalise),
)
_project = operator(
    "powersgd_project(Tensor bucket, Tensor source, Tensor(a!) target, Tensor scale, Tensor start, Tensor(b!) left, "
    "Tensor(c!) used, Tensor table, Tensor tiles, int rank, int rows, int columns)",
    _per_tile(kernels.project, "ROWS", "COLUMNS"),
)
_drop = operator(
    "powersgd_drop(Tensor(a!) left, Tensor used, Tensor table, Tensor tiles, int rank, int rows)",
    _per_tile(kernels.drop, "ROWS"),
)
_orthogonalise = operator(
    "powersgd_orthogonalise(Tensor left, Tensor(a!) factors, Tensor table, int rank, int columns)",
    _per_matrix(kernels.orthogonalise),
)
_back = operator(
    "powersgd_back(Tensor target, Tensor factors, Tensor used, Tensor(a!) parts, Tensor table, Tensor tiles, int rank, int rows, "
    "int columns, int split)",
    _per_tile(kernels.back, "ROWS", "COLUMNS", "SPLIT"),
)
_join = operator(
    "powersgd_join(Tensor parts, Tensor(a!) right, Tensor table, Tensor tiles, int rank, int columns)",
    _per_tile(kernels.join, "COLUMNS"),
)
_keep = operator(
    "powersgd_keep(Tensor right, Tensor last, Tensor(a!) target, Tensor(b!) factors, Tensor table, int rank, "
    "int columns)",
    _per_matrix(kernels.keep),
)
_update = operator(
    "powersgd_update(Tensor(a!) bucket, Tensor(b!) target, Tensor scale, Tensor factors, Tensor table, Tensor tiles, "
    "int rank, int rows, int columns)",
    _per_tile(kernels.update, "ROWS", "COLUMNS"),
)
_compare = operator(
    "powersgd_compare(Tensor addresses, Tensor factors, Tensor by, Tensor(a!) differs, Tensor table, Tensor tiles, "
    "ScalarType kind, int rank, int rows, int columns)",
    _launch_compare,
)
_expand = operator(
    "powersgd_expand(Tensor factors, Tensor(a!) out, int first, int height, int width, int rank, int elements)",
    _launch_expand,
)


def _room(count: int, beside: torch.Tensor) -> torch.Tensor:
    """Make room for so many float32 where another tensor lies."""
    return torch.empty(count, dtype=torch.float32, device=beside.device)


@dataclass(frozen=True, slots=True)
class Products:
    """The steps of PowerSGD over some matrices of a bucket.

    Attributes:
        tiling: How work is divided.
    """

    tiling: Tiling = field(default_factory=Tiling)

    def project(
        self,
        bucket: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        scale: torch.Tensor,
        last: torch.Tensor,
        table: Matrices,
        rank: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write gradient plus residual, and return its products with the last Q.

        Returns:
            P of all matrices, to be averaged; and int32 per matrix whether its gradient is used at all.

        Args:
            bucket: Flat gradients; float32, bfloat16 or float16.
            source: Flat residual.
            target: Flat residual that is written; may be ``source``.
            scale: float32 ``[]``: by what gradients are multiplied, and the residual is not.
            last: Q of all matrices of the last step, flat.
            table: Where what is.
            rank: Of the approximation.
        """
        start, left = _room(table.right, bucket), _room(table.left, bucket)
        used = torch.zeros(len(table.matrices), dtype=torch.int32, device=bucket.device)
        rows, columns = self.tiling.rows, self.tiling.columns
        _normalise(last, table.drawn, start, table.values, rank, self.tiling.length)
        _project(
            bucket, source, target, scale, start, left, used, table.values, table.by_rows, rank, rows, columns
        )  # fmt: skip
        _drop(left, used, table.values, table.by_rows, rank, rows)
        return left, used

    def back(
        self,
        target: torch.Tensor,
        left: torch.Tensor,
        used: torch.Tensor,
        table: Matrices,
        rank: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make P orthonormal, and multiply with it.

        Returns:
            Factors, P and Q of one matrix after the other, with P in place; and Q of all matrices, to be averaged.
        """
        factors, right = _room(table.left + table.right, target), _room(table.right, target)
        parts = _room(table.parts, target)
        tiling, values = self.tiling, table.values
        # Products of all pairs of rows are summed up in registers.
        length = tiling.length if rank <= 4 else tiling.columns
        _orthogonalise(left, factors, values, rank, length)
        _back(
            target, factors, used, parts, values, table.by_splits, rank, tiling.rows, tiling.columns, tiling.split
        )  # fmt: skip
        _join(parts, right, values, table.by_columns, rank, tiling.columns)
        return factors, right

    def update(
        self,
        bucket: torch.Tensor,
        target: torch.Tensor,
        scale: torch.Tensor,
        last: torch.Tensor,
        kept: torch.Tensor,
        factors: torch.Tensor,
        right: torch.Tensor,
        table: Matrices,
        rank: int,
    ) -> None:
        """Put Q into the factors and keep it; write the average gradient, and what is owed now.

        Args:
            bucket: See `project`.
            target: Likewise.
            scale: Likewise.
            last: Likewise.
            kept: Where Q is kept for the next step; may be ``last``.
            factors: P and Q of one matrix after the other; Q is written here.
            right: Q of all matrices, averaged.
            table: Where what is.
            rank: Of the approximation.
        """
        _keep(right, last, kept, factors, table.values, rank, self.tiling.length)
        _update(
            bucket, target, scale, factors, table.values, table.by_rows, rank, self.tiling.rows, self.tiling.columns
        )  # fmt: skip

    def compare(
        self,
        addresses: torch.Tensor,
        factors: torch.Tensor,
        by: torch.Tensor,
        kind: torch.dtype,
        table: Matrices,
        rank: int,
    ) -> torch.Tensor:
        """Return which gradients are not P Q^T, as `update` wrote it, multiplied by some numbers in turn.

        Args:
            addresses: int64 ``[matrices]``: where the gradient lies, 0 where it is not asked for.
            factors: P and Q of one matrix after the other.
            by: float32 ``[n]``: the numbers.
            kind: Dtype of the gradients.
            table: Where what is.
            rank: Of the approximation.

        Returns:
            bool ``[matrices]``: whether one differs, or is not finite.
        """
        differs = torch.zeros(len(table.matrices), dtype=torch.int32, device=factors.device)
        _compare(
            addresses, factors, by, differs, table.values, table.by_rows, kind, rank, self.tiling.rows, self.tiling.columns
        )  # fmt: skip
        return differs != 0

    def expand(
        self,
        factors: torch.Tensor,
        rows: int,
        columns: int,
        rank: int,
        first: int,
        out: torch.Tensor,
    ) -> None:
        """Write elements from ``first`` on of P Q^T, in row order, with the bits of `update`."""
        if out.numel():
            _expand(factors, out, first, rows, columns, rank, self.tiling.elements)
