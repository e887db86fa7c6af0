"""Tensors of published weights, as bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from lowdiff.core.memory import byte_view, in_memory_order
from lowdiff.errors import ConfigError
from lowdiff.persistence.format.image import item_bytes

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.unsignedinteger[Any]]

#: Safetensors dtype code -> torch dtype name.
DTYPES: Mapping[str, str] = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in DTYPES.items()}
_WORDS: Mapping[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
#: Integers of these widths view any tensor of torch.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def is_publishable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's dtype has a code."""
    return str(tensor.dtype).removeprefix("torch.") in _CODES


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of published weights.

    Attributes:
        dtype: Safetensors dtype code, e.g. ``"BF16"``.
        shape: Its shape.
        bits: Its elements, flat and row-major, as little-endian unsigned integers of their width.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: Words

    @classmethod
    def of_bytes(cls, dtype: str, shape: tuple[int, ...], data: bytearray | memoryview) -> Tensor:
        """Return a tensor that shares memory with its bytes.

        Raises:
            ValueError: If they are not those of such a tensor.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r:.40} is not known")
        bits = np.frombuffer(data, _WORDS[item_bytes(dtype)])
        if bits.size != math.prod(shape):
            raise ValueError(f"{len(data)} bytes for shape {shape}")
        return cls(dtype, shape, bits)

    @classmethod
    def of_torch(cls, tensor: torch.Tensor) -> Tensor:
        """Return a copy of a tensor's bits.

        Raises:
            ConfigError: If its dtype cannot be published.
        """
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _CODES:
            raise ConfigError(f"a tensor of {tensor.dtype} cannot be published")
        own = bytearray(byte_view(in_memory_order(tensor)))
        return cls.of_bytes(_CODES[name], tuple(tensor.shape), own)

    def to_numpy(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of another dtype; bfloat16 may be an array of ``ml_dtypes``, too.

        Raises:
            ConfigError: If NumPy does not know the tensor's own dtype.
        """
        wanted, name = np.dtype(dtype), DTYPES[self.dtype]
        if wanted.name == name:
            return self.bits.view(wanted).reshape(self.shape)
        if self.dtype == "BF16":
            own = (self.bits.astype("<u4") << np.uint32(16)).view("<f4")
        elif self.dtype.startswith("F8"):
            raise ConfigError(
                f"NumPy has no {name}; give an array of that dtype of ml_dtypes, or torch tensors"
            )
        else:
            own = self.bits.view(name)
        return own.astype(wanted).reshape(self.shape)

    def to_torch(self) -> torch.Tensor:
        """Return a tensor on the CPU, which shares memory with bits that can be written to."""
        import torch

        width = self.bits.itemsize
        bits = self.bits if self.bits.flags.writeable else self.bits.copy()
        signed = torch.from_numpy(bits.view(np.dtype(_INTEGERS[width])))
        return signed.view(getattr(torch, DTYPES[self.dtype])).reshape(self.shape)

    @property
    def digest(self) -> str:
        """XXH3 of the bits, 128 bits as hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(self.bits.data)

    @property
    def data(self) -> memoryview:
        """The bytes."""
        return self.bits.data.cast("B") if self.bits.size else memoryview(b"")

    def frozen(self) -> Tensor:
        """Return the same tensor, whose bits cannot be written to."""
        bits = self.bits.view()
        bits.flags.writeable = False
        return Tensor(self.dtype, self.shape, bits)
