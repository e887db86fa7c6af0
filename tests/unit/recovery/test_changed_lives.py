"""``verify`` and ``timeline`` where a life attached something else, or a step has only a snapshot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lowdiff.compressors import TopK
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.image import Manifest
from lowdiff.persistence.format.values import encode
from lowdiff.recovery import recover
from lowdiff.recovery.compare import differences
from lowdiff.recovery.inspect.timeline import Timeline, timeline
from lowdiff.recovery.inspect.verify import Replayed, VerifyReport, verify
from tests.unit.cli.commands import Command, command
from tests.unit.loops import Loop
from tests.unit.recovery.training import flip, part_sums

__all__ = ["command"]  # fixtures

Attached = Callable[[Loop], dict[str, Any]]
Inside = Callable[[Loop, int, dict[str, Any]], None]


class Vocabulary:
    """A small object that no step changes."""

    def __init__(self, *words: str) -> None:
        self.words, self.table = list(words), torch.arange(3000.0) * len(words)

    def state_dict(self) -> dict[str, Any]:
        return {"words": self.words, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.words, self.table = state["words"], state["table"]


class OtherVocabulary(Vocabulary):
    pass


def nothing(_: Loop) -> dict[str, Any]:
    return {}


def step_lr(loop: Loop) -> dict[str, Any]:
    return {"scheduler": lr_scheduler.StepLR(loop.optimizer, 5)}


def cosine(loop: Loop) -> dict[str, Any]:
    return {"scheduler": lr_scheduler.CosineAnnealingLR(loop.optimizer, 100)}


def ema(loop: Loop) -> dict[str, Any]:
    return {"ema": AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))}


def average(loop: Loop) -> dict[str, Any]:
    return {"ema": AveragedModel(loop.model)}


def own_average(loop: Loop) -> dict[str, Any]:
    return {"ema": AveragedModel(loop.model, avg_fn=lambda mean, new, _: (mean + new) / 2)}


def damp_after(*steps: int) -> Inside:
    def inside(loop: Loop, step: int, _: dict[str, Any]) -> None:
        if step in steps:
            loop.optimizer.state[next(loop.model.parameters())]["exp_avg"].mul_(0.5)

    return inside


def live(
    folder: Path,
    until: int,
    attached: Attached = nothing,
    *,
    inside: Inside | None = None,
    dies: bool = False,
    **settings: Any,
) -> Loop:
    """One life of a training, with a snapshot every ten steps."""
    loop = Loop(folder, settings={"snapshot_every": 10, **settings})
    things = attached(loop)
    loop.attach(**things)
    for number in loop.checkpointer.steps(until):
        loop.step(number)
        if "scheduler" in things:
            things["scheduler"].step()
        if "ema" in things:
            things["ema"].update_parameters(loop.model)
        if inside is not None:
            inside(loop, number + 1, things)
    if dies:
        loop.die()
    else:
        loop.checkpointer.close()
    return loop


def check(folder: Path) -> VerifyReport:
    return verify(folder / "run", folder / "staging")


def measure(folder: Path, **options: Any) -> Timeline:
    return timeline(folder / "run", staging=folder / "staging", **options)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("first", "second", "dies"),
    [
        (step_lr, cosine, True),
        (step_lr, nothing, True),
        (nothing, ema, False),
        (ema, nothing, True),
        (ema, own_average, False),
        (lambda _: {"data": Vocabulary("old")}, lambda _: {"data": OtherVocabulary("new")}, True),
        (lambda _: {"data": Vocabulary("old")}, lambda _: {"more": Vocabulary("new")}, False),
    ],
    ids=["scheduler", "no scheduler", "new EMA", "no EMA", "own EMA", "other class", "other name"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_life_attached_anew_is_no_difference(
    tmp_path: Path, first: Attached, second: Attached, dies: bool
) -> None:
    live(tmp_path, 7, first, dies=dies)
    live(tmp_path, 12, second)
    report = check(tmp_path)
    assert not report.failures
    assert report.recoverable == ((0, 12),)
    assert report.replays[-1].last == 12


def test_another_compressor_after_an_object_has_gone_is_no_difference(tmp_path: Path) -> None:
    live(tmp_path, 7, step_lr)
    live(tmp_path, 12, compressor=TopK(0.5))
    report = check(tmp_path)
    assert not report.failures
    assert Replayed(7, 7, compared=True) in report.replays


@pytest.mark.slow
@pytest.mark.parametrize("tensor", ["model/0.weight", "optimizer/0/0.weight/exp_avg"])
def test_what_a_life_inherited_is_compared_with_its_first_snapshot(
    tmp_path: Path, tensor: str
) -> None:
    live(tmp_path, 7, step_lr)
    live(tmp_path, 12, cosine)
    path = tmp_path / "run/snapshots/i000001-s0000000007/rank-0000.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    flip(path, start + json.loads(data[8:start])[tensor]["data_offsets"][0])
    manifest = Manifest.read(path.with_suffix(".json"))
    data = path.read_bytes()
    good = replace(manifest, checksum=crc32c(data), parts=tuple(part_sums(data)))
    write_json(path.with_suffix(".json"), good.document())
    message = check(tmp_path).failures[0].message
    assert "snapshot 7 differs from the replay of snapshot 7" in message
    assert tensor.rpartition("/")[2] in message


def test_between_lives_that_were_set_up_otherwise_only_tensors_are_compared(tmp_path: Path) -> None:
    live(tmp_path, 3, lambda loop: {**step_lr(loop), **ema(loop), "data": Vocabulary("old")})
    before, after = (recover(tmp_path / "run", staging=tmp_path / "staging") for _ in range(2))
    after.items[0]["stateful/data"] = encode({"words": ["new"]})
    after.averages["ema"]["0.bias"][2] += 1
    after.optimizers[0].groups[0]["of a later torch"] = 1
    after.parameters["0.bias"][1] += 1
    assert [text.partition(" (")[0] for text in differences(before, after)] == [
        "parameter 0.bias",
        "optimizer 0: hyper-parameters",
        "average ema: 0.bias",
        "rank 0: item stateful/data",
    ]
    others = {**after.fence.stateful, "scheduler": "another.Scheduler"}
    after.fence = replace(after.fence, stateful=others)
    assert [text.partition(" (")[0] for text in differences(before, after)] == ["parameter 0.bias"]


@pytest.mark.slow
def test_the_timeline_goes_on_after_a_step_that_only_a_snapshot_leads_to(tmp_path: Path) -> None:
    live(tmp_path / "whole", 25)
    live(tmp_path, 25, inside=damp_after(15, 16, 23))
    found = measure(tmp_path)
    assert found.left_out == (15, 16, 23)
    assert [s.step for s in found.steps] == sorted(set(range(1, 26)) - {15, 16, 23})
    whole = measure(tmp_path / "whole")
    # A header names its residual by a random number, which packs to a byte more or less.
    for here, there in zip(found.steps[:14], whole.steps[:14], strict=True):
        assert replace(here, stored_bytes=0) == replace(there, stored_bytes=0)
    assert found.document()["left_out"] == [15, 16, 23]
    assert measure(tmp_path, first=18, last=20).steps == found.steps[15:18]
    part = measure(tmp_path, first=15, last=17)
    assert ([s.step for s in part.steps], part.left_out) == ([17], (15, 16))
    seen: list[tuple[int, int]] = []
    measure(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (22, 22)


def test_the_command_says_which_steps_it_left_out(command: Command, tmp_path: Path) -> None:
    live(tmp_path, 12, inside=damp_after(5))
    said = command("timeline", tmp_path / "run", "--staging", tmp_path / "staging")
    assert (said.code, said.err) == (0, "")
    assert "11 steps, 1 to 12; the largest updates" in said.out
    assert "1 step left out (5)" in said.out


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("first", "second", "dies"),
    [(nothing, ema, False), (ema, nothing, True), (ema, average, True)],
    ids=["new", "gone", "another"],
)
def test_the_timeline_crosses_lives_with_other_averages(
    tmp_path: Path, first: Attached, second: Attached, dies: bool
) -> None:
    live(tmp_path, 7, first, dies=dies)
    live(tmp_path, 12, second)
    found = measure(tmp_path)
    assert [step.step for step in found.steps] == list(range(1, 13))
    assert not found.left_out
    assert [step.incarnation for step in found.steps] == [0] * 7 + [1] * 5


@pytest.mark.slow
def test_steps_whose_average_began_with_a_lost_snapshot_are_left_out(tmp_path: Path) -> None:
    live(tmp_path, 7)
    live(tmp_path, 12, ema)
    shutil.rmtree(tmp_path / "run/snapshots/i000001-s0000000007")
    found = measure(tmp_path)
    assert found.left_out == (8, 9, 10)
    assert [step.step for step in found.steps] == [*range(1, 8), 11, 12]
