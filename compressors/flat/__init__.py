"""Selection over whole buckets of an accelerator: a fixed number of kernels, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lowdiff.compressors.flat.selection import (
    Entries,
    Operands,
    Segment,
    Selection,
    TorchSelection,
    table_of,
)
from lowdiff.compressors.flat.sent import Places, Reading, SentBucket, TorchReading
from lowdiff.core import devices
from lowdiff.core.events import Code

if TYPE_CHECKING:
    from lowdiff.compressors.flat.matrix_operators import Products


#: What kernels take.
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def selection_on(device: torch.device, dtypes: Collection[torch.dtype]) -> Selection:
    """Return the selection for a device: Triton's kernels, or PyTorch's operations where these are not to be had.

    Kernels are tried before anything depends on them: a compiler that fails, or a device on which they do
    not make the bits of PyTorch's operations, costs speed and a warning.

    Args:
        device: Where buckets are.
        dtypes: Of these.
    """
    plain = TorchSelection()
    if not devices.compiles_kernels(device):
        return plain
    why = "Triton's kernels do not make the bits of PyTorch's operations"
    try:
        from lowdiff.compressors.flat.operators import TritonSelection

        kernels = TritonSelection()
        if all(_are_alike(kernels, plain, device, dtype) for dtype in DTYPES & {*dtypes}):
            return kernels
    except Exception as error:  # noqa: BLE001  an import and a compiler raise what they like
        why = f"Triton's kernels are not to be had ({type(error).__name__}: {error})"
    Code.KERNELS_MISSING.warn(
        f"{why}, so top-k on {device} sorts each bucket by PyTorch's operations: the same entries, several times "
        "slower. Triton comes with PyTorch's CUDA builds"
    )
    return plain


def reading_on(
    device: torch.device, selection: Selection, dtypes: Collection[torch.dtype]
) -> Reading:
    """Return what reads consumed gradients: Triton's kernels where these select.

    They are tried as well, on a bucket of two parameters.

    Args:
        device: Where buckets are.
        selection: Selects from them.
        dtypes: Of these.
    """
    if isinstance(selection, TorchSelection):
        return TorchReading()
    try:
        from lowdiff.compressors.flat.reading import TritonReading

        found = TritonReading()
        if all(_reads_alike(found, TorchReading(), device, dtype) for dtype in DTYPES & {*dtypes}):
            return found
        why = "Triton's kernels do not read what PyTorch's operations read"
    except Exception as error:  # noqa: BLE001  a compiler raises what it likes
        why = f"Triton's kernels are not to be had ({type(error).__name__}: {error})"
    Code.KERNELS_MISSING.warn(
        f"{why}, so top-k on {device} reads gradients parameter by parameter, which takes longer"
    )
    return TorchReading()


def products_on(
    device: torch.device, rank: int, dtypes: Collection[torch.dtype]
) -> Products | None:
    """Return the products of matrices by Triton's kernels; None where there are none, and PyTorch multiplies.

    Kernels are tried on a small bucket before anything depends on them.

    Args:
        device: Where buckets are.
        rank: Of the approximation.
        dtypes: Of buckets.
    """
    if not devices.compiles_kernels(device):
        return None
    try:
        from lowdiff.compressors.flat.matrix_operators import Products

        found = Products()
        for dtype in DTYPES & {*dtypes}:
            _multiply(found, device, rank, dtype)
    except Exception as error:  # noqa: BLE001  an import and a compiler raise what they like
        Code.KERNELS_MISSING.warn(
            f"Triton's kernels are not to be had ({type(error).__name__}: {error}), so PowerSGD on {device} multiplies "
            "matrix by matrix, which takes longer. Triton comes with PyTorch's CUDA builds"
        )
        return None
    return found


def agreed(
    products: Products | None, device: torch.device, group: dist.ProcessGroup | None
) -> Products | None:
    """Return the products if all ranks have them: those of PyTorch have other bits, and ranks would part."""
    if not devices.compiles_kernels(device) or group is None or group.size() == 1:
        return products
    flag = torch.full((1,), int(products is not None), dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return products if int(flag) else None


def _multiply(products: Products, device: torch.device, rank: int, dtype: torch.dtype) -> None:
    """Factorise a small bucket."""
    from lowdiff.compressors.flat.matrices import Matrix, matrices_of

    rows, columns = 40, 70
    drawn = [torch.ones(rank, columns, device="cpu")]
    table = matrices_of([Matrix(0, 0, 0, rows, columns, 0)], rank, drawn, products.tiling, device)
    generator = torch.Generator(device="cpu").manual_seed(0)
    gradient = torch.randn(rows * columns, generator=generator, device="cpu")
    bucket = gradient.to(device).to(dtype)
    owed = torch.zeros_like(bucket).to(_owed(dtype))
    last = torch.zeros(rank * columns, device=device)
    scale = torch.ones((), device=device)
    left, used = products.project(bucket, owed, owed, scale, last, table, rank)
    factors, right = products.back(owed, left, used, table, rank)
    products.update(bucket, owed, scale, last, last, factors, right, table, rank)
    again = torch.empty_like(bucket)
    products.expand(factors, rows, columns, rank, 0, again)
    # The host waits for it: what fails, fails here.
    if not torch.equal(bucket.view(torch.uint8), again.view(torch.uint8)):
        raise RuntimeError("two kernels make other bits of one product")


def _owed(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of residuals; see `lowdiff.compressors.feedback.residuals_of`."""
    return torch.float32 if dtype == torch.float16 else dtype


