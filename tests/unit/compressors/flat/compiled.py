"""Compiles every kernel for an H100, which takes no GPU, and prints its assembly as JSON: name and dtypes -> PTX.

python -m tests.unit.compressors.flat.compiled
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowdiff.compressors.flat import kernels

#: Dtypes of gradients and residuals.
DTYPES = (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"))
_CONSTANTS = {
    "BLOCK": 8192, "CHUNK": 2048, "ROOM": 1024, "WIDTH": 2048,
    "SHIFT": 20, "FIRST": 11, "SECOND": 10, "THIRD": 10, "BITS": 11,
}
_INTEGERS = ("state", "counts", "positions", "rooms", "sizes", "above", "equal")
_LONG = ("own", "table")


def assembly() -> dict[str, str]:
    """Compile all of them."""
    target = GPUTarget("cuda", 90, 32)
    found = {}
    for gradient, residual in DTYPES:
        floats = {"bucket": gradient, "values": gradient, "source": residual, "target": residual}
        types = {
            **{name: f"*{kind}" for name, kind in floats.items()},
            "totals": f"*{residual}", "scale": "*fp32",
            **dict.fromkeys(_INTEGERS, "*i32"),
            **dict.fromkeys(_LONG, "*i64"),
            **dict.fromkeys(("NUM_BLOCKS", "NUM_SEGMENTS"), "i32"),
        }
        for name, kernel in vars(kernels).items():
            if not isinstance(kernel, triton.JITFunction) or name.startswith("_"):
                continue
            names: list[str] = kernel.arg_names
            signature = {n: "constexpr" if n in _CONSTANTS else types[n] for n in names}
            constants: dict[Any, Any] = {
                (names.index(n),): value for n, value in _CONSTANTS.items() if n in names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {"num_warps": 8, "enable_fp_fusion": False}
            made = triton.compile(source, target=target, options=options)
            found[f"{name} {gradient} {residual}"] = made.asm["ptx"]
    return found


if __name__ == "__main__":
    print(json.dumps(assembly()))
