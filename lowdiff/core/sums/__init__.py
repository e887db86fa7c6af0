"""Position-weighted sums of 64 bits: the checksums of what lies on an accelerator.

The memory of a tensor, one element behind the other, is words of 32 bits, ``x[0], x[1], ...``; zeros fill up the last.
A row is 4096 words, and the sum is ::

    sum of  row(j // 4096) * column(j % 4096) * x[j]   modulo 2 ** 64

where ``column(c)`` is output ``c``, and ``row(r)`` output ``4096 + r``, of splitmix64 seeded with 0, with its lowest bit
set. So the words may come in any order, and sums of disjoint ranges add up. A weight is odd, so any change of one word
shows; of other changes that know nothing of the weights one in 2 ** 32 or fewer does not.

`host` computes it on the CPU at the speed of memory, `kernels` by Triton in one launch, and `plain` by operations of
PyTorch wherever tensors are. Reference: Lemire and Kaser, "Strongly universal string hashing is fast", 2014, MULTILINEAR;
here weights are products of two numbers, so that a long tensor needs no long table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.sums.plain import plain_sums

#: What a sum is modulo.
MODULUS = 1 << 64


class Sums(Protocol):
    """Sums tensors where they are."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return one sum a tensor, as int64 on their device; the host does not wait.

        Args:
            tensors: Dense, on one device, at least one; read in memory order.
            starts: Per tensor: place of its first element in the tensor that it is a block of. None: it is all of it.
        """
        ...


def sums_on(device: torch.device) -> Sums:
    """Return what sums tensors on a device: Triton's kernel, or PyTorch's operations where it is not to be had.

    The kernel is tried on a few tensors before anything depends on it.
    """
    if not devices.compiles_kernels(device):
        return plain_sums
    why = "Triton's kernel does not make the sums of PyTorch's operations"
    try:
        from lowdiff.core.sums.kernels import TritonSums

        found = TritonSums()
        drawn = torch.arange(20_000, device="cpu").to(device)
        parts = [drawn.to(kind) for kind in (torch.float32, torch.bfloat16, torch.int64)]
        starts = [0, 777, 5]
        if torch.equal(found(parts, starts), plain_sums(parts, starts)):
            return found
    except Exception as error:  # noqa: BLE001  an import and a compiler raise what they like
        why = f"Triton's kernel is not to be had ({type(error).__name__}: {error})"
    Code.KERNELS_MISSING.warn(
        f"{why}, so checksums of parameters on {device} are taken parameter by parameter, which takes longer. Triton "
        "comes with PyTorch's CUDA builds"
    )
    return plain_sums


def unsigned(sums: torch.Tensor) -> list[int]:
    """Return sums on the host as whole numbers from 0 on."""
    return [number % MODULUS for number in sums.tolist()]
