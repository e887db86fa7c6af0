"""Steps that training had made and no recovery brings back: they are said, or predicted where the user asks for it.

The lease in the run folder tells, to within three seconds, how far the life before had come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch

from lowdiff.attach.restore import load_model
from lowdiff.core.events import Code
from lowdiff.errors import LowDiffError
from lowdiff.model.binding import Attached
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery.plan import recoverable
from lowdiff.recovery.prediction import History, choose, predicted_state
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.search import Search
from lowdiff.recovery.state import RecoveredState, inherit
from lowdiff.settings import Settings
from lowdiff.types import Decision, Reached

#: States of the past that a prediction is made from; each takes 4 bytes per parameter.
_STATES = 12


def lost_until(
    ranks: Ranks, catalog: Catalog, reached: Reached | None, state: RecoveredState
) -> int | None:
    """The step that training had come to, if it is behind the recovered one; the same on every rank.

    Args:
        ranks: All of them.
        catalog: What there is.
        reached: How far an incarnation had come, as far as rank 0 knows. It says nothing if a later one has begun; that
            had come to its base at least.
        state: The newest that was recovered.
    """
    newest = max(catalog.incarnations, default=-1)
    known = -1 if newest < 0 else catalog.incarnations[newest].base_step
    if reached is not None and reached.incarnation == newest:
        known = max(known, reached.step)
    told: int = ranks.gather(known)[0]
    return told if told > state.step else None


def settle_lost_steps(
    settings: Settings,
    attached: Attached,
    catalog: Catalog,
    ranks: Ranks,
    state: RecoveredState,
    step: int,
) -> tuple[RecoveredState, Decision | None]:
    """Say which steps are lost; predict the last of them if the user wants that, on all ranks together.

    Args:
        settings: Of the run.
        attached: Its model is filled with every candidate in turn, and holds any of them afterwards.
        catalog: Where states of the past are.
        ranks: All of them; each calls ``settings.validate``, and the mean of their losses counts.
        state: The newest that was recovered.
        step: The step that training had come to.

    Returns:
        The state to start from, and what was decided; None where nothing was to be.
    """
    if settings.lost_steps == "redo":
        if ranks.rank == 0:
            Code.STEPS_LOST.warn(
                f"training had come to step {step}, and the newest that can be recovered is {state.step}: "
                f"{step - state.step} step(s) are lost and made again",
                step=state.step,
            )
        return state, None
    candidates = _Candidates(settings, attached, ranks, state)
    if ranks.rank == 0:
        decision, parameters = _decided(attached, catalog, candidates, state, step)
        candidates.end(decision)
    else:
        decision, parameters = candidates.follow(), {}
    if not decision.chosen:
        if ranks.rank == 0:
            Code.STEPS_LOST.warn(str(decision), step=state.step)
        return state, decision
    assert parameters is not None
    parameters = {**parameters, **ranks.spread(parameters)}
    if ranks.rank == 0:
        Code.STEPS_PREDICTED.warn(str(decision), step=step)
    return predicted_state(state, parameters, step), decision


def _decided(
    attached: Attached,
    catalog: Catalog,
    candidates: _Candidates,
    state: RecoveredState,
    step: int,
) -> tuple[Decision, Mapping[str, torch.Tensor] | None]:
    """Predict in several ways, and choose; whatever stands in the way is a reason to predict nothing."""
    why = ""
    if state.fence.layout != attached.layout:
        why = "the parameters are divided over the ranks in another way than before"
    else:
        try:
            history = _history(attached, catalog, state, step)
        except (LowDiffError, MemoryError, RuntimeError, OSError) as error:
            why = f"states of the past cannot be had ({type(error).__name__}: {error})"
        else:
            return choose(history, step, candidates.loss)
    return Decision(state.step, step, {}, {}, "", f"{why}; nothing is predicted"), None


def _history(attached: Attached, catalog: Catalog, state: RecoveredState, step: int) -> History:
    """Recover some states before the newest one.

    They lie as far apart as what is to be predicted, or closer where the run does not reach back that far.
    """
    ranges = [
        (first, min(last, state.step)) for first, last in recoverable(catalog) if first < state.step
    ]
    oldest = min((first for first, _ in ranges), default=state.step)
    apart = min(step - state.step, max(1, (state.step - oldest) // (_STATES - 1)))
    wanted = (state.step - number * apart for number in range(1, _STATES))
    at_hand = (
        max((min(last, at) for first, last in ranges if first <= at), default=-1) for at in wanted
    )
    steps = sorted({*at_hand} - {-1, state.step})
    options = ReplayOptions(device=attached.device)
    earlier = (Search(catalog, at, goes_back=False).run(options) for at in steps)
    return History.of_states([*earlier, state])


class _Candidates:
    """What rank 0 predicts, tried by all ranks: each loads it and asks the user's function."""

    def __init__(
        self, settings: Settings, attached: Attached, ranks: Ranks, state: RecoveredState
    ) -> None:
        assert settings.validate is not None
        self._validate: Callable[[torch.nn.Module], float] = settings.validate
        self._attached, self._ranks, self._state = attached, ranks, state
        self._items = inherit(state.items, state.fence.draws, attached.draws, ranks.world_size)[
            ranks.rank
        ]

    def loss(self, parameters: Mapping[str, torch.Tensor]) -> float:
        """Return the mean of all ranks' losses; on rank 0, while the others `follow`.

        Raises:
            RuntimeError: If the user's function raised on any rank.
        """
        self._ranks.gather(None)
        return self._tried(parameters)

    def end(self, decision: Decision) -> None:
        """Tell the others what was decided."""
        self._ranks.gather(asdict(decision))

    def follow(self) -> Decision:
        """Try what rank 0 predicts, until it has decided."""
        while (told := self._ranks.gather(None)[0]) is None:
            try:
                self._tried({})
            except RuntimeError:
                continue  # rank 0 has heard the same, and decides
        return Decision(**told)

    def _tried(self, parameters: Mapping[str, torch.Tensor]) -> float:
        parameters = {**parameters, **self._ranks.spread(parameters)}
        loss, trouble = 0.0, ""
        try:
            loss = self._own_loss(parameters)
        except Exception as error:  # noqa: BLE001  whatever the user's function raises
            trouble = f"{type(error).__name__}: {error}"
        told = self._ranks.gather([loss, trouble])
        for rank, (_, text) in enumerate(told):
            if text:
                raise RuntimeError(f"rank {rank}: {text}" if len(told) > 1 else text)
        return float(sum(own for own, _ in told)) / len(told)

    def _own_loss(self, parameters: Mapping[str, torch.Tensor]) -> float:
        model, known = self._attached.module, self._state.parameters
        made = {name: values.to(known[name].dtype) for name, values in parameters.items()}
        load_model(replace(self._state, parameters=made), self._items, self._attached)
        with _as_it_was(model), torch.no_grad():
            return float(self._validate(model))


@contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Give a model back the tensors and modes that it had; their values are loaded anew."""
    parts = [
        (
            part,
            dict(part._parameters),
            dict(part._buffers),
            set(part._non_persistent_buffers_set),
            part.training,
        )
        for part in model.modules()
    ]
    tensors = [(p, p.data, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for part, parameters, buffers, not_saved, is_training in parts:
            part._parameters.clear()
            part._parameters.update(parameters)
            part._buffers.clear()
            part._buffers.update(buffers)
            part._non_persistent_buffers_set, part.training = not_saved, is_training
        for parameter, data, needs_gradient in tensors:
            parameter.data = data
            parameter.requires_grad_(needs_gradient)
