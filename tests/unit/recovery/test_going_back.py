"""What recovery does where the newest step's snapshot is damaged, or a run goes on beside it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import DamagedFile, RunMismatch, StepNotFound
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery import search
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.plan import RecoveryPlan
from tests.crash.lives import history
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS
from tests.unit.loops import Loop
from tests.unit.recovery.training import flip


class Words:
    """A stateful object that changes only when it is told to."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)

    def state_dict(self) -> dict[str, Any]:
        return {"words": self.words}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.words = list(state["words"])


class OtherWords(Words):
    """Of another class, which begins afresh."""


def live(
    folder: Path,
    until: int,
    *,
    settings: dict[str, Any] | None = None,
    inside: Callable[[int, Loop], None] | None = None,
    dies: bool = True,
    **stateful: Any,
) -> Loop:
    """One life, which ends as SIGKILL of trainer and writer would end it, or is closed."""
    loop = Loop(folder, settings={"batch_size": 2, **(settings or {})})
    loop.attach(**stateful)
    for number in loop.checkpointer.steps(until):
        loop.step(number)
        if inside is not None:
            inside(number + 1, loop)
    loop.die() if dies else loop.checkpointer.close()
    return loop


def shard(folder: Path, step: int, incarnation: int = 0) -> Path:
    name = f"i{incarnation:06d}-s{step:010d}"
    return folder / "run/snapshots" / name / "rank-0000.safetensors"


def recover(folder: Path, step: int | None = None) -> lowdiff.RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging")


def damp(step: int, loop: Loop) -> None:
    if step == 7:
        loop.optimizer.state[next(loop.model.parameters())]["exp_avg"].mul_(0.5)


