"""One rank that compresses by top-k, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from lowdiff.compressors import TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import INT_OF_BYTES, layout_of, torch_dtype
from lowdiff.types import Block, Layout, Payload

CPU = torch.device("cpu")


def a_layout(*parameters: tuple[int, torch.dtype]) -> Layout:
    return layout_of(
        (f"p{i}", torch.nn.Parameter(torch.zeros(n, dtype=dtype)))
        for i, (n, dtype) in enumerate(parameters)
    )


def exact(tensor: torch.Tensor) -> list[int]:
    """Bit patterns: 0.0 is not -0.0, and NaN equals itself."""
    patterns: list[int] = tensor.view(INT_OF_BYTES[tensor.element_size()]).tolist()
    return patterns


class Rank:
    """One rank's reducer, fed the way DDP and an optimizer would."""

    def __init__(self, compressor: TopK, layout: Layout) -> None:
        self.layout, self.compressor = layout, compressor
        self.residual = RotatingResidual.zeros(layout, CPU)
        self.reducer = compressor.bind(layout, self.residual, None)

    def backward(
        self, gradients: Sequence[torch.Tensor], buckets: Sequence[Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """Averaged gradients, as they leave the communication hook."""
        averaged = [torch.empty(0)] * len(gradients)
        for bucket in buckets or [[i] for i in range(len(gradients))]:
            buffer = torch.cat([gradients[i] for i in bucket])
            views = list(buffer.split([gradients[i].numel() for i in bucket]))
            assert self.reducer.reduce(bucket, views, buffer).wait() is buffer
            for i, view in zip(bucket, views, strict=True):
                averaged[i] = view.clone()
        return averaged

    def owed(self) -> list[torch.Tensor]:
        return [self.residual.pair(i)[0].clone() for i in range(len(self.layout.parameters))]


def decoded(
    compressor: TopK, payloads: Sequence[Payload], layout: Layout, block_elements: int
) -> list[torch.Tensor]:
    """Every parameter's gradient, rebuilt block by block."""
    out = []
    for i, spec in enumerate(layout.parameters):
        gradient = torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype))
        for start in range(0, spec.numel, block_elements):
            stop = min(start + block_elements, spec.numel)
            compressor.decoder(payloads, layout)(Block(i, start, stop), gradient[start:stop])
        out.append(gradient)
    return out


def clipped_by(coefficient: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient * torch.tensor(coefficient, dtype=gradient.dtype)


def assert_split(
    compressor: TopK,
    gradient: torch.Tensor,
    owed: torch.Tensor,
    sent: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """What is sent and what is owed from now on share out gradient plus residual, exactly."""
    if compressor.kept(gradient.numel()) == gradient.numel():
        assert exact(sent) == exact(gradient)
        return
    total = gradient + owed
    kept = sent.ne(0) | sent.isnan()
    assert exact(torch.where(kept, sent, residual)) == exact(total)
    assert not residual[kept].any()
    assert int(kept.sum()) <= compressor.kept(gradient.numel())
    smallest = sent[kept].abs().nan_to_num(math.inf).min() if kept.any() else 0
    assert bool((residual.abs() <= smallest).all())
