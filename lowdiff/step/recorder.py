"""The recorder of steps: reads what optimizers consume, and seals a step into its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from crc32c import crc32c

from lowdiff.compressors.exchange import stamp_of
from lowdiff.core import devices
from lowdiff.core.nested import copied, each_tensor
from lowdiff.errors import UsageError
from lowdiff.model.binding import hyper_parameters
from lowdiff.model.device_watch import DeviceWatch, Looks
from lowdiff.model.tracked import Live
from lowdiff.model.watch import ReplayGuard, Seen, StepGuard, Watch
from lowdiff.persistence.format.values import encode, same
from lowdiff.protocols import Reducer
from lowdiff.recovery.replay.optimizers import granularity
from lowdiff.step.ddp_hook import autocasts
from lowdiff.step.gradients import Gradients, Scaling
from lowdiff.step.late import (
    LateGradients,
    LateGroups,
    LateItems,
    LateLooks,
    LatePayload,
    LateResidual,
    late_tensors,
)
from lowdiff.step.proofs import Proofs
from lowdiff.step.states import Change, Groups, Late, Sealed, State, Step
from lowdiff.step.verdict import Verdict
from lowdiff.types import Differential, OptimizerStep, Payload, Written


class Recorder:
    """Records the steps of one rank, one after the other.

    Args:
        live: The training.
        reducer: Reads gradients before an optimizer consumes them.
        gradients: Reads them, and refuses what ranks have not averaged.
        scaling: Knows what multiplied gradients since their exchange.
        proofs: Prove steps of registered optimizers.
        watches: What to look at; see `Watch`.
        most_calls: Optimizer steps that one loop body may make and a log can hold; 1 where a second
            one is an error.
        is_replayed: Whether recovery replays steps. If not, it makes no difference what else than an
            optimizer wrote: only full snapshots are recovered, and they hold it.
        peers: Ranks whose payloads are read as well.

    Attributes:
        step: The step under way.
        reducer: The same as the argument.
        scaling: The same.
        guard: Refuses other optimizers than the attached ones; notices writes to their state, if steps are replayed.
        watch: Notices writes to parameters.
        proofs: Replay steps of registered optimizers.
    """

    def __init__(
        self,
        live: Live,
        reducer: Reducer,
        gradients: Gradients,
        scaling: Scaling,
        proofs: Proofs,
        *,
        watches: str,
        most_calls: int,
        is_replayed: bool,
        peers: Sequence[int],
    ) -> None:
        self._live = live
        self.reducer = reducer
        self._gradients = gradients
        self.scaling = scaling
        self.proofs = proofs
        self._most_calls = most_calls
        self._is_replayed = is_replayed
        self._peers = peers
        specs = enumerate(live.attached.specs)
        #: Optimizers that do more than work element by element.
        self._coupled = {i for i, spec in specs if granularity(spec) != "element"}
        self.guard = ReplayGuard(live.attached) if is_replayed else StepGuard(live.attached)
        sums = live.sums if watches else None
        self.watch: Watch | DeviceWatch = (
            Watch if sums is None else partial(DeviceWatch, sums=sums)
        )(
            live.attached,
            live.averages.named_tensors(),
            live.rank,
            live.world_size,
            mode=watches,
        )
        self.step = Step(-1, 0)

    def base(self) -> Sealed:
        """Describe the state that an incarnation starts from, as if a step had just led to it."""
        step = self._live.base_step
        copy = self._live.residual.copy(step, is_first=True)
        if copy is not None:
            copy.arrive()
        return Sealed(
            Differential(
                step=step,
                incarnation=self._live.incarnation,
                rank=self._live.rank,
                world_size=self._live.world_size,
                optimizers=(),
                absent=(),
                held=tuple(self._live.attached.held()),
                payload=Payload(()),
                residual=self._live.residual.mark(),
            ),
            frozenset(),
            self._groups(),
        )

    def begin(self, step: int) -> None:
        """Open the step that leads to state ``step``."""
        self.step = Step(step, len(self._live.attached.optimizers))
        self.proofs.begin()
        self.reducer.begin(stamp_of(self._live.incarnation, step))

    @property
    def is_complete(self) -> bool:
        """Whether every optimizer stepped, none may step again, and no step was refused."""
        return self.step.is_complete and self._most_calls == 1 and self.proofs.refusal is None

    def refuse_autocast(self, optimizer: int) -> None:
        """Refuse a step inside ``torch.autocast`` of an optimizer that would multiply matrices.

        Raises:
            UsageError: Unless the optimizer works element by element, where autocast changes nothing.
        """
        attached = self._live.attached
        if optimizer in self._coupled and autocasts(attached.device):
            raise UsageError(
                f"optimizer.step() runs inside torch.autocast, where "
                f"{attached.specs[optimizer].class_name} would "
                "multiply matrices in half width, which replay does not repeat; call it after the "
                "with block, which is for the forward pass and the loss"
            )

    def begin_call(self, optimizer: int) -> None:
        """Close the current call before this optimizer steps again, or after an average moved on.

        Raises:
            UsageError: If a body may make one optimizer step only, and this is a second one.
        """
        step, averages = self.step, self._live.averages
        if self._most_calls == 1:
            step.refuse_again(optimizer, self._live.attached.optimizer_names)
        elif optimizer in step.consumed or (step.consumed and not averages.is_as_committed):
            done, are_replayable = averages.commit()
            if not are_replayable:
                step.changes.add(Change.OUTSIDE)
            step.end_call(done, self.watch.end_call(step.number, done))

    def consume(self, index: int, arguments: Sequence[Any]) -> bool:
        """Read what an optimizer is about to use: unscaled and clipped by now.

        Args:
            index: The optimizer.
            arguments: What its ``step()`` was called with.

        Returns:
            Whether the log has room for as many optimizer calls as this step has made by now.

        Raises:
            UsageError: If the gradients, or the optimizer, are not what a run records.
            UnsupportedOptimizer: If it is called with a closure.
        """
        step, optimizer = self.step, self._live.attached.optimizers[index]
        # The optimizer holds a reference to itself in front of the caller's arguments.
        given = [argument for argument in arguments if argument is not optimizer]
        if self.guard.before_step(index, given) or self._live.averages.before_step(index):
            step.changes.add(Change.OUTSIDE)
        self.watch.before_step(index)
        verdict = Verdict.of(optimizer, waits=self.proofs.copies(index))
        done = OptimizerStep(stepped=True, consumed=copied(hyper_parameters(optimizer)))
        absent = self._gradients.consume(index, step.number, verdict)
        step.late.pop(index, None)  # a step may be tried again
        if verdict.is_late:
            step.late[index] = verdict
        else:
            done = self._judged(index, done, verdict)
        step.consume(index, done, absent)
        self.proofs.before_step(index, step.number, done)
        is_loggable = step.calls <= self._most_calls
        if not is_loggable:
            step.changes.add(Change.TOO_MANY_CALLS)
        elif (departed := self._gradients.depart()) is not None:
            step.departed[len(step.earlier), index] = departed
        return is_loggable

    def _judged(self, optimizer: int, done: OptimizerStep, verdict: Verdict) -> OptimizerStep:
        """Return what an optimizer consumed with a scaler's verdict, which is waited for."""
        scale, found_inf = verdict.arrived()
        if found_inf:
            if verdict.is_late:
                self._gradients.skipped(optimizer)
            if verdict.leaves_unwritten:
                self.step.changes.add(Change.UNWRITTEN_STATE)
        return replace(done, grad_scale=scale, found_inf=found_inf)

    def end(self, optimizer: int) -> None:
        """Look at what an optimizer has just updated."""
        self.watch.after_step(optimizer)
        self.guard.after_step(optimizer)
        self.proofs.after_step(optimizer, self.step.number)
        self.step.end(optimizer)

    def look_outside(self) -> None:
        """Notice what was changed since the optimizers stepped, also by a step that was broken off."""
        self.guard.keep_forms()
        if self.guard.at_commit():
            self.step.changes.add(Change.OUTSIDE)
        if self.step.is_broken_off:
            self.step.changes.add(Change.BROKEN_OFF)
        if self.proofs.has_late_state:
            self.step.changes.add(Change.UNPROVEN_STATE)

    def seal(self, *, thorough: bool, follows_snapshot: bool) -> Sealed:
        """Read the step that just ended; the same value again until the next step begins.

        Args:
            thorough: Whether to read frozen parameters whole that nothing says were written.
            follows_snapshot: Whether a recovery may begin just before this step.

        Raises:
            UsageError: If sealing was broken off before, with several ranks.
        """
        step = self.step
        if step.state is State.SEALED:
            assert step.sealed is not None
            step.sealed = replace(step.sealed, changes=self._changes())
            return step.sealed
        # First, because the user's objects may raise: nothing has been read once by then.
        items, tensors = self._live.tracker.changed(thorough=thorough)
        late: list[Late] = [] if tensors is None else [LateItems(self._live.tracker, tensors)]
        step.begin_sealing(ranks=self._live.world_size)
        step.seal(self._read(items, late, follows_snapshot=follows_snapshot))
        assert step.sealed is not None
        return step.sealed

    def _read(self, items: dict[str, bytes], late: list[Late], *, follows_snapshot: bool) -> Sealed:
        """Read the step.

        Args:
            items: That changed.
            late: What has departed so far; the rest is added in the order in which it departs.
            follows_snapshot: See `seal`.
        """
        step, live = self.step, self._live
        for index, verdict in step.late.items():
            step.consumed[index] = self._judged(index, step.consumed[index], verdict)
        departed = self.reducer.depart()  # first: the rest is done meanwhile
        self._gradients.end_step(step.stepped)
        live_groups = [hyper_parameters(optimizer) for optimizer in live.attached.optimizers]
        comes_late = devices.comes_late(live.attached.device)
        optimizers = tuple(
            _ended(step.consumed.get(i), now, can_compare=not (comes_late and late_tensors(now)))
            for i, now in enumerate(live_groups)
        )
        held = tuple(live.attached.held())
        live.residual.advance()
        self.scaling.end_step()
        averages, are_replayable = live.averages.commit()
        if not are_replayable:
            step.changes.add(Change.OUTSIDE)
        seen = self.watch.at_commit(step.number, averages, whole_state=follows_snapshot)
        payload, of_peers = Payload(()), dict[int, Payload]()
        if departed.travels:
            late.append(LatePayload(departed, self._peers))
        else:
            payload = departed.payload()
            of_peers = {rank: departed.payload(rank) for rank in self._peers}
            departed.learn()
            if departed.has_missed:
                step.changes.add(Change.GRADIENT_MISSED)
        if step.departed:
            late.append(LateGradients(dict(step.departed), self._peers))
        copy = live.residual.copy(step.number)
        if copy is not None:
            late.append(LateResidual(copy))
        if isinstance(seen, Looks):
            late.insert(0, LateLooks(seen))  # copied behind the payload, which is here with it
            seen = Seen((), {}, averages, Written())
        differential = Differential(
            step=step.number,
            incarnation=live.incarnation,
            rank=live.rank,
            world_size=live.world_size,
            optimizers=optimizers,
            absent=tuple(sorted(step.absent)),
            held=held,
            payload=payload,
            items=items,
            residual=live.residual.mark(),
            digests=seen.digests,
            state_digests=seen.states,
            averages=seen.averages,
            written=seen.written,
            earlier=step.earlier,
        )
        if comes_late:
            done = [one for call in differential.steps for one in call.optimizers]
            if tensors := late_tensors([[one.consumed, one.committed] for one in done]):
                late.append(LateGroups(tensors))
        stepped, consumed = (0, 0)
        if live.world_size > 1:
            stepped, consumed = _agreed(differential, comes_late=comes_late)
        return Sealed(
            differential,
            self._changes(),
            [o.after for o in optimizers],
            calls=step.calls,
            stepped=stepped,
            consumed=consumed,
            own=seen.own,
            other=seen.other,
            watched=seen.watched,
            of_peers=of_peers,
            late=late,
        )

    def _changes(self) -> frozenset[Change]:
        """Why the record of the step under way cannot be replayed, if it has to be."""
        return frozenset(self.step.changes) if self._is_replayed else frozenset()

    def is_as_sealed(self, *, with_items: bool) -> bool:
        """Whether the live state is still that of the last sealed step.

        Args:
            with_items: Whether a snapshot would read buffers and frozen parameters from the live training.

        Groups are left out: a snapshot holds those of the sealed step.
        """
        live = self._live
        return (
            not self.step.consumed
            and not self.step.changes
            and not self.guard.at_commit()
            and self.watch.is_as_committed()
            and live.averages.is_as_committed
            and (not with_items or live.tracker.is_as_committed())
        )

    def _groups(self) -> list[Groups]:
        return [copied(hyper_parameters(o)) for o in self._live.attached.optimizers]


def _ended(done: OptimizerStep | None, groups: Groups, *, can_compare: bool) -> OptimizerStep:
    """One optimizer's part of a step, with its groups as they are at the end, unless the host sees that they are equal."""
    if done is None:
        return OptimizerStep(stepped=False, consumed=copied(groups))
    if can_compare and same(done.consumed, groups):
        return done
    return replace(done, committed=copied(groups))


def _agreed(differential: Differential, *, comes_late: bool) -> tuple[int, int]:
    """Which optimizers stepped, and a checksum of what they used: alike on all ranks of a run.

    Of a tensor on an accelerator, for which the host would wait, only the form is in it.
    """
    calls = [step.optimizers for step in differential.steps]
    stepped = sum(
        any(call[i].stepped for call in calls) << i for i in range(len(differential.optimizers))
    )
    parts = [[o.stepped, o.consumed, o.after] for call in calls for o in call]
    if comes_late:
        parts = each_tensor(parts, _comparable)
    return stepped, crc32c(encode(parts))


def _comparable(_: str, tensor: torch.Tensor) -> object:
    return [tensor.dtype, tensor.shape] if devices.comes_late(tensor) else tensor
