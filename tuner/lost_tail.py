"""How often to save where steps lost in a failure are predicted from past states instead of trained again.

Reference: Wang et al., "Rehabilitating over Recomputing" (CPSR). A predictor learns from the saved states
how parameters move. After a failure the predictor supplies the state that was lost, and training goes on
from there with a somewhat higher loss. The paper's letters stand in brackets.

The paper's text was not at hand. Given were the forms of the two loss curves and the closed form in
`interval_closed_form`. The cost below was derived backwards, until its minimum was that closed form:

1. The loss of training is ``exp(-a1 t + a2)``, ``t`` seconds after the predictor began.
2. Each save gives the predictor one state, and the predictor learns one round from it. After ``n`` saves the
   squared error of one predicted parameter is ``exp(-tau1 n + tau2)``; at time ``t``, ``n = t / T``.
3. An error of squared length ``e`` raises the loss by about ``xi e / 2``, a Taylor expansion about the lost
   state with curvature ``xi``. All ``N_p`` parameters make ``e = N_p exp(-tau1 t / T + tau2)``.
4. Training lowers the loss by ``a1 exp(-a1 t + a2)`` a second. To win the excess back takes
   ``R(t) = K exp((a1 - tau1 / T) t)`` seconds, with ``K = xi N_p exp(tau2 - a2) / (2 a1)``.
5. A failure comes at an exponential time of rate ``lambda``. With ``B = a1 - lambda`` the mean of ``R`` is
   ``K lambda / (tau1 / T - B)``. The mean exists only where ``tau1 / T > B``: otherwise the loss of training
   falls faster than the predictor follows.
6. Saving takes ``T_s / T`` of all time, and failures come ``lambda`` times a second::

       cost(T) = T_s / T + lambda K lambda / (tau1 / T - B)

   With ``A = K tau1``, the zero of the derivative with respect to ``1 / T`` is exactly
   ``T_c = tau1 / (B + lambda sqrt(A / T_s))``. The cost is convex in ``1 / T``, so no other interval costs less,
   and the nearest end of a range is the best of the range.

Steps 2 and 3 hold choices that the closed form does not settle: ``tau1`` counts saves, because only then do the
units of ``B`` and of the square root agree; and ``xi`` is taken for a curvature, because of the 2 in ``A``. Step 4
is of first order and overstates ``R`` where the excess is not small beside the loss. Steps 5 and 6 let
the predictor and both curves begin anew after each failure (`LossCurve.since` moves the beginning). A predictor
that learns on through failures costs less than this where ``tau1 / T > a1``, and more where not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from typing_extensions import Self

from lowdiff.errors import ConfigError

#: Share of the variance of log loss that a curve must explain before its interval is taken. Our choice: of fits to ten
#: points with so much noise, half miss the rate by more than a tenth.
MIN_R_SQUARED = 0.8
#: Points of a fit: two always lie on a line, and so say nothing about its quality.
_MIN_POINTS = 3


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss of training, ``loss(t) = exp(-a1 t + a2)`` (CPSR, the model's convergence).

    Attributes:
        a1: Fall of log loss per unit of ``t``: per step as fitted over steps, see `over_seconds`.
        a2: Log loss at ``t = 0``.
        r_squared: Share of the variance of log loss that the curve explains (R²), at most 1; 0 for losses that are
            all equal.
    """

    a1: float
    a2: float
    r_squared: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Fit the curve by least squares on log loss.

        Args:
            points: Steps and losses; steps ascend.

        Raises:
            ConfigError: If there are fewer than 3 points, a loss is not positive and finite, or steps do not ascend.
        """
        return cls(*_fitted(points))

    def at(self, t: float) -> float:
        """Return the loss at ``t``."""
        return _exp(self.a2 - self.a1 * t)

    def since(self, start: float) -> LossCurve:
        """Return the same curve with ``t`` counted from ``start``, for a predictor that begins there."""
        return LossCurve(self.a1, self.a2 - self.a1 * start, self.r_squared)

    def over_seconds(self, step_seconds: float) -> LossCurve:
        """Return a curve over steps as one over seconds.

        Args:
            step_seconds: Time of one step.

        Raises:
            ConfigError: If the time of a step is not positive and finite.
        """
        if not 0 < step_seconds < math.inf:
            raise ConfigError(f"a step takes a positive time, got {step_seconds} s")
        return LossCurve(self.a1 / step_seconds, self.a2, self.r_squared)


@dataclass(frozen=True, slots=True)
class PredictorCurve:
    """Loss of a predictor, ``loss(n) = exp(-tau1 n + tau2)`` (CPSR, the predictor's convergence).

    The loss is the mean squared error of one parameter.

    Attributes:
        tau1: Fall of log loss per unit of ``n``: per save, for an interval; see `per_save`.
        tau2: Log loss at ``n = 0``.
        r_squared: Share of the variance of log loss that the curve explains (R²), at most 1; 0 for losses that are
            all equal.
    """

    tau1: float
    tau2: float
    r_squared: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Fit the curve by least squares on log loss.

        Args:
            points: How long the predictor had trained (saves, epochs or seconds) and its loss then; ascending.

        Raises:
            ConfigError: If there are fewer than 3 points, a loss is not positive and finite, or times do not ascend.
        """
        return cls(*_fitted(points))

    def at(self, n: float) -> float:
        """Return the loss after ``n``."""
        return _exp(self.tau2 - self.tau1 * n)

    def per_save(self, training: float) -> PredictorCurve:
        """Return a curve over epochs or seconds as one over saves.

        Args:
            training: Epochs or seconds that the predictor trains for each save.

        Raises:
            ConfigError: If the training is not positive and finite.
        """
        if not 0 < training < math.inf:
            raise ConfigError(f"a predictor trains a positive time for each save, got {training}")
        return PredictorCurve(self.tau1 * training, self.tau2, self.r_squared)


@dataclass(frozen=True, slots=True)
class Curves:
    """What one training says about predicting its steps.

    Attributes:
        loss: Over steps.
        predictor: Over saves.
    """

    loss: LossCurve
    predictor: PredictorCurve

    @classmethod
    def fit(
        cls, losses: Sequence[tuple[float, float]], errors: Sequence[tuple[float, float]]
    ) -> Self:
        """Fit both.

        Args:
            losses: Steps and losses of the training; steps ascend.
            errors: Saves and the mean squared error of a parameter that was predicted from so many, as
                `lowdiff.recovery.prediction.backtest` finds them; saves ascend.

        Raises:
            ConfigError: If a curve cannot be fitted.
        """
        return cls(LossCurve.fit(losses), PredictorCurve.fit(errors))

    def planned(
        self,
        *,
        num_parameters: float,
        step_seconds: float,
        failures_per_second: float,
        save_seconds: float,
    ) -> Interval:
        """Choose the interval between saves; see `PredictedJob` and `planned_interval`."""
        loss = self.loss.over_seconds(step_seconds)
        return planned_interval(
            PredictedJob(loss, self.predictor, num_parameters, failures_per_second, save_seconds)
        )


@dataclass(frozen=True, slots=True)
class PredictedJob:
    """A job whose lost steps are predicted.

    All times have one unit. Seconds are named here; steps do as well, if the curve and all else are per step.

    Attributes:
        loss: Over seconds since the predictor began.
        predictor: Over saves.
        num_parameters: Number of parameters of the model (``N_p``).
        failures_per_second: Failures of the whole job in a second (``lambda``).
        save_seconds: Time that training stops for one save (``T_s``).
        xi: Excess loss of a prediction over half its squared error (``xi``), see `calibrated`.

    Raises:
        ConfigError: If a value is not positive and finite, a curve's rate or offset is not finite, or a save takes
            longer than the mean time between failures.
    """

    loss: LossCurve
    predictor: PredictorCurve
    num_parameters: float
    failures_per_second: float
    save_seconds: float
    xi: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self)[2:]:
            _check_positive(field.name, getattr(self, field.name))
        exponents = {
            "a1": self.loss.a1,
            "a2": self.loss.a2,
            "tau1": self.predictor.tau1,
            "tau2": self.predictor.tau2,
        }
        for name, value in exponents.items():
            if not math.isfinite(value):
                raise ConfigError(f"{name} must be finite, got {value}")
        if self.save_seconds * self.failures_per_second > 1:
            raise ConfigError(
                f"a save takes {self.save_seconds:g} s, but failures are "
                f"{1 / self.failures_per_second:g} s apart: no interval keeps anything; save less "
                "or faster"
            )


