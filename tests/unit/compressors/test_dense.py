"""Training without compression has the bits of DDP without a hook, or bits that no bucket changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowdiff.compressors import Dense
from lowdiff.compressors.dense import DenseReducer
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import layout_of, share_owners, shares_of
from lowdiff.core.memory import bits
from lowdiff.step.ddp_hook import HookState, comm_hook
from lowdiff.types import Block, Layout
from tests.crash.pool import Pool

NO_RESIDUAL = RotatingResidual.zeros(Layout(()), torch.device("cpu"))


def gradients_of(hooked: bool, rank: int, world_size: int) -> list[bytes]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 50), nn.Linear(50, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    if hooked:
        named = list(ddp.module.named_parameters())
        reducer = Dense().bind(layout_of(named), NO_RESIDUAL, dist.group.WORLD)
        state = HookState()
        state.open(reducer, [p for _, p in named])
        ddp.register_comm_hook(state, comm_hook)
    found = []
    for step in range(3):
        if hooked:
            reducer.begin(step)
        ddp.zero_grad()
        torch.manual_seed(100 * step + rank)
        ddp(torch.randn(9, 30)).square().mean().backward()
        found += [bits(p.grad.flatten()).tobytes() for p in ddp.parameters() if p.grad is not None]
    return found


def compare(rank: int, world_size: int) -> bool:
    return gradients_of(True, rank, world_size) == gradients_of(False, rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_averages_have_the_bits_of_ddp_without_a_hook(pool: Pool, world_size: int) -> None:
    assert pool.run(compare, world_size) == [True] * world_size


def test_every_rank_stores_the_whole_gradient_of_its_own_parameters() -> None:
    named = [(str(n), nn.Parameter(torch.zeros(n))) for n in (5, 300, 64, 1)]
    named += [("half", nn.Parameter(torch.zeros(7, dtype=torch.float64)))]
    layout = layout_of(named)
    gradients = [torch.randn(p.numel()).to(p.dtype) for _, p in named]
    compressor = Dense()
    payloads = []
    for rank in range(3):
        reducer = DenseReducer(compressor, None, (), shares=[shares_of(layout, 3)[rank]])
        reducer.begin(1)
        reducer.consume(gradients)
        payloads.append(reducer.payload())
    assert sum(p.bytes for p in payloads) == sum(g.nbytes for g in gradients)
    decode = compressor.decoder(payloads, layout)
    for i, gradient in enumerate(gradients):
        out = torch.zeros_like(gradient)
        decode(Block(i, 0, gradient.numel()), out)
        assert torch.equal(out, gradient)
    assert set(share_owners(layout, 3)) == {0, 1, 2}
