"""Jobs of very different sizes, for tests of the tuner."""

from __future__ import annotations

from dataclasses import replace

from lowdiff.tuner.costs import Costs
from lowdiff.tuner.failures import FailureRates

LAPTOP = Costs(
    step_seconds=0.3,
    differential_seconds=0.006,
    snapshot_seconds=0.08,
    staged_bytes=2e6,
    differential_bytes=0.9e6,
    snapshot_bytes=240e6,
    encode_seconds=0.01,
    write_latency_seconds=0.004,
    write_bytes_per_second=400e6,
    load_seconds=0.2,
    replay_seconds=0.03,
    restart_seconds=8.0,
)
CLUSTER = Costs(
    step_seconds=6.0,
    differential_seconds=0.03,
    snapshot_seconds=1.2,
    staged_bytes=6e6,
    differential_bytes=4e6,
    snapshot_bytes=6e9,
    encode_seconds=0.03,
    write_latency_seconds=0.05,
    write_bytes_per_second=1.5e9,
    load_seconds=20.0,
    replay_seconds=0.5,
    restart_seconds=240.0,
    world_size=16384,
)
#: A network disk: each durable write takes longer than a step.
SLOW_DISK = Costs(
    step_seconds=0.4,
    differential_seconds=0.01,
    snapshot_seconds=0.5,
    staged_bytes=4e6,
    differential_bytes=2e6,
    snapshot_bytes=600e6,
    encode_seconds=0.02,
    write_latency_seconds=1.5,
    write_bytes_per_second=30e6,
    load_seconds=20.0,
    replay_seconds=0.06,
    restart_seconds=30.0,
)
JOBS = {
    "laptop": (LAPTOP, FailureRates.known(2 * 3600.0)),
    "cluster": (CLUSTER, FailureRates.known(54 * 86400.0 / 466, node_share=0.8)),
    "slow disk": (SLOW_DISK, FailureRates.known(3600.0)),
    "slow store": (
        replace(LAPTOP, store_bytes_per_second=8e6, store_latency_seconds=0.2),
        FailureRates.known(3600.0),
    ),
}
