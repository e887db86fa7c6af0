"""Compiles every kernel for an H100, which takes no GPU, and prints its assembly as JSON: name and dtypes -> PTX.

python -m tests.unit.compressors.flat.compiled
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowdiff.compressors.flat import kernels, matrix_kernels, reading
from lowdiff.core.sums import kernels as sums

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
    "ROW": 4096,
}
_INTEGERS = (
    "state",
    "counts",
    "positions",
    "rooms",
    "sizes",
    "above",
    "equal",
    "strange",
    "differs",
)
_LONG = ("table", "tiles", "addresses", "sums", "columns")
#: Of PowerSGD's factors and their like.
_WIDE = ("last", "drawn", "start", "left", "right", "factors", "parts", "scale", "size", "by")
_KINDS = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
_PATTERNS = {"fp32": tl.int32, "bf16": tl.int16, "fp16": tl.int16}
_NUMBERS = (
    "STRIDE",
    "SPAN",
    "COUNT",
    "NUM_BLOCKS",
    "NUM_SEGMENTS",
    "NUM",
    "NUM_TILES",
    "first",
    "count",
    "height",
    "width",
)


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
        types["patterns"] = "*i32" if gradient == "fp32" else "*i16"
        of_modules = [vars(module) for module in (kernels, matrix_kernels, reading, sums)]
        for name, kernel in {
            name: kernel for own in of_modules for name, kernel in own.items()
        }.items():
            if not isinstance(kernel, triton.JITFunction) or name.startswith("_"):
                continue
            chosen = dict(_CONSTANTS)
            goes_by_patterns = name in of_modules[2] or name in of_modules[3]
            chosen["KIND"] = (_PATTERNS if goes_by_patterns else _KINDS)[gradient]
            chosen["SIZE"] = 4 if gradient == "fp32" else 2
            if name in of_modules[3]:
                chosen |= {"ROWS": 8, "CHUNK": 512}
            chosen["PATTERN"] = _PATTERNS[gradient]
            names: list[str] = kernel.arg_names
            own = types | ({"target": "*fp32"} if name == "keep" else {})
            own |= {"used": "*i32"} if "used" in names else {}
            signature = {n: "constexpr" if n in chosen else own[n] for n in names}
            constants: dict[Any, Any] = {
                (names.index(n),): value for n, value in chosen.items() if n in names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            warps = 8 if name in vars(kernels) else 4
            options = {"num_warps": warps, "enable_fp_fusion": False}
            made = triton.compile(source, target=target, options=options)
            found[f"{name} {gradient} {residual}"] = made.asm["ptx"]
    return found


if __name__ == "__main__":
    json.dump(assembly(), sys.stdout)
