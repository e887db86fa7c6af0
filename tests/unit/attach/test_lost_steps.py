"""Steps that are lost for good: said, made again, or predicted where the user asks for that."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_fence
from lowdiff.recovery.inspect.branch import start_run
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.inspect.timeline import timeline
from lowdiff.recovery.inspect.verify import verify
from lowdiff.types import Decision
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import Loop, small_model

LAST, DURABLE = 48, 40
HELD_OUT = torch.randn(64, 20, generator=torch.Generator().manual_seed(99))
STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {},
    "replica": {"compressor": None},
    "survivors": {"compressor": None, "strategy": "survivors"},
}


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Falls with every step of these trainings."""
    model.eval()
    return float(model(HELD_OUT).square().mean())


def loop(folder: Path, **settings: Any) -> Loop:
    return Loop(
        folder,
        make=lambda parameters: torch.optim.AdamW(
            parameters, lr=1e-3
        ),  # slow, so that it goes on falling
        settings={"snapshot_every": 10, "batch_size": 1000, **settings},
    )


def lose(folder: Path, **settings: Any) -> Loop:
    """Train, and lose the machine's memory: what comes back is the last durable snapshot's step."""
    lost = loop(folder, **settings)
    lost.attach()
    for number in lost.checkpointer.steps(LAST):
        lost.step(number)
        if number == DURABLE:
            testing.wait_until(
                lost.checkpointer, lambda stats: stats["durable_snapshot"] >= DURABLE
            )
    lost.die()
    shutil.rmtree(folder / "staging")
    return lost


def predicting(folder: Path, validate: Callable[[nn.Module], float], **settings: Any) -> Loop:
    return loop(folder, lost_steps="predict", validate=validate, **settings)


def decision_of(folder: Path) -> Decision | None:
    run = RunFolder(folder / "run")
    return read_fence(run.fence(max(run.incarnations()), 0)).lost_tail


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_made_again_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    lose(tmp_path, **STRATEGIES[name])
    with caplog.at_level(logging.WARNING, "lowdiff"):
        again = loop(tmp_path, **STRATEGIES[name])
        assert again.attach() == DURABLE
    (line,) = [record.getMessage() for record in caplog.records if "LD315" in record.getMessage()]
    assert f"step {LAST}, and the newest that can be recovered is {DURABLE}: 8 step(s)" in line
    assert decision_of(tmp_path) is None
    again.checkpointer.close()


def test_nothing_is_lost_where_every_step_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = loop(tmp_path)
    killed.attach()
    for number in killed.checkpointer.steps(8):
        killed.step(number)
    killed.die()

    def refuse(model: nn.Module) -> float:
        raise AssertionError("there is nothing to predict")

    with caplog.at_level(logging.WARNING, "lowdiff"):
        again = predicting(tmp_path, refuse)
        assert again.attach() == 8
        again.checkpointer.close()
        back = predicting(tmp_path, refuse)
        assert back.attach(step=3) == 3  # the user's own choice
        back.die()
        last = predicting(tmp_path, refuse)
        assert last.attach() == 3
        last.checkpointer.close()
    assert not {getattr(r, "code", "") for r in caplog.records} & {"LD315", "LD316"}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_lost_steps_are_predicted_and_the_run_says_since_when_it_is_inexact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    lost = lose(tmp_path, **STRATEGIES[name])
    before = lowdiff.recover(tmp_path / "run", DURABLE)
    again = predicting(tmp_path, held_out, **STRATEGIES[name])
    with caplog.at_level(logging.WARNING, "lowdiff"):
        assert again.attach() == LAST
    assert (
        f"LD316: steps {DURABLE + 1} to {LAST} are lost; inexact since step {LAST}" in caplog.text
    )

    decision = decision_of(tmp_path)
    assert decision is not None
    assert (decision.base_step, decision.step) == (DURABLE, LAST)
    assert decision.losses[decision.chosen] == min(decision.losses.values())
    assert decision.losses["stale"] > 1.01 * decision.losses[decision.chosen]
    again.model.eval()
    assert held_out(again.model) == decision.losses[decision.chosen]
    again.model.train()
    # Moments and buffers are those of the last state, the count of steps is not.
    old = before.optimizer_state_dict()["state"][0]
    new = again.optimizer.state_dict()["state"][0]
    assert torch.equal(old["exp_avg"], new["exp_avg"])
    assert (float(old["step"]), float(new["step"])) == (DURABLE, LAST)
    buffers = before.model_state_dict()
    assert torch.equal(again.weights()["1.running_mean"], buffers["1.running_mean"])
    assert not torch.equal(again.weights()["0.weight"], lost.weights()["0.weight"])

    begun = again.weights()
    for number in again.checkpointer.steps(LAST + 5):
        again.step(number)
    again.checkpointer.close()
    ended = again.weights()
    run = tmp_path / "run"
    found = lowdiff.recover(run, LAST).model_state_dict()
    assert all(torch.equal(found[key], values) for key, values in begun.items())
    resumed = predicting(tmp_path, held_out, **STRATEGIES[name])
    assert resumed.attach() == LAST + 5
    assert all(torch.equal(resumed.weights()[key], values) for key, values in ended.items())
    resumed.checkpointer.close()

    assert inspect(run).lost_tails == (decision,)
    report = verify(run)
    assert report.ok, report.failures
    assert str(decision) in [note.message for note in report.notes]
    with pytest.raises(StepNotFound, match=f"step {DURABLE + 1} was lost, and the run went on"):
        lowdiff.recover(run, DURABLE + 3)
    if name == "log":
        measured = timeline(run)
        assert measured.lost_tails == (decision,)
        assert measured.steps[0].step == LAST + 1
        json.dumps(measured.document(), allow_nan=False)
    json.dumps(inspect(run).document(), allow_nan=False)


