"""Costs of a job that does not exist yet, from the size of its model and its machines."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lowdiff.errors import ConfigError
from lowdiff.tuner.costs import Costs, Estimate
from lowdiff.tuner.measured import ASSUMED_REPLAY_SECONDS_PER_ELEMENT, Measured

#: float32 tensors of a parameter's size that an optimizer keeps.
OPTIMIZERS: Mapping[str, int] = {
    "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2,
}  # fmt: skip
#: Step time that is assumed if the user states none. Much depends on it.
ASSUMED_STEP_SECONDS = 5.0
#: Bytes of a kept element on disk: sorted index and float32 value (docs/format.md).
_BYTES_PER_ENTRY = 4.3
_STAGED_BYTES_PER_ENTRY = 8.0
#: Entries that one core encodes; docs/benchmarks.md measures 55 to 83 million.
_ENCODE_ENTRIES_PER_SECOND = 50e6

#: Time of one request to an object store in the same region.
_STORE_LATENCY_SECONDS = 0.1
#: Cost -> options of ``lowdiff plan`` that determine it, besides the mandatory options. Costs not
#: listed here follow from a figure of docs/benchmarks.md, or from experience.
_FOLLOWS_FROM: Mapping[str, tuple[str, ...]] = {
    "step_seconds": ("step_time",),
    "differential_seconds": ("density", "copy"),
    "snapshot_seconds": ("optimizer", "copy"),
    "staged_bytes": ("density",),
    "differential_bytes": ("density",),
    "snapshot_bytes": ("optimizer",),
    "residual_bytes": (),
    "write_bytes_per_second": ("gpus_per_node",),
    "load_seconds": ("optimizer",),
    "restart_seconds": ("restart",),
    "store_bytes_per_second": ("gpus_per_node",),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A planned job. Every rank selects from the whole model and persists its selection.

    Attributes:
        params: Parameters of the model.
        optimizer: A name of `OPTIMIZERS`.
        density: Share of each gradient that `TopK` keeps.
        value_bits: Bits of a kept value, 2 or 4; None keeps float32.
        gpus: Number of ranks.
        step_seconds: Time of one training step.
        disk_bytes_per_second: Durable bandwidth of one node.
        gpus_per_node: Ranks that share a node's disk.
        copy_bytes_per_second: Bandwidth from a rank's device to memory.
        restart_seconds: Time from a failure until loading begins.
        replay_workers: Cores that replay on a rank.
        write_latency_seconds: Time of a durable write beyond what its size explains.
        store_bytes_per_second: Upload bandwidth of one node; 0 without an object store.

    Raises:
        ConfigError: If a value is out of range.
    """

    params: float
    optimizer: str
    density: float
    gpus: int
    step_seconds: float
    disk_bytes_per_second: float
    gpus_per_node: int = 8
    copy_bytes_per_second: float = 10e9
    restart_seconds: float = 120.0
    replay_workers: int = 8
    write_latency_seconds: float = 0.01
    store_bytes_per_second: float = 0.0
    value_bits: int | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer is one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}"
            )
        if not 0 < self.density <= 1:
            raise ConfigError(f"density must be in (0, 1], got {self.density}; 0.01 keeps 1 %")
        if self.value_bits not in (None, 2, 4):
            raise ConfigError(f"value_bits is 2, 4 or None, got {self.value_bits}; None is float32")
        if self.gpus < 1 or self.gpus_per_node < 1 or self.replay_workers < 1:
            raise ConfigError("gpus, gpus per node and replay workers count from 1")
        if not self.params >= 1:
            raise ConfigError(f"a model has at least 1 parameter, got {self.params}")

    @property
    def state_bytes(self) -> float:
        """Return the bytes of parameters and optimizer state, in float32."""
        return 4.0 * self.params * (1 + OPTIMIZERS[self.optimizer])

    @property
    def bytes_per_entry(self) -> float:
        """Return the bytes of a kept entry on disk; with few bits, positions are most of them."""
        if self.value_bits is None:
            return _BYTES_PER_ENTRY
        p = self.density
        # The entropy of a gap between kept entries; measured are 1 to 8 % more.
        gap = -math.log2(p) - (math.log1p(-p) / p * (1 - p) / math.log(2) if p < 1 else 0.0)
        return (gap + self.value_bits) / 8

    @property
    def staged_bytes_per_entry(self) -> float:
        """Return the bytes of a kept entry in staging memory."""
        if self.value_bits is None:
            return _STAGED_BYTES_PER_ENTRY
        return 8 + self.value_bits / 8  # a position is int64

    @property
    def residual_bytes(self) -> float:
        """Return the bytes of one rank's error-feedback residual."""
        return 4.0 * self.params

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks that share a node."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        """Return the number of machines; the last one may have free places."""
        return -(-self.gpus // self.gpus_per_node)


def spread(gpus: int, nodes: int) -> int:
    """Return how many GPUs each node has; the last one may have fewer.

    Raises:
        ConfigError: If a node would have none.
    """
    each = -(-gpus // nodes)
    taken = -(-gpus // each)
    if taken != nodes:
        raise ConfigError(
            f"{gpus:,} GPUs, {each:,} on each node, take {taken:,} nodes, not {nodes:,}"
        )
    return each


def planned(job: Job, stated: Collection[str] = ()) -> Measured:
    """Return the costs of a job, each marked as stated or assumed.

    A snapshot has 4 bytes for each parameter and each element of optimizer state, divided over the
    ranks, and 4 bytes per parameter on every rank for its own error-feedback residual. A
    differential has ``density * params`` entries of every rank. Replay steps the whole optimizer
    once per step on every node.

    Args:
        job: The job.
        stated: Options of ``lowdiff plan`` that the user stated; a cost that follows from another
            option is marked as assumed.
    """
    entries = job.density * job.params
    residual = job.residual_bytes
    share = job.state_bytes / job.gpus + residual
    # Every rank reads and checks all shares, residuals included, through its node's disk.
    load = share * job.gpus / job.disk_bytes_per_second
    decode = entries * min(job.gpus, 1 / job.density) * 2e-9
    replay = (job.params * ASSUMED_REPLAY_SECONDS_PER_ELEMENT + decode) / job.replay_workers
    costs = Costs(
        step_seconds=job.step_seconds,
        differential_seconds=entries * job.staged_bytes_per_entry / job.copy_bytes_per_second,
        snapshot_seconds=share / job.copy_bytes_per_second,
        staged_bytes=entries * job.staged_bytes_per_entry,
        differential_bytes=entries * job.bytes_per_entry,
        snapshot_bytes=share,
        encode_seconds=entries / _ENCODE_ENTRIES_PER_SECOND,
        write_latency_seconds=job.write_latency_seconds,
        write_bytes_per_second=job.disk_bytes_per_second / job.ranks_per_node,
        load_seconds=load,
        replay_seconds=replay,
        restart_seconds=job.restart_seconds,
        store_latency_seconds=_STORE_LATENCY_SECONDS if job.store_bytes_per_second else 0.0,
        store_bytes_per_second=job.store_bytes_per_second / job.ranks_per_node,
        residual_bytes=residual,
        world_size=job.gpus,
    )
    stated_options = {*stated, "gpus_per_node"} if job.gpus == 1 else set(stated)
    known = {name for name, options in _FOLLOWS_FROM.items() if stated_options.issuperset(options)}
    estimates = {
        name: (Estimate.stated if name in known else Estimate.assumed)(getattr(costs, name))
        for name in Costs.__dataclass_fields__
        if name != "world_size" and (job.store_bytes_per_second or not name.startswith("store_"))
    }
    return Measured(costs, estimates)
