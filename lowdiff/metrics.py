"""A Checkpointer's counters for a Prometheus server: the extra ``lowdiff[metrics]``.

::

    import prometheus_client
    import lowdiff.metrics

    prometheus_client.REGISTRY.register(lowdiff.metrics.collector(checkpointer))
    prometheus_client.start_http_server(8000 + local_rank)

Nothing is counted twice: each scrape reads ``checkpointer.stats()``, in the scraping thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lowdiff.errors import ConfigError

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