@pytest.mark.slow
def test_who_goes_back_before_the_prediction_is_exact_again(tmp_path: Path) -> None:
    lose(tmp_path)
    predicted = predicting(tmp_path, held_out)
    predicted.attach()
    predicted.checkpointer.close()
    assert len(inspect(tmp_path / "run").lost_tails) == 1
    back = loop(tmp_path)
    assert back.attach(step=DURABLE - 5) == DURABLE - 5
    back.step(0)
    back.checkpointer.close()
    assert inspect(tmp_path / "run").lost_tails == ()
    assert verify(tmp_path / "run").ok


def raising(model: nn.Module) -> float:
    raise OSError("the held-out file is gone")


def not_a_number(model: nn.Module) -> float:
    return math.nan


def constant(model: nn.Module) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("validate", "why"),
    [
        (raising, "validate raised RuntimeError('OSError: the held-out file is gone')"),
        (not_a_number, "the last state's loss is no finite number"),
        (constant, "0.99 was needed"),
    ],
)
def test_nothing_is_predicted_where_the_users_loss_does_not_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, validate: Any, why: str
) -> None:
    lose(tmp_path)
    before = lowdiff.recover(tmp_path / "run", DURABLE)
    again = predicting(tmp_path, validate)
    with caplog.at_level(logging.WARNING, "lowdiff"):
        assert again.attach() == DURABLE
    assert "LD315" in caplog.text
    assert why in caplog.text
    exact = before.model_state_dict()
    assert all(torch.equal(exact[key], values) for key, values in again.weights().items())
    assert again.model.training
    again.checkpointer.close()
    decision = decision_of(tmp_path)
    assert decision is not None
    assert why in decision.reason
    assert inspect(tmp_path / "run").lost_tails == (decision,)
    assert verify(tmp_path / "run").ok


def test_a_history_of_one_state_predicts_nothing(tmp_path: Path) -> None:
    lost = loop(tmp_path, snapshot_every=1000)
    lost.attach()
    for number in lost.checkpointer.steps(9):
        lost.step(number)
    lost.die()
    shutil.rmtree(tmp_path / "staging")
    again = predicting(tmp_path, held_out, snapshot_every=1000)
    assert again.attach() == 0
    decision = decision_of(tmp_path)
    assert decision is not None
    assert decision.chosen == ""
    assert "no predictor made a candidate" in decision.reason
    assert set(decision.losses) == {"stale"}
    assert "needs 2 states" in decision.refused["damped linear"]
    again.checkpointer.close()


