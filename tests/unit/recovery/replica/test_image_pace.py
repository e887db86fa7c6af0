"""Replicas whose disks do not take every image still make some of the same steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.recovery.replica.main import ImagePace

EVERY, INTERVALS = 50, 400


def settings(keep_every: int = 0) -> ReplicaSettings:
    return ReplicaSettings(
        run="run",
        staging_root="staging",
        run_id="00112233445566778899aabbccddeeff",
        incarnation=0,
        rank=0,
        world_size=2,
        trainer_pid=1,
        image_every=EVERY,
        keep_every=keep_every,
        waits=False,
    )


def made(shortest: float, longest: float, seed: int) -> list[int]:
    """A rank's images, each durable after so many intervals; the first takes ``seed`` of them."""
    chance, pace = random.Random(seed), ImagePace(settings())
    found: list[int] = []
    free_at = 0.0
    for step in range(EVERY, EVERY * INTERVALS, EVERY):
        if pace.takes(step, is_free=step >= free_at):
            free_at = step + EVERY * (chance.uniform(shortest, longest) if found else seed)
            found.append(step)
    return found


def test_a_disk_that_takes_every_image_gets_every_image() -> None:
    assert made(0.1, 0.9, seed=0) == list(range(EVERY, EVERY * INTERVALS, EVERY))


@pytest.mark.parametrize("one", [(0.3, 1.0), (1.0, 2.0), (2.2, 3.9)], ids=str)
@pytest.mark.parametrize("other", [(0.3, 1.0), (1.0, 2.0)], ids=str)
def test_ranks_that_leave_images_out_by_themselves_make_the_same_ones(
    one: tuple[float, float], other: tuple[float, float]
) -> None:
    warm = 40 * EVERY
    for seed in range(20):
        both = set(made(*one, seed)) & set(made(*other, seed + 1))
        steps = [warm, *(step for step in sorted(both) if step > warm), EVERY * INTERVALS]
        assert max(after - before for before, after in pairwise(steps)) <= 4 * EVERY


def test_a_disk_that_is_fast_again_gets_every_image_again() -> None:
    pace = ImagePace(settings())
    for interval in range(1, 12):
        pace.takes(interval * EVERY, is_free=interval == 1)
    steps = [n * EVERY for n in range(12, 60) if pace.takes(n * EVERY, is_free=True)]
    assert steps[0] <= 16 * EVERY
    assert steps[3:] == list(range(steps[3], 60 * EVERY, EVERY))


def test_images_that_are_kept_for_ever_are_made_whenever_the_disk_is_free() -> None:
    pace = ImagePace(settings(keep_every=70))
    assert pace.takes(50, is_free=True)
    assert not pace.takes(100, is_free=False)
    assert pace.takes(140, is_free=True)
    assert not pace.takes(150, is_free=False)
    assert pace.takes(200, is_free=True)
