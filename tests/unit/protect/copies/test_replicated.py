"""``residual="replicated"`` in a training: what is sent, what comes back after a node is lost, what is refused."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors import Cast, PowerSGD, TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.testing import kill, wait_until
from tests.crash.lives import owed_by
from tests.crash.pool import Pool
from tests.unit.protect.copies.test_copies import Said, Training, remove_while_used

COMPRESSORS: list[Compressor] = [TopK(0.1), PowerSGD(1, dense_below=8)]


def is_held(step: int, stats: dict[str, Any]) -> bool:
    return bool(stats["held_step"] >= step)


def owed(training: Training) -> dict[str, torch.Tensor]:
    return {n: values for n, values in owed_by(training.checkpointer).items() if values.any()}


def lived(
    rank: int,
    world_size: int,
    folder: str,
    compressor: Compressor,
    until: int,
    residual: str,
    nodes: tuple[int, int] = (0, 1),
) -> Any:
    """A life from where the last one ended until a step, which ends as by SIGKILL of all."""
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    staging = Path(folder) / f"staging-{nodes[rank]}"
    settings = {"residual": residual, "snapshot_every": 100, "staging": staging}
    training = Training(rank, folder, compressor, **settings)
    began = training.began
    found = {began: owed(training)}
    for step in range(began, until):
        training.train(step)
        wait_until(training.checkpointer, partial(is_held, step + 1))
        dist.barrier()  # no residual is sent while one rank is in the next exchange
        found[step + 1] = owed(training)
    state = [p.detach().clone() for p in training.ddp.parameters()]
    dist.barrier()  # the other one has what this one sent
    stats = training.checkpointer.stats()
    kill(training.checkpointer)
    logging.getLogger("lowdiff").removeHandler(said)
    return began, found, state, stats, said.texts


def flip_newest(folder: Path) -> None:
    """Change a bit of the slot with the newest residual that rank 0 keeps of rank 1."""
    (copy,) = (s for s in StagingFolder.all(folder / "staging-0") if s.keeper is not None)
    data = bytearray(copy.residual.read_bytes())
    generations = [int.from_bytes(data[16 + 16 * i : 24 + 16 * i], "little") for i in range(3)]
    slot = generations.index(max(generations))
    data[128 + slot * ((len(data) - 128) // 3)] ^= 1
    copy.residual.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: c.name)
def test_a_lost_nodes_residual_comes_back_bit_for_bit(
    pool: Pool, tmp_path: Path, compressor: Compressor
) -> None:
    folder = str(tmp_path)
    first = pool.run(lived, 2, folder, compressor, 4, "replicated")
    for _, _, _, stats, said in first:
        assert stats["residual_step"] == 4
        assert not said
    shutil.rmtree(tmp_path / "staging-1")
    # Nobody makes a step: what this life began with is on both nodes as well.
    second = pool.run(lived, 2, folder, compressor, 4, "replicated")
    shutil.rmtree(tmp_path / "staging-1")
    third = pool.run(lived, 2, folder, compressor, 8, "replicated")
    whole = pool.run(lived, 2, str(tmp_path / "whole"), compressor, 8, "exact")
    for rank in range(2):
        assert second[rank][0] == third[rank][0] == 4
        for _, found, _, _, said in (first[rank], second[rank], third[rank]):
            assert all(same(values, whole[rank][1][step]) for step, values in found.items())
            assert not [text for text in said if "LD31" in text]
        assert all(map(torch.equal, third[rank][2], whole[rank][2]))
    assert whole[1][1][4], "else nothing was owed"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_lives_on_another_node_finds_its_residual(
    pool: Pool, tmp_path: Path, lost: int
) -> None:
    first = pool.run(lived, 2, str(tmp_path), TopK(0.1), 4, "replicated")
    shutil.rmtree(tmp_path / f"staging-{lost}")
    second = pool.run(lived, 2, str(tmp_path), TopK(0.1), 4, "replicated", (1, 0))
    for (_, before, *_), (began, after, *_, said) in zip(first, second, strict=True):
        assert began == 4
        assert same(after[4], before[4])
        assert not [text for text in said if "LD31" in text]


def ended(
    rank: int, world_size: int, folder: str, compressor: Compressor | None, *steps: int
) -> int:
    """A life that ends well, of ranks whose nodes have disks of their own."""
    training = Training(rank, f"{folder}/node-{rank}", compressor, snapshot_every=100)
    training.train(*steps)
    training.checkpointer.close()
    return training.began


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [Cast(), None], ids=["log", "replica"])
def test_a_node_may_be_lost_after_a_run_has_ended_well(
    pool: Pool, tmp_path: Path, compressor: Compressor | None
) -> None:
    assert pool.run(ended, 2, str(tmp_path), compressor, 0, 1, 2) == [0, 0]
    shutil.rmtree(tmp_path / "node-1")
    assert pool.run(ended, 2, str(tmp_path), compressor, 3) == [3, 3]
    shutil.rmtree(tmp_path / "node-0")
    assert pool.run(ended, 2, str(tmp_path), compressor) == [4, 4]


def test_without_it_the_lost_rank_owes_nothing(pool: Pool, tmp_path: Path) -> None:
    """So that the test above would notice."""
    pool.run(lived, 2, str(tmp_path), TopK(0.1), 4, "exact")
    shutil.rmtree(tmp_path / "staging-1")
    _, (_, found, *_, said) = pool.run(lived, 2, str(tmp_path), TopK(0.1), 4, "exact")
    assert found == {4: {}}
    assert [text for text in said if "LD312" in text]


def test_a_residual_that_was_damaged_gives_way_to_the_one_before(
    pool: Pool, tmp_path: Path
) -> None:
    _, (_, before, *_) = pool.run(lived, 2, str(tmp_path), TopK(0.1), 4, "replicated")
    shutil.rmtree(tmp_path / "staging-1")
    flip_newest(tmp_path)
    _, (began, after, *_, said) = pool.run(lived, 2, str(tmp_path), TopK(0.1), 4, "replicated")
    assert began == 4
    assert same(after[4], before[3])
    assert [text for text in said if "LD313" in text and "that of step 3" in text]


def removed(rank: int, world_size: int, folder: str) -> Any:
    """Somebody removes the staging folder of rank 0's node."""
    training = Training(rank, folder, TopK(0.1), residual="replicated", snapshot_every=100)
    training.train(0, 1, 2)
    if rank == 0:
        remove_while_used(training.staging)
    training.train(3, 4, 5)
    wait_until(training.checkpointer, lambda stats: stats["held_step"] == 6)
    training.train(6, 7)
    wait_until(training.checkpointer, lambda stats: stats["held_step"] == 8)
    found = owed(training)
    dist.barrier()  # the other one has what this one sent
    stats = training.checkpointer.stats()
    kill(training.checkpointer)
    return found, stats["residual_step"]


