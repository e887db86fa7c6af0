"""Strategies side by side for one job: overhead, loss and restart by a failure, bytes, waste.

Every strategy is weighed by one formula, ``w = overhead + (restart + loss) / M`` in seconds per second
of useful training, with a failure every ``M`` seconds; that of Gupta et al. (``just_in_time``) has the
same terms. Costs of files and of logged steps are the job's own. What a strategy adds to each step is a
share that was measured (docs/benchmarks.md), unless the user states one. With copies in other nodes'
memory the loss of a node is weighed as that of one node at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Setting, written_bytes_per_hour
from lowdiff.tuner.costs import (
    Costs,
    loop_seconds,
    lost_steps,
    recovery_seconds,
    snapshot_write_seconds,
    waste,
    without_residual,
)
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.just_in_time import (
    GangJob,
    best_checkpoints_per_second,
    periodic_waste,
    transparent_waste,
    user_level_waste,
    wasted_share,
)

#: Of a step, with a 10.8 M parameter GPT on CPUs: ``overhead_median`` of docs/results/overhead.json.
LOG_OVERHEAD_SHARE = 0.041
#: Likewise, of docs/results/lowdiff_plus.json: ``overhead_median`` and ``gradients_median``, images included.
REPLICA_OVERHEAD_SHARE = 0.039
GRADIENTS_OVERHEAD_SHARE = 0.048
#: What a replica, on one CPU, takes for Adam: measured beside an H200 (docs/benchmarks.md, "The first run").
REPLICA_SECONDS_PER_ELEMENT = 1.5 / 124e6
#: Of a step of two ranks: ``training_thread_share`` of docs/results/survivors.json.
SURVIVORS_OVERHEAD_SHARE = 0.006
#: What copies on other nodes add to a step of two ranks that share two cores: ``overheads`` of
#: docs/results/peer_memory.json.
COPIES_OVERHEAD_SHARE = 0.076
REPLICA_COPIES_OVERHEAD_SHARE = 0.138
#: Failures that leave no rank alive although no memory is lost. Never measured.
ALL_AT_ONCE_SHARE = 0.05
#: A state read back from memory over a plain copy: ``restart_over_copy`` of lowdiff_plus.json.
READ_OVER_COPY = 1.45
_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Figures that the table takes for granted, because no run of strategy log measures them.

    Attributes:
        log_overhead_share: Seconds that logging adds to a second of training, snapshots not included;
            None: as the job's costs say.
        replica_overhead_share: Likewise, with the replica's snapshots, which cost training nothing.
        survivors_overhead_share: Likewise, snapshots not included.
        all_at_once_share: Share of the failures that leave all memory, but no rank alive, so that nobody
            saves the state.
        snapshot_every: Steps between full snapshots of gradients, replica and survivors.
        save_seconds: Time of one ``torch.save``; None: rank 0 writes the whole state to its node's disk.
        copies: On how many nodes everything lies in memory, its own included.
        copies_overhead_share: Seconds that copies on other nodes add to a second of training; None: as
            measured, for each strategy.
        gradients_overhead_share: Seconds that gradients in memory, and images there, add to a second of training.

    Raises:
        ConfigError: If a value is out of range.
    """

    log_overhead_share: float | None = LOG_OVERHEAD_SHARE
    replica_overhead_share: float = REPLICA_OVERHEAD_SHARE
    survivors_overhead_share: float = SURVIVORS_OVERHEAD_SHARE
    all_at_once_share: float = ALL_AT_ONCE_SHARE
    snapshot_every: int = 100
    save_seconds: float | None = None
    copies: int = 1
    copies_overhead_share: float | None = None
    gradients_overhead_share: float = GRADIENTS_OVERHEAD_SHARE

    def __post_init__(self) -> None:
        for name in ("log", "gradients", "replica", "survivors", "copies"):
            share = getattr(self, f"{name}_overhead_share")
            if share is not None and not 0 <= share < math.inf:
                raise ConfigError(f"the overhead of {name} is a share, at least 0, got {share}")
        if not 0 <= self.all_at_once_share <= 1:
            raise ConfigError(f"all_at_once_share is a share, 0 to 1, got {self.all_at_once_share}")
        if self.snapshot_every < 1:
            raise ConfigError(f"snapshot_every counts steps from 1, got {self.snapshot_every}")
        if self.copies < 1:
            raise ConfigError(f"copies counts nodes, each rank's own included, got {self.copies}")
        if self.save_seconds is not None and not 0 < self.save_seconds < math.inf:
            raise ConfigError(f"save_seconds must be positive, got {self.save_seconds}")


@dataclass(frozen=True, slots=True)
class Row:
    """Costs of one strategy.

    Attributes:
        name: Name of the strategy.
        detail: Its setting, for people.
        overhead_share: Seconds that saving adds to a second of training.
        lost_seconds: Training time that a failure takes on average, to be made again.
        restart_seconds: Time from a failure until training goes on, on average.
        bytes_per_day: Bytes that all ranks write to local disks in a day of training.
        wasted_share: Share of all time that is wasted.
    """

    name: str
    detail: str
    overhead_share: float
    lost_seconds: float
    restart_seconds: float
    bytes_per_day: float
    wasted_share: float


