"""A run of rolling snapshots in an object store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowdiff
from lowdiff.recovery.verify import verify
from tests.face.loops import Loop
from tests.face.test_store import assert_same_weights, loop_in, lose, reached, train, wait_until
from tests.persistence.s3_server import BUCKET, S3Server, running_server

ROLLING = {"snapshot": "rolling", "snapshot_every": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


def train_slowly(loop: Loop, until: int) -> None:
    """Each step is in the store, as an object of its own, before the next begins."""
    for step in range(1, until + 1):
        train(loop, step)
        wait_until(loop, reached(step))


def test_a_killed_run_comes_back_from_the_store_alone(tmp_path: Path, server: S3Server) -> None:
    url = server.url("killed")
    loop = loop_in(tmp_path / "node", url, retention=1, **ROLLING)
    loop.attach()
    train_slowly(loop, 14)
    wait_until(loop, lambda stats: stats["snapshots"] == 4 and "s0000000004" not in held(server))
    loop.die()
    lose(tmp_path / "node")
    # The newest one is rolling, so the one before it is left, and of earlier steps those of its cycle.
    left = re.findall(r"snapshots/i000000-s(\d+)/rank-0000.json", held(server))
    assert left == ["0000000008", "0000000012"]
    assert "i000000-s0000000005.seg" in held(server)
    assert "i000000-s0000000004.seg" not in held(server)
    found = lowdiff.recover(url, staging=tmp_path / "none")
    assert (found.step, found.base_step) == (14, 12)
    assert_same_weights(found, loop)
    report = verify(url, tmp_path / "none")
    assert report.ok, report.failures
    assert loop_in(tmp_path / "other", url, **ROLLING).run(15) == 14


@pytest.mark.slow
def test_a_snapshot_that_came_before_its_differentials_is_passed_over(
    tmp_path: Path, server: S3Server
) -> None:
    url = server.url("early")
    loop = loop_in(tmp_path / "node", url, retention=None, **ROLLING)
    loop.attach()
    train_slowly(loop, 9)
    loop.die()
    for step in (7, 8, 9):
        key = f"early/segments/rank-0000/i000000-s{step:010d}.seg"
        server.client.delete_object(Bucket=BUCKET, Key=key)
    found = lowdiff.recover(url, staging=tmp_path / "none")
    assert (found.step, found.base_step) == (6, 4)


def held(server: S3Server) -> str:
    """Names of everything of the first test's run that is in the store."""
    return "\n".join(server.names("killed"))
