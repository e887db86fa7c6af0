"""What fails on one rank during attach fails on all, at once, and leaves nothing behind."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import StorageError
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.protect.copies.copies import Copies
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS

ADVICE = "Mend that, and start all ranks again"


class Fragile:
    """A stateful object that cannot be restored where its file is missing."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.broken:
            raise FileNotFoundError("shard 7 of the data")


@contextmanager
def files_up_to(most_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def attach(
    rank: int, world_size: int, folder: str, until: int, broken: str
) -> tuple[str, int | str]:
    """Attach and train; on failure says why, and whether it was this rank's own error."""
    made = TRAININGS["cnn_sgd"](rank, world_size)
    suffix = f"-{rank}" if broken == "staging" else ""
    run = f"{folder}/file/run" if broken == "run" and rank == 1 else f"{folder}/run"
    checkpointer = lowdiff.Checkpointer(
        run, compressor=TopK(0.1), staging=f"{folder}/staging{suffix}"
    )
    sampler = Fragile(broken == "load_state_dict" and rank == 1)
    if broken == "optimizer" and rank == 1:
        made.optimizer = torch.optim.SGD([next(iter(made.model.parameters()))], lr=0.1)
    if broken == "hook" and rank == 1:
        assert isinstance(made.model, DistributedDataParallel)
        made.model.register_comm_hook(None, allreduce_hook)
    try:
        resumed = checkpointer.attach(made.model, made.optimizer, sampler=sampler)
    except Exception as error:
        return type(error).__name__, str(error)
    for step in checkpointer.steps(until):
        made.step(step)
    checkpointer.close()
    return "resumed", resumed


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("run", "NotARun", "a part of its path is a file"),
        ("staging", "ConfigError", "staging-1 is no folder"),
        ("load_state_dict", "FileNotFoundError", "shard 7 of the data"),
        ("optimizer", "ConfigError", "trainable parameters belong to no attached optimizer"),
        ("hook", "ConfigError", "communication hook 'allreduce_hook' already"),
    ],
)
def test_one_rank_that_cannot_attach_ends_it_on_all_and_the_next_attach_works(
    pool: Pool, tmp_path: Path, broken: str, error: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "staging-1").touch()
    assert pool.run(attach, 2, str(tmp_path), 4, "") == [("resumed", 0)] * 2
    first, second = pool.run(attach, 2, str(tmp_path), 6, broken)
    assert second[0] == error
    assert message in str(second[1])
    assert first == ("LowDiffError", f"rank 1 failed: {error}: {second[1]}. {ADVICE}")
    assert pool.run(attach, 2, str(tmp_path), 6, "") == [("resumed", 4)] * 2


def attach_with_groups(
    rank: int, world_size: int, folder: str, is_limited: bool
) -> tuple[str, int | str]:
    """Attach with a compressor that has a process group of its own; staging fits on rank 0 alone."""
    made = TRAININGS["cnn_sgd"](rank, world_size)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=PowerSGD(1), staging=f"{folder}/staging"
    )
    try:
        with files_up_to(16 << 10 if is_limited and rank == 1 else -1):
            begun = checkpointer.attach(made.model, made.optimizer)
    except Exception as error:
        return type(error).__name__, str(error)
    checkpointer.close()
    return "attached", begun


def test_memory_that_one_rank_lacks_ends_it_on_all_and_none_is_left(
    pool: Pool, tmp_path: Path
) -> None:
    """The others do not wait for it in the process group that the compressor makes."""
    first, second = pool.run(attach_with_groups, 2, str(tmp_path), True)
    assert "File too large" in str(second[1])
    assert first == ("LowDiffError", f"rank 1 failed: {second[0]}: {second[1]}. {ADVICE}")
    assert not list((tmp_path / "staging").rglob("*.log"))
    assert sorted((tmp_path / "staging").rglob("*")) == []
    assert pool.run(attach_with_groups, 2, str(tmp_path), False) == [("attached", 0)] * 2


def attach_nodes(rank: int, world_size: int, folder: str, is_broken: bool) -> str:
    """Attach ranks on nodes of their own; rank 1 has no room for its copy of rank 0."""
    made = TRAININGS["cnn_sgd"](rank, world_size)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(0.1), staging=f"{folder}/staging-{rank}", copies=2
    )

    def fail(*_: Any) -> None:
        time.sleep(1.0)
        raise StorageError("no room for a copy of rank 0")

    with pytest.MonkeyPatch.context() as patched:
        if is_broken and rank == 1:
            patched.setattr(Copies, "wait_for_base", fail)
        try:
            checkpointer.attach(made.model, made.optimizer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    checkpointer.close()
    return "attached"


def test_nodes_say_that_an_incarnation_began_only_where_no_rank_can_fail(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(attach_nodes, 2, str(tmp_path), True)
    assert second == "StorageError: no room for a copy of rank 0"
    assert first == f"LowDiffError: rank 1 failed: {second}. {ADVICE}"
    folder = RunFolder(tmp_path / "run")
    assert not folder.begun(0).exists()
    assert pool.run(attach_nodes, 2, str(tmp_path), False) == ["attached"] * 2
    assert folder.begun(max(folder.incarnations())).exists()


def share(rank: int, world_size: int, folder: str) -> str:
    """Rank 0 has a file for rank 1, which cannot store it."""
    import torch.distributed as dist

    own = Path(folder) / f"rank-{rank}"
    visible = {"x/data": own / "x/data"} if rank == 0 else {}
    try:
        Ranks(dist.group.WORLD).share_files(visible, own, durable=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "shared"


def test_a_file_that_a_rank_cannot_store_fails_on_all(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "rank-0/x").mkdir(parents=True)
    (tmp_path / "rank-0/x/data").write_bytes(b"bytes")
    (tmp_path / "rank-1").mkdir()
    assert pool.run(share, 2, str(tmp_path)) == ["shared"] * 2
    assert (tmp_path / "rank-1/x/data").read_bytes() == b"bytes"
    (tmp_path / "rank-1/x/data").unlink()
    (tmp_path / "rank-1/x").rmdir()
    (tmp_path / "rank-1/x").touch()
    first, second = pool.run(share, 2, str(tmp_path))
    assert second.startswith(("NotADirectoryError", "FileExistsError"))
    assert first == f"LowDiffError: rank 1 failed: {second}. {ADVICE}"
