"""Noticing what replay could not reproduce: other writes, other state, other objects that train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowdiff.core.digest import Looker, entry_digests, in_order, join, state_digest
from lowdiff.core.events import Code
from lowdiff.core.layout import flat, own_name, refuse_shared_memory, shares_of, torch_dtype
from lowdiff.core.memory import bits
from lowdiff.core.transforms import inside
from lowdiff.errors import UnsupportedOptimizer, UsageError
from lowdiff.model.binding import Attached, are_same
from lowdiff.model.items import extra_state_keys
from lowdiff.model.sharding import is_sharded, local_of
from lowdiff.recovery.replay.optimizers import refuse_foreign_state
from lowdiff.types import AverageStep, Bits, Layout, ParameterSpec, Written

#: Steps in which every optimizer state has had its turn to be summed.
_TURNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Findings of a look at the end of a step.

    Attributes:
        digests: See `Differential.digests`.
        states: See `Differential.state_digests`.
        averages: What averages did, with their digests.
        written: What something else than the optimizer wrote.
        own: One checksum of what others train as well of this rank's share; 0 where ranks are not compared.
        other: The same of the rank ``watched``.
        watched: Whose share this rank looked at besides its own.
    """

    digests: tuple[int, ...]
    states: Mapping[int, int]
    averages: Mapping[str, AverageStep]
    written: Written
    own: int = 0
    other: int = 0
    watched: int = 0


