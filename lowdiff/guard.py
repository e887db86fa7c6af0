"""Noticing what replay could not reproduce."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch

from lowdiff.attached import Attached
from lowdiff.digests import in_order
from lowdiff.errors import UnsupportedOptimizer, UsageError
from lowdiff.layout import refuse_shared_memory
from lowdiff.recovery.optimizers import refuse_foreign_state

_logger = logging.getLogger(__name__)

#: What a user can do whose parameters are to be trained otherwise from some step on.
_TRAINED_OTHERWISE = (
    "a run keeps the parameters and groups that it began with: close this checkpointer and attach "
    "model and optimizer as they are now to one with a new run folder, or to one with this folder "
    'by attach(..., restore="model"), which counts from step 0; wrap the module anew first if it is '
    "in DDP"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What an optimizer held when it was last looked at.

    The objects themselves are kept, not their ids, which others could have by now.

    Attributes:
        state: Its ``state``.
        owners: Parameters that have some.
        values: All that they have, tensors or not, in the same order.
        tensors: Which of ``values`` are tensors; on an accelerator, the optimizer's parameters too.
        versions: Theirs.
    """

    state: Mapping[torch.Tensor, Any]
    owners: list[torch.Tensor]
    values: list[Any]
    tensors: list[torch.Tensor]
    versions: list[int]

    def holds(self, state: Mapping[torch.Tensor, Any]) -> bool:
        """Whether nothing in an optimizer's state was put in, taken out or replaced since."""
        owners, entries = _filled(state)
        # ``==`` would compare the elements of tensors.
        return (
            state is self.state
            and len(owners) == len(self.owners)
            and all(map(is_, owners, self.owners))
            and sum(map(len, entries)) == len(self.values)
            and all(map(is_, _values(entries), self.values))
        )


