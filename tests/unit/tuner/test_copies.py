"""Copies of a planned job: each figure by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from lowdiff.errors import ConfigError
from lowdiff.model.items import random_generators
from lowdiff.persistence.format.values import encode
from lowdiff.tuner.copies import ITEMS_BYTES, copies_facts, copies_title, planned_copies
from lowdiff.tuner.plan import Job, spread

#: 12 GB of state on 16 nodes with 2 ranks each: 375 MB a rank, 750 MB a node.
JOB = Job(
    params=1e9,
    optimizer="adamw",
    density=0.01,
    gpus=32,
    step_seconds=10.0,
    disk_bytes_per_second=1e9,
    gpus_per_node=2,
)


def test_the_known_probabilities_come_out() -> None:
    found = planned_copies(JOB, 2).survival
    assert [(one.lost_nodes, round(float(one.probability), 4)) for one in found] == [
        (1, 1.0),
        (2, 0.9333),
        (3, 0.8),
    ]
    found = planned_copies(JOB, 4).survival
    assert [one.lost_nodes for one in found] == [1, 4, 5]
    assert round(float(found[1].probability), 4) == 0.9978


def test_no_more_nodes_are_lost_than_there_are() -> None:
    found = planned_copies(replace(JOB, gpus=4), 2)
    assert found.nodes == 2
    assert [(one.lost_nodes, float(one.probability)) for one in found.survival] == [
        (1, 1.0),
        (2, 0.0),
    ]


@pytest.mark.parametrize("copies", [2, 3])
def test_items_are_sent_where_gemini_sends_the_state(copies: int) -> None:
    found = planned_copies(JOB, copies)
    assert found.sent_bytes == (copies - 1) * ITEMS_BYTES
    assert found.gemini_sent_bytes == (copies - 1) * 12e9 / 32
    assert planned_copies(replace(JOB, optimizer="sgd"), copies).gemini_sent_bytes == (
        (copies - 1) * 4e9 / 32
    )
    assert found.residual_bytes == 4e9


def test_items_are_the_generators_of_a_process_and_the_numbers_of_a_step() -> None:
    read = [read for read, _ in random_generators(torch.device("cpu")).values()]
    generators = sum(len(encode(one())) for one in read)
    assert generators < ITEMS_BYTES < 1.2 * generators


def test_memory_is_that_of_the_ranks_of_a_node() -> None:
    memory = planned_copies(JOB, 3).memory_bytes
    assert memory.log == 5 * 750e6
    assert memory.replica_state == 3 * 750e6
    assert memory.replica == 7 * 750e6
    # What one copy takes without copies elsewhere is that of docs/operations.md.
    alone = planned_copies(JOB, 1).memory_bytes
    assert (alone.log, alone.replica) == (750e6, 3 * 750e6)


def test_more_copies_than_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="copies=17 needs 17 nodes, and there are 16"):
        planned_copies(JOB, 17)


def test_figures_are_said_as_text_and_in_json() -> None:
    found = planned_copies(JOB, 2)
    assert copies_title(found) == "Copies on 2 of 16 nodes"
    text = dict(copies_facts(found))
    assert text["memory alone brings all back"] == (
        "1 node lost: 100%; 2 at once: 93.33%; 3 at once: 80.00%"
    )
    assert text["sent per step and rank"].startswith("12.4 kB: numbers and generators")
    assert text["with Gemini"].startswith("375 MB")
    assert "4 GB of each rank: lost with its node" in text["not copied"]
    assert text["memory of a node, log"].startswith("2.25 GB")
    assert "1.5 GB state of replicas" in text["memory of a node, replica"]
    document = json.loads(json.dumps(found.document()))
    assert document["survival"][1] == {
        "lost_nodes": 2,
        "probability": float(Fraction(14, 15)),
    }
    assert document["memory_bytes"]["replica_state"] == 1.5e9


def test_only_what_is_certain_is_a_hundred_percent() -> None:
    many = replace(JOB, gpus=100_000, gpus_per_node=1)
    text = dict(copies_facts(planned_copies(many, 2)))["memory alone brings all back"]
    assert text == "1 node lost: 100%; 2 at once: over 99.99%; 3 at once: over 99.99%"


def test_gpus_are_spread_evenly_over_nodes() -> None:
    assert (spread(32, 16), spread(10, 4), spread(3, 3)) == (2, 3, 1)
    for gpus, nodes, text in (
        (10, 6, "10 GPUs, 2 on each node, take 5 nodes, not 6"),
        (2, 3, "2 GPUs, 1 on each node, take 2 nodes, not 3"),
    ):
        with pytest.raises(ConfigError, match=text):
            spread(gpus, nodes)
