"""What a store lacks is uploaded again, or said; what another life needs stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lowdiff
from lowdiff.errors import RecoveryError
from lowdiff.persistence.store.client import ObjectStore
from tests.unit.commit.test_store import (
    assert_same_weights,
    loop_in,
    lose,
    lost,
    reached,
    train,
    wait_until,
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in a folder, which needs no server."""
    return f"file://{tmp_path}/store"


def snapshots(url: str) -> set[int]:
    """Steps of those that are in the store."""
    found = (re.search(r"-s(\d{10})/rank-0000\.json", name) for name in ObjectStore(url).sizes())
    return {int(match[1]) for match in found if match}


@pytest.mark.cases(1)
@pytest.mark.parametrize("missing", ["manifest", "shard"])
def test_a_store_without_a_whole_snapshot_is_no_new_run(
    tmp_path: Path, url: str, missing: str
) -> None:
    lost(tmp_path / "node", url, 3, snapshot_every=100)
    folder = tmp_path / "store/snapshots/i000000-s0000000000"
    if missing == "manifest":
        (folder / "rank-0000.json").unlink()
    else:
        shard = folder / "rank-0000.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    held = sorted(ObjectStore(url).sizes())
    with pytest.raises(RecoveryError, match="and a snapshot to begin from"):
        loop_in(tmp_path / "other", url, snapshot_every=100).attach()
    assert sorted(ObjectStore(url).sizes()) == held


@pytest.mark.slow
def test_a_life_that_went_back_uploads_what_the_store_no_longer_had(
    tmp_path: Path, url: str
) -> None:
    first = loop_in(tmp_path / "node", url)
    first.attach()
    for step in range(1, 13):
        train(first, step)
        wait_until(first, reached(step))
    first.checkpointer.close()
    # As its retention would have left it; the run folders of nodes keep more.
    for name in ObjectStore(url).sizes():
        found = re.search(r"-s(\d{10})", name)
        if found and int(found[1]) <= 10:
            (tmp_path / "store" / name).unlink()
    back = loop_in(tmp_path / "node", url, snapshot_every=100)
    assert back.attach(step=8) == 8
    train(back, 9)
    wait_until(back, reached(9))
    back.die()
    lose(tmp_path / "node")
    assert_same_weights(lowdiff.recover(url, staging=tmp_path / "none"), back)


@pytest.mark.slow
def test_a_life_that_another_one_follows_elsewhere_removes_nothing(
    tmp_path: Path, url: str
) -> None:
    cut_off = loop_in(tmp_path / "a", url, retention=1)
    cut_off.attach()
    train(cut_off, 6)
    wait_until(cut_off, reached(6))
    follower = loop_in(tmp_path / "b", url, snapshot_every=100, retention=None)
    assert follower.attach() == 6
    train(follower, 7)
    wait_until(follower, reached(7))
    for step in range(7, 17):
        train(cut_off, step)
        wait_until(cut_off, lambda s: s["remote_error"] or s["remote_step"] == s["steps"])
    stats = wait_until(cut_off, lambda s: s["remote_error"])
    assert "holds another history" in stats["remote_error"]
    cut_off.die()
    follower.die()
    lose(tmp_path / "b")
    assert_same_weights(lowdiff.recover(url, staging=tmp_path / "none"), follower)


@pytest.mark.slow
def test_a_new_node_keeps_the_snapshots_of_the_last_hours(tmp_path: Path, url: str) -> None:
    policy = lowdiff.Retention(snapshots=1, age_hours=1)
    loop_in(tmp_path / "node", url, retention=policy, snapshot_every=2).run(6)
    lose(tmp_path / "node")
    assert loop_in(tmp_path / "other", url, retention=policy, snapshot_every=2).run(8) == 6
    assert snapshots(url) >= {2, 4, 6, 8}


@pytest.mark.slow
def test_what_a_killed_fetch_left_is_removed(tmp_path: Path, url: str) -> None:
    lost(tmp_path / "node", url, 4)
    segments = tmp_path / "other/run/segments/rank-0000"
    segments.mkdir(parents=True)
    left = segments / "i000000-s0000000001.seg.99999999.partial"
    left.write_bytes(b"x")
    assert loop_in(tmp_path / "other", url).run(5) == 4
    assert not left.exists()
