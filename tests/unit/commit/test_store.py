"""A run with an object store: it outlives its node, and the store may do what it likes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.errors import ConfigError, RunMismatch, StepNotFound, StoreError, WriterFailed
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop
from tests.unit.persistence.s3_server import BUCKET, S3Server, running_server

PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def _server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


@pytest.fixture
def server(_server: S3Server) -> S3Server:
    _server.forget()
    return _server


@pytest.fixture
def url(server: S3Server, tmp_path: Path) -> str:
    return server.url(tmp_path.name)


class QuickLoop(Loop):
    """One whose segments are sealed at once, or each step would take 10 seconds to the store."""

    def attach(self, **options: Any) -> int:
        at_once = partial(WriterSettings, segment_seconds=0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lowdiff.attach.begin.WriterSettings", at_once)
            return super().attach(**options)


def loop_in(folder: Path, url: str | None, **settings: Any) -> Loop:
    return QuickLoop(folder, settings={"store": url, "batch_size": 1, **settings})


def train(loop: Loop, until: int) -> None:
    for number in loop.checkpointer.steps(until):
        loop.step(number)


def wait_until(loop: Loop, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition(stats := loop.checkpointer.stats()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.005)
    return stats


def reached(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda stats: bool(stats["remote_step"] == step)


def has_object(server: S3Server, url: str, name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda stats: name in server.names(url.rpartition("/")[2])


def assert_same_weights(found: lowdiff.recovery.RecoveredState, loop: Loop) -> None:
    expected = loop.weights()
    recovered = found.model_state_dict()
    assert set(recovered) == set(expected)
    assert all(torch.equal(recovered[name], expected[name]) for name in expected)


def lose(folder: Path) -> None:
    """What the end of a node takes with it."""
    shutil.rmtree(folder)


def lost(folder: Path, url: str, until: int, **settings: Any) -> Loop:
    """A run that was killed when the store had all its steps; its node is gone as well."""
    loop = loop_in(folder, url, **settings)
    loop.attach()
    train(loop, until)
    wait_until(loop, reached(until))
    loop.die()
    lose(folder)
    return loop


@pytest.mark.slow
def test_a_closed_run_goes_on_bit_for_bit_after_its_node_is_lost(tmp_path: Path, url: str) -> None:
    whole = loop_in(tmp_path / "whole", None)
    whole.run(14)
    loop_in(tmp_path / "first", url).run(9)
    lose(tmp_path / "first")
    second = loop_in(tmp_path / "second", url)
    assert second.run(14) == 9
    assert all(torch.equal(second.weights()[k], v) for k, v in whole.weights().items())
    assert second.checkpointer.stats()["remote_step"] == 14
    report = verify(url, tmp_path / "no-staging")
    assert report.ok, report.failures
    assert report.recoverable == ((0, 14),)


@pytest.mark.slow
def test_a_killed_run_is_recovered_from_the_store_alone(tmp_path: Path, url: str) -> None:
    loop = lost(tmp_path / "node", url, 8)
    assert_same_weights(lowdiff.recover(url, staging=tmp_path / "none"), loop)
    other = loop_in(tmp_path / "other", url)
    assert other.attach() == 8
    assert all(torch.equal(other.weights()[k], v) for k, v in loop.weights().items())
    other.checkpointer.close()
    third = loop_in(tmp_path / "third", url)
    assert third.attach(step=6) == 6  # the past is there as well
    third.checkpointer.close()


@pytest.mark.slow
def test_frozen_parameters_are_in_the_store(tmp_path: Path, url: str) -> None:
    def weight(loop: Loop) -> torch.Tensor:
        return loop.model.get_parameter("0.weight")

    def frozen(folder: Path) -> Loop:
        loop = loop_in(folder, url)
        weight(loop).requires_grad_(False)
        return loop

    loop = frozen(tmp_path / "node")
    loop.run(3)
    lose(tmp_path / "node")
    assert_same_weights(lowdiff.recover(url, staging=tmp_path / "none"), loop)
    other = frozen(tmp_path / "other")
    with torch.no_grad():
        weight(other).zero_()
    assert other.run(4) == 3
    assert torch.equal(weight(other), weight(loop))
    report = verify(url, tmp_path / "none")
    assert report.ok, report.failures


@pytest.mark.slow
def test_recovery_reads_one_snapshot_and_the_differentials_after_it(
    tmp_path: Path, url: str, server: S3Server
) -> None:
    loop = loop_in(tmp_path / "node", url)
    loop.attach()
    train(loop, 12)
    wait_until(loop, reached(12))
    loop.checkpointer.close()
    kept = lowdiff.recover(tmp_path / "node" / "run", 7, staging=tmp_path / "none")
    server.forget()
    found = lowdiff.recover(url, 7, staging=tmp_path / "none")
    assert all(torch.equal(found.tensors()[k], v) for k, v in kept.tensors().items())
    read = server.asked("GET")
    assert {name for name in read if "snapshots" in name} == {
        "snapshots/i000000-s0000000005/rank-0000.json",
        "snapshots/i000000-s0000000005/rank-0000.safetensors",
    }
    segments = [name for name in read if "segments" in name]
    assert len(segments) == len(set(segments))
    # Steps that were staged while the disk was busy share a segment.
    assert 1 <= len(segments) <= 2
    assert len(segments) < len([n for n in server.names(tmp_path.name) if "segments" in n])
    with pytest.raises(StepNotFound, match=r"step 99 of s3://.*recoverable steps: 0, 5, 10, 12"):
        lowdiff.recover(url, 99, staging=tmp_path / "none")


@pytest.mark.slow
def test_training_goes_on_while_the_store_is_away(
    tmp_path: Path, url: str, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_in(tmp_path / "node", url)
    loop.attach()
    train(loop, 3)
    wait_until(loop, reached(3))
    with server.away():
        train(loop, 12)
        stats = wait_until(loop, lambda s: s["remote_error"] and s["durable_step"] == 12)
        assert stats["remote_step"] == 3
        train(loop, 13)
        assert "nothing reaches the store now" in caplog.text
    stats = wait_until(loop, lambda s: s["remote_step"] == 13 and not s["remote_error"])
    assert stats["remote_retries"] > 0
    loop.checkpointer.close()
    report = verify(url, tmp_path / "no-staging")
    assert report.ok, report.failures
    assert report.recoverable == ((0, 13),)


@pytest.mark.slow
def test_with_raise_a_store_that_is_away_ends_training(
    tmp_path: Path, url: str, server: S3Server
) -> None:
    loop = loop_in(tmp_path / "node", url, on_error="raise")
    loop.attach()
    with server.away(), pytest.raises(WriterFailed, match="error sending request"):
        train(loop, 100_000)
    loop.die()


@pytest.mark.slow
def test_throttling_by_half_costs_nothing_but_time(
    tmp_path: Path, url: str, server: S3Server
) -> None:
    numbers = iter(range(10_000))
    server.throttled = lambda method, name: next(numbers) % 2 == 0
    loop = loop_in(tmp_path / "node", url)
    loop.run(8)
    lose(tmp_path / "node")
    assert loop.checkpointer.stats()["remote_step"] == 8
    assert_same_weights(lowdiff.recover(url, staging=tmp_path / "none"), loop)


def test_a_slow_store_does_not_hold_up_local_durability(
    tmp_path: Path, url: str, server: S3Server
) -> None:
    loop = loop_in(tmp_path / "node", url, snapshot_every=100)
    loop.attach()
    go_on = threading.Event()
    server.throttled = lambda method, name: "segments" in name and not go_on.wait(60)
    try:
        train(loop, 12)
        stats = wait_until(loop, lambda stats: stats["durable_step"] == 12)
        assert stats["remote_step"] == 0
    finally:
        go_on.set()
    wait_until(loop, reached(12))
    loop.checkpointer.close()
    assert verify(url, tmp_path / "no-staging").ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    [
        "safetensors",
        pytest.param("segments", marks=pytest.mark.slow),
        pytest.param("rank-0000.json", marks=pytest.mark.slow),
    ],
)
def test_a_writer_killed_in_the_middle_of_an_upload_leaves_nothing_out(
    tmp_path: Path, url: str, server: S3Server, victim: str
) -> None:
    loop = loop_in(tmp_path / "node", url)
    loop.attach()
    killed: list[int] = []

    def kill(method: str, name: str) -> bool:
        if method not in ("PUT", "POST") or victim not in name or killed:
            return False
        killed.append(loop.checkpointer.stats()["writer_pid"])
        os.kill(killed[0], signal.SIGKILL)
        return True  # what was under way is not stored

    server.throttled = kill
    train(loop, 7)
    testing.wait_until(loop.checkpointer, lambda stats: killed not in ([], [stats["writer_pid"]]))
    wait_until(loop, reached(7))
    loop.checkpointer.close()
    report = verify(url, tmp_path / "no-staging")
    assert report.ok, report.failures
    assert report.recoverable == ((0, 7),)


@pytest.mark.slow
def test_the_store_keeps_what_retention_keeps(tmp_path: Path, url: str, server: S3Server) -> None:
    loop = loop_in(tmp_path / "node", url, retention=2)
    loop.attach()
    for until in (5, 10, 15, 20):
        train(loop, until)
        # One snapshot after the other, or the store would never see the older ones.
        wait_until(loop, reached(until))
        wait_until(loop, has_object(server, url, f"snapshots/i000000-s{until:010d}/rank-0000.json"))
    train(loop, 22)
    loop.checkpointer.close()
    found = inspect(url, tmp_path / "no-staging")
    assert found.snapshots == (20, 22)
    assert found.recoverable_ranges[0].first == 20
    assert found.recoverable is not None
    assert found.recoverable.last == 22
    first = min(n for n in server.names(tmp_path.name) if "segments" in n)
    assert int(first[-14:-4]) > 10
    report = verify(url, tmp_path / "no-staging")
    assert report.ok, report.failures
    lose(tmp_path / "node")
    assert loop_in(tmp_path / "other", url).run(23) == 22


@pytest.mark.slow
def test_a_fresh_node_does_not_begin_afresh_while_the_store_is_away(
    tmp_path: Path, url: str, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    loop_in(tmp_path / "node", url).run(3)
    with server.away():
        with pytest.raises(StoreError, match="error sending request"):
            loop_in(tmp_path / "fresh", url).attach()
        with pytest.raises(StoreError, match="error sending request"):
            loop_in(tmp_path / "node", url, on_error="raise").attach()
        here = loop_in(tmp_path / "node", url)
        assert here.attach() == 3
        assert "going on with the history in" in caplog.text
        train(here, 5)
        wait_until(here, lambda stats: stats["remote_error"])
    wait_until(here, reached(5))
    here.checkpointer.close()
    assert loop_in(tmp_path / "fresh", url).run(6) == 5


@pytest.mark.slow
def test_two_runs_do_not_share_a_url(tmp_path: Path, url: str, server: S3Server) -> None:
    loop_in(tmp_path / "one", url).run(2)
    loop_in(tmp_path / "two", None).run(2)
    with pytest.raises(RunMismatch, match="holds another run"):
        loop_in(tmp_path / "two", url).attach()
    # Begun while the store did not answer, it finds out later and touches nothing.
    before = server.names(tmp_path.name)
    with server.away():
        late = loop_in(tmp_path / "two", url)
        late.attach()
    stats = wait_until(late, lambda s: "holds another history" in s["remote_error"])
    assert stats["remote_step"] == -1
    late.checkpointer.close()
    assert server.names(tmp_path.name) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "steps"), [({"compressor": lowdiff.compressors.TopK(0.5)}, 0), ({}, 0), ({}, 4)]
)
def test_histories_that_parted_are_not_mixed(
    tmp_path: Path, url: str, server: S3Server, changes: dict[str, Any], steps: int
) -> None:
    loop_in(tmp_path / "a", url).run(2)
    lost = loop_in(tmp_path / "b", url)  # goes on from the store, elsewhere
    assert lost.run(4) == 2
    with server.away():
        apart = loop_in(tmp_path / "a", url, **changes)
        apart.attach()
        # With other data; so even where all that was set is equal, what follows is not.
        for number in apart.checkpointer.steps(2 + steps):
            apart.step(number + 1000)
        wait_until(apart, lambda s: s["durable_step"] == 2 + steps)
    wait_until(apart, lambda s: "holds another history" in s["remote_error"])
    apart.checkpointer.close()
    with pytest.raises(RunMismatch, match="different histories"):
        loop_in(tmp_path / "a", url).attach()
    assert loop_in(tmp_path / "c", url).run(5) == 4


@pytest.mark.slow
def test_an_older_history_gets_into_a_store_that_comes_later(
    tmp_path: Path, url: str, server: S3Server
) -> None:
    loop = loop_in(tmp_path / "node", None, batch_size=4)
    loop.attach()
    train(loop, 6)
    loop.die()  # the last steps are in staging only
    # Long enough for an attach that does not wait for all of it to be found out.
    server.requested = lambda method, name: time.sleep("snapshots/i" in name)
    with_store = loop_in(tmp_path / "node", url)
    assert with_store.attach() == 6
    assert with_store.checkpointer.stats()["remote_step"] == 6
    with_store.die()
    lose(tmp_path / "node")
    assert_same_weights(lowdiff.recover(url, staging=tmp_path / "none"), loop)


@pytest.mark.slow
def test_a_damaged_snapshot_in_the_store_is_passed_over(
    tmp_path: Path, url: str, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_in(tmp_path / "node", url)
    loop.run(7)
    name = f"{tmp_path.name}/snapshots/i000000-s0000000007/rank-0000.safetensors"
    data = bytearray(server.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
    data[-1] ^= 1
    server.client.put_object(Bucket=BUCKET, Key=name, Body=bytes(data))
    found = lowdiff.recover(url, staging=tmp_path / "none")
    assert found.base_step == 5
    assert_same_weights(found, loop)
    assert "going back to an older snapshot" in caplog.text
    report = verify(url, tmp_path / "none")
    assert not report.ok
    assert any(url in finding.message for finding in report.failures)
    lose(tmp_path / "node")
    assert loop_in(tmp_path / "other", url).run(8) == 7


def test_a_bucket_that_is_not_there_is_refused_at_attach(tmp_path: Path, server: S3Server) -> None:
    with pytest.raises(StoreError, match="NoSuchBucket"):
        loop_in(tmp_path, "s3://no-such-bucket/run").attach()


def test_a_url_is_no_run_folder(url: str) -> None:
    with pytest.raises(ConfigError, match="store="):
        lowdiff.Checkpointer(url, compressor=lowdiff.compressors.TopK(0.1))
    with pytest.raises(lowdiff.LowDiffError, match=r"is not a lowdiff run: it has no run\.json"):
        lowdiff.recover(url)
