"""Noticing what replay could not reproduce."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch

from lowdiff.core.digest import Looker, in_order, join
from lowdiff.core.layout import bits, flat, refuse_shared_memory, shares_of
from lowdiff.errors import UnsupportedOptimizer, UsageError
from lowdiff.model.binding import Attached
from lowdiff.recovery.replay.optimizers import refuse_foreign_state
from lowdiff.types import AverageStep, Bits, Written

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a look at the end of a step found.

    Attributes:
        digests: See `Differential.digests`.
        averages: What averages did, with their digests.
        written: What something else than the optimizer wrote.
        own: One checksum of this rank's share; 0 where ranks are not compared.
        other: The same of the rank ``watched``.
        watched: Whose share this rank looked at besides its own.
    """

    digests: tuple[int, ...]
    averages: Mapping[str, AverageStep]
    written: Written
    own: int = 0
    other: int = 0
    watched: int = 0


class Watch:
    """Looks at one rank's share of the parameters, and at the averages that follow them.

    Args:
        attached: Whose parameters. On an accelerator a look would stop the host: there nothing is
            looked at, and `StepGuard` goes by version counters.
        averages: Name of each average -> layout index -> tensor.
        rank: This rank.
        world_size: Number of ranks.
        is_live: Whether to look around the optimizer's step as well, as ``watch="live"`` says. Else
            only digests are taken, which recovery compares.
    """

    def __init__(
        self,
        attached: Attached,
        averages: Mapping[str, Mapping[int, torch.Tensor]],
        rank: int,
        world_size: int,
        *,
        is_live: bool,
    ) -> None:
        self._attached = attached
        self._rank, self._world_size = rank, world_size
        self._can_look = attached.is_on_host
        self._is_live = is_live and self._can_look
        self._shares = shares_of(attached.layout, world_size)
        self._own = self._shares[rank]
        self._of_optimizer = [
            [i for i in self._own if attached.owner[i] == index]
            for index in range(len(attached.optimizers))
        ]
        self._parameters = Looker(attached.parameters)
        self._averages = {
            name: _Average([i for i in self._own if i in tensors], tensors)
            for name, tensors in averages.items()
        }
        self._before: dict[int, Bits] = {}
        self._told: set[int] = set()
        self._seen: dict[int, int] = {}
        if self._can_look:
            self._seen = self._look(self._own)

    def before_step(self, optimizer: int) -> None:
        """Look at what an optimizer is about to update."""
        if self._is_live:
            own = self._of_optimizer[optimizer]
            for i in own:  # a step may be tried again behind one that was refused
                self._before.pop(i, None)
            self._before |= self._changed(self._look(own))

    def after_step(self, optimizer: int) -> None:
        """Look at what an optimizer has updated, before any hook of the user's can write to it."""
        if self._is_live:
            self._seen |= self._look(self._of_optimizer[optimizer])

    def end_call(self, step: int, averages: Mapping[str, AverageStep]) -> Written:
        """Close one optimizer step of a body, in which another one follows.

        Parameters are looked at if an average may have taken in what something else wrote to them;
        else the next look is soon enough.

        Args:
            step: Number of the body's step.
            averages: What every average did since the last call.
        """
        before, self._before = self._before, {}
        if not self._is_live or not any(average.updated for average in averages.values()):
            self._say(step, before, {})
            return Written(before)
        found = self._look(self._own)
        after = self._changed(found)
        self._seen = found
        _, moved = self._look_at_averages(averages, after)
        self._say(step, before, after)
        return Written(before, after, moved)

    def at_commit(self, step: int, averages: Mapping[str, AverageStep]) -> Seen:
        """Look at everything at the end of a step; forgets the step.

        Args:
            step: Number of the step that ends.
            averages: What every average did in it.
        """
        before, self._before = self._before, {}
        if not self._can_look:
            return Seen((), averages, Written())
        found = self._look(self._own)
        after = self._changed(found) if self._is_live else {}
        self._seen = found
        done, moved = self._look_at_averages(averages, after)
        self._say(step, before, after)
        seen = Seen(tuple(found.values()), done, Written(before, after, moved))
        if not self._is_live or self._world_size == 1:
            return seen
        watched = (self._rank + 1 + step % (self._world_size - 1)) % self._world_size
        other = join(self._look(self._shares[watched]).values())
        return replace(seen, own=join(seen.digests), other=other, watched=watched)

    def is_as_committed(self) -> bool:
        """Whether this rank's share is as the last commit left it."""
        return not self._can_look or (
            self._look(self._own) == self._seen
            and all(average.look() == average.seen for average in self._averages.values())
        )

    def digests(self) -> list[int]:
        """A checksum of every parameter as it is now, in layout order."""
        return self._parameters.look(range(len(self._attached.parameters)))

    def _look(self, parameters: Sequence[int]) -> dict[int, int]:
        return dict(zip(parameters, self._parameters.look(parameters), strict=True))

    def _changed(self, found: Mapping[int, int]) -> dict[int, Bits]:
        """Values of the parameters that are not as they were seen last."""
        changed = [i for i, value in found.items() if value != self._seen[i]]
        return {i: self._values(i, self._attached.parameters[i]) for i in changed}

    def _values(self, index: int, tensor: torch.Tensor) -> Bits:
        """What a parameter, or its average, holds now: a copy, because its record may be staged later."""
        strides = self._attached.layout.parameters[index].strides
        return bits(flat(in_order(tensor, strides)))

    def _look_at_averages(
        self, averages: Mapping[str, AverageStep], after: Mapping[int, Bits]
    ) -> tuple[dict[str, AverageStep], dict[str, dict[int, Bits]]]:
        """What averages did, with digests; and what of them only values can tell.

        These are what was written without an update, and averages of parameters that something else
        wrote in the same step: nobody knows which of the two came first.
        """
        done, moved = {}, {}
        for name, average in self._averages.items():
            found, seen = average.look(), average.seen
            average.seen = found
            step = averages.get(name)
            if step is not None:
                done[name] = replace(step, digests=tuple(found.values()))
            if self._is_live and step is not None:
                values = {
                    i: self._values(i, average.tensors[i])
                    for i in found
                    if (i in after if step.updated else found[i] != seen[i])
                }
                if values:
                    moved[name] = values
        return done, moved

    def _say(self, step: int, before: Mapping[int, Bits], after: Mapping[int, Bits]) -> None:
        """Tell the user once per parameter that something writes to it, and what that costs."""
        written = {**before, **after}
        news = [i for i in written if i not in self._told]
        if not news:
            return
        self._told.update(news)
        more = f" and {len(news) - 1} more" if len(news) > 1 else ""
        _logger.warning(
            "rank %d: something else than the optimizer wrote to %r%s in step %d (clamping, weight "
            "normalisation, load_state_dict, ...). Training goes on and the step stays exact; each "
            "step that does so logs these parameters whole, %s bytes. This is said once per parameter",
            self._rank,
            self._attached.layout.parameters[news[0]].name,
            more,
            step,
            f"{sum(written[i].nbytes for i in news):,}",
        )


class _Average:
    """The tensors of one average that follow this rank's share."""

    def __init__(self, indices: Sequence[int], tensors: Mapping[int, torch.Tensor]) -> None:
        self.tensors = {i: tensors[i] for i in indices}
        self._looker = Looker([*self.tensors.values()])
        self.seen = self.look()

    def look(self) -> dict[int, int]:
        """Layout index -> checksum as it is now."""
        found = self._looker.look(range(len(self.tensors)))
        return dict(zip(self.tensors, found, strict=True))


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
