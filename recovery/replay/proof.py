"""Whether one step of the live run comes out of replay: what a registered optimizer has to prove.

Nobody but its author knows what such an optimizer does. So a step is replayed from a copy of what was
there before, by the very code that recovery uses, and compared with what the live step made: every bit
of parameters and optimizer state. Recovery itself has checksums, of state at some steps only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowdiff.core.layout import flat, flat_like, shaped, torch_dtype
from lowdiff.errors import UnsupportedOptimizer
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.load import empty_state
from lowdiff.recovery.replay.optimizers import (
    build,
    granularity,
    needs_live_threads,
    settle_kernels,
    usable_on,
    without_default_group,
)
from lowdiff.recovery.replay.replayer import ReplayOptions, plan_units
from lowdiff.recovery.replay.sizing import BLOCK_ELEMENTS, threads_put_back
from lowdiff.recovery.replay.unit import Scratch, Step, UnitState, is_out_of_means
from lowdiff.recovery.state import OptimizerState, RecoveredState, is_aligned, is_scalar
from lowdiff.types import (
    Block,
    Differential,
    Fence,
    Layout,
    OptimizerSpec,
    OptimizerStep,
    ParameterSpec,
    Payload,
)

#: The largest parameter is cut into so many blocks, so that a granularity which is too fine shows.
_NUM_BLOCKS = 3
_ALIGNMENT = 64

#: What keeps a step from coming out again, as far as experience goes.
_CAUSES = (
    "A step must be a function of gradients, groups and state alone. Does it draw random numbers, count "
    "in an attribute (self.t, where self.state[p]['t'] would be replayed), keep anything else outside "
    "its state, or exchange with other ranks?"
)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Some parameters and what their optimizer keeps of them, at one moment.

    Attributes:
        parameters: Layout index -> flat values in memory order.
        state: Layout index -> the optimizer's entries. In a copy, tensors of the parameter's shape are
            flat as in `RecoveredState`.
    """

    parameters: Mapping[int, torch.Tensor]
    state: Mapping[int, Mapping[str, Any]]

    @classmethod
    def copied(
        cls,
        layout: Layout,
        parameters: Mapping[int, torch.Tensor],
        state: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> Held:
        """A copy of live parameters and their optimizer's ``state``."""
        specs = layout.parameters
        return cls(
            {i: flat(parameter).clone() for i, parameter in parameters.items()},
            {
                i: {
                    key: _copied(key, value, specs[i])
                    for key, value in state.get(parameter, {}).items()
                }
                for i, parameter in parameters.items()
            },
        )


def _copied(key: str, value: Any, spec: ParameterSpec) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    is_full = tuple(value.shape) == spec.shape and not is_scalar(key, spec.numel)
    return (flat_like(value.detach(), spec) if is_full else value.detach()).clone()


def refuse_unbuildable(
    layout: Layout,
    spec: OptimizerSpec,
    groups: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> None:
    """See that replay can construct an optimizer, over parameters of the run's forms.

    Args:
        layout: The run's.
        spec: The optimizer.
        groups: Hyper-parameters of each of its groups.
        device: Where the parameters are.

    Raises:
        UnsupportedOptimizer: With what the constructor says.
    """
    known = {parameter.name: parameter for parameter in layout.parameters}
    kind = granularity(spec)
    made = []
    for hyper, names in zip(groups, spec.groups, strict=True):
        own = []
        for parameter in (known[name] for name in names if name in known):
            values = torch.empty(parameter.numel, dtype=torch_dtype(parameter.dtype), device=device)
            values = values if kind == "element" else shaped(values, parameter)
            own.append(torch.nn.Parameter(values, requires_grad=False))
        if own:
            made.append((usable_on(device, dict(hyper)), own))
    # Of a finer one each unit holds a part of the groups, so its constructor must do with one.
    parts = [made] if kind == "whole" else [[part] for part in made]
    for part in parts:
        try:
            with without_default_group([spec]):
                optimizer = build(spec, part)
            if len(optimizer.param_groups) != len(part):
                raise ValueError(
                    f"it makes {len(optimizer.param_groups)} groups of the {len(part)} it was given"
                )
        except Exception as error:
            if is_out_of_means(error):
                raise
            raise UnsupportedOptimizer(
                f"{spec.class_name} cannot be built by replay: {error!r:.300}. Replay constructs it "
                "outside the training script, in one process, from parameter groups or a flat list of "
                "parameters, and from the hyper-parameters in its groups by their names. Give what else "
                "its constructor wants a default, or put it into the groups: super().__init__(params, "
                "{...})"
            ) from error


def refuse_unproven(
    fence: Fence,
    index: int,
    step: int,
    done: OptimizerStep,
    gradients: Mapping[int, torch.Tensor | None],
    before: Held,
    after: Held,
) -> None:
    """Replay one step of one optimizer, and compare.

    Args:
        fence: Of the incarnation.
        index: Which optimizer.
        step: Number of the step, for the message.
        done: What the optimizer consumed beside gradients.
        gradients: Layout index -> flat gradient as it was consumed; None where there was none.
        before: A copy from just before the step; consumed by the replay.
        after: The live tensors, just after it.

    Raises:
        UnsupportedOptimizer: Naming the optimizer, the step, and what differs.
    """
    spec = fence.optimizers[index]
    kind = granularity(spec)
    try:
        state = _replayed(fence, index, step, done, gradients, before)
        difference = _difference(fence.layout, state, index, after)
    except Exception as error:  # whatever an optimizer of the user's raises
        if is_out_of_means(error):
            raise
        difference = f"replaying it fails with {error!r:.300}"
        cause: Exception | None = error
    else:
        cause = None
    if difference is None:
        return
    finer = "" if kind == "whole" else " If it couples more than that, 'whole' is always right."
    raise UnsupportedOptimizer(
        f"{spec.class_name} cannot be checkpointed: step {step} does not come out of replay, from a copy "
        f"of what was there before it: {difference}. {_CAUSES} It is registered as {kind!r}.{finer} The "
        f"step is not committed; a mended optimizer goes on after step {step - 1}"
    ) from cause


def _replayed(
    fence: Fence,
    index: int,
    number: int,
    done: OptimizerStep,
    gradients: Mapping[int, torch.Tensor | None],
    before: Held,
) -> RecoveredState:
    layout = fence.layout
    names = {i: layout.parameters[i].name for i in before.parameters}
    state = empty_state(number - 1, replace(fence, averages={}))
    state.parameters = {names[i]: values for i, values in before.parameters.items()}
    state.optimizers = [OptimizerState([{} for _ in o.groups], {}) for o in fence.optimizers]
    state.items = [{}]
    state.optimizers[index] = OptimizerState(
        [dict(group) for group in done.consumed],
        {names[i]: dict(entries) for i, entries in before.state.items()},
    )
    optimizers = [OptimizerStep(stepped=False, consumed=()) for _ in fence.optimizers]
    # The optimizer may write to tensors in its groups, and the originals are yet to be logged.
    optimizers[index] = replace(done, consumed=copy.deepcopy(done.consumed))
    absent = tuple(i for i, gradient in gradients.items() if gradient is None)

    def decode(block: Block, out: torch.Tensor) -> None:
        gradient = gradients[block.parameter]
        assert gradient is not None
        out.copy_(gradient[block.start : block.stop])

    step = Step.of(
        (Differential(number, 0, 0, 1, tuple(optimizers), absent, (), Payload(())),),
        lambda _: decode,
    )
    num_threads = fence.environment.num_threads
    is_whole = needs_live_threads([fence.optimizers[index]], num_threads)
    device = next(iter(before.parameters.values())).device
    settle_kernels()
    with threads_put_back(), torch.no_grad(), without_default_group(fence.optimizers):
        torch.set_num_threads(num_threads if is_whole else 1)
        largest = max(layout.parameters[i].numel for i in names)
        elements = largest // _NUM_BLOCKS // _ALIGNMENT * _ALIGNMENT
        elements = min(BLOCK_ELEMENTS, max(_ALIGNMENT, elements))
        options = ReplayOptions(whole=is_whole, device=device, block_elements=elements)
        replaying = [
            UnitState(unit, state, state.fence)
            for unit in plan_units(state, state.fence, options)
            if unit.optimizer == index
        ]
        for unit in replaying:
            unit.step(step, Scratch(unit.unit.scratch_elements))
        # Only now: what one unit collects must not be where the next one begins.
        for unit in replaying:
            unit.collect(state)
    return state


def _difference(layout: Layout, state: RecoveredState, index: int, after: Held) -> str | None:
    """The first thing that replay made otherwise."""
    for i, live in after.parameters.items():
        spec = layout.parameters[i]
        if not has_same_bits(state.parameters[spec.name], live):
            return f"parameter {spec.name!r} differs"
        replayed = state.optimizers[index].state.get(spec.name, {})
        if replayed.keys() != after.state[i].keys():
            both = f"{sorted(replayed)} where the live one keeps {sorted(after.state[i])}"
            return f"of {spec.name!r} it keeps {both}"
        for key, value in after.state[i].items():
            found = replayed[key]
            if is_aligned(key, found, spec.numel):
                found = shaped(found, spec)
            if not has_same_bits(found, value):
                return f"state[{key!r}] of parameter {spec.name!r} differs"
    return None
