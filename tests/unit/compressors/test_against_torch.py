"""The compressors that PyTorch has as well, against PyTorch's own hooks, under DDP."""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, known to type checkers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import Cast, PowerSGD
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import layout_of
from lowdiff.protocols import Compressor
from lowdiff.step.ddp_hook import HookState
from tests.contract.compressors import Patterns, exact
from tests.crash.pool import Pool
from tests.crash.trainings import TinyCNN, batch, labels

STEPS = 3


class OurHook:
    """A DDP model under one of our compressors, without a run."""

    def __init__(self, model: nn.Module, compressor: Compressor) -> None:
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        layout = layout_of(model.named_parameters())
        kept = compressor.residual_layout(layout)
        self.residual = RotatingResidual.zeros(kept, torch.device("cpu"))
        self.reducer = compressor.bind(layout, self.residual, self.ddp.process_group)
        state = HookState()
        state.open(self.reducer, list(model.parameters()))
        self.ddp.register_comm_hook(state, lowdiff.comm_hook)

    def gradients(self, step: int, loss: Any) -> list[torch.Tensor]:
        self.reducer.begin(step)
        found = gradients(self.ddp, loss)
        self.residual.settle()
        self.residual.advance()
        return found


def gradients(ddp: DistributedDataParallel, loss: Any) -> list[torch.Tensor]:
    ddp.zero_grad()
    loss(ddp).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def cast_both(rank: int, world_size: int, dtype: torch.dtype) -> list[tuple[Patterns, Patterns]]:
    """A pool's job: gradients under our hook and under PyTorch's."""
    torch.manual_seed(0)
    ours = OurHook(TinyCNN(), Cast(dtype))
    torch.manual_seed(0)
    theirs = DistributedDataParallel(TinyCNN(), bucket_cap_mb=1)
    hook = {
        torch.bfloat16: default_hooks.bf16_compress_hook,
        torch.float16: default_hooks.fp16_compress_hook,
    }[dtype]

    # DDP refuses the hook named bf16_compress_hook on a CPU, though it works.
    def unnamed(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = hook(theirs.process_group, bucket)
        return done

    theirs.register_comm_hook(None, unnamed)
    pairs = []
    for step in range(1, STEPS + 1):

        def loss(model: nn.Module, step: int = step) -> torch.Tensor:
            scores = model(batch(step, rank, 8, 3, 8, 8))
            return nn.functional.cross_entropy(scores, labels(step, rank, 8, 10))

        for left, right in zip(ours.gradients(step, loss), gradients(theirs, loss), strict=True):
            pairs.append((exact(left).copy(), exact(right).copy()))
    return pairs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cast_has_the_bits_of_pytorchs_hook_with_two_ranks(pool: Pool, dtype: torch.dtype) -> None:
    first, second = pool.run(cast_both, 2, dtype)
    for (ours, theirs), (others, _) in zip(first, second, strict=True):
        assert np.array_equal(ours, theirs)
        assert np.array_equal(ours, others)
    assert any(ours.any() for ours, _ in first)


def low_rank_both(
    rank: int, world_size: int, matrix_rank: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A pool's job: the gradient of one matrix under both, from the same start."""
    rows, columns = 48, 80
    ours = OurHook(nn.Linear(columns, rows, bias=False), PowerSGD(matrix_rank))
    theirs = DistributedDataParallel(nn.Linear(columns, rows, bias=False))
    state = powerSGD_hook.PowerSGDState(
        theirs.process_group, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2
    )
    state.iter = 2
    q = torch.randn(matrix_rank, columns, generator=torch.Generator().manual_seed(1))
    ours.residual.load([None, q.flatten()])
    state.p_memory_dict[0] = torch.empty(rows * matrix_rank)
    state.q_memory_dict[0] = q.T.contiguous().flatten()
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    pairs = []
    for step in range(1, 9):
        generator = torch.Generator().manual_seed(100 * step + rank)
        wanted = torch.randn(rows, columns, generator=generator)

        def loss(model: nn.Module, wanted: torch.Tensor = wanted) -> torch.Tensor:
            total: torch.Tensor = (model(torch.eye(columns)) * wanted.T).sum()
            return total

        pairs.append((ours.gradients(step, loss)[0], gradients(theirs, loss)[0]))
    return pairs


@pytest.mark.parametrize("matrix_rank", [1, 2, 4])
def test_powersgd_is_numerically_pytorchs(pool: Pool, matrix_rank: int) -> None:
    for ours, theirs in pool.run(low_rank_both, 2, matrix_rank)[0]:
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert torch.linalg.matrix_rank(ours, rtol=1e-5) == matrix_rank