#: Of each: how it trains and whether it dies, which snapshot is damaged, and where that leads back to.
ONLY_BY_SNAPSHOT: dict[str, tuple[dict[str, Any], bool, int, int]] = {
    "no compressor": ({"settings": {"compressor": None, "snapshot_every": 1000}}, False, 8, 4),
    "changed outside the optimizer": ({"inside": damp}, True, 7, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dies", "damaged", "left"), ONLY_BY_SNAPSHOT.values(), ids=list(ONLY_BY_SNAPSHOT)
)
def test_where_only_a_damaged_snapshot_leads_to_the_newest_step_an_older_one_serves(
    tmp_path: Path,
    how: dict[str, Any],
    dies: bool,
    damaged: int,
    left: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    live(tmp_path, 4, dies=False, **how)
    live(tmp_path, 8, dies=dies, **how)
    expected = recover(tmp_path, left).model_state_dict()
    flip(shard(tmp_path, damaged, 1), 3000)
    why = rf"\(snapshot {damaged}, which leads there, is damaged\)"
    with pytest.raises(StepNotFound, match=rf"step 8 .* {why}"):
        recover(tmp_path, 8)
    caplog.clear()
    found = recover(tmp_path)
    assert found.step == left
    assert same(dict(found.model_state_dict()), dict(expected))
    assert "fails its checksum" in caplog.text
    assert f"going back to step {left}" in caplog.text

    again = Loop(tmp_path, settings=how.get("settings", {}))
    caplog.clear()
    assert again.attach() == left
    assert f"snapshot {damaged}, which leads there, is damaged" in caplog.text
    assert same(again.weights(), dict(expected))
    again.checkpointer.close()


def test_a_step_that_only_a_snapshot_leads_to_is_said_to_be_one(tmp_path: Path) -> None:
    live(tmp_path, 9, inside=damp)
    shutil.rmtree(shard(tmp_path, 7).parent)
    why = "changed outside the optimizer in step 7, so only a snapshot leads to it"
    with pytest.raises(StepNotFound, match=f"step 8 .*{why}.*: 0 to 6"):
        recover(tmp_path, 8)


@pytest.mark.slow
def test_ranks_go_back_together_where_one_of_them_reads_damage(pool: Pool, tmp_path: Path) -> None:
    build = TRAININGS["gpt_adamw"]
    settings = {"compressor": None, "retention": None}
    life: dict[str, Any] = {"world_size": 2, "settings": settings, "staging": "staging-{rank}"}
    for until in (4, 8):
        history(pool, build, tmp_path, until=until, **life)
    for rank in (0, 1):
        shutil.copytree(tmp_path / "run", tmp_path / f"run-{rank}")
        shutil.rmtree(tmp_path / f"staging-{rank}")
    # A replica writes an image whenever the one before is durable, so the last but one that all ranks have varies.
    snapshots = sorted((tmp_path / "run-1/snapshots").iterdir())
    *_, older, newest = (s for s in snapshots if len([*s.glob("rank-*.json")]) == 2)
    assert newest.name.endswith("s0000000008")
    flip(newest / "rank-0001.safetensors", 3000)
    lived = history(pool, build, tmp_path, until=9, run="run-{rank}", **life)
    left = int(older.name.partition("s")[2])
    assert 4 <= left < 8
    assert [life.resumed for life in lived.lives[-1]] == [left, left]


def test_generators_of_ranks_that_joined_are_said_to_be_unknown(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for world_size, until in ((1, 4), (2, 6)):
        history(
            pool,
            TRAININGS["gpt_adamw"],
            tmp_path,
            world_size=world_size,
            until=until,
            settings={"retention": None},
        )
    assert recover(tmp_path, 5).base_step == 4
    assert "random generators" not in caplog.text
    shutil.rmtree(tmp_path / "run/snapshots/i000001-s0000000004")
    assert len(recover(tmp_path, 5).items) == 2
    assert "step 5 goes without some random generators of rank(s) 1, which joined" in caplog.text


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """Life 1 attaches ``data`` of another class and ``more`` beside it; its first snapshot is lost."""
    live(tmp_path, 7, dies=False, data=Words("old"), same=Words("both"))
    live(
        tmp_path,
        9,
        settings={"snapshot_every": 100},
        data=OtherWords("new", "words"),
        more=Words("one"),
        same=Words(),
    )
    return tmp_path


def test_objects_that_only_a_damaged_snapshot_held_are_not_made_up(renamed: Path) -> None:
    expected = recover(renamed, 8)
    assert expected.stateful["data"] == {"words": ["new", "words"]}
    flip(shard(renamed, 7, 1), 3000)
    lost = r"what \['data', 'more'\] held after step 8 is lost: .* recover step 7 or one before it"
    with pytest.raises(RunMismatch, match=lost):
        recover(renamed, 8)
    with pytest.raises(RunMismatch, match="held after step 9 is lost"):
        recover(renamed)
    with pytest.raises(RunMismatch, match="held after step 9 is lost"):
        live(renamed, 9, data=OtherWords(), more=Words(), same=Words())
    assert not verify(renamed / "run", renamed / "staging").ok
    before = recover(renamed, 7).stateful
    assert before == {"data": {"words": ["old"]}, "same": {"words": ["both"]}}
    data = OtherWords("third")
    again = Loop(renamed)
    assert again.attach(step=7, data=data, same=Words()) == 7
    assert data.words == ["third"]
    again.checkpointer.close()


def test_objects_that_have_changed_since_need_no_snapshot(tmp_path: Path) -> None:
    def schedulers(loop: Loop, kind: Callable[..., Any], *arguments: int) -> Loop:
        scheduler = kind(loop.optimizer, *arguments)
        loop.attach(scheduler=scheduler)
        for number in loop.checkpointer.steps(7 if kind is torch.optim.lr_scheduler.StepLR else 9):
            loop.step(number)
            scheduler.step()
        return loop

    schedulers(Loop(tmp_path), torch.optim.lr_scheduler.StepLR, 3).checkpointer.close()
    other = Loop(tmp_path, settings={"snapshot_every": 100})
    schedulers(other, torch.optim.lr_scheduler.CosineAnnealingLR, 10).die()
    expected = recover(tmp_path)
    flip(shard(tmp_path, 7, 1), 3000)
    found = recover(tmp_path)
    assert (found.step, found.base_step, found.fence.incarnation) == (9, 7, 1)
    assert same(found.stateful, expected.stateful)
    assert same(dict(found.model_state_dict()), dict(expected.model_state_dict()))
    with pytest.raises(RunMismatch, match=r"\['scheduler'\]"):
        live_without_steps(tmp_path)


def live_without_steps(folder: Path) -> None:
    """A scheduler of a third class, which has not changed when its only snapshot is damaged."""
    loop = Loop(folder)
    scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer)
    resumed = loop.attach(scheduler=scheduler)
    for number in loop.checkpointer.steps(resumed + 1):
        loop.step(number)
    loop.die()
    flip(shard(folder, resumed, 2), 3000)
    recover(folder)


def test_beside_a_live_run_the_step_that_was_newest_at_first_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a replay goes on, the trainer reuses the staging memory that it was to read."""
    loop = Loop(tmp_path, settings={"snapshot_every": 1000, "compressor": TopK(0.1)})
    loop.attach()
    steps = loop.checkpointer.steps(100)
    weights: dict[int, dict[str, torch.Tensor]] = {}

    def train(number: int) -> None:
        for step in (next(steps) for _ in range(number)):
            weights[step] = loop.weights()
            loop.step(step)

    train(6)
    carry_out = search.carry_out
    planned: list[int] = []

    def slower_than_the_trainer(catalog: Catalog, plan: RecoveryPlan, *rest: Any) -> Any:
        planned.append(plan.step)
        train(4)
        if len(planned) == 1 or plan.step != planned[0]:
            staged = catalog.staging[0].root / "log-00000000.chunk"
            raise DamagedFile(staged, f"step {plan.step} was overwritten by its trainer")
        return carry_out(catalog, plan, *rest)

    monkeypatch.setattr(search, "carry_out", slower_than_the_trainer)
    found = recover(tmp_path)
    assert (found.step, planned) == (5, [5, 5])
    assert same(dict(found.model_state_dict()), weights[5])
    monkeypatch.undo()
    loop.checkpointer.close()


def test_what_goes_while_nothing_is_done_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step is out of reach by the second look; the newest is still what was asked for."""
    live(tmp_path, 9, inside=damp)
    carry_out = search.carry_out
    looks: list[int] = []

    def meets_retention(catalog: Catalog, plan: RecoveryPlan, *rest: Any) -> Any:
        looks.append(plan.step)
        if len(looks) == 1:
            gone = shard(tmp_path, 7)
            shutil.rmtree(gone.parent)
            raise DamagedFile(gone, "it is not there")
        return carry_out(catalog, plan, *rest)

    monkeypatch.setattr(search, "carry_out", meets_retention)
    with caplog.at_level(logging.WARNING):
        assert recover(tmp_path).step == 6
    assert looks == [9, 6]
    assert "step 9 of" in caplog.text
