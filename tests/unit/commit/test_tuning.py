"""Runs measure themselves, say how their lives ended, and may set their own interval and batch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff import testing
from lowdiff.commit.agreement import RankNews
from lowdiff.commit.schedule import Cadence
from lowdiff.commit.storage import Trainer
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.staging.measurements import (
    Measurements,
    Recorder,
    gather_measurements,
    read_all_measurements,
)
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.settings import Settings
from lowdiff.tuner import measured
from lowdiff.tuner.choice import Limits, Setting, stored_bytes
from lowdiff.tuner.costs import Costs, writer_share
from lowdiff.tuner.measured import Past
from lowdiff.tuner.policy import Tuning
from lowdiff.types import Retention
from tests.crash.pool import Pool
from tests.processes import is_alive
from tests.unit.loops import Loop, small_model, wait_until
from tests.unit.tuner.jobs import LAPTOP


def lives(folder: Path, rank: int = 0) -> list[Measurements]:
    run = RunFolder(folder / "run")
    return read_all_measurements(run, read_run_id(run), rank)


def endings(folder: Path) -> list[tuple[str, Any]]:
    return [(life.ended, life.facts["restart"]) for life in lives(folder)]


def test_a_life_leaves_its_measurements(tmp_path: Path) -> None:
    Loop(tmp_path).run(12)
    (life,) = lives(tmp_path)
    assert len(life.samples["iteration_seconds"]) == 11
    assert len(life.samples["step_bytes"]) == 12
    assert len(life.samples["snapshot_seconds"]) >= 2
    assert sum(life.samples["batch_steps"]) == 12
    assert measured.number(life.facts, "snapshot_bytes") > 0
    assert life.facts["elements"] == sum(p.numel() for p in small_model().parameters())
    assert (life.facts["snapshot_every"], life.facts["batch_size"]) == (5.0, 16.0)
    assert life.ended == "closed"


def test_a_life_that_was_closed_is_no_failure(tmp_path: Path) -> None:
    Loop(tmp_path).run(3)
    Loop(tmp_path).run(6)
    assert endings(tmp_path) == [("closed", ""), ("closed", "")]


def test_a_crash_that_memory_survives_is_one_of_processes(tmp_path: Path) -> None:
    killed = Loop(tmp_path)
    killed.attach()
    for number in killed.checkpointer.steps(7):
        killed.step(number)
    killed.die()
    Loop(tmp_path).run(9)
    assert endings(tmp_path) == [("died", ""), ("closed", "process")]
    restart = lives(tmp_path)[1].facts
    # From the snapshot of step 5 or, if that was not durable yet, of step 0.
    assert restart["replayed_steps"] in (1.0, 2.0, 6.0, 7.0)
    assert measured.number(restart, "recovery_seconds") > 0
    # From the last commit until `attach` returned, less what recovery took of it.
    facts = [measured.number(lives(tmp_path)[0].facts, "seen_unix_seconds")]
    facts += [measured.number(restart, n) for n in ("began_unix_seconds", "gap_seconds")]
    assert facts[2] + measured.number(restart, "recovery_seconds") > facts[1] - facts[0] > 0


def test_a_crash_that_took_the_memory_is_one_of_a_node(tmp_path: Path) -> None:
    killed = Loop(tmp_path)
    killed.attach()
    for number in killed.checkpointer.steps(7):
        killed.step(number)
    writer = killed.checkpointer.stats()["writer_pid"]
    testing.kill(killed.checkpointer, processes=False)
    wait_until(lambda: not is_alive(writer))  # all is durable, and its last document is written
    shutil.rmtree(tmp_path / "staging")
    Loop(tmp_path).run(9)
    assert endings(tmp_path) == [("died", ""), ("closed", "node")]


def test_a_crash_of_which_nothing_is_left_is_unknown(tmp_path: Path) -> None:
    killed = Loop(tmp_path)
    killed.attach()
    killed.die()
    shutil.rmtree(tmp_path / "staging")
    Loop(tmp_path).run(3)
    assert endings(tmp_path) == [("closed", "unknown")]


def test_an_exception_is_a_failure(tmp_path: Path) -> None:
    failing = Loop(tmp_path)

    def train() -> None:
        with failing.checkpointer:
            failing.attach()
            for number in failing.checkpointer.steps(9):
                failing.step(number)
                if number == 4:
                    raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        train()
    Loop(tmp_path).run(7)
    assert endings(tmp_path) == [("failed", ""), ("closed", "process")]


def test_damaged_measurements_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(3)
    path = RunFolder(tmp_path / "run").measurements(0, 0)
    path.write_text(path.read_text().replace("closed", "glosed"))
    assert Loop(tmp_path).run(6) == 3
    assert "measurements are passed over" in caplog.text
    assert len(lives(tmp_path)) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("every", [2, 6])
def test_each_snapshot_is_one_sample(tmp_path: Path, every: int) -> None:
    loop = Loop(tmp_path, settings={"snapshot_every": every})
    loop.attach()
    for number in loop.checkpointer.steps(18):
        loop.step(number)
    stats = loop.checkpointer.stats()
    loop.checkpointer.close()
    (life,) = lives(tmp_path)
    assert len(life.samples["snapshot_seconds"]) == 1 + 18 // every
    assert sum(life.samples["snapshot_seconds"]) == pytest.approx(stats["snapshot_seconds"])


@pytest.mark.slow
def test_auto_never_begins_with_more_steps_at_risk_than_may_be_lost(tmp_path: Path) -> None:
    chosen = {"snapshot_every": "auto", "batch_size": "auto"}
    Loop(tmp_path, settings=chosen).run(3)
    assert lives(tmp_path)[0].facts["batch_size"] == 16.0
    for number, (loss_steps, batch) in enumerate([(4, 2), (7, 2), (2, 1), (64, 1)], 1):
        tuning = Tuning(limits=Limits(loss_steps=loss_steps), every_steps=1000)
        Loop(tmp_path, settings={**chosen, "tuning": tuning}).run(3 + 8 * number)
        life = lives(tmp_path)[number]
        assert life.facts["batch_size"] == batch
        assert max(life.samples["batch_steps"]) <= batch


@pytest.mark.slow
def test_auto_obeys_a_limit_and_the_next_life_begins_where_it_was(tmp_path: Path) -> None:
    settings = {"snapshot_every": "auto", "batch_size": "auto"}
    Loop(tmp_path / "before", settings=settings).run(8)
    (life,) = lives(tmp_path / "before")
    room = 4.5 * max(life.samples["step_bytes"])  # for a batch of two
    memory = measured.number(life.facts, "snapshot_bytes") + room
    tuning = Tuning(mtbf_hours=0.5, limits=Limits(staging_bytes=memory), every_steps=3)
    loop = Loop(tmp_path, settings={**settings, "tuning": tuning})
    loop.run(60)
    (life,) = lives(tmp_path)
    assert life.facts["batch_size"] in (1.0, 2.0)
    moves = [(d["batch_size_before"], d["batch_size"]) for d in life.decisions]
    assert [b for b in (16, 8, 4, 2) if b not in {size for pair in moves for size in pair}] == []
    assert all(decision["reasons"] for decision in life.decisions)
    # The writer was told: after the last move no batch is longer than two.
    assert max(life.samples["batch_steps"][-3:]) <= 2
    Loop(tmp_path, settings={**settings, "tuning": tuning}).run(63)
    assert lives(tmp_path)[1].facts["batch_size"] in (1.0, 2.0)


def test_a_step_of_a_tuned_run_is_recovered_bit_for_bit(tmp_path: Path) -> None:
    settings = {"snapshot_every": "auto", "batch_size": "auto", "tuning": Tuning(every_steps=2)}
    loop = Loop(tmp_path, settings=settings)
    loop.run(20)
    expected = loop.weights()
    state = lowdiff.recover(tmp_path / "run", 20, staging=tmp_path / "staging")
    found = state.model_state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["snapshot_every", "batch_size"])
def test_another_word_than_auto_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f'{name} is a number of steps or "auto"'):
        Loop(tmp_path, settings={name: "often"})


def train_tuned(rank: int, world_size: int, folder: str, until: int) -> tuple[int, list[Any]]:
    """A life of one rank; the decisions it recorded."""
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        compressor=TopK(0.1),
        staging=f"{folder}/staging-{rank}",
        snapshot_every="auto",
        batch_size="auto",
        # One failure in three seconds, so that short steps are worth tuning.
        tuning=Tuning(mtbf_hours=0.1, limits=Limits(loss_steps=16), every_steps=3 + 2 * rank),
    )
    resumed = checkpointer.attach(model, optimizer)
    for number in checkpointer.steps(until):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number + 100 * rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    (stage,) = StagingFolder.all(Path(folder, f"staging-{rank}"))
    decisions = list(gather_measurements(stage, "", world_size, ended="").decisions)
    checkpointer.close()
    return resumed, decisions


@pytest.mark.slow
def test_all_ranks_decide_the_same_at_the_same_step(tmp_path: Path, pool: Pool) -> None:
    (_, mine), (_, other) = pool.run(train_tuned, 2, str(tmp_path), 40)
    kept = ("step", "snapshot_every", "batch_size")
    assert len(mine) > 0
    assert [[d[key] for key in kept] for d in mine] == [[d[key] for key in kept] for d in other]
    assert mine[-1]["batch_size"] <= 8
    # Snapshots exist, so all ranks took them at the same steps; and the run goes on from them.
    ((resumed, _), _) = pool.run(train_tuned, 2, str(tmp_path), 44)
    assert resumed == 40


class ToldWriter:
    """Stands for a writer process: the batch size it was told last."""

    def __init__(self) -> None:
        self.batch_size = 16

    def set_batch_size(self, batch_size: int) -> None:
        self.batch_size = batch_size


class SyntheticRank:
    """A rank whose steps and writes take the times of a cost model, on a clock of its own."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        costs: Costs,
        past: Past | None = None,
        **chosen: Any,
    ) -> None:
        self.costs = costs
        self.staging = StagingFolder(folder / f"rank-{rank}", 0, rank)
        self.staging.root.mkdir(parents=True)
        self.trained = Recorder(self.staging.measured_by_trainer)
        self.written = Recorder(self.staging.measured_by_writer)
        self.writer = ToldWriter()
        settings = Settings(
            run=folder / "run",
            compressor=TopK(0.1),
            snapshot_every=91,
            batch_size=16,
            tunes_interval=True,
            tunes_batch=True,
            **{"tuning": Tuning(mtbf_hours=1.0), **chosen},
        )
        self.cadence = Cadence(
            Trainer(self.staging, settings, rank, world_size),
            cast(WriterProcess, self.writer),
            self.trained,
        )
        self.cadence.begin(0, past or Past((), {}, None))
        self.trained.set_facts(began_unix_seconds=0.0, elements=10e6)
        self.written.set_facts(snapshot_bytes=costs.snapshot_bytes)
        self.staged = 0
        self.snapshots: list[int] = []

    def step(self, step: int, heard: list[RankNews]) -> None:
        costs = self.costs
        self.cadence.follow(step, heard)
        self.trained.observe("iteration_seconds", costs.step_seconds)
        self.trained.observe("differential_seconds", costs.differential_seconds)
        self.trained.observe("step_bytes", costs.staged_bytes)
        self.trained.set_facts(seen_unix_seconds=step * costs.step_seconds)
        self.staged += 1
        if self.staged >= self.writer.batch_size:
            size = self.staged * costs.differential_bytes
            seconds = costs.write_latency_seconds + size / costs.write_bytes_per_second
            self.written.observe("batch_steps", self.staged)
            self.written.observe("batch_bytes", size)
            self.written.observe("batch_seconds", seconds)
            self.staged = 0
            self.written.publish()
        if self.cadence.is_due(step + 1):
            self.cadence.snapshot_taken(step + 1)
            self.snapshots.append(step + 1)
            self.trained.observe("snapshot_seconds", costs.snapshot_seconds)
            seconds = costs.snapshot_bytes / costs.write_bytes_per_second
            self.written.observe("snapshot_write_seconds", seconds)
            self.written.publish()

    def keeps_up(self, at_most: float = 0.85) -> bool:
        """Whether the disk, as it is now, sustains the setting in force."""
        busy = writer_share(self.costs, self.cadence.snapshot_every, self.writer.batch_size)
        return busy <= at_most


