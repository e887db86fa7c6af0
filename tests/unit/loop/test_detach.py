"""``detach()``: the run is let go of, and training goes on as if nobody had ever looked."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import UsageError, WriterFailed
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.protocols import Compressor
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import Loop

UNTIL, DETACHES_AT = 12, 7
COMPRESSORS: dict[str, Compressor | None] = {"topk": TopK(0.1), "none": None}


def twin_of(loop: Loop, folder: Path) -> Loop:
    """The same training from here on, which never had a Checkpointer attached."""
    twin = Loop(folder)
    twin.model.load_state_dict(loop.model.state_dict())
    twin.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    return twin


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def hooks_of(loop: Loop) -> int:
    own = loop.optimizer
    found = len(own._optimizer_step_pre_hooks) + len(own._optimizer_step_post_hooks)
    return found + sum(len(part._forward_pre_hooks) for part in loop.model.modules())


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", ["before the step", "after the step"])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_loop_over_steps_goes_on_and_what_was_committed_is_durable(
    tmp_path: Path, compressor: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"compressor": COMPRESSORS[compressor]}
    loop = Loop(tmp_path, settings=settings)
    loop.attach()
    numbers, committed = [], {}
    for number in loop.checkpointer.steps(UNTIL):
        numbers.append(number)
        if number == DETACHES_AT:
            committed = loop.weights()
            if place == "before the step":
                loop.checkpointer.detach()
                twin = twin_of(loop, tmp_path / "twin")
            else:
                loop.step(number)
                loop.checkpointer.detach()
                twin = twin_of(loop, tmp_path / "twin")
                continue
        loop.step(number)
        if number >= DETACHES_AT:
            twin.step(number)
    assert numbers == list(range(UNTIL))
    assert_same(loop.weights(), twin.weights())
    assert loop.checkpointer.stats()["committed_step"] == DETACHES_AT
    assert hooks_of(loop) == 0
    lock = FileLock(RunFolder(tmp_path / "run").lock(0))
    assert lock.acquire("a test")
    lock.release()
    is_kept = any((tmp_path / "staging").glob("*/i*"))
    assert is_kept == (place == "after the step")
    assert ("the model changed after its last commit (step 7)" in caplog.text) == is_kept

    loop.checkpointer.detach()
    loop.checkpointer.close()
    again = Loop(tmp_path, settings=settings)
    assert again.attach() == DETACHES_AT
    assert_same(again.weights(), committed)
    again.checkpointer.close()


def test_a_loop_of_its_own_goes_on_and_may_attach_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in range(UNTIL):
        loop.step(number)
        loop.checkpointer.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.checkpointer.commit()
        if number == 4:
            loop.checkpointer.detach()
    assert list(loop.checkpointer.steps(UNTIL + 2)) == [UNTIL, UNTIL + 1]
    assert loop.checkpointer.preempted is False
    with pytest.raises(UsageError, match="call attach"):
        loop.checkpointer.keep()
    assert loop.checkpointer.attach(loop.model, loop.optimizer) == 5
    for number in loop.checkpointer.steps(8):
        loop.step(number)
    loop.checkpointer.close()
    with pytest.raises(UsageError, match="call attach"):
        loop.checkpointer.commit()
    uninterrupted = Loop(tmp_path / "other")
    uninterrupted.run(8)
    assert_same(loop.weights(), uninterrupted.weights())


def test_before_attach_it_does_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.checkpointer.detach()
    assert loop.run(2) == 0


def test_loaders_go_on(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    samples = [torch.full((20,), float(i)) for i in range(16)]
    loader = loop.checkpointer.dataloader(samples, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    loop.attach()
    for number, inputs in zip(loop.checkpointer.steps(4), loader, strict=False):
        loop.optimizer.zero_grad()
        loop.model(inputs).square().mean().backward()
        loop.optimizer.step()
        if number == 2:
            loop.checkpointer.detach()
    assert sum(len(inputs) for _ in range(2) for inputs in loader) == 16, "the next epoch is whole"


class Broken:
    """An attached object of the user's that cannot say its state for ever."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls > 12:
            raise RuntimeError("no state")
        return {"calls": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


@pytest.mark.parametrize("where", ["inside except", "after it"])
def test_training_goes_on_after_an_error_of_a_commit(tmp_path: Path, where: str) -> None:
    loop = Loop(tmp_path)
    loop.attach(broken=Broken())
    failed_at = -1
    for number in range(30):
        loop.step(number)
        try:
            loop.checkpointer.commit()
        except RuntimeError:
            failed_at = number
            if where == "inside except":
                loop.checkpointer.detach()
        if failed_at == number and where == "after it":
            loop.checkpointer.detach()
    assert 0 < failed_at < 29, "it failed once, and no more"
    assert hooks_of(loop) == 0
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == failed_at


# The writer goes on by itself, and ends once it has written all.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_storage_in_trouble_does_not_hold_it_up(tmp_path: Path, compressor: str) -> None:
    settings = {"compressor": COMPRESSORS[compressor], "on_error": "raise", "batch_size": 1}
    loop = Loop(tmp_path, settings=settings)
    loop.attach()
    is_broken, committed = False, 0
    for number in range(2000):
        loop.step(number)
        if number == 2:
            (tmp_path / "run").rename(tmp_path / "away")
        if is_broken:
            continue
        try:
            loop.checkpointer.commit()
            committed += 1
        except WriterFailed:
            is_broken = True
            began = time.monotonic()
            loop.checkpointer.detach()
            assert time.monotonic() - began < 20
        time.sleep(0.05)  # a training that does nothing else takes a core
        if is_broken and number > committed + 10:
            break
    assert is_broken
    (tmp_path / "away").rename(tmp_path / "run")
    again = Loop(tmp_path, settings=settings)
    assert again.attach() == committed
    again.checkpointer.close()


def detach_in_ddp(rank: int, world_size: int, folder: str, compressor: str) -> bool:
    """Whether a rank's weights are those of plain DDP from the detached step on."""
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen: dict[str, Compressor | None] = {**COMPRESSORS, "powersgd": PowerSGD(1, dense_below=8)}
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=chosen[compressor], staging=f"{folder}/staging"
    )
    checkpointer.attach(model, optimizer)
    plain: Any = None
    for step in checkpointer.steps(10):
        if step == 6:
            checkpointer.detach()
            plain = wrapped(copy.deepcopy(model.module))
            plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
            plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        pairs = [(model, optimizer)]
        pairs += [] if plain is None else [(plain, plain_optimizer)]
        for module, own in pairs:
            own.zero_grad()
            module(batch(step, rank, 6, 12)).square().mean().backward()
            own.step()
    dist.barrier()
    return all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressor", ["topk", "powersgd", "none"])
def test_ddp_goes_on_as_without_lowdiff(tmp_path: Path, pool: Pool, compressor: str) -> None:
    assert pool.run(detach_in_ddp, 2, str(tmp_path), compressor) == [True, True]
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 6
    assert not any((tmp_path / "staging").glob("*/i*")), "given back as at close"