@pytest.mark.slow
def test_residuals_are_kept_again_where_somebody_removed_staging(
    pool: Pool, tmp_path: Path
) -> None:
    _, (expected, sent) = pool.run(removed, 2, str(tmp_path))
    assert sent >= 7
    shutil.rmtree(tmp_path / "staging-1")
    _, (began, found, *_, said) = pool.run(lived, 2, str(tmp_path), TopK(0.1), 8, "replicated")
    assert began == 8
    assert same(found[8], expected)
    assert not [text for text in said if "LD31" in text]


def watched(rank: int, world_size: int, folder: str, residual: str) -> Any:
    training = Training(rank, folder, TopK(0.1), residual=residual)
    exchanges = training.checkpointer.hook_state._exchanges
    training.train(*range(6))
    wait_until(training.checkpointer, partial(is_held, 6))
    stats = training.checkpointer.stats()
    sizes = [s.residual.exists() for s in StagingFolder.all(Path(folder)) if s.keeper is not None]
    training.checkpointer.close()
    return exchanges is not None, stats["copies_bytes_sent"], "residual_step" in stats, sizes


@pytest.mark.parametrize("residual", ["exact", "snapshot"])
def test_unless_it_is_asked_for_no_exchange_is_watched_and_nothing_is_sent(
    pool: Pool, tmp_path: Path, residual: str
) -> None:
    for is_watched, num_bytes, has_step, sizes in pool.run(watched, 2, str(tmp_path), residual):
        assert not is_watched
        assert num_bytes < 6 * 4096
        assert not has_step
        assert not any(sizes)


def refused(rank: int, world_size: int, folder: str) -> str:
    try:
        Training(rank, folder, Cast(), residual="replicated")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_compressor_without_a_residual_is_refused(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(refused, 2, str(tmp_path)):
        assert "cast keeps no error feedback of this model; leave it out" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compressor": TopK(0.1)}, 'copies=1 keeps none; give copies=2, or residual="exact"'),
        ({"copies": 2}, "strategy 'replica' has no residual to send, so leave it out"),
        ({"copies": 2, "strategy": "survivors"}, "strategy 'survivors' has no residual to send"),
    ],
)
def test_where_there_is_nothing_to_send_or_nobody_keeps_it(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lowdiff.Checkpointer(tmp_path, residual="replicated", **settings)


def memory(rank: int, world_size: int, folder: str, residual: str) -> str:
    said: list[str] = []

    class Texts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("lowdiff"), Texts()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    training = Training(rank, folder, TopK(0.1), residual=residual)
    training.checkpointer.close()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    (found,) = (text for text in said if "staging at" in text)
    return found


def test_what_is_kept_of_others_is_counted(pool: Pool, tmp_path: Path) -> None:
    def copies(text: str) -> float:
        return float(text.partition("copies ")[2].partition(",")[0])

    exact = copies(pool.run(memory, 2, str(tmp_path / "exact"), "exact")[0])
    replicated = copies(pool.run(memory, 2, str(tmp_path / "replicated"), "replicated")[0])
    model = sum(
        p.numel() * 4 for p in nn.Sequential(nn.Linear(12, 40), nn.Linear(40, 30)).parameters()
    )
    assert replicated - exact == pytest.approx(3 * model / 2**20, abs=0.11)
