"""What the timeline says of runs that a gradient scaler holds back, and of runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.recovery.inspect import timeline as module
from lowdiff.recovery.inspect.timeline import first_outlier, timeline
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery
from lowdiff.recovery.search import carry_out
from tests.unit.loops import Loop


def test_a_step_that_its_scaler_skipped_is_not_out_of_line(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop.attach(scaler=scaler)
    for number in loop.checkpointer.steps(14):
        loop.scaled_step(number, scaler, overflows=number == 11)
    loop.checkpointer.close()
    found = timeline(tmp_path / "run", staging=tmp_path / "staging")
    assert [step.step for step in found.steps if not step.stepped] == [12]
    skipped = found.steps[11]
    assert (skipped.update_norm, skipped.gradient_norm, skipped.density) == (0.0, 0.0, 0.0)
    assert first_outlier(found.steps) is None


def test_the_newest_step_is_the_one_that_was_newest_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    steps = loop.checkpointer.steps(20)
    for number in steps:
        if number == 8:
            break
        loop.step(number)
    replayed: list[int] = []

    def overtaken_once(catalog: Any, plan: Any, options: Any) -> Any:
        replayed.append(plan.step)
        if len(replayed) > 1:
            return carry_out(catalog, plan, options)
        loop.step(8)
        for number in steps:
            if number == 12:
                break
            loop.step(number)
        raise DamagedFile(tmp_path / "staging" / "log", "overwritten by its trainer")

    monkeypatch.setattr("lowdiff.recovery.inspect.timeline.carry_out", overtaken_once)
    found = timeline(tmp_path / "run", staging=tmp_path / "staging")
    loop.die()
    assert len(replayed) > 1, "it looked again"
    assert max(replayed) == 8
    assert found.steps[-1].step == 8


def test_a_newest_step_that_was_dropped_meanwhile_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk that does not keep up makes a trainer do, with ``backpressure="degrade"``."""
    loop = Loop(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(8):
        loop.step(number)
    loop.checkpointer.close()
    asked = []

    def dropped(catalog: Any, last: int | None) -> RecoveryPlan:
        asked.append(last)
        if last is not None:
            raise StepNotFound(catalog.root, last, (), "dropped")
        return plan_recovery(catalog, last)

    def damaged_once(*arguments: Any) -> Any:
        if len(asked) == 1:
            raise DamagedFile(tmp_path / "staging" / "log", "overwritten by its trainer")
        return carry_out(*arguments)

    monkeypatch.setattr(module, "plan_recovery", dropped)
    monkeypatch.setattr(module, "carry_out", damaged_once)
    assert timeline(tmp_path / "run", staging=tmp_path / "staging").steps[-1].step == 8
    assert asked == [None, 8, None]
