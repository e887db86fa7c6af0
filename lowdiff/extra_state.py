"""What modules of the model keep beside parameters and buffers: their ``get_extra_state()``."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowdiff.capture import Stateful
from lowdiff.errors import ConfigError
from lowdiff.layout import own_name
from lowdiff.recovery.state import EXTRA_STATE

_logger = logging.getLogger(__name__)

#: What torch appends to a module's prefix in a state dict.
_SUFFIX = "_extra_state"


class ExtraStates:
    """The extra state of all modules of a model, as one stateful object."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        """Speak for the modules in ``module``, whose parameters are on ``device``.

        Raises:
            ConfigError: If one could not take its state back.
        """
        self._device = device
        self._modules: dict[str, torch.nn.Module] = {}
        for part, (key, *_) in extra_state_keys(module).items():
            if type(part).set_extra_state is torch.nn.Module.set_extra_state:
                raise ConfigError(
                    f"{type(part).__name__} has get_extra_state() and no set_extra_state(), so that "
                    f"{key} could not be restored; define both"
                )
            self._modules[key] = part

    def state_dict(self) -> dict[str, Any]:
        """Key in the model's state dict -> the state, and which of its tensors are on a device."""
        found = {}
        for key, part in self._modules.items():
            value = part.get_extra_state()
            found[key] = {"value": value, "on_device": _on_device(value)}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every module its own; who has none keeps what it was built with, and is named."""
        for key, part in self._modules.items():
            if key in state:
                part.set_extra_state(self._placed(**state[key]))
        new = [key for key in self._modules if key not in state]
        gone = [key for key in state if key not in self._modules]
        if new:
            _logger.warning(
                "the run has no state of these modules, which keep what they were built with: %s",
                ", ".join(new),
            )
        if gone:
            _logger.warning(
                "no module of the model takes these states of the run, which are left out: %s",
                ", ".join(gone),
            )

    def _placed(self, value: Any, on_device: list[bool]) -> Any:
        """``value`` with its tensors where they were: modules may keep them as they get them."""
        marks = iter(on_device)
        return _each_tensor(value, lambda t: t.to(self._device) if next(marks) else t)


def with_extra_states(
    stateful: Mapping[str, Stateful], module: torch.nn.Module, device: torch.device
) -> dict[str, Stateful]:
    """What was attached by name, and the extra states of the model if its modules have any.

    Args:
        stateful: What was attached by name.
        module: The user's own model.
        device: Where its parameters live.

    Raises:
        ConfigError: If their name is taken, or a module could not take its state back.
    """
    if EXTRA_STATE in stateful:
        raise ConfigError(
            f"{EXTRA_STATE!r} is the name of what the model's modules keep; attach the object by "
            "another one"
        )
    if not extra_state_keys(module):
        return dict(stateful)
    return {**stateful, EXTRA_STATE: ExtraStates(module, device)}


def extra_state_keys(module: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every module that has extra state -> its keys in the state dict, as parameters are named."""
    found: dict[torch.nn.Module, list[str]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            key = f"{prefix}.{_SUFFIX}" if prefix else _SUFFIX
            found.setdefault(part, []).append(own_name(key))
    return found


def _on_device(value: Any) -> list[bool]:
    """Of each tensor in ``value``, whether it is on an accelerator."""
    found: list[bool] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(not tensor.is_cpu)
        return tensor

    _each_tensor(value, note)
    return found


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with what ``change`` makes of each tensor in it, in an order that encoding keeps."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return change(value)
    if kind is dict or kind is OrderedDict:
        return kind((key, _each_tensor(part, change)) for key, part in value.items())
    if kind is list or kind is tuple:
        return kind(_each_tensor(part, change) for part in value)
    return value
