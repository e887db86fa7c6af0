"""Fingerprints of a training state, so that two runs can be compared bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler


def state_digests(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
) -> dict[str, str]:
    """SHA-256 of every tensor of the state, of every other setting, and of the random states.

    Equal digests mean equal bits, shapes and dtypes. Nothing is changed and no random number
    is drawn.
    """
    return {name: hashlib.sha256(data).hexdigest() for name, data in _parts(model, optimizer)} | {
        "scheduler": hashlib.sha256(repr(scheduler.state_dict()).encode()).hexdigest()
    }


def checkpoint_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Number of trainable elements, and bytes of one full checkpoint of model and optimizer."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(p.numel() for p in model.parameters()), sum(t.nbytes for t in tensors)


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, bytes]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        yield f"parameter {name}", _bits(parameter)
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", _bits(buffer)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                yield f"optimizer {key} of {names[parameter]}", _bits(value)
        settings = {key: value for key, value in group.items() if key != "params"}
        yield f"optimizer group {index}", repr(sorted(settings.items())).encode()
    yield "torch random state", _bits(torch.get_rng_state())
    for device, state in enumerate(torch.cuda.get_rng_state_all() if _on_cuda(names) else []):
        yield f"CUDA random state of device {device}", _bits(state)
    yield "Python random state", repr(random.getstate()).encode()
    numpy_state = np.random.get_state(legacy=True)
    yield "NumPy random state", b"".join(np.asarray(part).tobytes() for part in numpy_state)


def _on_cuda(parameters: dict[nn.Parameter, str]) -> bool:
    return any(parameter.is_cuda for parameter in parameters)


def _bits(value: object) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    flat = value.detach().cpu().reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} ".encode() + flat.numpy().tobytes()