class Watch:
    """Looks at one rank's share of the parameters, and at the averages that follow them.

    Large because what was seen last is compared at four places of a step.

    Args:
        attached: Whose parameters. On an accelerator a look would stop the host: see `DeviceWatch`.
        averages: Name of each average -> layout index -> tensor.
        rank: This rank.
        world_size: Number of ranks.
        mode: ``"live"``: look around the optimizer's step as well. ``"recovery"``: only take digests,
            which recovery compares. Empty: nothing is replayed, and nothing looked at.
    """

    def __init__(
        self,
        attached: Attached,
        averages: Mapping[str, Mapping[int, torch.Tensor]],
        rank: int,
        world_size: int,
        *,
        mode: str,
    ) -> None:
        self._attached = attached
        self._rank = rank
        self._can_look = mode != ""
        self._is_live = mode == "live" and self._can_look
        self._shares = shares_of(attached.layout, world_size)
        self._own = self._shares[rank]
        #: Of each rank's share what others train as well: in DDP all of it, of shards perhaps nothing.
        self._common = [
            [i for i in share if len(attached.layout.parameters[i].ranks) != 1]
            for share in self._shares
        ]
        size = len(self._shares)
        others = [(rank + 1 + i) % size for i in range(size - 1)]
        self._watchable = [
            r for r in others if {*self._common[r]} and {*self._common[r]} <= {*attached.parameters}
        ]
        self._of_optimizer = [
            [i for i in self._own if attached.owner[i] == index]
            for index in range(len(attached.optimizers))
        ]
        self._turns = in_turns(attached.layout, self._own)
        self._parameters = Looker({i: attached.local(i) for i in attached.parameters})
        self._averages = {
            name: _Average([i for i in self._own if i in tensors], tensors)
            for name, tensors in averages.items()
        }
        self._before: dict[int, Bits] = {}
        self._told: set[int] = set()
        self._seen: dict[int, int] = {}
        if self._can_look:
            self._seen = self._parameters.look(self._own)

    def before_step(self, optimizer: int) -> None:
        """Look at what an optimizer is about to update."""
        if self._is_live:
            own = self._of_optimizer[optimizer]
            for i in own:  # a step may be tried again behind one that was refused
                self._before.pop(i, None)
            self._before |= self._changed(self._parameters.look(own))

    def after_step(self, optimizer: int) -> None:
        """Look at what an optimizer has updated, before any hook of the user's can write to it."""
        if self._is_live:
            self._seen |= self._parameters.look(self._of_optimizer[optimizer])

    def end_call(self, step: int, averages: Mapping[str, AverageStep]) -> Written:
        """Close one optimizer step of a body, in which another one follows.

        Parameters are looked at if an average may have taken in what something else wrote to them;
        else the next look is soon enough.

        Args:
            step: Number of the body's step.
            averages: What every average did since the last call.
        """
        if self._is_live and any(average.updated for average in averages.values()):
            return self._look_at_all(step, averages)[1]
        before, self._before = self._before, {}
        self._say(step, before)
        return Written(before)

    def at_commit(
        self, step: int, averages: Mapping[str, AverageStep], *, whole_state: bool
    ) -> Seen:
        """Look at everything at the end of a step; forgets the step.

        Args:
            step: Number of the step that ends.
            averages: What every average did in it.
            whole_state: Whether to look at what optimizers keep of the whole share, as at the first step
                behind a snapshot, not only of the parameters whose turn it is.
        """
        if not self._can_look:
            return Seen((), {}, averages, Written())
        done, written = self._look_at_all(step, averages)
        turn = self._turns[step % len(self._turns)]
        states = self.look_at_states(self._own if whole_state else turn)
        seen = Seen(tuple(self._seen.values()), states, done, written)
        if not self._is_live or len(self._shares) == 1:
            return seen
        own = join(self._seen[i] for i in self._common[self._rank])
        if not self._watchable:
            return replace(seen, own=own, other=own, watched=self._rank)
        watched = self._watchable[step % len(self._watchable)]
        other = join(self._parameters.look(self._common[watched]).values())
        return replace(seen, own=own, other=other, watched=watched)

    def is_as_committed(self) -> bool:
        """Whether this rank's share is as the last commit left it."""
        return not self._can_look or (
            self._parameters.look(self._own) == self._seen
            and all(average.look() == average.seen for average in self._averages.values())
        )

    def digests(self) -> dict[int, int]:
        """A checksum of every parameter that this rank trains as it is now, by layout index."""
        return self._parameters.look()

    def look_at_states(self, indices: Iterable[int]) -> dict[int, int]:
        """Return the checksum of what an optimizer keeps of each of these parameters, where there is one."""
        attached = self._attached
        found = {}
        for i in indices:
            state = attached.optimizers[attached.owner[i]].state.get(attached.parameters[i], {})
            local = {key: local_of(v) for key, v in state.items() if isinstance(v, torch.Tensor)}
            digests = entry_digests(local, attached.layout.parameters[i])
            if digests is not None:
                found[i] = state_digest(digests)
        return found

    def _look_at_all(
        self, step: int, averages: Mapping[str, AverageStep]
    ) -> tuple[dict[str, AverageStep], Written]:
        """Return what averages did, with digests, and what something else than the optimizer wrote."""
        before, self._before = self._before, {}
        found = self._parameters.look(self._own)
        after = self._changed(found) if self._is_live else {}
        self._seen = found
        done, moved = self._look_at_averages(averages, after)
        self._say(step, before | after)
        return done, Written(before, after, moved)

    def _changed(self, found: Mapping[int, int]) -> dict[int, Bits]:
        """Values of the parameters that are not as they were seen last."""
        changed = [i for i, value in found.items() if value != self._seen[i]]
        return {i: self._values(i, self._attached.local(i)) for i in changed}

    def _values(self, index: int, tensor: torch.Tensor) -> Bits:
        """Copy the values of a parameter, or its average: their record may be staged later."""
        strides = self._attached.layout.parameters[index].strides
        return bits(flat(in_order(tensor, strides)))

    def _look_at_averages(
        self, averages: Mapping[str, AverageStep], after: Mapping[int, Bits]
    ) -> tuple[dict[str, AverageStep], dict[str, dict[int, Bits]]]:
        """Return what averages did, with digests, and what of them only values can tell.

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

    def _say(self, step: int, written: Mapping[int, Bits]) -> None:
        """Tell the user once per parameter that something writes to it, and what that costs."""
        news = [i for i in written if i not in self._told]
        if not news:
            return
        self._told.update(news)
        more = f" and {len(news) - 1} more" if len(news) > 1 else ""
        Code.FOREIGN_WRITE.warn(
            "something else than the optimizer wrote to "
            f"{self._attached.layout.parameters[news[0]].name!r}{more} in step {step} (clamping, "
            "weight normalisation, load_state_dict, ...). Training goes on and the step stays "
            "exact; each step that does so logs these parameters whole, "
            f"{sum(written[i].nbytes for i in news):,} bytes. This is said once per parameter",
            rank=self._rank,
        )


def in_turns(layout: Layout, share: Iterable[int]) -> list[list[int]]:
    """Divide a share of the parameters over `_TURNS` steps, evenly by elements.

    Of parameters checksums are taken at every step, because what is wrong with one may never show in
    another. What an optimizer keeps moves on from itself: a difference is still there at the next turn.
    """
    turns: list[list[int]] = [[] for _ in range(_TURNS)]
    elements = [0] * _TURNS
    for i in sorted(share, key=lambda i: (-layout.parameters[i].numel, i)):
        turn = min(range(_TURNS), key=elements.__getitem__)
        turns[turn].append(i)
        elements[turn] += layout.parameters[i].numel
    return turns


class _Average:
    """The tensors of one average that follow this rank's share."""

    def __init__(self, indices: Sequence[int], tensors: Mapping[int, torch.Tensor]) -> None:
        self.tensors = {i: tensors[i] for i in indices}
        self._looker = Looker(self.tensors)
        self.seen = self.look()

    def look(self) -> dict[int, int]:
        """Layout index -> checksum as it is now."""
        return self._looker.look()


