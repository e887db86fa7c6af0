from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benches.bench_gpu import ARMS, figures_of
from benches.harness import versions

RATES = {"memory_bytes_per_second": 28e6}


def block(seconds: float, *, drain: float = 0.0, snapshot: bool = False) -> dict[str, Any]:
    return {
        "steps": 4,
        "seconds_per_step": seconds,
        "drain_seconds": drain,
        "holds_snapshot": snapshot,
    }


def found() -> dict[str, Any]:
    blocks = {arm: [block(1.0), block(1.0), block(1.0)] for arm in ARMS}
    blocks["hook"] = [block(2.0), block(2.0), block(2.0)]
    blocks["lowdiff_topk"] = [block(3.0), block(3.5, snapshot=True), block(3.0)]
    blocks["dcp_async"] = [block(1.5, drain=2.0), block(1.5, drain=2.0), block(1.5, drain=2.0)]
    return {
        "bit_identical": True,
        "blocks": blocks,
        "host_waits": {"lowdiff_topk": {"sparse.py:99": 2.0, "session.py:7": 0.25}},
        "audited_host_waits": {},
        "replica": {"replica_drift": None},
        "recover_seconds": {1: [9.0, 4.0], 11: [6.0, 7.0]},
        "elements": 1000,
    }


def test_a_full_snapshot_is_told_apart_from_the_steps_around_it() -> None:
    figures = figures_of(found(), RATES)
    assert figures["lowdiff_topk_seconds"] == 3.0
    assert figures["lowdiff_topk_snapshot_seconds"] == pytest.approx(0.5 * 4)
    assert figures["lowdiff_topk_mean_seconds"] == pytest.approx(9.5 / 3)


def test_only_what_compresses_is_compared_with_the_compressed_hook() -> None:
    figures = figures_of(found(), RATES)
    assert figures["lowdiff_topk_over_hook"] == pytest.approx(0.5)
    assert figures["dcp_async_over_none"] == pytest.approx(0.5)
    assert "dcp_async_over_hook" not in figures
    assert "lowdiff_plus_over_hook" not in figures


def test_what_a_block_leaves_to_be_done_counts_to_its_steps() -> None:
    figures = figures_of(found(), RATES)
    assert figures["dcp_async_drain_seconds"] == 2.0
    assert figures["dcp_async_drained_seconds"] == pytest.approx(1.5 + 2.0 / 4)


def test_waits_of_the_host_are_added_up() -> None:
    figures = figures_of(found(), RATES)
    assert figures["lowdiff_topk_host_waits_per_step"] == 2.25


def test_a_replayed_step_is_what_the_longer_recovery_takes_more() -> None:
    figures = figures_of(found(), RATES)
    assert figures["replay_with_decoding_seconds_per_step"] == pytest.approx((6.0 - 4.0) / 10)
    assert figures["replay_memory_bound_seconds_per_step"] == pytest.approx(0.001)


def test_a_machine_without_git_has_an_unknown_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions()["commit"] == "unknown"
