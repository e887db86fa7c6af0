"""Nodes that share nothing but an object store."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.recovery.inspect.verify import verify
from tests.crash.lives import digests
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS
from tests.unit.persistence.s3_server import S3Server

PATIENCE_SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as environment:
        made = S3Server(environment)
        yield made
        made.stop()


def live(
    rank: int,
    world_size: int,
    folder: str,
    url: str | None,
    environment: Mapping[str, str],
    until: int,
    killed: bool,
) -> tuple[int, dict[int, str], dict[str, str]]:
    """One life: where it resumed, its losses, and its state at the end."""
    os.environ.update(environment)
    torch.manual_seed(17)
    made = TRAININGS["cnn_sgd"](rank, world_size)
    node = Path(folder.format(rank=rank))
    checkpointer = lowdiff.Checkpointer(
        node / "run",
        staging=node / "staging",
        store=url,
        compressor=TopK(0.05, dense_below=64),
        snapshot_every=4,
        batch_size=1,
    )
    resumed = checkpointer.attach(made.model, made.optimizer, **made.stateful)
    losses = {}
    for step in checkpointer.steps(until):
        losses[step + 1] = float(made.step(step).detach()).hex()
    state = digests(made)
    if not killed:
        checkpointer.close()
        return resumed, losses, state
    deadline = time.monotonic() + PATIENCE_SECONDS
    while checkpointer.stats()["remote_step"] < until:
        assert time.monotonic() < deadline, checkpointer.stats()
        time.sleep(0.01)
    testing.kill(checkpointer)
    return resumed, losses, state


def weights(state: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in state.items() if not name.startswith("rng")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param((1,), id="one node"),
        pytest.param((0, 1), id="both nodes", marks=pytest.mark.slow),
    ],
)
def test_lost_nodes_are_replaced_from_the_store(
    pool: Pool, engine: str, tmp_path: Path, server: S3Server, lost: tuple[int, ...]
) -> None:
    url = server.url(f"nodes-{engine}-{len(lost)}")
    nodes = str(tmp_path / "node{rank}")
    environment = server.environment

    def run(until: int, killed: bool) -> list[tuple[int, dict[int, str], dict[str, str]]]:
        return pool.run(live, 2, nodes, url, environment, until, killed)

    first = run(6, True)
    for rank in lost:
        shutil.rmtree(tmp_path / f"node{rank}")
    # Of the state alone: nothing is trained in this life.
    second = run(6, True)
    assert [resumed for resumed, _, _ in second] == [6, 6]
    for (_, _, before), (_, _, after) in zip(first, second, strict=True):
        assert weights(before) == weights(after)
    third = run(9, False)
    assert [resumed for resumed, _, _ in third] == [6, 6]
    report = verify(url, tmp_path / "no-staging")
    assert report.ok, report.failures
    assert report.recoverable[-1][1] == 9
