"""Predictors on histories whose next state is known, the gate, and states with predicted parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError
from lowdiff.recovery.prediction import (
    AutoRegressive,
    DampedLinear,
    History,
    Predictor,
    Stale,
    Temporal,
    backtest,
    choose,
    predicted_state,
)
from lowdiff.recovery.prediction.predictors import denoised
from tests.unit.loops import Loop

PREDICTORS: list[Predictor] = [
    DampedLinear(),
    AutoRegressive(),
    AutoRegressive(kept=0.5),
    Temporal(),
]
EVEN, UNEVEN = tuple(range(0, 120, 10)), (0, 7, 20, 33, 38, 52, 60, 71, 83, 90, 104, 110)


def decaying(step: float) -> dict[str, torch.Tensor]:
    """Every element falls from its own height by a common rate."""
    heights = torch.linspace(-2, 3, 400)
    return {
        "a": heights[:300] * math.exp(-step / 60),
        "b": 1 + heights[300:] * math.exp(-step / 60),
    }


def history(steps: tuple[int, ...], noise: float = 0.0) -> History:
    generator = torch.Generator().manual_seed(0)
    rows = [decaying(step) for step in steps]
    return History(
        steps,
        {
            name: torch.stack([row[name] for row in rows])
            + noise * torch.randn(len(steps), len(rows[0][name]), generator=generator)
            for name in rows[0]
        },
    )


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((found[n] - wanted[n]).square().sum()) for n in wanted))


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.parametrize("steps", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("ahead", [3, 10, 25])
@pytest.mark.parametrize("predictor", PREDICTORS, ids=lambda one: one.name)
def test_a_smooth_course_is_predicted_closer_than_by_the_last_state(
    predictor: Predictor, steps: tuple[int, ...], ahead: int
) -> None:
    wanted = decaying(110 + ahead)
    stale = distance(Stale().predict(history(steps), 110 + ahead), wanted)
    assert distance(predictor.predict(history(steps), 110 + ahead), wanted) < 0.6 * stale


@pytest.mark.slow
@pytest.mark.parametrize("predictor", [Stale(), *PREDICTORS], ids=lambda one: one.name)
def test_a_backtest_predicts_every_state_from_those_before_it(predictor: Predictor) -> None:
    found = dict(backtest(predictor, history(EVEN)))
    assert list(found)[-1] == len(EVEN) - 1
    before = history(EVEN).until(EVEN[-2])
    wanted = distance(predictor.predict(before, EVEN[-1]), decaying(EVEN[-1])) ** 2 / 400
    assert found[len(EVEN) - 1] == pytest.approx(wanted, rel=1e-4)


def test_auto_regression_continues_what_it_can_express() -> None:
    found = AutoRegressive().predict(history(EVEN), 130)
    assert distance(found, decaying(130)) < 0.02 * distance(
        Stale().predict(history(EVEN), 130), decaying(130)
    )


def test_denoising_takes_noise_out_of_a_line() -> None:
    line = torch.linspace(0, 1, 16)[:, None] * torch.tensor([1.0, -2.0])
    noise = 0.1 * torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
    noise[[0, -1]] = 0.0
    assert denoised(line, 0.3).sub(line).abs().max() < 1e-6
    assert denoised(line + noise, 0.3).sub(line).square().sum() < 0.5 * noise.square().sum()
    torch.testing.assert_close(denoised(line + noise, 1.0), line + noise)


def test_where_all_frequencies_stay_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a transform and back would round")

    monkeypatch.setattr(torch.fft, "rfft", refuse)
    AutoRegressive().predict(history(EVEN), 130)
    with pytest.raises(AssertionError):
        AutoRegressive(kept=0.5).predict(history(EVEN), 130)


def test_no_generator_of_the_users_is_touched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = Temporal(rounds=3).predict(history(EVEN), 120)
    assert torch.equal(torch.get_rng_state(), before)
    again = Temporal(rounds=3).predict(history(EVEN), 120)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("steps", "shape"),
    [((), (0, 3)), ((2, 2), (2, 3)), ((3, 1), (2, 3)), ((1, 2), (3, 3)), ((1, 2), (2,))],
)
def test_a_history_that_is_none_is_refused(steps: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        History(steps, {"a": torch.zeros(shape)})


@pytest.mark.parametrize("settings", [{"window": 0}, {"kept": 0.0}, {"kept": 1.5}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        AutoRegressive(**settings)  # type: ignore[arg-type]


# The gate


def to(wanted: Mapping[str, torch.Tensor]) -> Callable[[Mapping[str, torch.Tensor]], float]:
    return lambda found: distance(found, wanted)


@pytest.mark.slow
def test_the_gate_takes_the_best_and_says_by_how_much() -> None:
    decision, taken = choose(history(EVEN), 120, to(decaying(120)))
    assert taken is not None
    assert decision.chosen == min(decision.losses, key=lambda name: decision.losses[name])
    assert distance(taken, decaying(120)) == pytest.approx(decision.losses[decision.chosen])
    assert decision.losses[decision.chosen] < 0.5 * decision.losses["stale"]
    assert (decision.base_step, decision.step) == (110, 120)


@pytest.mark.slow
def test_nothing_is_taken_that_does_not_beat_the_last_state() -> None:
    decision, taken = choose(history(EVEN), 120, to(decaying(110)))
    assert taken is None
    assert not decision.chosen
    assert "nothing is predicted" in decision.reason
    narrow, _ = choose(history(EVEN), 120, to(decaying(120)), margin=0.9999)
    assert not narrow.chosen


def test_a_history_that_is_too_short_is_said() -> None:
    decision, taken = choose(history(EVEN).until(0), 120, to(decaying(120)))
    assert taken is None
    assert set(decision.refused) == {one.name for one in PREDICTORS}
    assert "needs 2 states, the history has 1" in decision.refused["damped linear"]


@pytest.mark.parametrize("answer", [math.nan, math.inf])
def test_a_loss_of_the_last_state_that_is_no_number_predicts_nothing(answer: float) -> None:
    decision, taken = choose(history(EVEN), 120, lambda _: answer)
    assert taken is None
    assert "no finite number" in decision.reason


@pytest.mark.slow
def test_a_candidate_whose_loss_is_no_number_is_passed_over() -> None:
    losses = iter([2.0, math.nan, 1.0, math.nan, math.nan])  # the last state, then each predictor
    decision, taken = choose(history(EVEN), 120, lambda _: next(losses))
    assert taken is not None
    assert decision.chosen == "auto-regressive"
    assert decision.losses["damped linear"] == math.inf


def test_a_validate_that_raises_predicts_nothing() -> None:
    def broken(_: object) -> float:
        raise ZeroDivisionError("no data")

    decision, taken = choose(history(EVEN), 120, broken)
    assert taken is None
    assert "ZeroDivisionError" in decision.reason


@pytest.mark.parametrize(
    ("step", "margin"), [(110, 0.01), (90, 0.01), (120, -1.0), (120, math.nan)]
)
def test_what_is_not_lost_and_margins_that_are_none_are_refused(step: int, margin: float) -> None:
    with pytest.raises(ConfigError):
        choose(history(EVEN), step, lambda _: 1.0, margin=margin)


# States of a run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    loop = Loop(
        tmp_path, settings={"compressor": TopK(0.1), "snapshot_every": 5, "retention": None}
    )
    loop.run(30)
    return tmp_path


def test_any_steps_of_a_run_are_a_history(run: Path) -> None:
    steps = [4, 9, 17, 30]
    found = History.of_run(run / "run", steps, staging=run / "staging")
    assert found.steps == tuple(steps)
    for row, step in enumerate(steps):
        state = lowdiff.recover(run / "run", step, staging=run / "staging")
        for name, values in state.parameters.items():
            assert torch.equal(found.parameters[name][row], values)


def test_a_predicted_state_advances_counts_and_keeps_all_else(run: Path) -> None:
    state = lowdiff.recover(run / "run", 30, staging=run / "staging")
    wanted = {name: values + 1 for name, values in state.parameters.items()}
    made = predicted_state(state, wanted, 42)
    assert made.step == 42
    assert state.step == 30
    for name, values in made.parameters.items():
        assert torch.equal(values, wanted[name])
        ours, theirs = made.optimizers[0].state[name], state.optimizers[0].state[name]
        assert float(ours["step"]) == float(theirs["step"]) + 12 == 42
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    assert made.items == state.items


@pytest.mark.cases(2)
@pytest.mark.parametrize("broken", ["missing", "size", "nan", "step"])
def test_a_prediction_that_does_not_fit_is_refused(run: Path, broken: str) -> None:
    state = lowdiff.recover(run / "run", 30, staging=run / "staging")
    values = dict(state.parameters)
    name = next(iter(values))
    if broken == "missing":
        del values[name]
    elif broken == "size":
        values[name] = values[name][1:]
    elif broken == "nan":
        values[name] = torch.full_like(values[name], math.nan)
    with pytest.raises(ConfigError):
        predicted_state(state, values, 30 if broken == "step" else 42)


@pytest.mark.slow
def test_an_empty_parameter_and_a_predictor_that_fails_stop_nothing() -> None:
    class Failing:
        name, least_states = "failing", 1

        def predict(self, history: History, step: int) -> dict[str, torch.Tensor]:
            raise RuntimeError("singular")

    base = history(EVEN)
    with_empty = History(base.steps, {**base.parameters, "e": torch.zeros(len(EVEN), 0)})
    decision, taken = choose(
        with_empty,
        130,
        lambda made: distance({n: made[n] for n in ("a", "b")}, decaying(130)),
        predictors=[Failing(), *PREDICTORS],
    )
    assert decision.refused == {"failing": "singular"}
    assert taken is not None
    assert set(taken) == {"a", "b", "e"}
