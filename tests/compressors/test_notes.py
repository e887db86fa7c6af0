"""Bits that ranks tell each other on the back of the gradients' exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lowdiff.compressors.exchange import Notes, exchange
from tests.scenarios.pool import Pool


def tell(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Two steps: two exchanges between which a rank learns something, then one."""
    heard = []
    notes = Notes()
    for step, said in enumerate([[rank, rank | 4 * (rank == 1)], [0]]):
        notes.begin(0)
        assert notes.heard() == ()
        for own in said:
            notes.own = own
            buffer = torch.zeros(7)
            positions = torch.tensor([rank, 5])
            values = torch.tensor([1.0, 2.0])
            group = dist.group.WORLD
            exchange(buffer, positions, values, stamp=step, group=group, notes=notes).wait()
            assert buffer.tolist() == [1.0] * world_size + [0] * (5 - world_size) + [
                2.0 * world_size,
                0,
            ]
        heard.append(notes.heard())
    return heard


def test_every_rank_hears_all_bits_of_every_rank_in_a_step(pool: Pool) -> None:
    assert pool.run(tell, 3) == [[(0, 5, 2), (0, 0, 0)]] * 3


def test_a_single_process_hears_nobody() -> None:
    notes = Notes()
    notes.begin(3)
    exchange(
        torch.zeros(2), torch.tensor([0]), torch.tensor([1.0]), stamp=0, group=None, notes=notes
    )
    assert notes.heard() == ()
