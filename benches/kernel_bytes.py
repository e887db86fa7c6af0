"""Bytes that lowdiff's kernels read and write, counted load by load in Triton's interpreter.

    TRITON_INTERPRET=1 python -m benches.kernel_bytes

Prints, as JSON, the bytes per element of a bucket of each operator: a bucket of 2^20 normally distributed float32
gradients and as much residual; for top-k four parameters of which 1 % is sent, for PowerSGD(4) a matrix of 512 rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

_ELEMENTS, _DENSITY, _ROWS, _RANK = 1 << 20, 0.01, 512, 4


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

    from lowdiff.compressors.flat import matrix_operators, operators
    from lowdiff.compressors.flat.matrices import Matrix, matrices_of
    from lowdiff.compressors.flat.selection import Entries, Operands, Segment, table_of

    found: Counter[str] = Counter()
    running = [""]
    builder: Any = interpreter.InterpreterBuilder

    def counted(name: str, pointers_at: int, mask_at: int, times: int) -> Any:
        real = getattr(builder, name)

        def call(self: Any, *given: Any) -> Any:
            width = given[pointers_at].get_element_ty().primitive_bitwidth // 8
            found[running[0]] += times * width * int(given[mask_at].data.sum())
            return real(self, *given)

        return mock.patch.object(builder, name, call)

    def named(module: Any, kind: str, name: str) -> Any:
        real: Callable[..., None] = getattr(module, name)

        def call(*given: Any) -> None:
            running[0] = f"{kind}{name}"
            real(*given)

        return mock.patch.object(module, name, call)

    cpu, quarter = torch.device("cpu"), _ELEMENTS // 4
    torch.manual_seed(0)
    selection, products = operators.TritonSelection(), matrix_operators.Products()
    segments = [
        Segment(i, i * quarter, quarter, i * quarter, int(quarter * _DENSITY)) for i in range(4)
    ]
    table = table_of(segments, selection.block, cpu)
    columns = _ELEMENTS // _ROWS
    matrices = matrices_of(
        [Matrix(0, 0, 0, _ROWS, columns, 0)],
        _RANK,
        [torch.ones(_RANK, columns)],
        products.tiling,
        cpu,
    )
    entries = Entries.empty(table.num_entries, torch.float32, cpu)
    scale, last = torch.ones(()), torch.randn(_RANK * columns)
    own = set(dir(torch.ops.lowdiff))
    with ExitStack() as patched:
        for module, kind in ((operators, "topk"), (matrix_operators, "powersgd")):
            for name in [n for n in vars(module) if f"{kind}{n}" in own]:
                patched.enter_context(named(module, kind, name))
        patched.enter_context(counted("create_masked_load", 0, 1, 1))
        patched.enter_context(counted("create_masked_store", 0, 2, 1))
        patched.enter_context(counted("create_atomic_rmw", 1, 3, 2))
        bucket, owed = torch.randn(2, _ELEMENTS).unbind()
        operands = Operands(bucket, owed, torch.empty_like(owed), scale, scale)
        selection(operands, table, entries)
        bucket, owed = torch.randn(2, _ELEMENTS).unbind()
        left, used = products.project(bucket, owed, owed, scale, last, matrices, _RANK)
        factors, right = products.back(owed, left, used, matrices, _RANK)
        products.update(bucket, owed, scale, last, last, factors, right, matrices, _RANK)
        whole = torch.tensor([bucket.data_ptr()])
        products.compare(whole, factors, torch.empty(0), bucket.dtype, matrices, _RANK)
    json.dump({name: count / _ELEMENTS for name, count in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
