"""FSDP's all-reduce hook: from the gradients of a parameter group to the run's reducer and back.

``fully_shard`` over one dimension of a mesh averages gradients over the shards. It then calls a hook with
this rank's part of them, which the hook averages over the copies of the model. It is the seam that native
HSDP fills with an all-reduce; here a compressor may take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import completed
from lowdiff.compressors.dense import mean
from lowdiff.core import devices
from lowdiff.core.layout import flat
from lowdiff.core.waiting import wait_for_ranks
from lowdiff.errors import ConfigError, LowDiffError, RankLost, UnsupportedModel
from lowdiff.model.sharding import groups_of, local_of, sharded_modules
from lowdiff.step.ddp_hook import HookState


class GroupHook:
    """What FSDP calls with the gradients of one parameter group, reduced over the shards.

    Args:
        state: Exchanges them; the same of all groups.
        group: FSDP's own description of the parameter group.
        name: Of the module that was sharded, for errors.
        compresses: Whether the state needs to know which gradient lies where.
    """

    def __init__(self, state: HookState, group: Any, name: str, *, compresses: bool) -> None:
        self._state = state
        self._group = group
        self._name = name
        self._compresses = compresses
        #: What the last buffer held before its gradients became wider. On an accelerator its memory must
        #: not be used anew while the copy is still queued.
        self._narrow: torch.Tensor | None = None

    def __call__(self, buffer: torch.Tensor) -> None:
        """Average a buffer over the copies, in place; its dtype may change to that of the parameters.

        Raises:
            LowDiffError: Out of ``backward()``; RankLost if a rank that holds a copy died.
        """
        try:
            with torch.no_grad():
                self._exchange(buffer)
        except (LowDiffError, torch.OutOfMemoryError):
            self._state.has_failed = True
            raise
        except RuntimeError as error:  # the backend's
            self._state.has_failed = True
            raise RankLost(error) from error

    def _exchange(self, buffer: torch.Tensor) -> None:
        members = parameters_of(self._group)
        parameters = [parameter for parameter, _ in members]
        if not self._compresses:
            wait_for_ranks(self._state.exchange(parameters, (), buffer).wait)
            return
        if sum(size for _, size in members) != buffer.numel():
            raise UnsupportedModel(
                f"FSDP reduces {buffer.numel():,} elements of {self._name!r}, whose parameters have "
                f"{sum(size for _, size in members):,}: some got no gradient, or were frozen after "
                "attach. Use every parameter in every backward pass; newer versions of PyTorch fill in "
                "zeros"
            )
        # Compressors work in the parameters' dtype. FSDP would round their result once more, to the dtype
        # that it reduces in, and the optimizer would consume something else than was exchanged.
        wide = buffer.to(parameters[0].dtype)
        gradients = _views(wide, members)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not None:
                # Of an earlier backward pass: as in DDP, the last exchange replaces it. FSDP adds what it
                # gets, and to -0.0 that is the sum's own bits.
                earlier = flat(local_of(parameter.grad))
                gradient.add_(earlier)
                earlier.fill_(-0.0)
        wait_for_ranks(self._state.exchange(parameters, gradients, wide).wait)
        if wide is not buffer:
            self._narrow = None if devices.may_look(buffer) else buffer.detach()
            buffer.data = wide


def _views(
    buffer: torch.Tensor, members: Sequence[tuple[torch.nn.Parameter, int]]
) -> list[torch.Tensor]:
    """The part of a buffer that each parameter's gradient takes; padding follows it."""
    found, start = [], 0
    for parameter, size in members:
        found.append(buffer[start : start + local_of(parameter).numel()])
        start += size
    return found


def parameters_of(group: Any) -> list[tuple[torch.nn.Parameter, int]]:
    """Return the sharded parameters of an FSDP parameter group, and what each takes of its buffers.

    In the order of FSDP's buffers. Nothing public tells it, nor how far a shard is padded.
    """
    return [
        (own.sharded_param, own.padded_sharded_param_size.numel())
        for own in group.fsdp_params
        if own.sharded_param.requires_grad
    ]


def average_as_hsdp(
    buffer: torch.Tensor, group: dist.ProcessGroup, *, reproducible: bool
) -> torch.futures.Future[torch.Tensor]:
    """Average a buffer over the copies of the model, in place, with the arithmetic of native HSDP.

    Args:
        buffer: Flat; overwritten with the average.
        group: Ranks that hold a copy of the same shards.
        reproducible: Whether to add in rank order instead.
    """
    if reproducible or buffer.dtype not in (torch.float32, torch.bfloat16):
        return mean(buffer, group, reproducible=reproducible)
    dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=group)
    return completed(buffer)


def register_group_hooks(
    model: torch.nn.Module,
    parameters: Mapping[int, torch.nn.Parameter],
    name_of: Callable[[int], str],
    state: HookState,
    *,
    compresses: bool,
) -> None:
    """Have FSDP call our hook for every parameter group of a model.

    Args:
        model: The model.
        parameters: Layout index -> parameter, of what this rank trains.
        name_of: Layout index -> its name.
        state: Exchanges gradients.
        compresses: Whether a compressor does, and not an average.

    Raises:
        ConfigError: If a group has a hook already.
        UnsupportedModel: If FSDP reduces the gradient of a parameter in no group.
    """
    found: set[int] = set()
    for name, module in sharded_modules(model):
        for group in groups_of(module):
            _refuse_foreign_hook(module, group, name)
            hook = GroupHook(state, group, name, compresses=compresses)
            found.update(id(parameter) for parameter, _ in parameters_of(group))
            try:
                module.set_all_reduce_hook(hook)
            except ValueError as error:
                raise UnsupportedModel(
                    f"{name!r} has parameters on several meshes (shard_placement_fn), of which FSDP's "
                    "all-reduce hook knows one; shard them as modules of their own"
                ) from error
        # PyTorch has it from 2.11 on.
        if compresses and hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
    alone = next((i for i, p in parameters.items() if id(p) not in found), None)
    if alone is not None:
        raise UnsupportedModel(
            f"no fully_shard(...) has {name_of(alone)!r}, so nobody averages its gradient over the copies; "
            "call fully_shard on the whole model last, without ignored_params"
        )


def _refuse_foreign_hook(module: Any, group: Any, name: str) -> None:
    other = getattr(group, "_all_reduce_hook", None)
    if other is not None and not isinstance(other, GroupHook):
        raise ConfigError(
            f"{name!r} has the all-reduce hook {getattr(other, '__name__', other)!r} already, and FSDP "
            "takes one; leave it out, and choose lowdiff's compressor"
        )
