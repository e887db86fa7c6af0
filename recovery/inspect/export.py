"""A recovered state as one file that anyone can load, with or without lowdiff."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lowdiff.errors import ConfigError
from lowdiff.persistence.files.durable import unwritable
from lowdiff.recovery.inspect.branch import new_directory
from lowdiff.recovery.inspect.weights import WeightsFile, opened
from lowdiff.recovery.state import RecoveredState

#: What ``torch.load(weights_only=True)`` takes as it is.
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.Tensor, torch.Size, torch.dtype, torch.device),
)


def export(state: RecoveredState, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a state to one file; the name appears only once the bytes are complete.

    Args:
        state: What to write.
        path: Its ending says what is written. ``.pt``: a dict with ``model``, ``optimizer`` (a
            list when the run has several), ``stateful`` and ``step``, for
            ``torch.load(path, weights_only=True)``. NumPy values in it become tensors and plain
            numbers, and other containers the plain ones closest to them. ``.safetensors``: the
            model's weights and buffers, and extra states of modules that are a tensor; what is left
            out is named in a warning. Tied weights are written under each of their names.
            No ending: a folder in the format of ``torch.distributed.checkpoint``, with the keys
            of ``.pt``, for ``dcp.load`` at any number of ranks. Missing folders are created.
        overwrite: Replace a file of that name.

    Returns:
        The file.

    Raises:
        ConfigError: If the ending is another one, the file exists, or something in the state has
            no form that the file's loader takes.
        StorageError: If it cannot be written.
    """
    target = check_output(path, overwrite=overwrite)
    if not target.suffix:
        _write_distributed(_document(state), target)
        return target
    if target.suffix == ".safetensors":
        with opened(target) as file:
            WeightsFile(file, state.model_state_dict(), state.step)
        return target
    document = _document(state)
    try:
        with opened(target) as file:
            torch.save(document, file)
    except RuntimeError as error:  # as torch may report a full disk
        raise unwritable(target, error) from error
    return target


def check_output(path: str | Path, *, overwrite: bool) -> Path:
    """Refuse a file name that `export` would refuse, before any work is done.

    Raises:
        ConfigError: Saying what to give instead.
    """
    target = Path(path)
    if target.suffix not in (".pt", ".safetensors", "") or target.name.startswith("."):
        raise ConfigError(
            f"{target} ends neither in .pt (model, optimizer, stateful objects and step, for "
            "torch.load) nor in .safetensors (model weights only); without an ending it is a "
            "folder for torch.distributed.checkpoint"
        )
    if not target.suffix:
        if target.exists():
            raise ConfigError(f"{target} exists; give the name of a new folder")
        return target
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; give the name of a file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; allow overwriting (--force), or give another name")
    return target


def _write_distributed(document: dict[str, Any], target: Path) -> None:
    with new_directory(target) as partial, warnings.catch_warnings():
        # That one process saves alone is what no_dist asks for.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        # What PyTorch 2.10 says of its own saver.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        try:
            dcp.save(document, checkpoint_id=partial, no_dist=True)
        except CheckpointException as error:  # no Exception: nobody would take it for a full disk
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise unwritable(target, causes) from error


def _document(state: RecoveredState) -> dict[str, Any]:
    optimizers = [
        _plain(state.optimizer_state_dict(index), f"optimizer {index}")
        for index in range(len(state.optimizers))
    ]
    return {
        "model": {key: _plain(value, key) for key, value in state.model_state_dict().items()},
        "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
        "stateful": {name: _plain(value, name) for name, value in state.stateful.items()},
        "step": state.step,
    }


def _plain(value: Any, where: str) -> Any:
    """``value`` of nothing but types that ``torch.load(weights_only=True)`` takes.

    Raises:
        ConfigError: Naming the part that has no such form.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in _LEAVES:
        return value
    if kind is np.ndarray:
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=True))
    if kind in (list, tuple, deque):
        parts = [_plain(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return tuple(parts) if kind is tuple else parts
    if kind in (set, frozenset):
        return {_key(part, where) for part in value}
    if kind in (dict, OrderedDict, Counter, defaultdict):
        entries = {_key(k, where): _plain(v, f"{where}[{k!r}]") for k, v in value.items()}
        return {OrderedDict: OrderedDict, Counter: Counter}.get(kind, dict)(entries)
    raise _refusal(value, where)


def _key(value: Any, where: str) -> Any:
    """``value`` as a key or a member of a set; a frozenset has no hashable form left."""
    key = _plain(value, f"{where}[{value!r}]")
    try:
        hash(key)
    except TypeError:
        raise _refusal(value, where) from None
    return key


def _refusal(value: Any, where: str) -> ConfigError:
    return ConfigError(
        f"{where} holds a {type(value).__name__}, which torch.load(weights_only=True) refuses; "
        "export the weights alone to a name ending in .safetensors, or take it from what "
        "lowdiff.recover(...) returns"
    )
