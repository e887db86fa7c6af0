"""The memory of tensors, looked at and written without a copy and without a mark.

``Tensor.numpy``, ``numpy.asarray(tensor)`` and ``torch.from_numpy`` mark a storage: it can never be resized again,
also when the array is long gone. A module that resizes a buffer of its own, as the observers of quantization-aware
training do, would fail in its next forward pass. Whoever looks at a tensor therefore does it here, and
``tests/test_layout.py`` holds everybody to it.
"""

from __future__ import annotations

from ctypes import c_char
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowdiff.errors import UsageError

if TYPE_CHECKING:  # the writer process reads this module's importers without torch
    import torch

    from lowdiff.types import Bits


#: Unsigned integers by their size; to look one up by its name takes longer than all else here.
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor on the CPU whose bytes, one element behind the other, are its values.

    Some views only mark that their values are conjugate or negative: their memory holds others.
    """
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, in memory order, without a copy.

    The view keeps the storage alive, but not its size: if somebody resizes the storage afterwards, the view is of
    memory that was given back. It is used at once, or its address is compared before each use (`digest.Looker`).

    Raises:
        UsageError: If the storage was freed or is smaller than the tensor.
    """
    size = tensor.nbytes
    if not size:
        return memoryview(bytearray())
    storage, start = tensor.untyped_storage(), tensor.data_ptr()
    if not start or start + size > storage.data_ptr() + storage.nbytes():
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} has {storage.nbytes():,} bytes of memory and needs {size:,}: "
            "its storage was freed or resized. Give it back before attach(), optimizer.step() and commit(), "
            "which read it"
        )
    memory: Any = (c_char * size).from_address(start)
    memory.storage = storage  # lives as long as any view of it
    return memoryview(memory).cast("B")


def bits(values: torch.Tensor) -> Bits:
    """Return bit patterns of a flat CPU tensor as unsigned integers; shares its memory."""
    array: Bits = np.frombuffer(byte_view(values), _UNSIGNED[values.element_size()])
    return array


def array_of(values: torch.Tensor) -> npt.NDArray[Any]:
    """Return a flat CPU tensor as an array of the same dtype, which NumPy must know; shares its memory."""
    return np.frombuffer(byte_view(values), _numpy_dtype(values.dtype))
