"""Selection over whole buckets of an accelerator: a fixed number of kernels, whatever the number of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowdiff.compressors.flat.selection import Entries, Selection, TorchSelection
from lowdiff.compressors.flat.table import Segment, table_of
from lowdiff.core import devices
from lowdiff.core.events import Code

if TYPE_CHECKING:
    from lowdiff.compressors.flat.matrix_operators import Products


def selection_on(device: torch.device) -> Selection:
    """Return the selection for a device: Triton's kernels, or PyTorch's operations where these are not to be had.

    Kernels are tried before anything depends on them: a compiler that fails, or a device on which they do
    not make the bits of PyTorch's operations, costs speed and a warning.
    """
    plain = TorchSelection()
    if not devices.compiles_kernels(device):
        return plain
    try:
        from lowdiff.compressors.flat.operators import TritonSelection
    except ImportError as error:
        Code.KERNELS_MISSING.warn(
            _SLOWER.format(device=device, why=f"Triton is not there ({error})")
        )
        return plain
    kernels = TritonSelection()
    try:
        is_same = _are_alike(kernels, plain, device)
    except Exception as error:  # noqa: BLE001  a compiler raises what it likes
        Code.KERNELS_MISSING.warn(
            _SLOWER.format(
                device=device, why=f"Triton's kernels failed ({type(error).__name__}: {error})"
            )
        )
        return plain
    if not is_same:
        Code.KERNELS_MISSING.warn(
            _SLOWER.format(
                device=device, why="Triton's kernels do not make the bits of PyTorch's operations"
            )
        )
        return plain
    return kernels


def products_on(device: torch.device) -> Products | None:
    """Return the products of matrices by Triton's kernels; None where there are none, and PyTorch multiplies.

    Kernels are tried on a small bucket before anything depends on them.
    """
    if not (devices.takes_whole_buckets(device) and devices.compiles_kernels(device)):
        return None
    try:
        from lowdiff.compressors.flat.matrix_operators import Products

        found = Products()
        _multiply(found, device)
    except Exception as error:  # noqa: BLE001  a compiler raises what it likes
        Code.KERNELS_MISSING.warn(
            f"Triton's kernels are not to be had ({type(error).__name__}: {error}), so PowerSGD on {device} multiplies "
            "matrix by matrix, which takes longer. Triton comes with PyTorch's CUDA builds"
        )
        return None
    return found


_SLOWER = (
    "{why}, so top-k on {device} sorts each bucket by PyTorch's operations: the same entries, several times slower. "
    "Triton comes with PyTorch's CUDA builds"
)


def _multiply(products: Products, device: torch.device) -> None:
    """Factorise a small bucket."""
    from lowdiff.compressors.flat.matrices import Matrix, matrices_of

    rows, columns, rank = 40, 70, 2
    matrices = [Matrix(0, 0, 0, rows, columns, 0)]
    table = matrices_of(
        matrices, rank, [torch.ones(rank, columns, device="cpu")], products.tiling, device
    )
    bucket = torch.ones(rows * columns, device=device)
    owed, last = torch.zeros_like(bucket), torch.zeros(rank * columns, device=device)
    scale = torch.ones((), device=device)
    left = products.project(bucket, owed, owed, scale, last, table, rank)
    factors, right = products.back(owed, left, table, rank)
    products.update(bucket, owed, scale, last, last, factors, right, table, rank)
    products.expand(factors, rows, columns, rank, 0, bucket)


def _are_alike(kernels: Selection, plain: Selection, device: torch.device) -> bool:
    """Whether two selections take the same entries from a small bucket, and leave the same."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    gradient = torch.randn(5_000, generator=generator).mul_(3).round_().div_(7).to(device)
    segments = [Segment(0, 0, 100, 0, 100), Segment(1, 100, 4_900, 0, 49)]
    found = []
    for selection in (kernels, plain):
        bucket, owed = gradient.clone(), gradient.flip(0)
        scale = torch.full((), 3.0, device=device)
        table = table_of(segments, selection.block, device)
        entries = Entries.empty(table.num_entries, bucket.dtype, device)
        selection(bucket, owed, owed, scale, table, entries)
        found.append([bucket, owed, entries.positions, entries.own, entries.values])
    return all(
        torch.equal(*(t.view(torch.uint8) for t in pair)) for pair in zip(*found, strict=True)
    )
