"""What happens inside a step: what its optimizers consume, read in their hooks."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.errors import UsageError
from lowdiff.model.averages import Averages
from lowdiff.model.binding import Attached, hyper_parameters
from lowdiff.model.shared_memory import is_whole
from lowdiff.model.watch import StepGuard, Watch
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Reducer
from lowdiff.recovery.replay.optimizers import granularity
from lowdiff.step.ddp_hook import HookState, autocasts, without_autocast
from lowdiff.step.grad_scaling import Scaling
from lowdiff.step.proofs import Proofs
from lowdiff.types import EarlierStep, OptimizerStep, Payload

_logger = logging.getLogger(__name__)

#: What compiles the functions that are called next, if a compiled one called the present one. PyTorch
#: 2.6 does not tell.
_compiling_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


def copied(value: Any) -> Any:
    """Hyper-parameters as they are now: schedulers write into tensors, arrays and lists in place."""
    if type(value) is dict:
        return {key: copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)([copied(part) for part in value])
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


class StepCapture:
    """Reads one step after the other; `begin` forgets the last one.

    Attributes:
        absent: Parameters without a gradient when their optimizer stepped.
        changed_outside: Whether something changed parameters or optimizer state otherwise.
        committed_groups: Each optimizer's hyper-parameters as of the last `optimizer_steps`.
    """

    def __init__(
        self,
        attached: Attached,
        reducer: Reducer,
        residual: RotatingResidual,
        scaling: Scaling,
        averages: Averages,
        watch: Watch,
        proofs: Proofs,
        hook: HookState | None,
        most_calls: int,
    ) -> None:
        """Read the steps of one session.

        Args:
            attached: Model and optimizers.
            reducer: Reads gradients before an optimizer consumes them.
            residual: What compression owes.
            scaling: What multiplies gradients.
            averages: Those that follow the parameters.
            watch: Notices what else writes to the parameters.
            proofs: Replays steps of registered optimizers.
            hook: Tells what ranks exchange; None where there is one rank only.
            most_calls: Optimizer steps that one loop body may make and a log can hold; 1 where a
                second one is an error.
        """
        self._attached = attached
        self._hook = hook
        self._reducer = reducer
        self._residual = residual
        self._scaling = scaling
        self._averages = averages
        self._watch = watch
        self._proofs = proofs
        self._most_calls = most_calls
        self._step = 0
        self._earlier: list[EarlierStep] = []
        self._stepped: dict[int, OptimizerStep] = {}
        self._finished: set[int] = set()
        self.absent: set[int] = set()
        self.changed_outside = False
        self.committed_groups = self._hyper_parameters()
        self._guard = StepGuard(attached)
        #: Layout index -> gradient that the last body left, in which no optimizer stepped.
        self._kept: dict[int, weakref.ref[torch.Tensor]] = {}
        self._has_told_kept = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def install(
        self,
        timed: Callable[[], AbstractContextManager[None]],
        will_step: Callable[[], object],
        has_consumed: Callable[[], None],
    ) -> None:
        """Hook into the optimizers.

        Args:
            timed: Measures what the hooks take of the training thread.
            will_step: Called before an optimizer steps.
            has_consumed: Called when the reducer has read them, while they are still the same.
        """
        self._timed, self._will_step, self._has_consumed = timed, will_step, has_consumed
        for index, optimizer in enumerate(self._attached.optimizers):
            before = optimizer.register_step_pre_hook(partial(self._before_step, index))
            self._guard.registered(index, before)
            after = optimizer.register_step_post_hook(partial(self._after_step, index))
            # First of all: what the user's hooks write, replay lacks, so it must not count as the
            # optimizer's own work.
            hooks = optimizer._optimizer_step_post_hooks
            assert isinstance(hooks, OrderedDict)
            hooks.move_to_end(after.id, last=False)
            self._handles += [before, after]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, step: int) -> None:
        """Start the step that leads to state ``step``."""
        self._step = step
        self._earlier.clear()
        self._stepped.clear()
        self._finished.clear()
        self.absent.clear()
        self.changed_outside = False
        self._proofs.begin()

    @property
    def has_finished(self) -> bool:
        """Whether every optimizer stepped, none may step again, and no step was refused."""
        all_stepped = len(self._finished) == len(self._attached.optimizers)
        return all_stepped and self._most_calls == 1 and self._proofs.refusal is None

    @property
    def earlier(self) -> tuple[EarlierStep, ...]:
        """Optimizer steps of this body that others followed."""
        return tuple(self._earlier)

    @property
    def is_loggable(self) -> bool:
        """Whether the log has room for as many optimizer steps as this body has made by now."""
        return len(self._earlier) < self._most_calls

    def look_outside(self) -> None:
        """Notice what was changed since the optimizers stepped, also by one that was broken off."""
        self._guard.keep_forms()
        self.changed_outside |= self._guard.at_commit() or self._stepped.keys() > self._finished

    def optimizer_steps(self) -> tuple[OptimizerStep, ...]:
        """What each optimizer did, with its groups as they are now; ends the step."""
        steps = []
        self.committed_groups = self._hyper_parameters()
        has_stepped = self._stepped or self._earlier
        self._kept = {} if has_stepped else self._attached.kept_gradients()
        for index, groups in enumerate(self.committed_groups):
            done = self._stepped.get(index)
            if done is None:
                steps.append(OptimizerStep(stepped=False, consumed=groups))
            elif same(list(done.consumed), list(groups)):
                steps.append(done)
            else:
                steps.append(replace(done, committed=groups))
        return tuple(steps)

    def is_as_committed(self) -> bool:
        """Whether no parameter or optimizer state moved since the last `optimizer_steps`.

        Groups are left out: of these a snapshot holds `committed_groups`.
        """
        return not self._stepped and not self.changed_outside and not self._guard.at_commit()

    def _hyper_parameters(self) -> list[tuple[dict[str, Any], ...]]:
        return [copied(hyper_parameters(o)) for o in self._attached.optimizers]

    def _before_step(
        self,
        index: int,
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        # torch.compile goes on without compiling what raises while it is traced, but it still
        # compiles what that calls: the update itself, and any function that is called here.
        if torch.compiler.is_compiling() or _compiling_callback() not in (None, False):
            raise UsageError(
                "optimizer.step() runs inside torch.compile, whose arithmetic replay does not "
                "repeat; compile the model alone, or mark the function that calls "
                "optimizer.step() with torch.compiler.disable"
            )
        self._refuse_autocast(index)
        with self._timed(), without_autocast(self._attached.device):
            self._begin_call(index)
            self._will_step()
            self._consume(index, optimizer, [*args, *kwargs.values()])
            if self.is_loggable:
                self._has_consumed()
            else:
                self.changed_outside = True

    def _after_step(self, index: int, *_: object) -> None:
        with self._timed():
            self._watch.after_step(index)
            self._guard.after_step(index)
            with without_autocast(self._attached.device):
                self._proofs.after_step(index, self._step)
            self._finished.add(index)

    def _refuse_autocast(self, index: int) -> None:
        """Optimizers that only work element by element do nothing that autocast would change."""
        spec = self._attached.specs[index]
        if autocasts(self._attached.device) and granularity(spec) != "element":
            raise UsageError(
                f"optimizer.step() runs inside torch.autocast, where {spec.class_name} would "
                "multiply matrices in half width, which replay does not repeat; call it after the "
                "with block, which is for the forward pass and the loss"
            )

    def _begin_call(self, index: int) -> None:
        """Keep what was done before this optimizer steps again, or before an average moved on.

        Raises:
            UsageError: If a body may make one optimizer step only.
        """
        is_again = index in self._stepped
        if self._most_calls == 1:
            if is_again and index not in self._finished:
                name = type(self._attached.optimizers[index]).__name__
                raise UsageError(
                    f"optimizer.step() of {name} began again in step {self._step} before it had "
                    "ended: it raised an error, or it calls the step() of a class of which there are "
                    "optimizers as well, so that PyTorch runs the hooks of both; after an error end the "
                    "training and attach again, and share the update in a method of another name"
                )
            if is_again:
                raise UsageError(
                    f"the optimizer stepped twice between commits of step {self._step}; add one line, "
                    "checkpointer.commit(), after optimizer.step(), or loop over "
                    "checkpointer.steps(...). Without a compressor, "
                    'Checkpointer(..., optimizer_steps="any") takes all steps of a body together'
                )
        elif is_again or (self._stepped and not self._averages.is_as_committed):
            self._end_call()

    def _end_call(self) -> None:
        self.changed_outside |= self._stepped.keys() > self._finished  # one was broken off
        averages, are_replayable = self._averages.commit()
        self.changed_outside |= not are_replayable
        skipped = OptimizerStep(stepped=False, consumed=())
        self._earlier.append(
            EarlierStep(
                optimizers=tuple(
                    self._stepped.get(i, skipped) for i in range(len(self._attached.optimizers))
                ),
                absent=tuple(sorted(self.absent)),
                payload=Payload(()),
                averages={name: done for name, done in averages.items() if done.updated},
                written=self._watch.end_call(self._step, averages),
            )
        )
        self._stepped.clear()
        self._finished.clear()
        self.absent.clear()

    def _consume(self, index: int, optimizer: torch.optim.Optimizer, arguments: list[Any]) -> None:
        """Read what the optimizer is about to use: unscaled and clipped by now."""
        # The optimizer holds a reference to itself in front of the caller's arguments.
        self.changed_outside |= self._guard.before_step(
            index, [argument for argument in arguments if argument is not optimizer]
        ) or self._averages.before_step(index)
        self._watch.before_step(index)
        self._tell_of_kept_gradients(index)
        gradients = self._attached.gradients(index)
        self._refuse_own_gradients(gradients)
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        step = OptimizerStep(
            stepped=True,
            consumed=copied(hyper_parameters(optimizer)),
            grad_scale=scale if scale is None else float(scale),
            found_inf=found_inf if found_inf is None else float(found_inf),
        )
        self.changed_outside |= bool(step.found_inf) and _keeps_unwritten_memory(optimizer)
        if self._attached.ddp is None:
            # Only a fused optimizer that unscales by itself still gets them scaled.
            self._scaling.exchanged_at(step.grad_scale or 1.0)
            self._compress_in_place(gradients)
            self._reducer.consume(gradients)
        else:
            self._reducer.consume(gradients, factors=self._scaling.factors)
        if not step.found_inf:
            self._residual.settle({i for i, g in enumerate(gradients) if g is not None})
        owned = (i for i, owner in enumerate(self._attached.owner) if owner == index)
        self.absent.update(i for i in owned if gradients[i] is None)
        self._stepped[index] = step
        self._proofs.before_step(index, self._step, step)

    def _tell_of_kept_gradients(self, index: int) -> None:
        """Say once that a body steps with gradients of the one before, which no resume has."""
        parameters, owner = self._attached.parameters, self._attached.owner
        kept = self._kept.items()
        used = any(owner[i] == index and ref() is parameters[i].grad for i, ref in kept)
        if used and not self._has_told_kept:
            self._has_told_kept = True
            _logger.warning(
                "step %d ended without optimizer.step(), and the next one uses its gradients, unless "
                "they were zeroed in place: a run that resumes between the two lacks them, and what "
                "was compressed away of them is owed anew; run all backward passes of an optimizer "
                "step between two commits, or clear what a skipped step leaves with "
                "optimizer.zero_grad(). This is said once",
                self._step - 1,
            )

    def _refuse_own_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        if self._hook is None:
            return
        if self._hook.has_failed:
            raise UsageError(
                f"the backward pass of step {self._step} raised an error, so its gradients are not "
                "averaged over the ranks; clear them, and run it again or end all ranks"
            )
        consumed = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        own = consumed.keys() - self._hook.averaged
        # Zeros are the same on all ranks: a batch that was left out, say.
        first = next((i for i in sorted(own) if bool(consumed[i].any())), None)
        if first is not None:
            raise UsageError(
                f"optimizer.step() of step {self._step} would use gradients that were not averaged "
                f"over the ranks, {self._attached.layout.parameters[first].name!r} among them, and the "
                "ranks' parameters would part; run the last backward pass before it outside "
                "ddp.no_sync(), also where an epoch ends with fewer micro-batches. Averages of your "
                "own cannot be told from a rank's own gradients: leave them to DDP and its hook"
            )
        self._hook.averaged -= consumed.keys()

    def _compress_in_place(self, gradients: list[torch.Tensor | None]) -> None:
        """Without DDP there is no communication hook: compress what backward left."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._reducer.reduce([i], [gradient], gradient).wait()
            live = self._attached.parameters[i].grad
            assert live is not None
            if live.data_ptr() != gradient.data_ptr():
                spec = self._attached.layout.parameters[i]
                made = gradient.as_strided(spec.shape, spec.strides)
                if is_whole(live):
                    live.copy_(made)
                else:  # an expanded gradient has no memory for each element
                    self._attached.parameters[i].grad = made


def _keeps_unwritten_memory(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step that a fused kernel skips leaves state that nobody has written.

    Before its first step with momentum torch's SGD allocates the buffers and leaves it to the kernel
    to fill them; the kernel does not, and SGD keeps them all the same.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        parameter.grad is not None
        and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
    )