@pytest.mark.slow
def test_a_disk_that_slows_down_by_ten_is_followed_by_all_ranks_alike(tmp_path: Path) -> None:
    fast = replace(
        LAPTOP, write_bytes_per_second=60e6, write_latency_seconds=0.3, snapshot_bytes=60e6
    )
    slow = replace(fast, write_bytes_per_second=6e6, write_latency_seconds=3.0)
    ranks = [SyntheticRank(tmp_path, rank, 3, fast) for rank in range(3)]

    def go(first: int, last: int) -> None:
        for step in range(first, last):
            # What a rank tells of a step was formed before the next one.
            wishes = [rank.cadence.wish() for rank in ranks]
            heard = [RankNews(0, step, interval=i, batch=b) for i, b in wishes]
            for rank in ranks:
                rank.step(step, heard)
                assert rank.cadence.snapshot_every == ranks[0].cadence.snapshot_every
                assert rank.writer.batch_size == ranks[0].writer.batch_size

    go(0, 1200)
    before = Setting(ranks[0].cadence.snapshot_every, ranks[0].writer.batch_size)
    assert ranks[2].keeps_up()
    ranks[2].costs = slow  # one rank's disk only
    assert not ranks[2].keeps_up()
    go(1200, 4000)
    after = Setting(ranks[0].cadence.snapshot_every, ranks[0].writer.batch_size)
    assert after.batch_size > before.batch_size
    assert ranks[2].keeps_up()
    decisions = [gather_measurements(rank.staging, "", 1, ended="").decisions for rank in ranks]
    settings = [
        [(d["step"], d["snapshot_every"], d["batch_size"]) for d in all_] for all_ in decisions
    ]
    assert settings[0] == settings[1] == settings[2]
    assert any("rank 2" in reason for d in decisions[0] for reason in d["reasons"])
    assert all(rank.writer.batch_size == after.batch_size for rank in ranks)
    assert ranks[0].snapshots == ranks[1].snapshots == ranks[2].snapshots
    # It comes to rest: nothing changes any more.
    go(4000, 5000)
    assert (ranks[0].cadence.snapshot_every, ranks[0].writer.batch_size) == (
        after.snapshot_every,
        after.batch_size,
    )


