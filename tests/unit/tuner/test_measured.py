from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Limits, recommend
from lowdiff.tuner.costs import writer_share
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.measured import (
    ASSUMED_RESTART_SECONDS,
    MeasuredIncarnation,
    failures_of,
    measure,
)


def life(number: int = 0, **facts: Any) -> MeasuredIncarnation:
    samples = {
        "iteration_seconds": [0.5, 0.5, 0.52, 9.0, 0.48],
        "differential_seconds": [0.004] * 5,
        "snapshot_seconds": [0.1, 0.12, 0.11],
        "step_bytes": [2e6] * 5,
        "encode_seconds": [0.01] * 4,
        "batch_seconds": [0.06] * 4,
        "batch_bytes": [4e6] * 4,
        "batch_steps": [4.0] * 4,
        "snapshot_write_seconds": [1.0, 1.0],
    }
    return MeasuredIncarnation(number, samples, {"snapshot_bytes": 100e6, "elements": 8e6, **facts})


def test_bandwidth_comes_from_snapshots_and_latency_from_batches() -> None:
    costs = measure([life()], world_size=2).costs
    assert costs.write_bytes_per_second == 100e6
    assert costs.write_latency_seconds == pytest.approx(0.06 - 4e6 / 100e6)
    assert costs.differential_bytes == 1e6
    assert costs.step_seconds == 0.5
    assert costs.world_size == 2


def test_only_the_newest_writes_count() -> None:
    now = life()
    slowed = {**now.samples, "snapshot_write_seconds": [1.0] * 30 + [10.0] * 5}
    slowed["batch_seconds"] = [0.06] * 30 + [0.6] * 15
    slowed["batch_bytes"], slowed["batch_steps"] = [4e6] * 45, [4.0] * 45
    costs = measure([replace(now, samples=slowed)], world_size=1).costs
    assert costs.write_bytes_per_second == 10e6
    assert costs.write_latency_seconds == pytest.approx(0.2)


SMALL = {
    "iteration_seconds": [0.002] * 30,
    "batch_seconds": [0.0012, 0.003, 0.0025, 0.007, 0.004, 0.0028],
    "batch_bytes": [60e3] * 6,
    "batch_steps": [16.0] * 6,
    "snapshot_write_seconds": [0.026],
    "encode_seconds": [1e-5] * 4,
}


def test_fsyncs_of_a_small_model_are_latency_and_no_bandwidth() -> None:
    facts = {"snapshot_bytes": 47e3, "elements": 4e3}
    small = MeasuredIncarnation(0, {**life().samples, **SMALL}, facts)
    measured = measure([small], world_size=1)
    costs = measured.costs
    assert measured.estimates["write_bytes_per_second"].source == "measured"
    # No write was faster than that; what a batch takes is as it was seen, however it is split.
    assert 60e3 / 0.003 < costs.write_bytes_per_second <= 60e3 / 0.0012
    batch = costs.write_latency_seconds + 60e3 / costs.write_bytes_per_second
    assert batch == pytest.approx(0.0029, rel=0.1)
    assert costs.write_latency_seconds > 0.001
    assert writer_share(costs, 100, 16) < 0.25  # of a step; nothing waited
    assert not recommend(costs, FailureRates.known(4 * 3600.0), Limits()).broken


def test_a_cache_that_takes_small_batches_fast_is_no_bandwidth_either() -> None:
    now = life()
    cached = {**now.samples, "batch_seconds": [0.004] * 4}  # 1 GB/s, of a 25th of a snapshot
    costs = measure([replace(now, samples=cached)], world_size=1).costs
    assert (costs.write_bytes_per_second, costs.write_latency_seconds) == (100e6, 0.0)


def test_large_batches_on_a_slow_disk_agree_with_its_snapshots() -> None:
    now = life()
    large = {**now.samples, "batch_bytes": [50e6] * 4, "batch_seconds": [1.5] * 4}
    costs = measure([replace(now, samples=large)], world_size=1).costs
    assert costs.write_bytes_per_second == 100e6
    assert costs.write_latency_seconds == pytest.approx(1.0)


def test_a_store_is_known_by_its_uploads() -> None:
    assert "store_bytes_per_second" not in measure([life()], world_size=1).estimates
    now = life()
    uploads = {
        "snapshots_upload_seconds": [30.0] + [2.0] * 5,
        "snapshots_upload_bytes": [100e6] * 6,
        "segments_upload_seconds": [0.3, 0.5],
        "segments_upload_bytes": [5e6, 15e6],
    }
    costs = measure([replace(now, samples={**now.samples, **uploads})], world_size=1).costs
    assert costs.store_bytes_per_second == 50e6
    assert costs.store_latency_seconds == pytest.approx(0.2)


def test_a_store_that_has_no_snapshot_yet_is_known_by_its_batches() -> None:
    now = life()
    uploads = {"segments_upload_seconds": [0.5, 0.5], "segments_upload_bytes": [5e6, 5e6]}
    costs = measure([replace(now, samples={**now.samples, **uploads})], world_size=1).costs
    assert (costs.store_bytes_per_second, costs.store_latency_seconds) == (10e6, 0.0)


def resumed(**facts: Any) -> MeasuredIncarnation:
    """Two commits after a resume: no snapshot, no durable write yet."""
    samples = {"iteration_seconds": [0.7], "differential_seconds": [0.005] * 2, "step_bytes": [3e6]}
    return MeasuredIncarnation(1, samples, {"elements": 8e6, **facts})