class StepGuard:
    """Watches what happens to optimizers and their state outside ``optimizer.step``."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._groups = [_group_ids(optimizer) for optimizer in attached.optimizers]
        pairs = list(zip(attached.parameters, attached.owner, strict=True))
        self._own = [[p for p, owner in pairs if owner == i] for i in range(len(self._groups))]
        self._seen = [self._look(i) for i in range(len(self._groups))]
        self._known = {id(parameter) for parameter in attached.parameters}
        self._forms = {id(parameter): _form(parameter) for parameter in attached.parameters}
        #: Where each lay when its form was last compared, and in which order.
        self._places = {id(p): (p.data_ptr(), p.stride()) for p in attached.parameters}
        self._strides = {id(parameter): parameter.stride() for parameter in attached.parameters}
        self._has_reordered = False
        self._num_entries = [len(optimizer.state) for optimizer in attached.optimizers]
        self._hook_ids: dict[int, int] = {}

    def registered(self, index: int, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Remember which pre-hook of an optimizer is ours."""
        self._hook_ids[index] = handle.id

    def before_step(self, index: int, arguments: Sequence[Any]) -> bool:
        """Check an optimizer that is about to step.

        Returns:
            Whether its parameters or state were changed since they were last seen.

        Raises:
            UsageError: If its groups or the form of its parameters changed, or a later hook could
                change the gradients.
            UnsupportedOptimizer: If it is called with a closure.
        """
        optimizer = self._attached.optimizers[index]
        if any(callable(argument) for argument in arguments):
            raise UnsupportedOptimizer(
                "optimizer.step(closure) may evaluate the gradient several times, which a "
                "differential cannot record; call backward() first and step() without a closure "
                "(under Lightning: examples/lightning_trainer.py)"
            )
        if _group_ids(optimizer) != self._groups[index]:
            raise UsageError(
                f"the optimizer's parameter groups changed after attach, and {_TRAINED_OTHERWISE}"
            )
        thawed = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) not in self._known
        ]
        if thawed:
            raise UsageError(
                f"a parameter of shape {tuple(thawed[0].shape)} was frozen at attach and has a "
                f"gradient now, but {_TRAINED_OTHERWISE}"
            )
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._hook_ids[index]:
            raise UsageError(
                "a step pre-hook was registered on the optimizer after attach and could change "
                "the gradient unseen; register it before attach"
            )
        self._keep_forms(self._own[index])
        self._refuse_other_gradients(index)
        return self._look_again(index)

    def _refuse_other_gradients(self, index: int) -> None:
        for parameter in self._own[index]:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != parameter.dtype:
                raise UsageError(
                    f"the gradient of {self._name_of(parameter)} is {gradient.dtype}, and the log "
                    f"holds it in the parameter's {parameter.dtype}; leave grad_dtype alone, or "
                    "train fp32 parameters under torch.autocast"
                )

    def _keep_forms(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep parameters as they were at attach, because replay goes by that.

        Values that were assigned in another memory order (``p.data = q.t()``) are moved to the
        parameter's own order before an optimizer or a look reads them.

        Raises:
            UsageError: If the dtype, shape or device of one changed.
            UnsupportedModel: If one was put into the memory of another.
        """
        has_moved = False
        for parameter in parameters:
            if (parameter.data_ptr(), parameter.stride()) == self._places[id(parameter)]:
                continue
            was, now = self._forms[id(parameter)], _form(parameter)
            if now[:_STRIDES] != was[:_STRIDES]:
                raise UsageError(
                    f"{self._name_of(parameter)} was {_worded(was)} at attach and is {_worded(now)} "
                    "now, so that its steps could not be replayed; convert the model, by .to(...), "
                    ".half() or .double(), before its optimizer is built and attached"
                )
            if now != was:
                self._reorder(parameter)
            self._places[id(parameter)] = parameter.data_ptr(), parameter.stride()
            has_moved = True
        if has_moved:
            specs = self._attached.layout.parameters
            pairs = zip(specs, self._attached.parameters, strict=True)
            refuse_shared_memory({spec.name: parameter for spec, parameter in pairs})

    def _reorder(self, parameter: torch.Tensor) -> None:
        strides = self._strides[id(parameter)]
        parameter.data = in_order(parameter, strides)
        if parameter.grad is not None:  # it follows the parameter's order, and so does replay
            parameter.grad = in_order(parameter.grad, strides)
        if not self._has_reordered:
            self._has_reordered = True
            _logger.warning(
                "%s was assigned values in another memory order (.t(), channels_last, ...); they were "
                "copied into the order that it had at attach, which replay goes by. Assign with "
                "p.data.copy_(values) to avoid the copy. This is said once",
                self._name_of(parameter),
            )

    def _name_of(self, parameter: torch.Tensor) -> str:
        layout = self._attached.layout.parameters
        pairs = zip(layout, self._attached.parameters, strict=True)
        return repr(next(spec.name for spec, own in pairs if own is parameter))

    def after_step(self, index: int) -> None:
        """Note the state that the optimizer left, in new tensors or in those it had.

        Gradients are not compared: no other hook comes after `before_step`, and what the step
        itself writes (``foreach`` adds Nesterov's momentum in place), replay writes as well.

        Raises:
            UnsupportedOptimizer: If it keeps state that belongs to no parameter.
        """
        self._look_again(index)
        optimizer = self._attached.optimizers[index]
        if len(optimizer.state) != self._num_entries[index]:
            refuse_foreign_state(optimizer)
            self._num_entries[index] = len(optimizer.state)

    def keep_forms(self) -> None:
        """See `_keep_forms`: of all parameters, at the end of a step.

        Raises:
            UsageError: If the dtype, shape or device of one changed.
            UnsupportedModel: If one was put into the memory of another.
        """
        self._keep_forms(self._attached.parameters)

    def at_commit(self) -> bool:
        """Whether anything was changed since the optimizers stepped; forgets it."""
        changes = [self._look_again(i) for i in range(len(self._seen))]  # at all of them
        return any(changes)

    def _look_again(self, index: int) -> bool:
        """Whether a parameter or state was written or replaced since the last look."""
        seen = self._seen[index]
        if not seen.holds(self._attached.optimizers[index].state):
            self._seen[index] = self._look(index)  # what was replaced is freed by this
            return True
        versions = _versions(seen.tensors)
        if versions == seen.versions:
            return False
        self._seen[index] = replace(seen, versions=versions)
        return True

    def _look(self, index: int) -> _Seen:
        state = self._attached.optimizers[index].state
        owners, entries = _filled(state)
        values = [*_values(entries)]
        # Of an accelerator's parameters only version counters tell without stopping the host.
        own = [] if self._attached.is_on_host else self._own[index]
        tensors = [*own, *(v for v in values if isinstance(v, torch.Tensor))]
        return _Seen(state, owners, values, tensors, _versions(tensors))


def _filled(
    state: Mapping[torch.Tensor, Any],
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Parameters that have state, and what they have."""
    # A mere look at a defaultdict makes an empty entry, which is as good as none.
    entries = [own for own in state.values() if isinstance(own, dict) and own]
    if len(entries) == len(state):
        return [*state], entries
    return [p for p, own in state.items() if isinstance(own, dict) and own], entries


def _values(entries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, entries))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


#: Dtype, shape, device and strides.
_Form: TypeAlias = "tuple[torch.dtype, tuple[int, ...], torch.device, tuple[int, ...]]"
_STRIDES = 3


def _form(tensor: torch.Tensor) -> _Form:
    # The stride of a dimension of one element says nothing of where its elements lie.
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(stride for size, stride in sizes if size > 1)
    return tensor.dtype, tuple(tensor.shape), tensor.device, strides


def _worded(form: _Form) -> str:
    dtype, shape, device, strides = form
    return f"{dtype} {shape} with strides {strides} on {device}"
