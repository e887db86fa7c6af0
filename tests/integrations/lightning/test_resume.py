"""A Lightning Trainer that is killed anywhere goes on as if it were not: every bit of what it leaves is compared."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch

from tests.integrations.scripts import Scripts, differences

pytestmark = [pytest.mark.framework, pytest.mark.launch, pytest.mark.timeout(300)]


#: Whose scripts the fixtures run.
TRAINING = "tests.integrations.lightning.training"


def check(found: list[Any], expected: list[Any]) -> None:
    """Compare what processes left, but what they loaded; checkpoints have other folders."""
    for result in (found, expected):
        for of_rank in result:
            if of_rank["saved"]:
                best = of_rank["saved"][1]
                # A checkpoint of a life that was killed keeps its name.
                names = {path: re.sub(r"-v\d+", "", Path(path).name) for path in best}
                of_rank["saved"][1] = {names[path]: value for path, value in best.items()}
    kept = [
        [{k: v for k, v in of_rank.items() if k != "loaded"} for of_rank in result]
        for result in (found, expected)
    ]
    assert not differences("", *kept)


PLACES = {
    "steps": [
        *("load:1", "on_train_batch_start:1", "on_train_batch_start:2", "on_before_optimizer_step:7"),
        *("on_train_batch_end:9", "on_validation_start:2", "on_validation_batch_end:5", "on_validation_end:3"),
        *("load:30", "on_train_epoch_end:1", "on_train_epoch_start:2", "on_train_batch_start:14"),
        *("on_train_batch_end:18", "on_train_end:1"),
    ],
    "epochs": [
        *("on_train_batch_start:2", "on_train_batch_end:8", "on_train_batch_start:13", "on_validation_end:1"),
        *("on_train_epoch_end:1", "on_train_epoch_start:2", "on_train_batch_start:20", "on_validation_batch_end:5"),
        *("on_train_epoch_start:3", "on_before_optimizer_step:12", "on_train_end:1"),
    ],
    "plateau": ["on_train_batch_start:4", "on_validation_end:2", "on_train_epoch_start:2", "on_validation_start:3"],
    "stops early": ["on_validation_end:2", "on_train_epoch_end:2", "on_train_end:1"],
    "short epochs": ["on_train_batch_start:3", "on_train_epoch_start:2", "on_train_batch_end:8"],
    "workers": ["on_train_batch_start:4", "on_train_epoch_start:2", "on_train_batch_end:15"],
    "torchdata": ["on_train_batch_start:4", "on_train_epoch_start:2", "on_train_batch_end:15"],
    "replica": ["on_train_batch_start:5", "on_train_epoch_start:2", "on_before_optimizer_step:16"],
    "average": [
        *("on_train_batch_start:3", "on_before_optimizer_step:5", "on_train_batch_start:12", "on_validation_batch_end:4"),
        *("on_validation_end:2", "on_train_epoch_start:2", "on_train_batch_end:20", "on_train_end:1"),
    ],
    "average as is": ["on_train_batch_start:7", "on_validation_batch_end:5", "on_train_epoch_start:2"],
    "hooks": ["on_train_batch_start:5", "on_train_epoch_start:2", "on_train_batch_end:20"],
    "thaws by number": ["on_train_batch_start:5", "on_train_batch_start:12", "on_train_epoch_start:2", "on_train_batch_end:20"],
    "compiled": ["on_train_batch_start:5", "on_train_epoch_start:2", "on_train_batch_end:20"],
    "gan": ["on_train_batch_start:5", "on_before_optimizer_step:21", "on_train_epoch_start:2", "on_train_batch_end:20"],
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
    assert not warned


@pytest.mark.parametrize(
    "name",
    [
        "steps",
        "epochs",
        "plateau",
        "short epochs",
        "own generators",
        "average",
        "hooks",
        "gan",
        "thaws by number",
        "compiled",
    ],
)
def test_without_a_compressor_a_training_is_what_it_is_without_lowdiff(
    scripts: Scripts, tmp_path: Path, name: str
) -> None:
    found = scripts.finish(name, tmp_path / "found", lowdiff="as is")
    expected = scripts.finish(name, tmp_path / "expected", lowdiff="not")
    for result in (*found, *expected):
        result["progress"] = result["progress"][:2]  # the loader's place is lowdiff's
        result["callbacks"] = result["callbacks"][:3]
    check(found, expected)


@pytest.mark.parametrize("name", ["steps", "epochs", "plateau", "workers", "replica", "gan"])
def test_it_goes_on_after_kills_at_random(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    expected = whole(name)
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    places = ("on_train_batch_start", "on_train_batch_end", "load", "on_before_optimizer_step")
    for _ in range(4):
        scripts.run(name, tmp_path / "run", f"{dice.choice(places)}:{dice.randint(1, 8)}")
    scripts.run(name, tmp_path / "run", seconds=dice.uniform(0.5, 3.0))
    check(scripts.finish(name, tmp_path / "run"), expected)


@pytest.mark.parametrize(
    "place",
    [
        *("on_train_batch_start:4", "on_before_optimizer_step:2", "on_validation_batch_end:4"),
        *("on_train_epoch_start:2", "on_train_batch_end:9", "on_train_end:1"),
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


@pytest.mark.parametrize("name", ["steps", "epochs", "stops early", "average", "hooks", "gan"])
def test_a_finished_run_ends_at_once_with_the_same_metrics(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    expected = whole(name)
    check(scripts.finish(name, tmp_path / "run"), expected)
    again = scripts.finish(name, tmp_path / "run")
    check(again, expected)
    assert again[0]["loaded"] == []


@pytest.mark.parametrize("name", ["gan", "average"])
def test_a_finished_run_goes_on_with_more_epochs(
    scripts: Scripts, whole: Any, tmp_path: Path, name: str
) -> None:
    scripts.finish(name, tmp_path / "run", max_epochs=1)
    check(scripts.finish(name, tmp_path / "run"), whole(name))


def test_a_signal_ends_training_after_a_step_and_it_goes_on(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    assert scripts.run("epochs", tmp_path / "run", "on_train_batch_end:7:SIGUSR1") == [0]
    stopped = torch.load(tmp_path / "run" / "result-0.pt", weights_only=False)
    assert stopped["progress"][0] in (2, 3, 4)  # a thread notices it
    # Lightning raises an exception of its own here.
    assert scripts.run("epochs", tmp_path / "run", "on_train_batch_end:8:SIGTERM") == [1]
    found, expected = scripts.finish("epochs", tmp_path / "run"), whole("epochs")
    # Where the signal cut an epoch short, its means were logged as well.
    found[0]["logs"] = {key: found[0]["logs"][key] for key in expected[0]["logs"]}
    check(found, expected)


def test_batches_that_were_consumed_are_not_loaded_again(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    scripts.run("steps", tmp_path / "run", "on_train_batch_start:9")
    found = scripts.finish("steps", tmp_path / "run")[0]["loaded"]
    # It died in the ninth step, whose batch and all later ones are loaded.
    assert found == whole("steps")[0]["loaded"][8 * 4 :]


def test_a_checkpoint_of_lightning_is_not_loaded_and_it_says_so(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    scripts.run("steps", tmp_path / "run", "on_train_batch_start:10")
    checkpoint = str(tmp_path / "run" / "saved" / "last.ckpt")
    check(scripts.finish("steps", tmp_path / "run", ckpt_path=checkpoint), whole("steps"))
    said = (tmp_path / "run" / "output.txt").read_text()
    assert f"LD314: ckpt_path='{checkpoint}' is not loaded" in said


def test_a_run_does_not_begin_with_a_checkpoint_of_lightning(
    scripts: Scripts, tmp_path: Path
) -> None:
    scripts.finish("steps", tmp_path / "first")
    checkpoint = str(tmp_path / "first" / "saved" / "last.ckpt")
    assert scripts.run("steps", tmp_path / "second", ckpt_path=checkpoint) == [1]
    assert "has none yet" in (tmp_path / "second" / "output.txt").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stochastic", "StochasticWeightAveraging swaps the scheduler"),
        ("thaws", "Thaws thaws layers and adds groups"),
        ("exports", "Exports has other hooks for checkpoints than WeightAveraging"),
        ("fails", "Fails.on_save_checkpoint() raised KeyError"),
        ("holds", "Holds"),
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name_before_the_first_step(
    scripts: Scripts, tmp_path: Path, name: str, said: str
) -> None:
    assert scripts.run(name, tmp_path / "run") == [1]
    printed = (tmp_path / "run" / "output.txt").read_text()
    assert said in printed.splitlines()[-1], printed[-2000:]
    assert not (tmp_path / "run" / "logs-0.jsonl").exists()


def test_a_scheduler_that_a_callback_puts_in_is_refused_at_the_step(
    scripts: Scripts, tmp_path: Path
) -> None:
    assert scripts.run("swaps", tmp_path / "run") == [1]
    printed = (tmp_path / "run" / "output.txt").read_text()
    assert "put another scheduler into the Trainer by step 13" in printed
