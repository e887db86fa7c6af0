"""A loop with Accelerate that is killed anywhere goes on as if it were not: every bit of what it leaves is compared."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch

from tests.integrations.scripts import Scripts, differences

pytestmark = [pytest.mark.framework, pytest.mark.launch, pytest.mark.timeout(300)]

#: Whose scripts the fixtures run.
TRAINING = "tests.integrations.accelerate.training"


def check(found: list[Any], expected: list[Any]) -> None:
    """Compare what processes left, but what they loaded."""
    kept = [
        [{k: v for k, v in of_rank.items() if k != "loaded"} for of_rank in result]
        for result in (found, expected)
    ]
    assert not differences("", *kept)


PLACES = {
    "images": [
        *("load:1", "batch:1", "batch:2", "backward:7", "step:9", "load:30", "batch:13", "step:13"),
        *("evaluation:1", "evaluation:3", "evaluated:1", "batch:14", "step:20", "evaluated:2", "step:39", "end:1"),
    ],
    "accumulated": ["batch:2", "backward:5", "batch:13", "evaluated:1", "batch:14", "step:17", "evaluation:5", "end:1"],
    "workers": ["batch:4", "step:13", "evaluation:2", "batch:14", "backward:20"],
    "fresh workers": ["batch:4", "evaluated:1", "backward:20"],
    "replica": ["batch:5", "evaluated:1", "step:16"],
    "seedable": ["batch:5", "evaluated:1", "batch:16", "backward:30"],
    "by hand": ["batch:2", "backward:4", "step:7", "batch:13", "evaluation:2", "batch:14", "backward:21"],
    "average": ["batch:5", "evaluated:1", "step:16"],
    "stochastic": ["batch:5", "evaluated:1", "step:16"],
    "thaws by number": ["batch:5", "batch:12", "step:16"],
    "evaluates": ["evaluation:2", "evaluated:1", "batch:14"],
    "stops early": ["evaluated:1", "batch:20", "evaluated:2"],
    "compiled": ["batch:5", "evaluated:1", "step:16"],
    "two optimizers": ["backward:5", "evaluated:1", "step:16"],
    "left": ["batch:6", "evaluated:1", "step:18", "step:20", "end:1"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, places in PLACES.items() for place in places]
)
def test_it_goes_on_after_a_kill_at(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str, place: str
) -> None:
    expected = whole(name)
    assert scripts.run(name, tmp_path / "run", place) == [-9]
    check(scripts.finish(name, tmp_path / "run"), expected)
    warned = re.findall(r"LD\d+.*", (tmp_path / "run" / "output.txt").read_text())
    # An odd batch is left over, whose gradients no optimizer used.
    assert not [text for text in warned if name != "by hand" or "LD405" not in text]


@pytest.mark.parametrize("name", ["images", "accumulated", "workers", "replica", "by hand"])
def test_it_goes_on_after_kills_at_random(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    expected = whole(name)
    dice = random.Random(random.randrange(1 << 32))
    for _ in range(4):
        place = dice.choice(["batch", "backward", "step", "evaluation"])
        scripts.run(name, tmp_path / "run", f"{place}:{dice.randint(1, 8)}")
    scripts.run(name, tmp_path / "run", seconds=dice.uniform(0.5, 3.0))
    check(scripts.finish(name, tmp_path / "run"), expected)


@pytest.mark.parametrize(
    "place", ["batch:4", "backward:5", "step:6", "evaluation:2", "evaluated:1", "batch:10", "end:1"]
)
def test_two_processes_go_on_after_one_dies_and_the_other_with_it(
    scripts: Scripts, whole: Any, tmp_path: Path, place: str
) -> None:
    expected = whole("two", 2)
    statuses = scripts.run("two", tmp_path / "run", place, ranks=2)
    assert -9 in statuses
    check(scripts.finish("two", tmp_path / "run", ranks=2), expected)


@pytest.mark.parametrize("name", ["images", "accumulated", "workers"])
def test_a_finished_run_ends_at_once_with_the_same_result(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    scripts.finish(name, tmp_path / "run")
    again = scripts.finish(name, tmp_path / "run")
    check(again, whole(name))
    assert again[0]["loaded"] == []
    assert not re.findall(r"LD\d+.*", (tmp_path / "run" / "output.txt").read_text())


def test_a_finished_run_goes_on_with_more_epochs(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    scripts.finish("images", tmp_path / "run", epochs=1)
    check(scripts.finish("images", tmp_path / "run"), whole("images"))


@pytest.mark.parametrize("place", ["step:7:SIGTERM", "step:13:SIGTERM", "evaluation:2:SIGTERM"])
def test_a_signal_ends_the_loop_after_a_step_and_it_goes_on(
    scripts: Scripts, whole: Any, tmp_path: Path, place: str
) -> None:
    assert scripts.run("images", tmp_path / "run", place) == [0]
    stopped = torch.load(tmp_path / "run" / "result-0.pt", weights_only=False)
    assert len(stopped["losses"]) < 39
    found = scripts.finish("images", tmp_path / "run")
    expected = [dict(of_rank) for of_rank in whole("images")]
    if place.startswith("step:7"):  # an evaluation followed where the signal cut the epoch short
        for result in (found, expected):
            del result[0]["drawn"], result[0]["metrics"]
    check(found, expected)


def test_batches_that_were_consumed_are_not_loaded_again(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    scripts.run("images", tmp_path / "run", "backward:9")
    found = scripts.finish("images", tmp_path / "run")[0]["loaded"]
    # It died in the ninth step, whose batch and all later ones are loaded.
    assert found == whole("images")[0]["loaded"][8 * 4 :]


def test_another_batch_size_is_refused_within_an_epoch(scripts: Scripts, tmp_path: Path) -> None:
    scripts.run("images", tmp_path / "run", "backward:9")
    assert scripts.run("images", tmp_path / "run", batch_size=2) == [1]
    said = (tmp_path / "run" / "output.txt").read_text().splitlines()[-1]
    assert "batches in an epoch 26 instead of 13" in said
