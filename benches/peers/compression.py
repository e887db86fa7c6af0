"""The compression of arms without a checkpointer: what lowdiff does to gradients, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from benches.bench_overhead import Compression as PlainCompression
from benches.hooked import Hooked
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.protocols import Compressor

COMPRESSORS: dict[str, Compressor] = {
    "topk": TopK(density=0.01),
    "powersgd": PowerSGD(matrix_rank=4),
}


@dataclass(slots=True)
class Compressed:
    """A lowdiff compressor on a module, in DDP's hook where there are several ranks."""

    compressor: Compressor
    num_ranks: int
    _made: PlainCompression | Hooked | None = field(default=None, init=False)

    def wrap(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """See ``Compression.wrap``."""
        if self.num_ranks == 1:
            self._made = PlainCompression(module, optimizer, self.compressor)
            return module
        self._made = Hooked(module, self.compressor)
        return self._made.ddp

    def after_backward(self) -> None:
        """Nothing: it is done in the hook, or before the optimizer's step."""

    def after_step(self) -> None:
        """The residual advances."""
        assert self._made is not None
        self._made.end_step()