#: What to do with a model or optimizer that is not the attached one.
_ATTACH_ANEW = (
    "a run records the objects that were attached, so this step is not committed: close this "
    "checkpointer, wrap the module anew if it is in DDP, build its optimizer, and attach both as "
    "they are now to a checkpointer with a new run folder, or to one with this folder by "
    'attach(..., restore="model"), which counts from step 0. Next time attach with all that will train, and freeze '
    "behind attach, by the step's number: module.requires_grad_(step >= 1000)"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Content of an optimizer when it was last looked at.

    The objects themselves are kept, not their ids, which others could have by now.

    Attributes:
        objects: Its ``state``, the parameters that have some, and all that they have.
        tensors: Those that only an optimizer writes; on an accelerator, its parameters too.
        versions: Theirs.
    """

    objects: list[Any]
    tensors: list[torch.Tensor]
    versions: list[int]


class StepGuard:
    """Refuses optimizers and parameters that are not those of the attached training any more."""

    def __init__(self, attached: Attached) -> None:
        """Look at them for the first time."""
        self._attached = attached
        self._specs, self._device = attached.layout.parameters, attached.device
        self._groups = [_group_ids(optimizer) for optimizer in attached.optimizers]
        self._own = [
            [i for i in attached.parameters if attached.owner[i] == index]
            for index in range(len(self._groups))
        ]
        self._known = {id(parameter) for parameter in attached.parameters.values()}
        #: Per optimizer: parameters of its groups that were frozen at attach.
        self._frozen = [
            [p for group in o.param_groups for p in group["params"] if id(p) not in self._known]
            for o in attached.optimizers
        ]
        #: Where each lay when its form was last compared, and in which order.
        self._places = {i: _place_of(attached.local(i)) for i in attached.parameters}
        self._has_reordered = False
        self._num_entries = [len(optimizer.state) for optimizer in attached.optimizers]
        #: Id of the pre-hook of each optimizer behind which no other may come: ours.
        self.last_pre_hooks: Sequence[int] = ()

    def before_step(self, index: int, arguments: Sequence[Any]) -> bool:
        """Check an optimizer that is about to step.

        Returns:
            Whether its parameters or state were changed since they were last seen, if somebody asks.

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
                "(under Lightning: lowdiff.integrations.lightning)"
            )
        if _group_ids(optimizer) != self._groups[index]:
            raise UsageError(
                f"the optimizer's parameter groups changed after attach, and {_ATTACH_ANEW}"
            )
        thawed = [parameter for parameter in self._frozen[index] if parameter.grad is not None]
        if thawed:
            raise UsageError(
                f"a parameter of shape {tuple(thawed[0].shape)} was frozen at attach and has a "
                f"gradient now, but {_ATTACH_ANEW}"
            )
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self.last_pre_hooks[index]:
            raise UsageError(
                "a step pre-hook was registered on the optimizer after attach and could change "
                "the gradient unseen; register it before attach"
            )
        self._keep_forms(self._own[index])
        return False

    def _keep_forms(self, indices: Iterable[int]) -> None:
        """Keep parameters as they were at attach, because replay goes by that.

        Values that were assigned in another memory order (``p.data = q.t()``) are moved to the
        parameter's own order before an optimizer or a look reads them.

        Raises:
            UsageError: If the dtype, shape or device of one changed.
            UnsupportedModel: If one was put into the memory of another.
        """
        attached, places = self._attached, self._places
        moved = [i for i in indices if _place_of(attached.local(i)) != places[i]]
        for i in moved:
            parameter, spec = attached.parameters[i], self._specs[i]
            if is_sharded(parameter):
                raise UsageError(
                    f"this rank's shard of {spec.tensor!r} lies elsewhere than at attach; move or "
                    "convert a model before its optimizer is built and attached, and load weights "
                    "by load_state_dict(..., assign=False)"
                )
            was = torch_dtype(spec.dtype), spec.shape, self._device
            now = parameter.dtype, tuple(parameter.shape), parameter.device
            if now != was:
                raise UsageError(
                    f"{spec.name!r} was {was[0]} {was[1]} on {was[2]} at attach and is {now[0]} "
                    f"{now[1]} on {now[2]} now, so that its steps could not be replayed; convert the "
                    "model, by .to(...), .half() or .double(), before its optimizer is built and "
                    "attached"
                )
            # The stride of a dimension of one element says nothing of where its elements lie.
            sizes = zip(spec.shape, spec.strides, parameter.stride(), strict=True)
            if any(size > 1 and old != new for size, old, new in sizes):
                self._reorder(parameter, spec)
            places[i] = _place_of(parameter)
        if moved:
            refuse_shared_memory({self._specs[i].name: attached.local(i) for i in places})

    def _reorder(self, parameter: torch.nn.Parameter, spec: ParameterSpec) -> None:
        parameter.data = in_order(parameter, spec.strides)
        if parameter.grad is not None:  # it follows the parameter's order, and so does replay
            parameter.grad = in_order(parameter.grad, spec.strides)
        if not self._has_reordered:
            self._has_reordered = True
            Code.MEMORY_ORDER_CHANGED.warn(
                f"{spec.name!r} was assigned values in another memory order (.t(), channels_last, "
                "...); they were copied into the order that it had at attach, which replay goes "
                "by. Assign with p.data.copy_(values) to avoid the copy. This is said once",
            )

    def after_step(self, index: int) -> None:
        """Look at the state that the optimizer left.

        Raises:
            UnsupportedOptimizer: If it keeps state that belongs to no parameter.
        """
        optimizer = self._attached.optimizers[index]
        if len(optimizer.state) != self._num_entries[index]:
            refuse_foreign_state(optimizer)
            self._num_entries[index] = len(optimizer.state)

    def at_commit(self) -> bool:
        """Whether anything was changed since the optimizers stepped, if somebody asks; forgets it."""
        return False

    def keep_forms(self) -> None:
        """See `_keep_forms`: of all parameters, at the end of a step."""
        self._keep_forms(self._places)