@dataclass(frozen=True, slots=True)
class Published:
    """Wasted shares of all time by the model of Gupta et al., for the same job.

    Attributes:
        periodic: Periodic checkpoints at their best interval.
        user_level: The ranks that live save after a failure, and all processes start anew.
        transparent: Recovery within the processes.
    """

    periodic: float
    user_level: float
    transparent: float


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The table.

    Attributes:
        rows: ``torch.save``, then lowdiff's strategies.
        published: What the model of Gupta et al. says.
    """

    rows: tuple[Row, ...]
    published: Published


def replica_overhead_share(elements_of_rank: float, step_seconds: float) -> float:
    """Return what a replica adds to a step: what was measured, or the wait for one that cannot keep up."""
    busy = REPLICA_SECONDS_PER_ELEMENT * elements_of_rank / step_seconds
    return max(REPLICA_OVERHEAD_SHARE, busy - 1)


def side_by_side(
    costs: Costs, rates: FailureRates, setting: Setting, assumed: Assumptions, *, num_nodes: int
) -> SideBySide:
    """Weigh ``torch.save`` and lowdiff's strategies for one job.

    Args:
        costs: Costs of the job with strategy log.
        rates: Failure rates of the job; it must fail at some time.
        setting: Snapshots and batches of strategy log.
        assumed: What is not in the costs.
        num_nodes: Machines of the ranks.
    """
    job = _Job(costs, without_residual(costs), rates, assumed, num_nodes)
    gang = job.gang
    published = Published(
        *(wasted_share(w(gang)) for w in (periodic_waste, user_level_waste, transparent_waste))
    )
    return SideBySide(
        (_periodic(job), _log(job, setting), _gradients(job), _replica(job), _survivors(job)),
        published,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """A job, and what several strategies need of it; ``plain`` are costs without error feedback."""

    costs: Costs
    plain: Costs
    rates: FailureRates
    assumed: Assumptions
    num_nodes: int

    @property
    def state_bytes(self) -> float:
        return self.plain.snapshot_bytes * self.plain.world_size

    @property
    def ranks_per_node(self) -> int:
        return -(-self.costs.world_size // self.num_nodes)

    @property
    def node_share(self) -> float:
        """Share of failures that lose a node's memory."""
        process, node = (1 / rate.mtbf_seconds for rate in (self.rates.process, self.rates.node))
        return node / (process + node)

    @property
    def has_copies(self) -> bool:
        """Whether another node's memory has all that a lost node had."""
        return self.assumed.copies > 1

    def copies_overhead(self, measured_share: float) -> float:
        """Share that copies add to a step of a strategy for which ``measured_share`` was measured."""
        stated = self.assumed.copies_overhead_share
        return (measured_share if stated is None else stated) if self.has_copies else 0.0

    @property
    def read_seconds(self) -> float:
        """Time in which a rank reads the whole state back from memory."""
        return READ_OVER_COPY * self.plain.snapshot_seconds * self.plain.world_size

    @property
    def from_disk_seconds(self) -> float:
        return self.plain.restart_seconds + self.plain.load_seconds

    @property
    def snapshot_every(self) -> int:
        """Steps between snapshots of gradients, replica and survivors: no more often than the disk takes them."""
        written = math.ceil(snapshot_write_seconds(self.plain) / self.plain.step_seconds)
        return max(self.assumed.snapshot_every, written)

    @property
    def save_seconds(self) -> float:
        """Time in which survivors save the state after a failure."""
        # One of a node may have to save the shares of all its ranks, and saves those of all other nodes.
        num_shares = max(self.ranks_per_node, self.plain.world_size - self.ranks_per_node + 1)
        return self.plain.snapshot_seconds * num_shares

    @property
    def nobody_share(self) -> float:
        """Share of failures that leave no rank alive to save the state."""
        if self.plain.world_size == 1:
            return 1.0
        lost = self.node_share if self.num_nodes == 1 else 0.0  # else another node has the state
        return lost + (1 - self.node_share) * self.assumed.all_at_once_share

    def back_to_snapshot_seconds(self, step_seconds: float) -> float:
        """Training time since the newest durable snapshot: half an interval, and what it took to write."""
        return self.snapshot_every / 2 * step_seconds + snapshot_write_seconds(self.plain)

    @property
    def gang(self) -> GangJob:
        """The job as the published model sees it."""
        plain, ranks = self.plain, self.plain.world_size
        save_seconds = self.assumed.save_seconds
        if save_seconds is None:
            # One rank writes what all ranks would share, but has its node's disk for itself.
            copying = plain.snapshot_seconds * ranks
            disk = plain.write_bytes_per_second * self.ranks_per_node
            save_seconds = copying + plain.write_latency_seconds + self.state_bytes / disk
        return GangJob(
            num_ranks=ranks,
            failures_per_rank_second=1 / (self.rates.total.mtbf_seconds * ranks),
            checkpoint_seconds=save_seconds,
            restart_seconds=self.from_disk_seconds,
            step_seconds=plain.step_seconds,
            overhead_share=self.assumed.survivors_overhead_share,
        )

    def row(
        self,
        name: str,
        detail: str,
        *,
        overhead: float,
        lost: float,
        restart: float,
        bytes_per_day: float,
    ) -> Row:
        total = overhead + (restart + lost) / self.rates.total.mtbf_seconds
        return Row(name, detail, overhead, lost, restart, bytes_per_day, wasted_share(total))