def test_a_decision_that_cannot_be_kept_is_followed_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = SyntheticRank(tmp_path, 0, 1, replace(LAPTOP, write_latency_seconds=3.0))
    rank.staging.decisions.mkdir()
    for step in range(1200):
        rank.step(step, [])
    assert (rank.cadence.snapshot_every, rank.writer.batch_size) != (91, 16)
    assert "a decision of the tuner is not kept: [Errno 21] Is a directory" in caplog.text


@pytest.mark.parametrize("kept", [2, 4])
def test_as_many_snapshots_count_as_the_retention_keeps(tmp_path: Path, kept: int) -> None:
    total = stored_bytes(LAPTOP, Limits(kept_snapshots=4), 45)
    assert stored_bytes(LAPTOP, Limits(kept_snapshots=2), 91) < total
    tuning = Tuning(mtbf_hours=1.0, limits=Limits(total_bytes=total))
    rank = SyntheticRank(tmp_path, 0, 1, LAPTOP, retention=Retention(kept), tuning=tuning)
    for step in range(300):
        rank.step(step, [])
    chosen = rank.cadence.snapshot_every
    assert (chosen < 91) == (kept == 4)
    assert stored_bytes(LAPTOP, Limits(kept_snapshots=kept), chosen) <= total


@pytest.mark.slow
def test_a_new_life_keeps_to_what_the_one_before_has_learned(tmp_path: Path) -> None:
    costs = replace(
        LAPTOP, write_bytes_per_second=30e6, write_latency_seconds=1.0, snapshot_seconds=2.0
    )
    before = SyntheticRank(tmp_path / "before", 0, 1, costs)
    for step in range(2000):
        before.step(step, [])
    cadence = before.cadence
    learned = Setting(cadence.snapshot_every, before.writer.batch_size)
    samples, facts = (
        {**getattr(before.trained, kind)(), **getattr(before.written, kind)()}
        for kind in ("samples", "facts")
    )
    past = Past((measured.MeasuredIncarnation(0, samples, facts),), {}, learned)
    after = SyntheticRank(tmp_path / "after", 0, 1, costs, past)
    for step in range(learned.snapshot_every - 1):  # up to its first snapshot
        after.step(step, [])
        now = Setting(after.cadence.snapshot_every, after.writer.batch_size)
        assert now == learned
