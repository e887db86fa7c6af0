"""Bits depend on how many threads share a kernel out, so a shard's own count is used, not the process's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lowdiff.recovery.replay.optimizers import settle_kernels
from lowdiff.recovery.replica.file import ReplicaFile
from lowdiff.recovery.replica.share import Shard, contents_of
from tests.unit.recovery.replica.test_shard import Live, image

LIVE_THREADS = 2


class HalfPrecision(Live):
    """Parameters that kernels share out among threads, and whose last bits show where."""

    def make(self) -> nn.Module:
        return nn.ParameterDict(
            {
                "large": nn.Parameter(torch.randn(200_003, dtype=torch.bfloat16)),
                "bias": nn.Parameter(torch.randn(33, dtype=torch.bfloat16)),
            }
        )


@pytest.fixture
def live() -> Iterator[HalfPrecision]:
    before = torch.get_num_threads()
    settle_kernels()
    torch.set_num_threads(LIVE_THREADS)
    yield HalfPrecision(torch.optim.SGD, lr=0.1, momentum=0.9)
    torch.set_num_threads(before)


@pytest.mark.parametrize("whole", [False, True], ids=["in blocks", "whole"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_shard_steps_as_the_live_run_did_whatever_the_threads_of_this_process(
    live: HalfPrecision, tmp_path: Path, threads: int, whole: bool
) -> None:
    torch.set_num_threads(threads)
    path = ReplicaFile.create(tmp_path / "state", contents_of(live.start, whole=whole)).path
    # Only what the file itself says is known to whoever opens it next.
    shard = Shard(ReplicaFile.open(path, private=False), live.fence, journaled=True)
    assert shard.is_whole == whole
    for step in live.steps:
        shard.apply(step)
    assert image(shard.state) == image(live.end)
    assert torch.get_num_threads() == threads