@dataclass(frozen=True, slots=True)
class Interval:
    """How often to save.

    Attributes:
        seconds: Time between saves, from one save's time to the mean time between failures; in the job's unit.
        by: ``"closed form"``; ``"clamped"`` for the end of the range nearest to the closed form; ``"Young"``
            for Young's interval, which counts with lost steps that are trained again.
        reason: Why, as a sentence without a full stop.
    """

    seconds: float
    by: Literal["closed form", "clamped", "Young"]
    reason: str


def excess_loss(job: PredictedJob, saves: float) -> float:
    """Return how much a prediction raises the loss: ``xi N_p exp(-tau1 n + tau2) / 2``.

    Source: step 3 of the module's derivation.

    Args:
        job: The job.
        saves: States that the predictor has learned from (``n``).
    """
    return job.xi * job.num_parameters * job.predictor.at(saves) / 2


def calibrated(
    xi: float, modelled: Sequence[float], observed: Sequence[float], *, weight: float = 0.0
) -> float:
    """Return ``xi`` corrected by past predictions: multiplied by the geometric mean of observed to modelled loss.

    An average of logarithms lets a prediction that was twice too high and one that was half as high as modelled
    cancel. The paper names ``xi`` a constant from past predictions (CPSR); how it averages was not at hand.

    Args:
        xi: The constant that ``modelled`` was computed with.
        modelled: Excess loss of each prediction, as `excess_loss` has it.
        observed: Loss right after each prediction less the loss before the failure.
        weight: Earlier predictions that ``xi`` stands for; each counts as much as a new one.

    Raises:
        ConfigError: If there is no prediction, the sequences differ in length, ``weight`` is negative, or a value is
            not positive and finite.
    """
    _check_positive("xi", xi)
    if not modelled or len(modelled) != len(observed):
        raise ConfigError(
            "calibration takes one modelled and one observed excess loss of each prediction, at "
            f"least one; got {len(modelled)} and {len(observed)}"
        )
    if not 0 <= weight < math.inf:
        raise ConfigError(f"weight must be at least 0, got {weight}")
    for name, values in (("modelled", modelled), ("observed", observed)):
        for value in values:
            _check_positive(f"{name} excess loss", value)
    ratios = [math.log(o) - math.log(m) for m, o in zip(modelled, observed, strict=True)]
    return xi * _exp(math.fsum(ratios) / (len(ratios) + weight))


