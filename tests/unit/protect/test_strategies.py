"""A strategy is found by its name, which stands in the fence; and runs change it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowdiff
from lowdiff.compressors import Averaged, Dense, TopK
from lowdiff.errors import ConfigError, RunMismatch
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import read_json, write_twice
from lowdiff.persistence.format.values import same
from lowdiff.types import STRATEGIES
from tests.unit.loops import Loop

SETTINGS: dict[str, dict[str, Any]] = {
    "log": {"compressor": TopK(0.1)},
    "gradients": {"compressor": None, "strategy": "gradients"},
    "replica": {"compressor": None, "strategy": "replica"},
    "survivors": {"compressor": None, "strategy": "survivors"},
}
STEPS = 4


def loop_of(folder: Path, strategy: str, **settings: Any) -> Loop:
    return Loop(folder, settings={"snapshot_every": 100, **SETTINGS[strategy], **settings})


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write the fence of the first incarnation as another version would."""
    path = RunFolder(folder / "run").fence(0, 0)
    document = read_json(path)
    change(document)
    write_twice(path, document)


def test_the_settings_above_name_every_strategy() -> None:
    assert tuple(SETTINGS) == STRATEGIES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"strategy": "rings"},
            'one of "log", "gradients", "replica", "survivors", or None, got \'rings\'',
        ),
        ({"strategy": "log"}, 'strategy="log" needs a compressor'),
        ({"strategy": "replica", "compressor": TopK(0.1)}, "leaves gradients as they are"),
        ({"strategy": "survivors", "copies": 2}, "copies=2 does not go with"),
        ({"strategy": "survivors", "publish": lowdiff.Publisher("there")}, "keeps no steps"),
        ({"publish": lowdiff.Publisher("there", durable=True)}, "durable=True waits"),
        ({"snapshot_every": "auto"}, 'are for strategy "log"'),
        ({"compressor": TopK(0.1), "optimizer_steps": "any"}, "one exchange per step"),
        ({"compressor": TopK(0.1), "reproducible": True}, "summed in rank order"),
        ({"compressor": Dense()}, r"compressor=Dense\(\) leaves gradients as they are"),
        ({"compressor": Averaged()}, r"compressor=Averaged\(\) leaves gradients"),
        ({"compressor": TopK(0.1), "hang_seconds": 60.0}, "hang_seconds and on_hang are for"),
        ({"on_hang": "exit"}, "this run has 'replica'"),
    ],
)
def test_what_does_not_go_together_is_refused_where_it_is_chosen(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lowdiff.Checkpointer(tmp_path / "run", **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fence_names_the_strategy_and_the_version(tmp_path: Path, strategy: str) -> None:
    loop_of(tmp_path, strategy).run(1)
    document = read_json(RunFolder(tmp_path / "run").fence(0, 0))
    assert document["strategy"] == strategy
    assert document["version"] == lowdiff.__version__
    names = {"log": "topk", "survivors": Averaged.name}
    assert document["compressor"]["name"] == names.get(strategy, Dense.name)


@pytest.mark.parametrize("strategy", ["log", "replica", "survivors"])
def test_a_run_of_before_strategies_had_names_goes_on(tmp_path: Path, strategy: str) -> None:
    whole = loop_of(tmp_path / "whole", strategy)
    whole.run(STEPS)
    loop_of(tmp_path, strategy).run(2)

    def forget(document: dict[str, Any]) -> None:
        del document["strategy"], document["version"]

    rewritten(tmp_path, forget)
    again = loop_of(tmp_path, strategy)
    assert again.run(STEPS) == 2
    assert same(again.weights(), whole.weights())


def test_a_strategy_that_a_later_version_has_is_named_with_that_version(tmp_path: Path) -> None:
    loop_of(tmp_path, "log").run(1)
    rewritten(tmp_path, lambda document: document.update(strategy="rings", version="9.9.0"))
    told = r"strategy 'rings'.*lowdiff 9\.9\.0"
    with pytest.raises(RunMismatch, match=told):
        loop_of(tmp_path, "log").attach()
    with pytest.raises(RunMismatch, match=told):
        recovered(tmp_path)


def recovered(folder: Path) -> int:
    return lowdiff.recover(folder / "run", staging=folder / "staging").step


@pytest.mark.parametrize(("first", "then"), [*itertools.permutations(STRATEGIES, 2)])
def test_what_two_strategies_left_side_by_side_in_memory_leads_to_the_newest_step(
    tmp_path: Path, first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one dies in attach, before its base is durable, when both have memory."""
    killed = loop_of(tmp_path, first)
    killed.attach()
    for number in range(STEPS):
        killed.step(number)
        killed.checkpointer.commit()
    weights = killed.weights()
    killed.die()

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.attach.begin._make_base_durable", dies)
        with pytest.raises(KeyboardInterrupt):
            loop_of(tmp_path, then).attach()
    expected = STEPS if first != "survivors" else 0  # alone, nobody saved it
    assert recovered(tmp_path) == expected
    again = loop_of(tmp_path, first)
    assert again.attach() == expected
    assert same(again.weights(), weights) is (expected == STEPS)
    again.checkpointer.close()