def _periodic(job: _Job) -> Row:
    gang = job.gang
    interval = max(job.plain.step_seconds, 1 / best_checkpoints_per_second(gang))
    return job.row(
        "torch.save",
        _every(round(interval / job.plain.step_seconds)),
        overhead=gang.checkpoint_seconds / interval,
        lost=interval / 2,
        restart=gang.restart_seconds,
        bytes_per_day=job.state_bytes * _DAY_SECONDS / (interval + gang.checkpoint_seconds),
    )


def _log(job: _Job, setting: Setting) -> Row:
    costs, share = job.costs, job.assumed.log_overhead_share
    if share is not None:
        costs = replace(costs, differential_seconds=share * costs.step_seconds)
    added = job.copies_overhead(COPIES_OVERHEAD_SHARE) * costs.step_seconds
    costs = replace(costs, differential_seconds=costs.differential_seconds + added)
    f, b = setting.snapshot_every, setting.batch_size
    found = waste(costs, job.rates, f, b)
    process, node = lost_steps(costs, f, b)
    from_disk = after_node = recovery_seconds(costs, f, b)
    if job.has_copies:  # records and the image that they follow are in memory
        node = process
        after_node = costs.restart_seconds + job.read_seconds + costs.replay_seconds * (f - 1) / 2
    steps = (1 - job.node_share) * process + job.node_share * node
    return job.row(
        "log",
        f"f = {f:,}, b = {b}{_copies(job)}",
        overhead=found.differentials + found.snapshots + found.backpressure,
        lost=steps * loop_seconds(costs, f, b),
        restart=(1 - job.node_share) * from_disk + job.node_share * after_node,
        bytes_per_day=24 * written_bytes_per_hour(costs, f, b),
    )


def _gradients(job: _Job) -> Row:
    # A rank that makes a copy writes another's gradients beside its own.
    share = job.assumed.gradients_overhead_share
    # Half an interval is replayed on the image, which is taken that often or, where memory is short, more often.
    replay = job.plain.replay_seconds * (job.snapshot_every - 1) / 2
    return _in_memory(job, "gradients", share, copies_share=share, replay_seconds=replay)


def _replica(job: _Job) -> Row:
    share = job.assumed.replica_overhead_share
    return _in_memory(job, "replica", share, copies_share=REPLICA_COPIES_OVERHEAD_SHARE)


def _in_memory(
    job: _Job, name: str, share: float, *, copies_share: float, replay_seconds: float = 0.0
) -> Row:
    """Weigh a strategy whose newest step lies in its node's memory."""
    overhead = share + job.copies_overhead(copies_share)
    step = (1 + overhead) * job.plain.step_seconds
    # What lies in the memory of a lost node goes with it; copies have it.
    fallen = 0.0 if job.has_copies else job.node_share
    in_memory = job.plain.restart_seconds + job.read_seconds + replay_seconds
    return job.row(
        name,
        f"f = {job.snapshot_every:,}{_copies(job)}",
        overhead=overhead,
        lost=(1 - fallen) * step / 2 + fallen * job.back_to_snapshot_seconds(step),
        restart=(1 - fallen) * in_memory + fallen * job.from_disk_seconds,
        bytes_per_day=_snapshot_bytes_per_day(job, step),
    )


def _survivors(job: _Job) -> Row:
    plain = job.plain
    snapshots = plain.snapshot_seconds / (job.snapshot_every * plain.step_seconds)
    overhead = job.assumed.survivors_overhead_share + snapshots
    step = (1 + overhead) * plain.step_seconds
    fallen = job.nobody_share
    in_memory = plain.restart_seconds + job.save_seconds + job.read_seconds
    saves_per_day = (1 - fallen) * _DAY_SECONDS / job.rates.total.mtbf_seconds
    return job.row(
        "survivors",
        f"f = {job.snapshot_every:,}",
        overhead=overhead,
        lost=(1 - fallen) * step / 2 + fallen * job.back_to_snapshot_seconds(step),
        restart=(1 - fallen) * in_memory + fallen * job.from_disk_seconds,
        bytes_per_day=_snapshot_bytes_per_day(job, step) + saves_per_day * job.state_bytes,
    )


def _snapshot_bytes_per_day(job: _Job, step_seconds: float) -> float:
    return job.state_bytes * _DAY_SECONDS / (job.snapshot_every * step_seconds)


def _copies(job: _Job) -> str:
    return f", {job.assumed.copies} copies" if job.has_copies else ""


def _every(steps: int) -> str:
    return "every step" if steps <= 1 else f"every {steps:,} steps"
