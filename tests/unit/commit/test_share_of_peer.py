"""A rank makes another one's share of a snapshot from its own live state, but for what only that one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lowdiff
from lowdiff.commit import staging
from lowdiff.commit.images import Share as ReadShare
from lowdiff.commit.images import share_of, share_of_items
from lowdiff.compressors import TopK
from lowdiff.model.tracked import Live
from lowdiff.persistence.format.image import OPTIMIZER, PARAMETER, SCALARS, ImageTensor
from lowdiff.persistence.format.values import decode, encode
from lowdiff.protocols import Compressor
from lowdiff.recovery.state import AVERAGE_ITEM
from lowdiff.step.states import Sealed
from tests.crash.all_trainings import TRAININGS
from tests.crash.pool import Pool

WORLD = 3
#: Name -> form, dtype and bytes.
Share = dict[str, tuple[Any, ...]]


def equal_parts(tensors: list[ImageTensor]) -> Share:
    """Parameters, optimizer state and averages of a share, and what its scalars tell of them."""
    prefixes = (PARAMETER, OPTIMIZER, AVERAGE_ITEM)
    parts: Share = {
        t.name: (t.dtype, t.shape, bytes(t.data)) for t in tensors if t.name.startswith(prefixes)
    }
    [scalars] = [bytes(t.data) for t in tensors if t.name == SCALARS]
    told = decode(scalars)
    del told["items"]
    return {**parts, SCALARS: (encode(told),)}


def shares(
    rank: int, world_size: int, folder: str, name: str, compressor: Compressor | None
) -> list[tuple[int, Share, list[Share]]]:
    """A pool's job: of each snapshot the step, this rank's share, and all ranks' as made here."""
    report = []

    def seen(live: Live, sealed: Sealed, **options: bool) -> ReadShare:
        read = share_of(live, sealed, **options)
        own = read.images()
        made = [share_of_items(live, sealed, of, {}).images() for of in range(live.world_size)]
        step = sealed.differential.step
        report.append((step, equal_parts(own), [equal_parts(share) for share in made]))
        return read

    training = TRAININGS[name](rank, world_size)
    settings = {"snapshot_every": 2, "compressor": compressor, **training.checkpointer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "share_of", seen)
        checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", staging=f"{folder}/staging", **settings
        )
        checkpointer.attach(training.model, training.optimizer, **training.stateful)
        for step in checkpointer.steps(5):
            training.step(step)
        checkpointer.close()
    return report


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "compressor", "snapshots"),
    [
        ("gpt_adamw", TopK(0.1), 3),
        ("ema_of_a_generator", TopK(0.1), 3),
        ("gpt_adamw", None, 1),
    ],
    ids=["gpt", "two optimizers and an average", "replica"],
)
def test_a_share_made_by_another_rank_has_the_bits_of_its_owners(
    pool: Pool, tmp_path: Path, name: str, compressor: Compressor | None, snapshots: int
) -> None:
    reports = pool.run(shares, WORLD, str(tmp_path), name, compressor)
    assert len(reports[0]) >= snapshots
    for of_ranks in zip(*reports, strict=True):
        assert len({step for step, _, _ in of_ranks}) == 1
        for _, _, made in of_ranks:
            for owner, share in enumerate(made):
                assert share == of_ranks[owner][1]
        names = [set(own) - {SCALARS} for _, own, _ in of_ranks]
        assert all(names)
        assert not names[0] & names[1]
        assert not names[0] & names[2]
        assert not names[1] & names[2]