def _are_alike(
    kernels: Selection, plain: Selection, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether two selections take the same entries from a small bucket, and leave the same."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.randn(60_000, generator=generator, device="cpu").mul_(3).round_().div_(7)
    drawn[:20_000] = 2.0  # rooms overflow, and ties cross blocks
    drawn[20_000:30_000:7] = torch.inf
    drawn[30_000:40_000] *= 1e-39
    drawn[40_000:50_000] = 0.0
    gradient = drawn.to(device).to(dtype)
    lengths = (20_000, 10_000, 10_000, 10_000, 100, 1, 9_899)
    segments, start = [], 0
    for number, length in enumerate(lengths):
        kept = length if length <= 100 else length // 100
        segments.append(Segment(number, start, length, start, kept))
        start += length
    found = []
    for selection in (kernels, plain):
        bucket, owed = gradient.clone(), gradient.flip(0).to(_owed(dtype)).clamp_(-9, 9)
        scale, size = (torch.full((), value, device=device) for value in (3.0, 7.0))
        table = table_of(segments, selection.block, device)
        entries = Entries.empty(table.num_entries, bucket.dtype, device)
        selection(Operands(bucket, owed, owed, scale, size), table, entries)
        found.append([bucket, owed, entries.positions, entries.values])
    pairs = zip(*found, strict=True)
    return all(torch.equal(*(t.view(torch.uint8) for t in pair)) for pair in pairs)


def _reads_alike(
    kernels: Reading, plain: Reading, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether two readings find the same in a small bucket, and leave it as it was."""
    length = 30_000
    places = Places.of([(0, 0, length, 5000), (1, length, length, 8)], device)
    own = torch.arange(0, length, 6, device="cpu")
    positions = torch.cat([own, torch.arange(length, length + 8, device="cpu")])
    bucket = torch.zeros(2 * length, device="cpu").index_copy_(0, positions, positions + 0.5)
    bucket[-1] = torch.nan
    seen = list(positions.int().to(device).repeat(2).chunk(2))
    found = []
    for reading in (kernels, plain):
        parts = dict(enumerate(bucket.to(device, dtype).split(length)))
        sent = [SentBucket(places, seen)]
        reading.read(parts, sent)
        strange = reading.strange(parts, sent, [0, 1])
        assert sent[0].values is not None
        found.append(
            [sent[0].values, strange, *(part.view(torch.uint8) for part in parts.values())]
        )
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))
