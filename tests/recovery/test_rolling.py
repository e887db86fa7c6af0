"""A rolling snapshot leads to the bits that the live run had at its step, and at every later one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.persistence.catalog import scan
from lowdiff.persistence.cycles import BLOCKS
from lowdiff.persistence.durable import write_json
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.snapshots import Manifest, manifest_file, shard_file
from lowdiff.persistence.values import same
from lowdiff.recovery.compare import differences
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.verify import verify
from tests.recovery.training import Trained, train
from tests.scenarios.lives import Kill, abandon
from tests.scenarios.pool import Pool
from tests.scenarios.trainings import batch, classifier, wrapped

Makers = dict[str, Callable[[Any], torch.optim.Optimizer]]
BY_ELEMENT: Makers = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p),
}
BY_TENSOR: Makers = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon(p, lr=0.1),
}
#: Two cycles of six steps and a part of a third.
STEPS, CYCLE = 15, 6


class Bag(torch.nn.Module):
    """Matrices of awkward sizes, one of which every cycle cuts into several blocks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, 63), (303, 131), (70, 10), (5, 1)]
        self.all = torch.nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)


def states(folder: Path, make: Callable[[Any], torch.optim.Optimizer]) -> dict[int, Any]:
    """What the live run held after each of its steps; it was killed in the middle of a cycle."""
    bag = Bag()
    optimizer = make(bag.parameters())
    checkpointer = lowdiff.Checkpointer(
        folder / "run",
        compressor=TopK(0.3, dense_below=64),
        snapshot="rolling",
        snapshot_every=CYCLE,
        batch_size=2,
        retention=None,
        staging=folder / "staging",
    )
    checkpointer.attach(bag, optimizer)
    found = {}
    for step in checkpointer.steps(STEPS):
        generator = torch.Generator().manual_seed(step)
        for parameter in bag.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        found[step + 1] = copy.deepcopy([bag.state_dict(), optimizer.state_dict()])
    assert checkpointer._opened is not None
    writer = checkpointer._opened.session.stager.writer._process
    abandon(checkpointer, Kill(STEPS, writers=False))
    writer.wait()  # its trainer is gone, so it makes all durable and ends
    return found


def recovered(folder: Path, step: int, options: ReplayOptions | None = None) -> Any:
    state = lowdiff.recover(folder / "run", step, staging=folder / "staging", options=options)
    return [dict(state.model_state_dict()), state.optimizer_state_dict()]


def is_equal(left: Any, right: Any) -> bool:
    return same(ordered(left), ordered(right))


def ordered(state: Any) -> Any:
    """Entries of an optimizer's state come in no particular order."""
    model, optimizer = state
    entries = {number: sorted(found.items()) for number, found in optimizer["state"].items()}
    return [dict(model), entries, optimizer["param_groups"]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("adamw", "muon") else pytest.mark.slow)
        for name in [*BY_ELEMENT, *BY_TENSOR]
    ],
)
def test_every_optimizer_comes_back_from_blocks_of_several_steps(name: str, tmp_path: Path) -> None:
    live = states(tmp_path, {**BY_ELEMENT, **BY_TENSOR}[name])
    for step in (CYCLE, CYCLE + 2, 2 * CYCLE, STEPS):
        assert is_equal(live[step], recovered(tmp_path, step)), f"step {step}"
    rolling = [s for s in scan(RunFolder(tmp_path / "run")).snapshots if s.is_rolling]
    assert [(s.first_base, s.step) for s in rolling] == [(1, CYCLE), (CYCLE + 1, 2 * CYCLE)]
    # What lies in the file is of several steps: recovery did bring it to one.
    fence = scan(RunFolder(tmp_path / "run")).incarnations[0].fence
    raw, _ = load_snapshot(rolling[1], fence, 1)
    assert not same(dict(live[2 * CYCLE][0]), raw.tensors())


@pytest.mark.parametrize(
    "options",
    [
        ReplayOptions(block_elements=64, num_workers=2),
        pytest.param(ReplayOptions(block_elements=8192, num_workers=1), marks=pytest.mark.slow),
        ReplayOptions(whole=True),
    ],
    ids=["small blocks", "large blocks", "whole tensors"],
)
def test_the_pieces_of_replay_need_not_be_those_of_the_cycle(
    options: ReplayOptions, tmp_path: Path
) -> None:
    live = states(tmp_path, BY_ELEMENT["adamw"])
    for step in (CYCLE, 2 * CYCLE, STEPS):
        assert is_equal(live[step], recovered(tmp_path, step, options))


# A run with buffers, scalars, stateful objects, dropout and a scheduler


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("rolling"), 17, snapshot="rolling", end="crash")


def test_an_atomic_snapshot_of_the_same_step_leads_to_the_same_bits(
    trained: Trained, tmp_path: Path
) -> None:
    twin = train(tmp_path, 17, end="crash")
    for step in (5, 8, 10, 15, 17):
        rolling = lowdiff.recover(trained.run, step, staging=trained.staging)
        atomic = lowdiff.recover(twin.run, step, staging=twin.staging)
        assert rolling.base_step == atomic.base_step == step - step % 5
        assert not list(differences(rolling, atomic))
        assert same(dict(rolling.model_state_dict()), dict(trained.models[step]))


def test_verify_compares_rolling_snapshots_with_the_replay_of_those_before(
    trained: Trained,
) -> None:
    report = verify(trained.run, trained.staging)
    assert report.ok, report.failures
    assert report.snapshots == (0, 5, 10, 15)
    assert [(r.first, r.last, r.compared) for r in report.replays] == [
        (0, 5, True),
        (5, 10, True),
        (10, 15, True),
        (15, 17, False),
    ]