class ReplayGuard(StepGuard):
    """Notices also what replay of an optimizer's step would not lead to: state that was changed outside it."""

    def __init__(self, attached: Attached) -> None:
        """Look at the optimizers and their state for the first time."""
        super().__init__(attached)
        self._seen = [self._look(index) for index in range(len(self._groups))]

    def before_step(self, index: int, arguments: Sequence[Any]) -> bool:
        """See `StepGuard`.

        Raises:
            UsageError: Also if a gradient is of another dtype than its parameter.
        """
        super().before_step(index, arguments)
        self._refuse_other_gradients(index)
        return self._look_again(index)

    def _refuse_other_gradients(self, index: int) -> None:
        for i in self._own[index]:
            parameter = self._attached.parameters[i]
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                raise UsageError(
                    f"the gradient of {self._specs[i].name!r} is {parameter.grad.dtype}, and the log "
                    f"holds it in the parameter's {parameter.dtype}; leave grad_dtype alone, or "
                    "train fp32 parameters under torch.autocast"
                )

    def after_step(self, index: int) -> None:
        """Note the state that the optimizer left, in new tensors or in those it had.

        Gradients are not compared: no other hook comes after `before_step`, and what the step
        itself writes (``foreach`` adds Nesterov's momentum in place), replay writes as well.
        """
        self._look_again(index)
        super().after_step(index)

    def at_commit(self) -> bool:
        """See `StepGuard`."""
        changes = [self._look_again(i) for i in range(len(self._seen))]  # at all of them
        return any(changes)

    def _look_again(self, index: int) -> bool:
        """Whether a parameter or state was written or replaced since the last look."""
        seen = self._seen[index]
        if not are_same(self._objects(index), seen.objects):
            self._seen[index] = self._look(index)  # what was replaced is freed by this
            return True
        versions = [tensor._version for tensor in seen.tensors]
        if versions == seen.versions:
            return False
        self._seen[index] = replace(seen, versions=versions)
        return True

    def _look(self, index: int) -> _Held:
        objects = self._objects(index)
        held = [o for o in objects if isinstance(o, torch.Tensor) and id(o) not in self._known]
        # Of an accelerator's parameters version counters tell at once; what `DeviceWatch` sees arrives late.
        own = [] if self._attached.is_on_host else self._own[index]
        tensors = [*(self._attached.local(i) for i in own), *map(local_of, held)]
        return _Held(objects, tensors, [tensor._version for tensor in tensors])

    def _objects(self, index: int) -> list[Any]:
        state = self._attached.optimizers[index].state
        # A mere look at a defaultdict makes an empty entry, which is as good as none.
        filled = [(p, own) for p, own in state.items() if isinstance(own, dict) and own]
        values = chain.from_iterable(own.values() for _, own in filled)
        return [state, *(p for p, _ in filled), *values]


