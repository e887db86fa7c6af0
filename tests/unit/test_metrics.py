"""A real scrape, over HTTP, of a training that runs."""

from __future__ import annotations

import importlib
import sys
import urllib.request
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import lowdiff.metrics
from lowdiff.errors import ConfigError
from tests.unit.loops import Loop


def scrape(port: int) -> dict[str, float]:
    """Sample name, with its bucket's bound, -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert all(sample.labels["rank"] == "0" for sample in samples)
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}


def test_a_scrape_tells_what_stats_tells_before_during_and_after_a_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"batch_size": 1})
    registry = prometheus_client.CollectorRegistry()
    registry.register(lowdiff.metrics.collector(loop.checkpointer))
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        port = server.server_port
        assert scrape(port) == {}
        loop.attach()
        for number in range(7):
            loop.step(number)
            loop.checkpointer.commit()
        live = scrape(port)
        assert live["lowdiff_steps_total"] == live["lowdiff_stall_seconds_count"] == 7
        assert live["lowdiff_staged_bytes_total"] >= live["lowdiff_step_bytes_sum"] > 0
        assert live["lowdiff_preempted"] == live["lowdiff_writer_in_trouble"] == 0
        loop.checkpointer.close()
        last, stats = scrape(port), loop.checkpointer.stats()
        assert last["lowdiff_durable_step"] == last["lowdiff_batch_seconds_count"] == 7
        assert last["lowdiff_durable_bytes_total"] == stats["durable_bytes"] > 0
        assert last["lowdiff_stall_seconds_bucket+Inf"] == 7
        assert last["lowdiff_stall_seconds_sum"] == stats["stall_seconds"]["sum"] > 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_every_figure_of_stats_is_there_also_those_of_a_replica(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"compressor": None})
    registry = prometheus_client.CollectorRegistry()
    registry.register(lowdiff.metrics.collector(loop.checkpointer))
    loop.run(3)
    told = {family.name.removeprefix("lowdiff_") for family in registry.collect()}
    texts = {"writer_error", "remote_error", "replica_error"}
    never_compared = {"replica_drift"}
    others = {"rank", "large_items", "diverged_ranks"} | texts | never_compared
    others |= {"writer_pid", "replica_pid", "staging"}
    missing = loop.checkpointer.stats().keys() - told - others
    assert not missing
    troubles = {"writer_in_trouble", "store_in_trouble", "replica_in_trouble", "ranks_diverged"}
    assert troubles <= told
    assert all(registry.get_sample_value(f"lowdiff_{t}", {"rank": "0"}) == 0 for t in troubles)


def test_without_prometheus_client_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(lowdiff, "metrics", lowdiff.metrics)  # to be put back
    monkeypatch.delitem(sys.modules, "lowdiff.metrics")
    alone = importlib.import_module("lowdiff.metrics")
    with pytest.raises(ConfigError, match="pip install prometheus_client"):
        alone.collector(Loop(tmp_path).checkpointer)