def test_other_bits_in_a_block_are_found(trained: Trained, tmp_path: Path) -> None:
    damaged = trained.copied(tmp_path)
    path = damaged.shard(10)
    data = bytearray(path.read_bytes())
    snapshot = next(s for s in scan(RunFolder(damaged.run)).snapshots if s.step == 10)
    data[int.from_bytes(data[:8], "little") + 8] ^= 1
    resealed(snapshot.manifests[0], snapshot.folder, bytes(data))
    report = verify(damaged.run, damaged.staging)
    assert any("snapshot 10 differs" in failure.message for failure in report.failures)


def resealed(manifest: Manifest, folder: Path, data: bytes) -> None:
    """Put other bytes under a right checksum."""
    shard_file(folder, manifest.rank).write_bytes(data)
    changed = replace(manifest, checksum=crc32c(data))
    write_json(manifest_file(folder, manifest.rank), changed.document())


def test_blocks_that_cannot_be_are_named(trained: Trained, tmp_path: Path) -> None:
    damaged = trained.copied(tmp_path)
    snapshot = next(s for s in scan(RunFolder(damaged.run)).snapshots if s.step == 15)
    data = damaged.shard(15).read_bytes()
    assert BLOCKS.encode() in data
    changed = data.replace(BLOCKS.encode(), b"lowdiff/blonks")
    resealed(snapshot.manifests[0], snapshot.folder, changed)
    for step in (0, 5, 10):
        shutil.rmtree(damaged.shard(step).parent)
    with pytest.raises(DamagedFile, match="its blocks cannot be read"):
        lowdiff.recover(damaged.run, 15, staging=damaged.staging)


def test_without_a_differential_of_its_cycle_a_snapshot_is_no_base(
    trained: Trained, tmp_path: Path
) -> None:
    damaged = trained.copied(tmp_path)
    shutil.rmtree(damaged.staging)
    damaged.segment(6).unlink()
    with pytest.raises(StepNotFound) as error:
        lowdiff.recover(damaged.run, 10, staging=damaged.staging)
    assert list(error.value.recoverable) == [(0, 5), (15, 17)]
    state = lowdiff.recover(damaged.run, 16, staging=damaged.staging)
    assert same(dict(state.model_state_dict()), dict(trained.models[16]))
    failures = verify(damaged.run, damaged.staging).failures
    assert [f.message for f in failures if "step 6" in f.message] == [
        f"step 6 of rank 0 is lost: {damaged.segment(6)} is missing"
    ]


def test_a_spoilt_cycle_is_named_also_where_nothing_before_it_is_left(
    trained: Trained, tmp_path: Path
) -> None:
    damaged = trained.copied(tmp_path)
    shutil.rmtree(damaged.staging)
    damaged.segment(6).unlink()
    for step in (0, 5):
        shutil.rmtree(damaged.shard(step).parent)
    report = verify(damaged.run, damaged.staging)
    assert not report.ok
    assert report.snapshots == (15,)
    assert [f.message for f in report.failures] == [
        f"step 7 of rank 0 is lost: {damaged.segment(7)} is missing"
    ]


def test_the_loss_of_the_node_costs_no_more_than_with_atomic_snapshots(
    trained: Trained, tmp_path: Path
) -> None:
    left = trained.copied(tmp_path)
    shutil.rmtree(left.staging)
    state = lowdiff.recover(left.run, staging=left.staging)
    assert state.step == 17
    assert same(dict(state.model_state_dict()), dict(trained.models[17]))
    assert same(state.stateful["scheduler"], trained.stateful[17]["scheduler"])


def one_rank_loses_its_cycle(
    rank: int, world_size: int, folder: str, name: str
) -> dict[int, list[Any]]:
    """A pool's job: what the live run held at two steps; rank 0 ends its cycle with an atomic shard."""
    torch.manual_seed(0)
    model = wrapped(classifier())
    optimizer = BY_ELEMENT[name](model.parameters())
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        compressor=TopK(0.3, dense_below=64),
        snapshot="rolling",
        snapshot_every=CYCLE,
        batch_size=2,
        retention=None,
        staging=f"{folder}/staging",
    )
    checkpointer.attach(model, optimizer)
    assert checkpointer._opened is not None
    session = checkpointer._opened.session
    assert session._rolling is not None
    found = {}
    for step in checkpointer.steps(CYCLE + 2):
        if rank == 0 and step == 4:
            session._rolling.restart()
        optimizer.zero_grad()
        model(batch(step, rank, 16, 40)).square().mean().backward()
        optimizer.step()
        if step + 1 >= CYCLE:
            found[step + 1] = copy.deepcopy([model.module.state_dict(), optimizer.state_dict()])
    writer = session.stager.writer._process
    abandon(checkpointer, Kill(CYCLE + 2, writers=False))
    writer.wait()
    return found


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in ("nadam", "asgd"))]
)
def test_shards_of_which_some_are_atomic_lead_to_the_live_bits(
    name: str, pool: Pool, tmp_path: Path
) -> None:
    live, _ = pool.run(one_rank_loses_its_cycle, 2, str(tmp_path), name)
    (snapshot,) = (s for s in scan(RunFolder(tmp_path / "run")).snapshots if s.step == CYCLE)
    assert [manifest.first_base for manifest in snapshot.manifests] == [None, 1]
    for step, state in live.items():
        assert is_equal(state, recovered(tmp_path, step)), f"step {step}"
