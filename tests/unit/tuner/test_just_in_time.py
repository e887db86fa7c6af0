"""The cost model of just-in-time checkpoints gives the figures of its paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.just_in_time import (
    GangJob,
    best_checkpoints_per_second,
    periodic_waste,
    transparent_waste,
    user_level_waste,
    wasted_share,
)

#: Two failures a day over 992 ranks, as in the paper, on 1024.
JOB = GangJob(
    num_ranks=1024,
    failures_per_rank_second=2 / 992 / 86400,
    checkpoint_seconds=5.0,
    restart_seconds=300.0,
    step_seconds=10.0,
)


def test_it_gives_the_figures_of_the_paper() -> None:
    assert f"{wasted_share(periodic_waste(JOB)):.2%}" == "2.21%"
    assert f"{wasted_share(user_level_waste(JOB)):.3%}" == "0.735%"
    assert f"{wasted_share(transparent_waste(JOB)):.3%}" == "0.012%"


def test_no_other_number_of_checkpoints_wastes_less() -> None:
    best = best_checkpoints_per_second(JOB)
    assert 1 / best == pytest.approx(647, abs=1)  # seconds
    assert periodic_waste(JOB) == periodic_waste(JOB, best)
    assert all(periodic_waste(JOB, best * x) > periodic_waste(JOB) for x in (0.5, 0.99, 1.01, 2.0))


def test_what_just_in_time_takes_without_a_failure_adds_up() -> None:
    slower = replace(JOB, overhead_share=0.01)
    for waste in (user_level_waste, transparent_waste):
        assert waste(slower) - waste(JOB) == pytest.approx(0.01)
    assert periodic_waste(slower) == periodic_waste(JOB)


def test_a_job_that_never_fails_wastes_nothing() -> None:
    safe = replace(JOB, failures_per_rank_second=0.0)
    assert periodic_waste(safe) == user_level_waste(safe) == transparent_waste(safe) == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_ranks", 0),
        ("checkpoint_seconds", 0.0),
        ("failures_per_rank_second", -1.0),
        ("step_seconds", float("nan")),
        ("restart_seconds", float("inf")),
    ],
)
def test_nonsense_is_refused(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name):
        replace(JOB, **wrong)