def cost(job: PredictedJob, interval: float) -> float:
    """Return the expected cost of saving and of failures: ``T_s / T + lambda K lambda / (tau1 / T - B)``.

    Source: step 6 of the module's derivation, which says where the paper was not at hand.

    Args:
        job: The job.
        interval: Time between saves in seconds (``T``).

    Returns:
        Lost seconds per second of training; infinite where the predictor does not follow training
        (``tau1 / T <= B``), and where the loss does not fall (``a1 <= 0``), so that no excess is won back.

    Raises:
        ConfigError: If the interval is not positive and finite.
    """
    _check_positive("interval", interval)
    saving = job.save_seconds / interval
    failures = job.failures_per_second
    lead = job.predictor.tau1 / interval - (job.loss.a1 - failures)
    if job.loss.a1 <= 0 or lead <= 0:
        return math.inf
    return saving + failures * _first_recovery(job) * failures / lead


def interval_closed_form(job: PredictedJob) -> float:
    """Return the interval of least `cost`: ``T_c = tau1 / (B + lambda sqrt(A / T_s))``.

    ``A = xi N_p tau1 exp(tau2 - a2) / (2 a1)`` and ``B = a1 - lambda`` (CPSR, optimal checkpoint interval; no
    section at hand). The interval is not clamped, and the quality of the fits is not looked at.

    Returns:
        Time between saves in seconds; 0 where predictions are so bad that the denominator overflows.

    Raises:
        ConfigError: If the loss or the predictor's loss does not fall, or the denominator is not positive.
    """
    flaw = _flaw(job)
    if flaw:
        raise ConfigError(f"the closed form has no interval: {flaw}")
    return job.predictor.tau1 / _denominator(job)


def young_interval(failures_per_second: float, save_seconds: float) -> float:
    """Return ``sqrt(2 T_s / lambda)`` in seconds (Young, CACM 17, 1974, https://doi.org/10.1145/361147.361115).

    Raises:
        ConfigError: If a value is not positive and finite.
    """
    _check_positive("failures_per_second", failures_per_second)
    _check_positive("save_seconds", save_seconds)
    return math.sqrt(2 * save_seconds / failures_per_second)