def test_what_validate_leaves_in_the_model_is_gone(tmp_path: Path) -> None:
    lose(tmp_path)

    def careless(model: nn.Module) -> float:
        loss = held_out(model)
        model.train()
        model(HELD_OUT)  # moves the running averages
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        return loss

    again = predicting(tmp_path, careless)
    assert again.attach() == LAST
    again.checkpointer.close()
    clean = tmp_path / "clean"
    clean.mkdir()
    lose(clean)
    other = predicting(clean, held_out)
    other.attach()
    assert all(torch.equal(other.weights()[k], v) for k, v in again.weights().items())
    other.checkpointer.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lost_steps": "guess"}, "lost_steps is one of"),
        ({"lost_steps": "predict"}, "needs validate="),
        ({"lost_steps": "predict", "validate": 3}, "needs validate="),
        ({"validate": held_out}, 'give lost_steps="predict"'),
        (
            {
                "lost_steps": "predict",
                "validate": held_out,
                "optimizer_steps": "any",
                "compressor": None,
            },
            "does not go with optimizer_steps",
        ),
        (
            {
                "lost_steps": "predict",
                "validate": held_out,
                "publish": lowdiff.Publisher("elsewhere"),
            },
            "does not go with publish",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        loop(tmp_path, **settings)


def life(rank: int, world_size: int, folder: str, what: str) -> tuple[int, str, str]:
    """A pool's job: a life that loses its memory, or one that predicts what that had made."""
    torch.manual_seed(0)
    model = wrapped(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def validate(own: nn.Module) -> float:
        if what == "raises" and rank == 2:
            raise ValueError("only here")
        return held_out(own) * (1 + rank)

    own = f"{folder}/staging-{rank}"
    settings: dict[str, Any] = {"snapshot_every": 10, "batch_size": 1000, "retention": None}
    if what != "loses":
        settings |= {"lost_steps": "predict", "validate": validate}
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(0.1), staging=own, node=str(rank), **settings
    )
    begun = checkpointer.attach(model, optimizer)
    weights = "".join(parameter.sum().item().hex() for parameter in model.module.parameters())
    for step in checkpointer.steps(LAST if what == "loses" else begun + 3):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step + 100 * rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if step == DURABLE and what == "loses":
            testing.wait_until(checkpointer, lambda stats: stats["durable_snapshot"] >= DURABLE)
    if what == "loses":
        testing.kill(checkpointer)
        shutil.rmtree(own)
        return begun, weights, ""
    checkpointer.close()
    return begun, weights, str(decision_of(Path(folder)))


@pytest.mark.parametrize("what", ["agrees", "raises"])
def test_all_ranks_take_the_same_prediction_or_none(pool: Pool, tmp_path: Path, what: str) -> None:
    pool.run(life, 3, str(tmp_path), "loses")
    lives = pool.run(life, 3, str(tmp_path), what)
    assert len(set(lives)) == 1
    begun, _, told = lives[0]
    if what == "agrees":
        assert begun == LAST - 1  # ranks hear of the last one with the next step
        assert "predicted by" in told
    else:
        assert begun == DURABLE
        assert "rank 2: ValueError: only here" in told
    assert verify(tmp_path / "run", tmp_path / "none").ok


def lazily_masked(model: nn.Module) -> float:
    if not hasattr(model, "mask"):
        model.register_buffer("mask", torch.ones(3))
    return held_out(model)


def frozen(model: nn.Module) -> float:
    model.requires_grad_(False)
    return held_out(model)


def in_double(model: nn.Module) -> float:
    model.double().eval()
    with torch.inference_mode():
        return float(model(HELD_OUT.double()).square().mean())


def replacing(model: nn.Module) -> float:
    loss = held_out(model)
    linear = model.get_submodule("0")
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach() * 2)
    return loss


@pytest.mark.parametrize("validate", [lazily_masked, frozen, in_double, replacing])
def test_what_validate_makes_of_the_model_is_undone(tmp_path: Path, validate: Any) -> None:
    lose(tmp_path)
    again = predicting(tmp_path, validate)
    before = dict(again.model.named_parameters())
    assert again.attach() == LAST
    after = dict(again.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in after.values())
    assert not hasattr(again.model, "mask")
    for number in again.checkpointer.steps(LAST + 2):
        again.step(number)
    again.checkpointer.close()


def test_a_prediction_is_pinned_and_branched_like_any_step(tmp_path: Path) -> None:
    lose(tmp_path)
    again = predicting(tmp_path, held_out)
    again.attach()
    again.checkpointer.keep(label="predicted")
    for number in again.checkpointer.steps(LAST + 4):
        again.step(number)
    again.checkpointer.close()
    assert [pin.is_void for pin in inspect(tmp_path / "run").pins] == [False]
    for step in (LAST, LAST + 2):
        new = tmp_path / f"from-{step}"
        start_run(lowdiff.recover(tmp_path / "run", step), new)
        assert verify(new).ok


def test_a_state_that_is_not_finite_predicts_nothing(tmp_path: Path) -> None:
    lost = loop(tmp_path)
    lost.attach()
    for number in lost.checkpointer.steps(LAST):
        lost.step(number)
        with torch.no_grad():
            next(lost.model.parameters()).fill_(math.nan)
        if number == DURABLE:
            testing.wait_until(
                lost.checkpointer, lambda stats: stats["durable_snapshot"] >= DURABLE
            )
    lost.die()
    shutil.rmtree(tmp_path / "staging")
    again = predicting(tmp_path, held_out)
    assert again.attach() == DURABLE
    decision = decision_of(tmp_path)
    assert decision is not None
    assert "the last state is not finite" in decision.reason
    again.checkpointer.close()


def test_a_death_in_attach_does_not_hide_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lose(tmp_path)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.attach.open.begin", die)
        with pytest.raises(KeyboardInterrupt):
            predicting(tmp_path, held_out).attach()
    assert inspect(tmp_path / "run").lost_tails == ()  # nothing came of it
    with caplog.at_level(logging.WARNING, "lowdiff"):
        again = predicting(tmp_path, held_out)
        assert again.attach() == LAST
    assert "LD316" in caplog.text
    again.checkpointer.close()
    assert verify(tmp_path / "run").ok
