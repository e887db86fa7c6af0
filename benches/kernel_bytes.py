"""Bytes that lowdiff's kernels read and write, counted load by load in Triton's interpreter.

    TRITON_INTERPRET=1 python -m benches.kernel_bytes

Prints, as JSON, the bytes per element of a bucket of each operator: a bucket of 2^20 normally distributed float32
gradients in four parameters, as much residual, 1 % of it sent. Where Triton is not there it prints nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

_ELEMENTS, _DENSITY = 1 << 20, 0.01


def measured() -> Mapping[str, float]:
    """Operator -> bytes per element, counted in a process of its own; empty without Triton."""
    if find_spec("triton") is None:
        return {}
    done = subprocess.run(
        [sys.executable, "-m", "benches.kernel_bytes"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Count, and print."""
    import torch
    from triton.runtime import interpreter

    from lowdiff.compressors.flat import operators
    from lowdiff.compressors.flat.selection import Entries
    from lowdiff.compressors.flat.table import Segment, table_of

    found: Counter[str] = Counter()
    running = [""]
    builder: Any = interpreter.InterpreterBuilder

    def counted(name: str, mask_at: int, times: int) -> Any:
        real = getattr(builder, name)

        def call(self: Any, *given: Any) -> Any:
            pointers, mask = given[0] if mask_at != 3 else given[1], given[mask_at]
            width = pointers.get_element_ty().primitive_bitwidth // 8
            found[running[0]] += times * width * int(mask.data.sum())
            return real(self, *given)

        return mock.patch.object(builder, name, call)

    def named(name: str) -> Any:
        real: Callable[..., None] = getattr(operators, name)

        def call(*given: Any) -> None:
            running[0] = f"topk{name}"
            real(*given)

        return mock.patch.object(operators, name, call)

    segments = [
        Segment(i, i * _ELEMENTS // 4, _ELEMENTS // 4, i * _ELEMENTS // 4, int(_ELEMENTS / 4 * _DENSITY))
        for i in range(4)
    ]
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    bucket, owed = torch.randn(2, _ELEMENTS).unbind()
    selection = operators.TritonSelection()
    table = table_of(segments, selection.block, cpu)
    entries = Entries.empty(table.num_entries, bucket.dtype, cpu)
    names = [n for n in vars(operators) if n.startswith("_") and callable(getattr(operators, n))]
    kernels = [n for n in names if f"topk{n}" in dir(torch.ops.lowdiff)]
    patches = [
        counted("create_masked_load", 1, 1),
        counted("create_masked_store", 2, 1),
        counted("create_atomic_rmw", 3, 2),
        *map(named, kernels),
    ]
    for patch in patches:
        patch.start()
    selection(bucket, owed, torch.empty_like(owed), torch.ones(()), table, entries)
    for patch in patches:
        patch.stop()
    json.dump({name: count / _ELEMENTS for name, count in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
