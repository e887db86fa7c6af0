"""A Trainer that is killed anywhere goes on as if it were not: every bit of what it leaves is compared."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from tests.integrations.scripts import Scripts, differences

pytestmark = [pytest.mark.framework, pytest.mark.launch, pytest.mark.timeout(300)]


#: Whose scripts the fixtures run.
TRAINING = "tests.integrations.transformers.training"


def compared(results: list[Any], folder: str = "") -> list[Any]:
    """What is compared: all but what differs from process to process."""
    found = []
    for result in results:
        kept = {key: value for key, value in result.items() if key != "loaded"}
        best = kept["state"]["best_model_checkpoint"]
        kept["state"] = {**kept["state"], "best_model_checkpoint": best and Path(best).name}
        found.append(kept)
    return found


def check(found: list[Any], expected: list[Any]) -> None:
    """Compare two results, bit for bit."""
    assert not differences("", compared(found), compared(expected))


PLACES = {
    "steps": [
        "collate:1", "on_step_begin:1", "on_step_begin:2", "on_pre_optimizer_step:9", "on_optimizer_step:14",
        "on_step_end:13", "on_log:5", "on_prediction_step:11", "on_evaluate:4", "collate:30", "torch.save:2",
        "on_save:2", "on_epoch_end:1", "on_epoch_begin:2", "torch.save:9", "on_save:3", "on_train_end:1",
    ],
    "epochs": [
        "collate:16", "on_substep_end:9", "on_step_end:5", "on_epoch_end:1", "on_prediction_step:1", "on_evaluate:2",
        "torch.save:3", "on_epoch_begin:2", "on_epoch_begin:3", "on_step_begin:6", "on_substep_end:14", "on_save:3",
        "on_train_end:1",
    ],
    "stops early": ["on_evaluate:2", "torch.save:8", "on_step_begin:8", "on_train_end:1"],
    "bf16 by length": ["on_step_begin:3", "on_step_end:13", "on_epoch_begin:2", "on_optimizer_step:16", "on_epoch_end:1"],
    "workers": ["on_step_begin:4", "on_prediction_step:3", "on_train_end:1", "on_step_end:13", "on_epoch_begin:2", "on_step_begin:17"],
    "forked anew": ["on_step_begin:4", "on_step_end:15"],
    "replica": ["on_step_begin:5", "on_epoch_begin:2", "on_optimizer_step:16"],
    "adapter": ["on_step_begin:5", "on_step_end:16"],
    "average": ["on_step_begin:5", "on_epoch_begin:2", "on_step_end:16"],
    "thaws by number": ["on_step_begin:5", "on_step_begin:12", "on_epoch_begin:2", "on_step_end:16"],
    "compiled": ["on_step_begin:5", "on_epoch_begin:2", "on_step_end:16"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, places in PLACES.items() for place in places]
)
def test_it_goes_on_after_a_kill_at(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str, place: str
) -> None:
    if name == "adapter":
        pytest.importorskip("peft")
    expected = whole(name)
    assert scripts.run(name, tmp_path / "run", place) == [-9]
    check(scripts.finish(name, tmp_path / "run"), expected)
    warned = re.findall(r"LD\d+.*", (tmp_path / "run" / "output.txt").read_text())
    assert not warned


@pytest.mark.parametrize(
    "name",
    [
        *("steps", "epochs", "stops early", "bf16 by length", "replica", "average"),
        *("thaws by number", "compiled"),
    ],
)
def test_without_a_compressor_a_training_is_what_it_is_without_lowdiff(
    scripts: Scripts, tmp_path: Path, name: str
) -> None:
    found = scripts.finish(name, tmp_path / "found", lowdiff="as is")
    expected = scripts.finish(name, tmp_path / "expected", lowdiff="not")
    check(found, expected)
    assert found[0]["loaded"] == expected[0]["loaded"]


@pytest.mark.parametrize("name", ["steps", "epochs", "stops early", "bf16 by length", "replica"])
def test_it_goes_on_after_kills_at_random(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    expected = whole(name)
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    for _ in range(4):
        place = dice.choice(
            ["on_step_begin", "on_step_end", "collate", "on_optimizer_step", "on_log"]
        )
        scripts.run(name, tmp_path / "run", f"{place}:{dice.randint(1, 8)}")
    scripts.run(name, tmp_path / "run", seconds=dice.uniform(0.5, 3.0))
    found = scripts.finish(name, tmp_path / "run")
    assert not differences("", compared(found), compared(expected)), f"seed {seed}"


@pytest.mark.parametrize(
    "place",
    [
        "on_step_begin:4",
        "on_substep_end:7",
        "on_prediction_step:4",
        "torch.save:2",
        "on_epoch_begin:2",
        "on_step_end:8",
    ],
)
def test_two_processes_go_on_after_one_dies_and_the_other_with_it(
    scripts: Scripts, whole: Any, tmp_path: Path, place: str
) -> None:
    expected = whole("two", 2)
    statuses = scripts.run("two", tmp_path / "run", place, ranks=2)
    assert -9 in statuses
    assert 0 not in statuses
    check(scripts.finish("two", tmp_path / "run", ranks=2), expected)


@pytest.mark.parametrize("name", ["steps", "epochs", "stops early"])
def test_a_finished_run_ends_at_once_with_the_same_metrics(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    expected = whole(name)
    first = scripts.finish(name, tmp_path / "run")
    check(first, expected)
    again = scripts.finish(name, tmp_path / "run")
    check(again, expected)
    assert again[0]["loaded"] == []


def test_a_finished_run_goes_on_with_more_steps(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    expected = scripts.finish("replica", tmp_path / "whole", **more)
    scripts.finish("replica", tmp_path / "run", max_steps=7, **more)
    found = scripts.finish("replica", tmp_path / "run", **more)
    for results in (found, expected):  # the shorter training logged its end
        results[0]["history"] = [
            entry for entry in results[0]["history"] if "train_loss" not in entry
        ]
    check(found, expected)


def test_a_signal_ends_training_after_a_step_and_it_goes_on(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    assert scripts.run("epochs", tmp_path / "run", "on_substep_end:9:SIGTERM") == [0]
    stopped = torch.load(tmp_path / "run" / "result-0.pt", weights_only=False)
    assert stopped["state"]["global_step"] in (6, 7)  # a thread notices it
    check(scripts.finish("epochs", tmp_path / "run"), whole("epochs"))


def test_batches_that_were_consumed_are_not_loaded_again(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    whole_order = whole("steps")[0]["loaded"]
    scripts.run("steps", tmp_path / "run", "on_step_begin:9")
    found = scripts.finish("steps", tmp_path / "run")[0]["loaded"]
    # It died in the ninth step, whose batch and all later ones are loaded.
    assert found == whole_order[8 * 4 :]


def test_a_checkpoint_of_the_trainer_is_not_loaded_and_it_says_so(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    scripts.run("steps", tmp_path / "run", "on_step_begin:10")
    checkpoint = str(tmp_path / "run" / "output" / "checkpoint-7")
    check(scripts.finish("steps", tmp_path / "run", resume=checkpoint), whole("steps"))
    said = (tmp_path / "run" / "output.txt").read_text()
    assert f"LD314: resume_from_checkpoint='{checkpoint}' is not loaded" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"resume": "elsewhere"}, "has none yet"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    scripts: Scripts, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    assert scripts.run("steps", tmp_path / "run", **arguments) == [1]
    said = (tmp_path / "run" / "output.txt").read_text()
    assert f"ConfigError: {says}" in said or says in said.splitlines()[-1]


def test_an_average_that_is_made_too_late_is_refused_at_the_first_step(
    scripts: Scripts, tmp_path: Path
) -> None:
    assert scripts.run("late average", tmp_path / "run") == [1]
    said = (tmp_path / "run" / "output.txt").read_text().splitlines()[-1]
    assert "LateEma made its AveragedModel after train() had prepared the model" in said


def test_other_batches_within_an_epoch_are_refused(scripts: Scripts, tmp_path: Path) -> None:
    scripts.run("steps", tmp_path / "run", "on_step_begin:6")
    assert scripts.run("steps", tmp_path / "run", per_device_train_batch_size=2) == [1]
    said = (tmp_path / "run" / "output.txt").read_text().splitlines()[-1]
    assert "RunMismatch: the run is within epoch 0, after 5 batches" in said
    assert "per_device_train_batch_size 2 instead of 4" in said
