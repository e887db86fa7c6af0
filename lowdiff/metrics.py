"""A Checkpointer's counters where others look: at a Prometheus server, or beside the losses.

Prometheus, with the extra ``lowdiff[metrics]``; each scrape reads ``checkpointer.stats()``, in the scraping thread::

    import prometheus_client
    import lowdiff.metrics

    prometheus_client.REGISTRY.register(lowdiff.metrics.collector(checkpointer))
    prometheus_client.start_http_server(8000 + local_rank)

Anything with ``log(dict, step=...)``, such as a run of wandb, or `lowdiff.integrations.tensorboard.TensorBoard`::

    watch = lowdiff.metrics.Watch(checkpointer, wandb.run)
    for step in checkpointer.steps(until=10_000):
        ...
        watch.step()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from lowdiff.errors import ConfigError
from lowdiff.types import whole_number

_PREFIX = "lowdiff/"

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from lowdiff.checkpointer import Checkpointer

_COUNTERS = {
    "steps": "Steps committed since attach.",
    "snapshots": "Full snapshots staged since attach.",
    "staged_bytes": "Bytes of differentials staged by the training thread.",
    "durable_bytes": "Bytes of differentials fsynced by the writer.",
    "snapshot_bytes": "Bytes of snapshots fsynced by the writer.",
    "training_thread_seconds": "Seconds that differentials cost the training thread.",
    "snapshot_seconds": "Seconds that snapshots cost the training thread.",
    "waiting_seconds": "Seconds that the training thread waited for storage.",
    "unprotected_steps": "Steps staged while more were at risk than power failures may cost.",
    "dropped_steps": "Steps given up because storage was too slow and staging memory full.",
    "retries": "Attempts to write or fsync that failed and were made again.",
    "remote_bytes": "Bytes uploaded to the store.",
    "remote_retries": "Uploads that failed and were or will be repeated.",
    "batches": "Durable writes.",
    "writer_restarts": "Writer processes that died and were replaced.",
    "replica_restarts": "Replicas that died and were replaced.",
    "published_versions": "Versions of the weights that were published.",
    "published_bytes": "Bytes of published versions.",
    "publisher_restarts": "Publishers that died and were replaced.",
}
_GAUGES = {
    "committed_step": "Newest step staged on all ranks, as far as this rank knows.",
    "kept_steps": "How many steps back gradients in memory lead.",
    "kept_bytes": "Memory of gradients and of the images that they lead on from.",
    "ring_fill": "Steps in memory over the steps that are planned for.",
    "pending_steps": "Steps that have ended and are on their way from an accelerator.",
    "durable_step": "Newest step of this rank that is fsynced.",
    "snapshot_step": "Newest full snapshot staged.",
    "durable_snapshot": "Newest full snapshot of this rank that is fsynced.",
    "remote_step": "Newest step of this rank that is in the store with all it builds on.",
    "attach_seconds": "Seconds that attach took.",
    "replica_step": "Step whose state the replica holds.",
    "replica_lag_steps": "Staged steps that the replica has not used.",
    "replica_seconds_per_step": "Seconds that the replica takes to apply a step.",
    "replica_drift": "Largest difference of a parameter from the trainer's newest snapshot.",
    "queue_bytes": "Memory of the replica's queue.",
    "published_step": "Step of the newest published version.",
    "published_version": "Number of the newest published version.",
}
_FLAGS = {
    "writer_error": ("writer_in_trouble", "1 while the writer reports an error."),
    "remote_error": ("store_in_trouble", "1 while nothing reaches the store."),
    "replica_error": ("replica_in_trouble", "1 while the replica reports an error."),
    "publisher_error": ("publisher_in_trouble", "1 while nothing is published."),
    "diverged_ranks": ("ranks_diverged", "1 once ranks held different parameters."),
    "preempted": ("preempted", "1 once SIGTERM or SIGUSR1 came to any rank."),
}
_HISTOGRAMS = {
    "stall_seconds": "Seconds per step that lowdiff took from the training thread.",
    "step_bytes": "Bytes staged per step.",
    "lag_steps": "Steps committed but not durable, at each commit.",
    "batch_seconds": "Seconds that a durable write took, failed attempts included.",
}


class Logger(Protocol):
    """Whoever takes figures by name; a run of wandb does."""

    def log(self, data: dict[str, Any], step: int | None = None) -> Any:
        """Take the figures of a step."""
        ...


class Watch:
    """Logs a Checkpointer's figures every few steps, on rank 0; on other ranks it does nothing.

    Names are ``lowdiff/`` and as in ``Checkpointer.stats()``. Counters count since ``attach``, flags are 0 or 1, and of a
    histogram such as ``stall_seconds`` it is the mean of what came since the last time.

    Args:
        checkpointer: Whose figures.
        logger: Is given them by ``log(dict, step=...)``.
        every: Steps between two times.

    Raises:
        ConfigError: If ``logger`` has no ``log``, or ``every`` is no number of steps.
    """

    def __init__(self, checkpointer: Checkpointer, logger: Logger, *, every: int = 10) -> None:
        if not callable(getattr(logger, "log", None)):
            raise ConfigError(
                f"logger is anything with log(dict, step=...), e.g. wandb.run, got {logger!r:.100}"
            )
        if whole_number("every", every) < 1:
            raise ConfigError(f"every counts steps, at least 1, got {every}")
        self._checkpointer, self._logger, self._every = checkpointer, logger, every
        self._calls = 0
        self._seen: dict[str, tuple[float, float]] = {}

    def step(self, step: int | None = None) -> None:
        """Count a step, and log if it is time; call it once in each step.

        Args:
            step: Its number, as the losses have it; None: the newest step that this rank knows to be committed.
        """
        self._calls += 1
        if self._calls % self._every == 0:
            self.log(step)

    def log(self, step: int | None = None) -> None:
        """Log now; ``step`` as above."""
        stats = self._checkpointer.stats()
        if stats and stats["rank"] == 0:
            values = {_PREFIX + name: value for name, value in self._figures(stats).items()}
            self._logger.log(values, step=max(0, stats["committed_step"]) if step is None else step)

    def _figures(self, stats: dict[str, Any]) -> dict[str, float]:
        found = {
            name: float(stats[name])
            for name in (*_COUNTERS, *_GAUGES)
            if stats.get(name) is not None
        }
        found |= {
            name: float(bool(stats[key])) for key, (name, _) in _FLAGS.items() if key in stats
        }
        for name in _HISTOGRAMS:
            total, count = stats[name]["sum"], stats[name]["buckets"][-1][1]
            sum_before, count_before = self._seen.get(name, (0.0, 0))
            if count > count_before:
                found[name] = (total - sum_before) / (count - count_before)
            self._seen[name] = (total, count)
        return {name: value for name, value in found.items() if math.isfinite(value)}


def collector(checkpointer: Checkpointer) -> Collector:
    """A collector to register with a Prometheus registry.

    Every metric is named ``lowdiff_`` and as in ``Checkpointer.stats()``, and carries the label
    ``rank``. Before ``attach`` there are none; after ``close()`` the last values stay.

    Raises:
        ConfigError: If ``prometheus_client`` is not installed.
    """
    try:
        from prometheus_client.registry import Collector
    except ModuleNotFoundError as error:
        raise ConfigError(
            "lowdiff.metrics needs prometheus_client: pip install prometheus_client"
        ) from error

    class StatsCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            return _families(checkpointer.stats())

        def describe(self) -> list[Metric]:
            # Without it, registering would scrape.
            return []

    return StatsCollector()


def _families(stats: dict[str, Any]) -> Iterator[Metric]:
    """The metrics of one scrape."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    if not stats:
        return
    labels = [str(stats["rank"])]
    # A run without a replica has no figures of one.
    for name, text in _COUNTERS.items():
        if name in stats:
            counter = CounterMetricFamily(f"lowdiff_{name}", text, labels=["rank"])
            counter.add_metric(labels, stats[name])
            yield counter
    gauges = {
        name: (text, stats[name]) for name, text in _GAUGES.items() if stats.get(name) is not None
    }
    gauges |= {
        name: (text, bool(stats[key])) for key, (name, text) in _FLAGS.items() if key in stats
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"lowdiff_{name}", text, labels=["rank"])
        gauge.add_metric(labels, float(value))
        yield gauge
    for name, text in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"lowdiff_{name}", text, labels=["rank"])
        found = stats[name]
        buckets = [(_bound(bound), total) for bound, total in found["buckets"]]
        histogram.add_metric(labels, buckets, sum_value=found["sum"])
        yield histogram


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)
