from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benches.harness import abba, excess, overhead
from tests.faults.nodes import why_no_nodes

ROOT = Path(__file__).parents[2]
KEYS = {"name", "settings", "machine", "versions", "seed", "samples", "summary"}
FIGURES = {
    "compress": {"topk_speedup_vs_torch", "powersgd_4/stored_bytes_per_element"},
    "convergence": {"digits/dense_loss", "text/topk_1_deviations", "worst_deviation_at_tuned_rate"},
    "device_ops": {
        "hook_launches",
        "hook_host_waits",
        "powersgd_predicted_step_ms",
        "buffers_host_waits",
    },
    "lowdiff_plus": {
        "overhead_upper95",
        "restart_over_copy",
        "gradients_upper95",
        "gradients_two_ranks_upper95",
    },
    "overhead": {"overhead_upper95", "overhead_median", "snapshot_over_memcpy"},
    "peers": {
        "tinyx1/lowdiff_topk/ratio",
        "tinyx1/torch_save/stall_p99_seconds",
        "tinyx1/dcp_thread/steps_lost_mean",
        "tinyx1/dcp_thread/after_3/first_step_seconds",
    },
    "peer_memory": {
        "bytes_sent_per_step_over_gemini",
        "overhead_over_one_copy_upper95",
        "overhead_replica",
        "retrieval_over_copy",
    },
    "replay": {
        "speedup_vs_naive",
        "speedup_vs_kept_memory",
        "speedup_two_workers",
        "speedup_vs_published",
    },
    "restart": {
        "ratio_to_parts",
        "ratio_to_dcp_load",
        "bytes_read_rank_of_2_over_1",
        "first_step_over_torch_save",
    },
    "sharded": {"overhead_upper95", "overhead_ddp_upper95", "training_thread_ms_per_step"},
    "lost_tail": {"gate_over_redo", "gate_worse_than_redo"},
    "publish": {"bytes_over_full", "training_thread_share"},
    "small_steps": {"commit_ms"},
    "survivors": {
        "training_thread_share",
        "restart_seconds_log",
        "restart_seconds_replica",
        "restart_seconds_survivors",
        "restart_seconds_in_process",
        "restart_seconds_torch_save",
        "redone_seconds_torch_save",
    },
    "effective_time": {
        "effective_share_10min",
        "effective_share_30min",
        "effective_share_10min_start_scaled",
        "log/600/effective_share",
        "log_copies/600/simulated_share",
        "replica/600/new_step_seconds",
        "survivors/1800/effective_share",
        "torch_save/600/steps_made_again",
        "dcp/600/simulated_share_of_many",
    },
    "codec": {
        "bytes_per_entry_float32",
        "bytes_per_entry_bfloat16",
        "encode_entries_per_second",
        "decode_bytes_per_second",
    },
    "catalog": {"worst_inspect_seconds", "attach_256_seconds", "plan_middle_256_peak_bytes"},
    "recovery_growth": {"peak_over_bound", "differentials_slope_seconds", "workers_worst_residual"},
    "scaling": {"topk_2_ranks_thread_seconds", "powersgd_2_ranks_disk_bytes"},
    "tuner": {"waste_over_best_fixed"},
    "failures": {"largest_error", "effective_share_simulated", "effective_share_real"},
}


#: Whose smoke runs start dozens of processes, half a minute of a core to minutes each.
LONG = {
    *("peers", "restart", "survivors", "effective_time", "scaling", "tuner"),
    *("failures", "publish", "sharded", "lowdiff_plus", "peer_memory"),
}
#: Of the files, where it is not the bench's: peers.json is that of the fault table.
RESULTS = {"peers": "peers_overhead"}


@pytest.mark.launch
# Cells of bench_peers start eighteen processes, one after the other.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name in LONG else pytest.mark.slow)
        for name in FIGURES
    ],
)
def test_a_bench_runs_and_writes_what_others_read(name: str, tmp_path: Path) -> None:
    if name == "peer_memory" and (reason := why_no_nodes()):
        pytest.skip(reason)
    command = [sys.executable, "-m", f"benches.bench_{name}", "--smoke", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    result_name = RESULTS.get(name, name)
    record = json.loads((tmp_path / f"{result_name}.json").read_text())
    assert record.keys() == KEYS
    # A count has no values, and so nothing to compare.
    assert record["summary"].get("bit_identical", name == "device_ops") is True
    assert FIGURES[name] <= record["summary"].keys()
    assert (tmp_path / f"{result_name}.png").read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{result_name}.json", f"{result_name}.png"}, "a bench removes the run it made"


def test_every_bench_is_tested() -> None:
    assert {p.stem for p in (ROOT / "benches").glob("bench_*.py")} == {
        f"bench_{name}" for name in FIGURES
    }


def test_a_steady_drift_cancels_in_abba_order() -> None:
    clock = iter(range(1000, 2000))
    pairs = [pair for _ in range(10) for pair in abba(lambda: next(clock), lambda: next(clock))]
    assert sum(arm - baseline for arm, baseline in pairs) == 0


def test_an_overhead_is_found_less_what_equal_arms_differ_by() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(1, 0.01, size=(4, 200))
    pairs = list(zip((1.05 * 1.02 * noise[0]).tolist(), noise[1].tolist(), strict=True))
    null_pairs = list(zip((1.02 * noise[2]).tolist(), noise[3].tolist(), strict=True))
    estimate = overhead(pairs, null_pairs, seed=0)
    assert estimate.median == pytest.approx(0.05, abs=0.005)
    assert estimate.null_median == pytest.approx(0.02, abs=0.005)
    assert estimate.median < estimate.upper95 < estimate.median + 0.01


def test_the_excess_is_relative_to_the_baseline() -> None:
    assert excess([(3.0, 2.0)]) == [0.5]
