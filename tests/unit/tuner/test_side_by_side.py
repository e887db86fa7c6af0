"""The table of strategies: each figure by hand, and against the published model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowdiff.cli.tune import plan, tune
from lowdiff.errors import ConfigError
from lowdiff.tuner import side_by_side as table
from lowdiff.tuner.choice import Setting
from lowdiff.tuner.costs import Costs, waste, without_residual
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.just_in_time import wasted_share
from lowdiff.tuner.plan import Job, planned
from lowdiff.tuner.side_by_side import Assumptions, Row, side_by_side
from tests.unit.tuner.jobs import JOBS, LAPTOP

RESULTS = Path(__file__).parents[3] / "docs/results"
DAY = 86400.0
#: Twelve GB of state on two nodes; a step takes 10 s.
JOB = planned(
    Job(
        params=1e9,
        optimizer="adamw",
        density=0.01,
        gpus=16,
        step_seconds=10.0,
        disk_bytes_per_second=1e9,
        restart_seconds=300.0,
    )
).costs
SETTING = Setting(50, 1)


def rows(
    rates: FailureRates, costs: Costs = JOB, num_nodes: int = 2, **assumed: Any
) -> dict[str, Row]:
    found = side_by_side(costs, rates, SETTING, Assumptions(**assumed), num_nodes=num_nodes)
    return {row.name: row for row in found.rows}


def half_a_step(row: Row) -> float:
    """Half of ten seconds, and of what checkpointing adds to them."""
    return 5.0 * (1.0 + row.overhead_share)


PROCESSES = FailureRates.known(DAY / 2, node_share=0.0)
NODES = FailureRates.known(DAY / 2, node_share=1.0)


def test_the_measured_shares_are_those_of_the_results() -> None:
    def summary(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["summary"]
        return found

    log, replica = summary("overhead"), summary("lowdiff_plus")
    assert round(log["overhead_median"], 3) == table.LOG_OVERHEAD_SHARE
    assert round(replica["overhead_median"], 3) == table.REPLICA_OVERHEAD_SHARE
    assert round(replica["gradients_median"], 3) == table.GRADIENTS_OVERHEAD_SHARE
    assert round(replica["restart_over_copy"], 2) == table.READ_OVER_COPY
    survivors, copies = summary("survivors"), summary("peer_memory")["overheads"]
    assert round(survivors["training_thread_share"], 3) == table.SURVIVORS_OVERHEAD_SHARE
    assert round(copies["log"]["median"], 3) == table.COPIES_OVERHEAD_SHARE
    assert round(copies["replica"]["median"], 3) == table.REPLICA_COPIES_OVERHEAD_SHARE


@pytest.mark.parametrize("command", [tune, plan])
def test_the_commands_take_the_measured_shares(command: Callable[..., None]) -> None:
    assumed = table.Assumptions()
    for name, option in inspect.signature(command).parameters.items():
        if name.endswith("_overhead"):
            assert option.default == getattr(assumed, f"{name}_share"), name


def test_a_crash_of_processes_takes_half_a_step() -> None:
    found = rows(PROCESSES, all_at_once_share=0.0)
    for name in ("log", "gradients", "replica", "survivors"):
        assert found[name].lost_seconds == pytest.approx(half_a_step(found[name]), rel=0.05), name


def test_where_nobody_is_left_survivors_lose_half_an_interval() -> None:
    writing = 12e9 / 2 / 1e9
    for found in (rows(PROCESSES, all_at_once_share=1.0), rows(NODES, num_nodes=1)):
        row = found["survivors"]
        assert row.lost_seconds == pytest.approx(50 * 10 + writing, rel=0.01)
        assert row.restart_seconds == 300 + 12
    fewer = rows(PROCESSES, all_at_once_share=0.25)["survivors"]
    assert fewer.lost_seconds == pytest.approx(0.75 * 5 + 0.25 * (500 + writing), rel=0.01)
    alone = rows(NODES, num_nodes=1)["replica"]
    assert alone.lost_seconds == pytest.approx(100 * half_a_step(alone) + writing, rel=0.06)


def test_where_a_node_is_lost_survivors_have_the_state() -> None:
    row = rows(NODES)["survivors"]
    assert row.lost_seconds == pytest.approx(half_a_step(row), rel=0.06)
    # A survivor saves its own share and the eight of the other node: 12 GB of 16 ranks at 10 GB/s.
    assert row.restart_seconds == pytest.approx(300 + 9 / 16 * 1.2 + table.READ_OVER_COPY * 1.2)


def test_without_copies_a_lost_node_takes_replicas_back_to_the_disk() -> None:
    row, alone = (rows(NODES, num_nodes=nodes)["replica"] for nodes in (2, 1))
    assert row == alone
    assert row.restart_seconds == 300 + 12


def test_a_single_rank_has_no_survivor() -> None:
    alone = replace(JOB, world_size=1)
    found = side_by_side(alone, PROCESSES, SETTING, Assumptions(), num_nodes=1)
    assert found.rows[-1].lost_seconds > 50 * 10


def test_one_torch_save_is_the_state_on_the_disk_of_one_node() -> None:
    found = rows(PROCESSES)["torch.save"]
    save = 12e9 / 10e9 + 0.01 + 12e9 / 1e9
    interval = (2 * save * DAY / 2) ** 0.5
    assert found.overhead_share == pytest.approx(save / interval)
    assert found.lost_seconds == pytest.approx(interval / 2)
    assert found.bytes_per_day == pytest.approx(12e9 * DAY / (interval + save))
    assert found.detail == f"every {round(interval / 10)} steps"
    slower = rows(PROCESSES, save_seconds=4 * save)["torch.save"]
    assert slower.lost_seconds == pytest.approx(2 * found.lost_seconds)


def test_the_published_model_agrees_where_both_weigh_the_same() -> None:
    assumed = Assumptions(survivors_overhead_share=0.0, all_at_once_share=0.0, save_seconds=5.0)
    found = side_by_side(JOB, PROCESSES, SETTING, assumed, num_nodes=2)
    periodic, *_, survivors = found.rows
    assert periodic.wasted_share == pytest.approx(found.published.periodic)
    # Ours also takes snapshots, and saves into memory instead of storage.
    assert survivors.wasted_share == pytest.approx(found.published.user_level, rel=0.05)
    assert found.published.transparent < found.published.user_level < found.published.periodic


@pytest.mark.parametrize("job", JOBS)
def test_log_as_measured_wastes_what_the_model_says(job: str) -> None:
    costs, rates = JOBS[job]
    assumed = Assumptions(log_overhead_share=None)
    found = side_by_side(costs, rates, Setting(100, 4), assumed, num_nodes=costs.world_size)
    model = wasted_share(waste(costs, rates, 100, 4).total)
    # The table counts failures per second of useful training, the model per second of running.
    assert found.rows[1].wasted_share == pytest.approx(model, rel=0.05, abs=1e-4)


def test_bytes_a_day_are_states_and_steps() -> None:
    found = rows(PROCESSES, all_at_once_share=0.0, replica_overhead_share=0.0)
    snapshots = 12e9 * DAY / (100 * 10)
    assert found["replica"].bytes_per_day == pytest.approx(snapshots)
    # After each of two failures the saved state goes to disk as well.
    assert found["survivors"].bytes_per_day == pytest.approx(snapshots + 2 * 12e9, rel=0.01)
    assert found["log"].bytes_per_day > DAY / 10.3 * 16 * JOB.differential_bytes


def test_snapshots_are_no_more_frequent_than_a_disk_takes_them() -> None:
    slow = replace(LAPTOP, write_bytes_per_second=1e6)
    found = side_by_side(slow, PROCESSES, SETTING, Assumptions(), num_nodes=1)
    writing = without_residual(slow).snapshot_bytes / 1e6
    assert found.rows[2].detail == f"f = {-(-(writing + 0.004) // 0.3):,.0f}"


@pytest.mark.parametrize("all_at_once", [0.0, 1.0])
def test_with_copies_a_lost_node_takes_half_a_step(all_at_once: float) -> None:
    found = rows(NODES, copies=2, all_at_once_share=all_at_once)
    for name in ("log", "replica"):
        assert found[name].lost_seconds == pytest.approx(half_a_step(found[name]), rel=0.06), name
    # From memory: nothing is loaded from a disk, and no survivor has to save anything.
    read = table.READ_OVER_COPY * 1.2
    assert found["replica"].restart_seconds == pytest.approx(300 + read)
    replay = JOB.replay_seconds * 49 / 2
    assert found["log"].restart_seconds == pytest.approx(300 + read + replay)
    assert all(found[name].detail.endswith(", 2 copies") for name in ("log", "replica"))
    assert found["survivors"] == rows(NODES, all_at_once_share=all_at_once)["survivors"]


def test_copies_are_of_no_use_where_processes_crash() -> None:
    without, found = rows(PROCESSES), rows(PROCESSES, copies=2, copies_overhead_share=0.0)
    for name, row in found.items():
        assert replace(row, detail=without[name].detail) == without[name], name
    both = FailureRates.known(DAY / 2, node_share=0.5)
    alone, copied = rows(both), rows(both, copies=2, copies_overhead_share=0.0)
    assert copied["log"].wasted_share < alone["log"].wasted_share
    assert copied["survivors"].wasted_share == alone["survivors"].wasted_share


@pytest.mark.parametrize("name", ["log", "replica"])
def test_what_copies_add_counts_with_copies_alone(name: str) -> None:
    free = rows(NODES, copies=2, copies_overhead_share=0.0)[name]
    found = rows(NODES, copies=2, copies_overhead_share=0.03)[name]
    assert found.overhead_share == pytest.approx(free.overhead_share + 0.03)
    assert rows(NODES, copies_overhead_share=0.03)[name] == rows(NODES)[name]
    share = (
        table.REPLICA_COPIES_OVERHEAD_SHARE if name == "replica" else table.COPIES_OVERHEAD_SHARE
    )
    measured = rows(NODES, copies=2)[name]
    assert measured.overhead_share == pytest.approx(free.overhead_share + share)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("copies", 0),
        ("copies_overhead_share", -0.1),
        ("log_overhead_share", -0.1),
        ("replica_overhead_share", float("nan")),
        ("survivors_overhead_share", float("inf")),
        ("all_at_once_share", 1.5),
        ("snapshot_every", 0),
        ("save_seconds", 0.0),
    ],
)
def test_nonsense_is_refused(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name.partition("_")[0]):
        Assumptions(**wrong)
