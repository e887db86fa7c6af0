"""A commit that broke off is called again, and nothing of its step is missing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
import lowdiff.model.item_tensors
import lowdiff.model.items
from lowdiff.compressors import TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.digest import Looker
from lowdiff.errors import ConfigError, StepNotFound, UsageError
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.recovery.state import RecoveredState
from tests.crash.pool import Pool
from tests.unit.loops import Loop

STEPS = 3
FAILING = 2


class Meter:
    """An object of the user's with a number, a tensor that is logged apart, and moods."""

    def __init__(self) -> None:
        self.count = 0
        self.table = torch.zeros(2048)
        self.mood = "good"

    def state_dict(self) -> dict[str, Any]:
        if self.mood == "raises":
            raise RuntimeError("not now")
        strange = {"what": object()} if self.mood == "strange" else {}
        return {"count": self.count, "table": self.table, **strange}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.table = state["count"], state["table"]


#: Breaks the next commit, and names the error.
Breaks = Callable[[pytest.MonkeyPatch, Meter], type[BaseException]]


def state_dict_raises(patch: pytest.MonkeyPatch, meter: Meter) -> type[BaseException]:
    patch.setattr(meter, "mood", "raises")
    return RuntimeError


def a_value_cannot_be_stored(patch: pytest.MonkeyPatch, meter: Meter) -> type[BaseException]:
    patch.setattr(meter, "mood", "strange")
    return ConfigError


def interrupted_in(owner: object, name: str) -> Breaks:
    """As Ctrl-C does, after the second call."""

    def breaks(patch: pytest.MonkeyPatch, meter: Meter) -> type[BaseException]:
        whole, calls = getattr(owner, name), []

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            result = whole(*args, **kwargs)
            calls.append(name)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return result

        patch.setattr(owner, name, interrupted)
        return KeyboardInterrupt

    return breaks


def interrupted_at_the_mark(patch: pytest.MonkeyPatch, meter: Meter) -> type[BaseException]:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for kind in (RotatingResidual, *RotatingResidual.__subclasses__()):
        patch.setattr(kind, "mark", interrupted)
    return KeyboardInterrupt


WAYS: list[Breaks] = [
    state_dict_raises,
    a_value_cannot_be_stored,
    interrupted_in(lowdiff.model.items, "encode"),
    interrupted_in(lowdiff.model.item_tensors, "crc32c"),
    interrupted_in(Looker, "look"),
    interrupted_at_the_mark,
]
NAMES = ["state_dict", "value", "encode", "checksum", "digest", "mark"]
#: Of others among them.
RELATIVES = {"value", "checksum", "digest"}


def trained(folder: Path, compressor: Compressor | None, breaks: Breaks | None = None) -> Path:
    """A run of which one step was committed at the second call."""
    torch.manual_seed(0)
    loop, meter = Loop(folder, settings={"compressor": compressor, "snapshot_every": 1000}), Meter()
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loop.attach(meter=meter, average=average)
    for number in range(STEPS if compressor else FAILING):
        loop.step(number)
        average.update_parameters(loop.model)
        meter.count += 1
        meter.table = torch.rand(2048)
        if breaks is not None and number + 1 == FAILING:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(breaks(patch, meter)):
                loop.checkpointer.commit()
        loop.checkpointer.commit()
    loop.checkpointer.close()
    return folder


def interrupted_alone(rank: int, _: int, folder: Path) -> str:
    """A pool's job: the first of the ranks is interrupted in its second commit, and repeats it."""
    loop = Loop(folder, model=DistributedDataParallel(torch.nn.Linear(20, 3)))
    loop.attach()
    for number in range(FAILING):
        loop.step(number)
        if number + 1 < FAILING or rank:
            loop.checkpointer.commit()
    told = ""
    if not rank:
        with pytest.MonkeyPatch.context() as patch:
            error = interrupted_at_the_mark(patch, Meter())
            with pytest.raises(error):
                loop.checkpointer.commit()
        with pytest.raises(UsageError) as caught:
            loop.checkpointer.commit()
        told = str(caught.value)
    loop.die()
    return told


def recovered(folder: Path, step: int) -> RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging")


@pytest.fixture(scope="module", params=[TopK(0.1), None], ids=["log", "replica"])
def compressor(request: pytest.FixtureRequest) -> Compressor | None:
    given: Compressor | None = request.param
    return given


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, compressor: Compressor | None
) -> dict[int, RecoveredState]:
    """By step; without a compressor only the last one lasts."""
    whole = trained(tmp_path_factory.mktemp("whole"), compressor)
    return {step: recovered(whole, step) for step in ((2, 3) if compressor else (2,))}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "breaks",
    [
        pytest.param(way, id=name, marks=[pytest.mark.slow] if name in RELATIVES else [])
        for way, name in zip(WAYS, NAMES, strict=True)
    ],
)
def test_nothing_of_its_step_is_missing(
    tmp_path: Path,
    breaks: Breaks,
    compressor: Compressor | None,
    expected: dict[int, RecoveredState],
) -> None:
    found = trained(tmp_path, compressor, breaks)
    for step, theirs in expected.items():
        ours = recovered(found, step)
        assert same(dict(ours.model_state_dict()), dict(theirs.model_state_dict()))
        assert same(ours.optimizer_state_dict()["state"], theirs.optimizer_state_dict()["state"])
        assert same(ours.stateful, theirs.stateful)
        assert same(ours.items, theirs.items)


@pytest.mark.cases(2)
@pytest.mark.parametrize("breaks", WAYS[:3], ids=NAMES[:3])
def test_a_step_whose_objects_could_not_be_read_is_replayed_all_the_same(
    tmp_path: Path, breaks: Breaks
) -> None:
    snapshots = trained(tmp_path, TopK(0.1), breaks) / "run/snapshots"
    assert sorted(path.name for path in snapshots.glob("i*")) == [
        "i000000-s0000000000",
        f"i000000-s{STEPS:010}",
    ]


def test_one_of_several_ranks_cannot_repeat_what_the_others_have_whole(
    tmp_path: Path, pool: Pool
) -> None:
    told, _ = pool.run(interrupted_alone, 2, tmp_path)
    assert "commit() of step 2 was broken off on this rank" in told
    assert recovered(tmp_path, 1).step == 1
    with pytest.raises(StepNotFound):
        recovered(tmp_path, 2)