MACHINE: dict[str, Any] = {"processor": "a", "cores": 2.0, "world_size": 2.0}


def test_what_the_newest_life_has_not_seen_yet_is_known_by_the_newest_that_has() -> None:
    older = replace(life(**MACHINE), samples={**life().samples, "snapshot_seconds": [9.0]})
    measured = measure([older, life(**MACHINE), resumed(**MACHINE)], world_size=2)
    costs = measured.costs
    assert (costs.step_seconds, costs.staged_bytes) == (0.7, 3e6)
    assert costs.snapshot_seconds == 0.11
    assert costs.snapshot_bytes == 100e6
    assert costs.write_bytes_per_second == 100e6
    assert costs.write_latency_seconds == pytest.approx(0.06 - 4e6 / 100e6)
    assert costs.differential_bytes == 1e6
    assert costs.encode_seconds == 0.01
    assumed = {name for name, e in measured.estimates.items() if e.source == "assumed"}
    assert assumed == {"replay_seconds", "load_seconds", "restart_seconds"}


@pytest.mark.parametrize("other", [{"processor": "b"}, {"cores": 4.0}, {"world_size": 4.0}])
def test_a_life_on_other_machines_or_of_other_shards_tells_nothing(other: dict[str, Any]) -> None:
    measured = measure([life(**{**MACHINE, **other}), resumed(**MACHINE)], world_size=2)
    assumed = {name for name, e in measured.estimates.items() if e.source == "assumed"}
    assert {"snapshot_seconds", "snapshot_bytes", "write_bytes_per_second"} < assumed
    assert measured.costs.snapshot_bytes == 4 * 8e6


def test_bandwidth_is_of_the_snapshots_of_one_life() -> None:
    now = resumed(**MACHINE, snapshot_bytes=500e6)  # which nobody timed
    costs = measure([life(**MACHINE), now], world_size=2).costs
    assert costs.snapshot_bytes == 500e6
    assert costs.write_bytes_per_second == 100e6


def test_a_store_that_was_given_up_is_not_missed() -> None:
    uploads = {"segments_upload_seconds": [0.5, 0.5], "segments_upload_bytes": [5e6, 5e6]}
    before = replace(life(**MACHINE), samples={**life().samples, **uploads})
    assert measure([before, life(**MACHINE)], world_size=2).costs.store_bytes_per_second == 0


def test_what_was_never_seen_is_assumed_and_says_so() -> None:
    measured = measure([life()], world_size=1)
    sources = {name: e.source for name, e in measured.estimates.items()}
    assert sources["replay_seconds"] == sources["restart_seconds"] == "assumed"
    assert sources["step_seconds"] == "measured"
    assert measured.costs.restart_seconds == ASSUMED_RESTART_SECONDS


def test_loading_and_replay_are_told_apart_by_restarts_that_replayed_differently_many() -> None:
    lives = [life()]
    for number, steps in enumerate((10.0, 60.0, 110.0), 1):
        seconds = 2.0 + 0.05 * steps
        restart = {"restart": "process", "gap_seconds": 12.0}
        lives.append(life(number, recovery_seconds=seconds, replayed_steps=steps, **restart))
    costs = measure(lives, world_size=1).costs
    assert costs.replay_seconds == pytest.approx(0.05)
    assert costs.load_seconds == pytest.approx(2.0)
    assert costs.restart_seconds == 12.0


def test_loading_that_was_never_seen_is_of_all_shards_through_the_disk_of_one_machine() -> None:
    one, three = (measure([life()], world_size=6, num_hosts=n).costs for n in (1, 3))
    # 100 MB of each of two ranks take a machine's disk a second, and it reads those of six.
    assert (one.load_seconds, three.load_seconds) == (1.0, 3.0)


def test_how_long_a_restart_takes_is_told_by_crashes_of_which_the_time_is_known() -> None:
    lives = [life(), life(1, restart="node", gap_seconds=30.0)]
    assert measure(lives, world_size=1).costs.restart_seconds == 30.0
    lives.append(life(2, restart="process", gap_seconds=12.0))
    assert measure(lives, world_size=1).costs.restart_seconds == 12.0


def test_replay_that_was_timed_itself_is_believed() -> None:
    facts = {"recovery_seconds": 5.0, "replayed_steps": 40.0, "replay_seconds": 4.0}
    costs = measure([life(), life(1, **facts)], world_size=1).costs
    assert (costs.replay_seconds, costs.load_seconds) == pytest.approx((0.1, 1.0))


def test_a_run_without_steps_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="lowdiff plan"):
        measure([MeasuredIncarnation(0, {}, {})], world_size=1)
    with pytest.raises(ConfigError, match="lowdiff plan"):
        measure([], world_size=1)


def test_failures_and_exposure_are_added_over_lives() -> None:
    kinds = ["", "process", "node", "", "unknown"]
    lives = [
        life(i, began_unix_seconds=1000.0 * i, seen_unix_seconds=1000.0 * i + 600, restart=kind)
        for i, kind in enumerate(kinds)
    ]
    found = failures_of(lives)
    assert (found.process, found.node, found.unknown) == (1, 1, 1)
    assert found.exposure_seconds == 3000.0


def test_a_clock_that_went_back_takes_no_exposure_away() -> None:
    back = life(began_unix_seconds=5000.0, seen_unix_seconds=10.0)
    assert failures_of([back]).exposure_seconds == 0.0
