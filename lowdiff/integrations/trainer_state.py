"""The state of a Trainer of Transformers beside its model, as objects that every step keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState

from lowdiff.errors import ConfigError, RunMismatch

#: Fields of the TrainerState that training changes; the others come from the arguments, and the history is kept apart.
_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
#: So many bytes of the log are kept as one tensor, which is logged once.
_CHUNK_BYTES = 16384


class TrainerProgress:
    """The small part of a Trainer's state, which every step changes: a stateful object.

    Attributes:
        found: What the run knew; None if nothing.
    """

    def __init__(self, trainer: Any, training: Any) -> None:
        self.found: dict[str, Any] | None = None
        self._trainer, self._training = trainer, training
        #: Whether what was found is not restored, so that it is still the state.
        self._is_waiting = True

    def state_dict(self) -> dict[str, Any]:
        """Return state, sums and place; the sums do not exist before the first ``train()``."""
        if self._is_waiting and self.found is not None:
            return self.found
        trainer, training = self._trainer, self._training
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": {name: _plain(getattr(trainer.state, name)) for name in _STATE},
            "callbacks": _states_of(self._callbacks()),
            "loss": None if loss is None else loss.detach().cpu(),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "first_step": int(getattr(trainer, "_initial_global_step", 0)),
            "flos": float(trainer.current_flos),
            "stopped_of": trainer.state.max_steps if training.is_stopped else None,
            "seconds": training.seconds,
            "epoch": training.epoch,
            "consumed": training.consumed,
            "layout": training.layout,
            "evaluated": sorted(trainer._lowdiff.evaluated),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until it can be restored."""
        self.found = state_dict

    def restore(self) -> None:
        """Restore the TrainerState and callbacks.

        Raises:
            RunMismatch: If the run is within an epoch whose batches were others.
        """
        found, trainer = self.found, self._trainer
        assert found is not None
        now = self._training.layout
        changed = [
            f"{name} {now[name]} instead of {was}"
            for name, was in found["layout"].items()
            if now[name] != was
        ]
        if found["consumed"] and changed:
            raise RunMismatch(
                f"the run is within epoch {found['epoch']}, after {found['consumed']} batches, and has "
                f"{', '.join(changed)} now, so what they were is unknown; keep the earlier arguments until that "
                "epoch is over"
            )
        for name, value in found["state"].items():
            setattr(trainer.state, name, value)
        _restore_states(self._callbacks(), found["callbacks"])

    def begin(self) -> None:
        """Restore what the Trainer sets to zero when training begins, unless the run begins."""
        found, trainer = self.found, self._trainer
        self._is_waiting = False
        if found is None or not self._training.is_resumed:
            return
        if found["loss"] is not None:
            trainer._tr_loss = found["loss"].to(trainer._tr_loss)
        trainer._total_loss_scalar = found["total_loss"]
        trainer._globalstep_last_logged = found["last_logged"]
        trainer._initial_global_step = found["first_step"]
        trainer.current_flos = found["flos"]

    def _callbacks(self) -> list[Any]:
        return [
            c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)
        ]


class LogHistory:
    """The log history, a line of JSON per entry: a stateful object.

    It grows as long as training does, and a step must not log all of it: what is full is a tensor, which is logged
    once.

    Attributes:
        found: What the run knew and is not restored yet; None if nothing.
    """

    def __init__(self, trainer: Any) -> None:
        self.found: dict[str, Any] | None = None
        self._trainer = trainer
        self._clear()

    def _clear(self) -> None:
        self._full: list[torch.Tensor] = []
        self._rest = b""
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all entries."""
        if self.found is not None:
            return self.found
        entries = self._trainer.state.log_history
        if len(entries) < self._count:  # somebody began another list
            self._clear()
        for entry in entries[self._count :]:
            self._rest += json.dumps(entry, default=_plain).encode() + b"\n"
        self._count = len(entries)
        while len(self._rest) >= _CHUNK_BYTES:
            chunk, self._rest = self._rest[:_CHUNK_BYTES], self._rest[_CHUNK_BYTES:]
            self._full.append(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
        return {"full": list(self._full), "rest": self._rest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until it can be restored."""
        self.found = state_dict

    def restore(self) -> None:
        """Restore the history."""
        assert self.found is not None
        text = (
            b"".join(chunk.numpy().tobytes() for chunk in self.found["full"]) + self.found["rest"]
        )
        self._trainer.state.log_history = [json.loads(line) for line in text.splitlines()]
        self.found = None
        self._clear()


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's; all else as it is."""
    return value.item() if isinstance(value, np.generic | torch.Tensor) else value


def _states_of(callbacks: Iterable[Any]) -> str:
    """The states of callbacks in their order, as the Trainer writes them: in JSON.

    Raises:
        ConfigError: If a state has no form in JSON.
    """
    states = []
    for callback in callbacks:
        try:
            states.append([type(callback).__name__, json.dumps(callback.state(), default=_plain)])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(callback).__name__}.state() has no form in JSON ({error}); return plain values"
            ) from error
    return json.dumps(states)


def _restore_states(callbacks: Iterable[Any], text: str) -> None:
    """Give callbacks their states, by class and order; the arguments of their constructors stay the script's."""
    waiting: dict[str, list[dict[str, Any]]] = {}
    for name, state in json.loads(text):
        waiting.setdefault(name, []).append(json.loads(state))
    for callback in callbacks:
        states = waiting.get(type(callback).__name__)
        if not states:
            continue
        state = states.pop(0)
        if type(callback).from_state.__func__ is ExportableState.from_state.__func__:
            for name, value in state.get("attributes", {}).items():
                setattr(callback, name, value)
        else:  # it alone knows how to read its state
            vars(callback).update(vars(type(callback).from_state(state)))
