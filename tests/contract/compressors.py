"""Every compressor, and a small run of it that all ranks can make up from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lowdiff import testing
from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import INT_OF_BYTES, flat, layout_of, torch_dtype
from lowdiff.protocols import Compressor
from lowdiff.types import Block, Layout, Payload, Section

Patterns = npt.NDArray[np.signedinteger[Any]]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

FAMILY: dict[str, Compressor] = {
    "topk": TopK(0.05, dense_below=64),
    "topk bfloat16": TopK(0.05, dense_below=64, value_dtype=torch.bfloat16),
    "topk float16": TopK(0.05, dense_below=64, value_dtype=torch.float16),
    "topk of 2 bits": TopK(0.05, dense_below=64, value_bits=2),
    "topk of 4 bits warming up": TopK(0.01, dense_below=64, warmup=3, value_bits=4),
    "topk warming up": TopK(0.01, dense_below=64, warmup=3),
    "topk by buckets": TopK(0.05, dense_below=64),
    "topk by buckets warming up": TopK(0.01, dense_below=64, warmup=3),
    "topk by buckets bfloat16": TopK(0.05, dense_below=64, value_dtype=torch.bfloat16),
    "topk by buckets of 2 bits": TopK(0.05, dense_below=64, value_bits=2),
    "cyclic": CyclicTopK(0.05, dense_below=64),
    "cyclic of 2 bits": CyclicTopK(0.05, dense_below=64, value_bits=2),
    "randomk": RandomK(0.05, dense_below=64, seed=7),
    "randomk of 4 bits": RandomK(0.05, dense_below=64, seed=7, value_bits=4),
    "powersgd": PowerSGD(2, dense_below=64),
    "powersgd of rank 5": PowerSGD(5, dense_below=0, seed=3),
    "8 bits": Quantize(8, seed=5),
    "8 bits to the nearest": Quantize(8, rounding="nearest"),
    "4 bits": Quantize(4),
    "cast to bfloat16": Cast(torch.bfloat16),
    "cast to float16": Cast(torch.float16),
}


def as_named(name: str) -> AbstractContextManager[None]:
    """Inside, compressors are bound as those of `FAMILY` with such a name are."""
    return testing.whole_buckets() if "by buckets" in name else nullcontext()


SHAPES = ((1,), (3,), (63,), (300,), (24, 40), (100, 17), (8, 6, 3, 3), (0,), (1777,))
#: What is done to gradients between hook and optimizer.
CHANGES = ("nothing", "clipped", "unscaled", "unscaled and clipped", "overflow", "by hand")


@dataclass(frozen=True)
class Case:
    """A few steps of one compressor on some parameters."""

    compressor: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    changes: tuple[str, ...]
    seed: int
    one_bucket: bool = True

    @property
    def made(self) -> Compressor:
        return FAMILY[self.compressor]

    @property
    def layout(self) -> Layout:
        parameters = []
        for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            tensor = torch.zeros(shape, dtype=dtype)
            if len(shape) == 4 and self.seed % 2:
                tensor = tensor.to(memory_format=torch.channels_last)
            parameters.append((f"p{i}", torch.nn.Parameter(tensor)))
        return layout_of(parameters)

    def gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        rng = np.random.default_rng([self.seed, rank, step])
        made = []
        for spec in self.layout.parameters:
            values = torch.from_numpy(rng.standard_normal(spec.numel))
            if rng.random() < 0.15:
                values.zero_()  # this rank did not use the parameter
            made.append(values.to(torch_dtype(spec.dtype)))
        return made

    def consumed(
        self, averaged: list[torch.Tensor], step: int, *, alone: bool = False
    ) -> list[torch.Tensor]:
        """What the optimizer gets; gradients of one dtype are scaled by one factor."""
        change = self.changes[step - 1]
        if alone and "by buckets" in self.compressor and change == "overflow":
            change = "nothing"  # without DDP a gradient is exchanged when its optimizer steps
        rng = np.random.default_rng([self.seed, step])
        coefficient = torch.tensor(rng.uniform(0.01, 1), dtype=torch.float32)
        made = []
        for gradient in averaged:
            own = gradient.clone()
            if "unscaled" in change:
                own.mul_(torch.tensor(2.0**-6))
            if "clipped" in change:
                factor = coefficient.double() if own.dtype == torch.float64 else coefficient
                own.mul_(factor)
            if change == "overflow":
                own.mul_(math.nan)
            if change == "by hand":  # keeps zeros, as every change does that TopK takes
                noise = torch.from_numpy(np.random.default_rng(self.seed).random(own.numel()))
                own.mul_(noise.to(own.dtype))
            made.append(own)
        return made


def run(case: Case, rank: int, group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """One rank's part: per step what was averaged, consumed and stored."""
    layout, compressor = case.layout, case.made
    kept = compressor.residual_layout(layout)
    residual = RotatingResidual.zeros(kept, torch.device("cpu"))
    with as_named(case.compressor):
        reducer = compressor.bind(layout, residual, group)
    report = []
    of_dtype = [[i for i, _ in layout.of_dtype(d)] for d in layout.dtypes]
    buckets = of_dtype if case.one_bucket else [[i] for b in reversed(of_dtype) for i in b]
    for step in range(1, len(case.changes) + 1):
        reducer.begin(stamp_of(3, step))
        averaged = reduced(reducer, case.gradients(rank, step), buckets)
        consumed = case.consumed(averaged, step, alone=group is None)
        reducer.consume([flat(c) for c in consumed])
        # The optimizer may do as it likes with the gradients once they are read.
        kept_bits = [exact(c).copy() for c in consumed]
        for tensor in consumed:
            tensor.fill_(99.0)
        if case.changes[step - 1] != "overflow":
            residual.settle()
        residual.advance()
        report.append(
            {
                "averaged": [exact(a).copy() for a in averaged],
                "consumed": kept_bits,
                "payload": [(s.name, s.coding, s.data.copy()) for s in reducer.payload().sections],
                "missed": reducer.depart().has_missed,
                "residual": {n: flat(t).clone() for n, t in residual.named().items()},
            }
        )
    return report


def reduced(
    reducer: Any, gradients: Sequence[torch.Tensor], buckets: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Averages; all buckets are under way at once, as with DDP."""
    averaged, waiting = [torch.empty(0)] * len(gradients), []
    for bucket in buckets:
        buffer = torch.cat([gradients[i] for i in bucket])
        views = list(buffer.split([gradients[i].numel() for i in bucket]))
        waiting.append((reducer.reduce(bucket, views, buffer), bucket, views))
    for future, bucket, views in waiting:
        future.wait()
        for i, view in zip(bucket, views, strict=True):
            averaged[i] = view
    return averaged


def exact(tensor: torch.Tensor) -> Patterns:
    """Bit patterns: 0.0 is not -0.0, and NaN equals itself."""
    patterns: Patterns = flat(tensor).view(INT_OF_BYTES[tensor.element_size()]).numpy()
    return patterns


def payload_of(report: dict[str, Any]) -> Payload:
    """A payload as it came from a rank's process."""
    return Payload(tuple(Section(*section) for section in report["payload"]))


def decoded(
    compressor: Compressor, payloads: Sequence[Payload], layout: Layout, block_elements: int
) -> list[torch.Tensor]:
    """Every parameter's gradient, rebuilt block by block."""
    decode = compressor.decoder(payloads, layout)
    out = []
    for i, spec in enumerate(layout.parameters):
        gradient = torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype))
        for start in range(0, spec.numel, block_elements):
            stop = min(start + block_elements, spec.numel)
            decode(Block(i, start, stop), gradient[start:stop])
        out.append(gradient)
    return out