def planned_interval(job: PredictedJob, *, min_r_squared: float = MIN_R_SQUARED) -> Interval:
    """Choose the interval: the closed form where its curves can be trusted, otherwise Young's.

    Both are clamped to ``[T_s, 1 / lambda]``. Young's is taken where

    * a curve explains less of the variance of log loss than ``min_r_squared``;
    * the loss of training or of the predictor does not fall;
    * the denominator of the closed form is not positive: the loss falls so slowly beside the failures that `cost`
      only falls as the interval grows, and the end of the range would rest on the predictor alone;
    * `cost` is infinite even with an interval of one save's time: the predictor does not keep up with training.

    Args:
        job: The job.
        min_r_squared: Share of variance that both curves must explain.
    """
    for name, curve in (("training", job.loss), ("predictor", job.predictor)):
        if not curve.r_squared >= min_r_squared:
            return _young(
                job,
                f"the {name} loss does not follow an exponential: R^2 is {curve.r_squared:.2f}, "
                f"below {min_r_squared:.2f}",
            )
    flaw = _flaw(job)
    if flaw:
        return _young(job, flaw)
    best = interval_closed_form(job)
    seconds = _clamped(job, best)
    if seconds > best:
        # Only a longer interval can leave the range in which the cost is finite.
        if math.isinf(cost(job, seconds)):
            return _young(job, "the predictor keeps up with training at no interval")
        reason = f"{best:.3g} s would cost least, but one save takes {seconds:.3g} s"
        return Interval(seconds, "clamped", reason)
    if seconds < best:
        reason = f"{best:.3g} s would cost least, but failures are {seconds:.3g} s apart"
        return Interval(seconds, "clamped", reason)
    return Interval(seconds, "closed form", "saving and recovery by prediction together cost least")


def _fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return rate of fall, offset and R² of a line through the logarithms."""
    if len(points) < _MIN_POINTS:
        raise ConfigError(f"a curve is fitted to at least {_MIN_POINTS} points, got {len(points)}")
    steps = np.array([float(step) for step, _ in points])
    losses = np.array([float(loss) for _, loss in points])
    if not (np.isfinite(losses) & (losses > 0)).all():
        wrong = losses[~(np.isfinite(losses) & (losses > 0))][0]
        raise ConfigError(
            f"losses must be positive and finite, got {wrong:g}; leave such points out"
        )
    if not (np.isfinite(steps).all() and (np.diff(steps) > 0).all()):
        raise ConfigError("steps must be finite and ascend, each once; sort the points by step")
    logs = np.log(losses)
    # Centred and of unit span, so that steps that lie close together far from 0 lose no digits.
    middle, span = float(steps.mean()), float(steps[-1] - steps[0])
    x, y = (steps - middle) / span, logs - logs.mean()
    slope = float(x @ y / (x @ x))
    residual = y - slope * x
    # The mean of equal numbers may differ from them in the last bit, so equal ones are told before.
    r_squared = 1.0 - float(residual @ residual / (y @ y)) if np.ptp(logs) > 0 else 0.0
    rate = -slope / span if np.ptp(logs) > 0 else 0.0
    return rate, float(logs.mean()) + rate * middle, r_squared


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be positive and finite, got {value}")


def _exp(exponent: float) -> float:
    """Return e to that power, infinite instead of an OverflowError."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def _first_recovery(job: PredictedJob) -> float:
    """Return the seconds to win a prediction's excess back right at the beginning (``K``)."""
    ratio = _exp(job.predictor.tau2 - job.loss.a2)
    return job.xi * job.num_parameters * ratio / (2 * job.loss.a1)


def _denominator(job: PredictedJob) -> float:
    """Return ``B + lambda sqrt(A / T_s)``."""
    weight = _first_recovery(job) * job.predictor.tau1 / job.save_seconds
    return job.loss.a1 - job.failures_per_second + job.failures_per_second * math.sqrt(weight)


def _flaw(job: PredictedJob) -> str:
    """Return why the closed form gives no interval; nothing if it does."""
    if job.loss.a1 <= 0:
        return "the loss of training does not fall"
    if job.predictor.tau1 <= 0:
        return "the loss of the predictor does not fall"
    if _denominator(job) <= 0:
        return (
            "the loss of training falls too slowly beside the failures (denominator not positive)"
        )
    return ""


def _clamped(job: PredictedJob, interval: float) -> float:
    return min(max(interval, job.save_seconds), 1 / job.failures_per_second)


def _young(job: PredictedJob, reason: str) -> Interval:
    young = young_interval(job.failures_per_second, job.save_seconds)
    return Interval(_clamped(job, young), "Young", reason)