def _place_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def _group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


class AttachedObjects:
    """The modules, parameters and optimizers of one session; `check` sees that they still train.

    What was attached is what steps record: a parameter that took the place of another one, or an
    optimizer for a new phase, would train unrecorded. Modules without parameters may be replaced.
    """

    def __init__(self, attached: Attached) -> None:
        """Remember the objects, and watch the optimizers of this process until `remove`."""
        self._attached = attached
        self._names = _parameters_by_path(attached.module)
        self._extra = set(extra_state_keys(attached.module))
        self._look()
        self._own = set(map(id, attached.optimizers))
        #: Optimizers whose step runs now, outermost first.
        self._stepping: list[torch.optim.Optimizer] = []
        self._foreign: str | None = None
        #: Whether the step that trains now was refused, so that it stays uncommitted.
        self.has_refused = False
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Stop watching the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self) -> None:
        """See, before a step is committed, that it is the attached objects that trained.

        Raises:
            UsageError: Naming the parameter, module or optimizer that took another's place.
        """
        self._stepping = []  # a step that raised never ended
        self.has_refused = False
        if self._foreign is not None:
            self._refuse(self._foreign)
        if not are_same([*chain.from_iterable(self._views)], self._seen):
            self._look_closely()

    def _look(self) -> None:
        """Remember which objects every module holds now."""
        parts = list(self._attached.model.modules())
        # These follow their dicts, and asking them for all costs little.
        self._views = [d.values() for part in parts for d in (part._parameters, part._modules)]
        self._filled = [view for view in self._views if view]
        self._seen = [*chain.from_iterable(self._views)]

    def _refuse(self, what: str) -> NoReturn:
        self.has_refused = True
        raise UsageError(f"{what}; {_ATTACH_ANEW}")

    def _look_closely(self) -> None:
        """Something was replaced, put in or taken out: go through all parameters by name."""
        now = _parameters_by_path(self._attached.module)
        for name, was in self._names.items():
            there = now.get(name)
            # FSDP2 puts gathered parameters there while a forward pass uses them, and after it.
            if there is was or (is_sharded(was) and there is not None and not is_sharded(there)):
                continue
            moved = next((other for other, parameter in now.items() if parameter is was), None)
            how = "assigned anew, by its module or by load_state_dict(assign=True), or taken out?"
            if moved is not None:
                how = f"that is found as {moved!r} now"
            self._refuse(f"{name!r} is not the parameter any more that was attached ({how})")
        new = next((name for name in now if name not in self._names), None)
        if new is not None:
            self._refuse(f"parameter {new!r} was added to the model after attach")
        changed = self._extra.symmetric_difference(extra_state_keys(self._attached.module))
        if changed:
            kind = type(next(iter(changed))).__name__
            self._refuse(f"a {kind}, which keeps extra state, was put in or taken out after attach")
        self._names = now
        self._look()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if inside(self._attached.device):
            return  # which the attached optimizers refuse
        if id(optimizer) in self._own:
            self._stepping = [optimizer]  # those around it, as SAM and Lookahead are, lead to it
            # Not only at commit: DDP leaves gradients as they are where a parameter is missing, which
            # would be said instead. What is put in where there was nothing can wait.
            if not are_same([*chain.from_iterable(self._filled)], self._seen):
                self._look_closely()
        elif self._held_by(optimizer) is not None:
            self._stepping.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(other is optimizer for other in self._stepping):
            return  # it has none of these parameters, or an attached one stepped within
        while self._stepping.pop() is not optimizer:
            pass  # that one's step raised
        # What steps within an attached optimizer is a part of its step.
        if id(optimizer) not in self._own and not self._stepping:
            self._foreign = (
                f"{self._held_by(optimizer)!r} was stepped by a {type(optimizer).__name__} that is "
                "not attached, whose state and hyper-parameters no step records"
            )
            self._refuse(self._foreign)

    def _held_by(self, optimizer: torch.optim.Optimizer) -> str | None:
        """A parameter of the model that an optimizer would step, if there is one."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return next((name for name, p in self._names.items() if id(p) in held), None)


def _parameters_by_path(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter under each of its names; one that is tied has several."""
    return {own_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
