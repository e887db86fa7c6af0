"""Compiles every kernel for an H100, which takes no GPU, and prints its assembly as JSON: name and dtypes -> PTX.

python -m tests.unit.compressors.flat.compiled
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowdiff.compressors.flat import kernels, matrix_kernels

#: Dtypes of gradients and residuals.
DTYPES = (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"))
_CONSTANTS = {
    "BLOCK": 8192,
    "CHUNK": 2048,
    "ROOM": 1024,
    "WIDTH": 2048,
    "SHIFT": 11,
    "BITS": 11,
    "RANK": 4,
    "R": 4,
    "ROWS": 16,
    "COLUMNS": 64,
    "SPLIT": 1024,
    "ELEMENTS": 1024,
}
_INTEGERS = ("state", "counts", "positions", "rooms", "sizes", "above", "equal")
_LONG = ("own", "table", "tiles")
#: Of PowerSGD's factors and their like.
_WIDE = ("last", "drawn", "start", "left", "right", "factors", "parts", "scale", "size")
_NUMBERS = ("NUM_BLOCKS", "NUM_SEGMENTS", "NUM", "NUM_TILES", "first", "count", "height", "width")


def assembly() -> dict[str, str]:
    """Compile all of them."""
    target = GPUTarget("cuda", 90, 32)
    found = {}
    for gradient, residual in DTYPES:
        floats = {"bucket": gradient, "values": gradient, "source": residual, "target": residual}
        floats |= {"out": gradient, **dict.fromkeys(_WIDE, "fp32")}
        types = {
            **{name: f"*{kind}" for name, kind in floats.items()},
            "totals": f"*{residual}",
            **dict.fromkeys(_INTEGERS, "*i32"),
            **dict.fromkeys(_LONG, "*i64"),
            **dict.fromkeys(_NUMBERS, "i32"),
        }
        for name, kernel in {**vars(kernels), **vars(matrix_kernels)}.items():
            if not isinstance(kernel, triton.JITFunction) or name.startswith("_"):
                continue
            names: list[str] = kernel.arg_names
            own = types | ({"target": "*fp32"} if name == "keep" else {})
            own |= {"used": "*i32"} if "used" in names else {}
            signature = {n: "constexpr" if n in _CONSTANTS else own[n] for n in names}
            constants: dict[Any, Any] = {
                (names.index(n),): value for n, value in _CONSTANTS.items() if n in names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            warps = 8 if name in vars(kernels) else 4
            options = {"num_warps": warps, "enable_fp_fusion": False}
            made = triton.compile(source, target=target, options=options)
            found[f"{name} {gradient} {residual}"] = made.asm["ptx"]
    return found


if __name__ == "__main__":
    json.dump(assembly(), sys.stdout)
