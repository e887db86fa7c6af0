"""Gradients between their exchange and the optimizer: their loss scale, clipping, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from lowdiff.compressors.changes import Known
from lowdiff.compressors.feedback import RotatingResidual, Scaled
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.waiting import wait_for_ranks
from lowdiff.errors import UsageError
from lowdiff.model.binding import Attached
from lowdiff.model.sharding import add_up, is_sharded
from lowdiff.model.shared_memory import is_whole
from lowdiff.protocols import Departed, Reducer
from lowdiff.step.ddp_hook import HookState
from lowdiff.step.verdict import Verdict


class Gradients:
    """The gradients of one rank, as its optimizers find them; nobody records what they consume.

    Args:
        attached: Model and optimizers.
        hook: Knows what DDP or FSDP has averaged by it; None where neither has it.
    """

    def __init__(self, attached: Attached, hook: HookState | None) -> None:
        self._attached = attached
        self._hook = hook
        #: Layout index -> gradient that the last body left, in which its optimizer did not step.
        self._kept: dict[int, weakref.ref[torch.Tensor]] = {}
        self._has_told_kept = False

    def end_step(self, stepped: Collection[int]) -> None:
        """Remember the gradients that a step leaves whose optimizers did not step in it."""
        self._kept = self._attached.kept_gradients(stepped)

    def consume(self, optimizer: int, step: int, verdict: Verdict) -> list[int]:
        """Read what an optimizer is about to consume.

        Args:
            optimizer: Index of the optimizer.
            step: Number of the step, for errors.
            verdict: A gradient scaler's, of these gradients.

        Returns:
            Its parameters that have no gradient, as layout indices; none where nobody records them.

        Raises:
            UsageError: If ranks have not averaged the gradients.
        """
        self._tell_of_kept(optimizer, step)
        if self._hook is not None:
            attached = self._attached
            owned = {i: p for i, p in attached.parameters.items() if attached.owner[i] == optimizer}
            gradients = {i: p.grad for i, p in owned.items() if p.grad is not None}
            self._refuse_not_averaged(self._hook, gradients, step)
        return []

    def depart(self) -> Departed | None:
        """Begin to take off an accelerator what was consumed last, before it may be overwritten; None where it is not kept."""
        return None

    def skipped(self, optimizer: int) -> None:
        """Tell that the optimizer skipped its step, for a verdict that was not known in `consume`."""

    def _refuse_not_averaged(
        self, hook: HookState, consumed: Mapping[int, torch.Tensor], step: int
    ) -> None:
        if hook.has_failed:
            raise UsageError(
                f"the backward pass of step {step} raised an error, so its gradients are not "
                "averaged over the ranks; clear them, and run it again or end all ranks"
            )
        own = hook.consume(consumed)
        # Zeros are the same on all ranks: a batch that was left out, say.
        first = next((i for i in sorted(own) if bool(consumed[i].any())), None)
        if first is not None:
            raise UsageError(
                f"optimizer.step() of step {step} would use gradients that were not averaged "
                f"over the ranks, {self._attached.layout.parameters[first].name!r} among them, and the "
                "ranks' parameters would part; run the last backward pass before it outside "
                "ddp.no_sync(), or after set_requires_gradient_sync(True), also where an epoch ends with "
                "fewer micro-batches. Averages of your own cannot be told from a rank's own gradients: "
                "leave them to DDP, or FSDP, and its hook"
            )

    def _tell_of_kept(self, optimizer: int, step: int) -> None:
        """Say once that a body steps with gradients of the one before, which no resume has."""
        if not self._kept or self._has_told_kept:
            return
        parameters, owner = self._attached.parameters, self._attached.owner
        if any(owner[i] == optimizer and r() is parameters[i].grad for i, r in self._kept.items()):
            self._has_told_kept = True
            Code.GRADIENTS_KEPT.warn(
                f"step {step - 1} ended without a step of optimizer {optimizer}, and the next one uses its "
                "gradients, unless they were zeroed in place: a run that resumes between the two "
                "lacks them, and what was compressed away of them is owed anew; run all backward "
                "passes of an optimizer step between two commits, or clear what a skipped step "
                "leaves with optimizer.zero_grad(). This is said once",
            )


class RecordedGradients(Gradients):
    """Gradients that a compressor takes in before an optimizer consumes them.

    Args:
        attached: Model and optimizers.
        hook: See `Gradients`.
        reducer: Compresses them, also in place where there is no communication hook.
        scaling: Knows what multiplied them since their exchange.
        residual: Settled where they are consumed.
        departs: Whether they leave an accelerator as they are.
    """

    def __init__(
        self,
        attached: Attached,
        hook: HookState | None,
        reducer: Reducer,
        scaling: Scaling,
        residual: RotatingResidual,
        *,
        departs: bool,
    ) -> None:
        super().__init__(attached, hook)
        self._departs = departs
        self._reducer = reducer
        self._scaling = scaling
        self._residual = residual
        self._is_sharded = attached.is_sharded

    def consume(self, optimizer: int, step: int, verdict: Verdict) -> list[int]:
        """See `Gradients.consume`."""
        self._tell_of_kept(optimizer, step)
        if self._is_sharded:
            for i, parameter in self._attached.parameters.items():
                if self._attached.owner[i] == optimizer:
                    add_up(parameter)
        gradients = self._attached.gradients(optimizer)
        if self._hook is not None:
            there = {i: g for i, g in enumerate(gradients) if g is not None}
            self._refuse_not_averaged(self._hook, there, step)
        if self._attached.ddp is None and not self._is_sharded:
            # Only a fused optimizer that unscales by itself still gets them scaled.
            self._scaling.exchanged_at(1.0 if verdict.grad_scale is None else verdict.grad_scale)
            self._compress_in_place(gradients)
            self._reducer.consume(gradients)
        else:
            parameters = {
                i: self._attached.parameters[i] for i, g in enumerate(gradients) if g is not None
            }
            is_scaled = verdict.grad_scale is not None
            for members, factors in self._scaling.factors(parameters, is_scaled=is_scaled):
                own = [g if i in members else None for i, g in enumerate(gradients)]
                self._reducer.consume(own, factors=factors)
        owned = self._owned(optimizer)
        if verdict.is_known_to_skip:
            self._reducer.skip(owned)
        else:
            self._residual.settle(self._own_of(i for i, g in enumerate(gradients) if g is not None))
        return [i for i in owned if gradients[i] is None]

    def depart(self) -> Departed | None:
        """See `Gradients.depart`."""
        return self._reducer.depart() if self._departs else None

    def _owned(self, optimizer: int) -> list[int]:
        owner = self._attached.owner
        return [i for i in self._attached.parameters if owner[i] == optimizer]

    def skipped(self, optimizer: int) -> None:
        """See `Gradients.skipped`: what was sent is owed again."""
        owned = self._owned(optimizer)
        self._reducer.skip(owned)
        self._residual.unsettle(self._own_of(owned))

    def _own_of(self, parameters: Iterable[int]) -> set[int]:
        """Return the parameters by their index among those that this rank's replica group has."""
        replicas = self._attached.replicas
        return set(parameters) if replicas is None else replicas.part.own(set(parameters))

    def _compress_in_place(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compress what backward left, without DDP and its communication hook."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            wait_for_ranks(self._reducer.reduce([i], [gradient], gradient).wait)
            live = self._attached.parameters[i].grad
            assert live is not None
            if live.data_ptr() != gradient.data_ptr():
                spec = self._attached.layout.parameters[i]
                made = gradient.as_strided(spec.shape, spec.strides)
                if is_whole(live):
                    live.copy_(made)
                else:  # an expanded gradient has no memory for each element
                    self._attached.parameters[i].grad = made


class Scaling:
    """The loss scale that exchanged gradients carry, and coefficients of clipping."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        #: Of gradients that are exchanged outside a backward pass, where that is on an accelerator.
        self._there: torch.Tensor | None = None
        self._seen: tuple[int, int] | None = None
        self._told = Scaled()
        #: Which parameters' gradients were clipped together, and by what.
        self._clipped: list[tuple[frozenset[int], float | torch.Tensor]] = []

    @property
    def _tensor(self) -> torch.Tensor | None:
        # It may be updated before or after a commit, or between two backward passes of a step.
        return self._there if self._scaler is None else self._scaler._scale

    def __call__(self) -> float:
        """By what the gradients that are exchanged now were multiplied; see `LossScale`."""
        tensor = self._tensor
        if tensor is not None:
            seen = id(tensor), tensor._version
            if seen != self._seen:  # reading it stops the host on CUDA
                scale = tensor if self._scaler is None else self._scaler.get_scale()
                self._seen, self._told = seen, Scaled(float(scale))
        return self._told.value

    def on(self, device: torch.device) -> torch.Tensor:
        """See `LossScale.on`."""
        tensor = self._tensor
        # Where the scaler has it already.
        return self._told.on(device) if tensor is None else tensor.to(device)

    def exchanged_at(self, scale: float | torch.Tensor) -> None:
        """Tell the scale of gradients that are exchanged outside a backward pass."""
        self._there, self._seen = scale if isinstance(scale, torch.Tensor) else None, None
        if self._there is None and self._told.value != scale:
            self._told = Scaled(float(scale))

    def factors(
        self, parameters: Mapping[int, torch.Tensor], *, is_scaled: bool = False
    ) -> Iterator[tuple[set[int], Known]]:
        """Yield what gradients were probably multiplied by since their exchange, in order; together what is alike.

        Args:
            parameters: Whose gradients, by layout index.
            is_scaled: Whether they still carry the loss scale.
        """
        together: dict[tuple[int, ...], set[int]] = {}
        for i, parameter in parameters.items():
            calls = (n for n, (own, _) in enumerate(self._clipped) if id(parameter) in own)
            together.setdefault(tuple(calls), set()).add(i)
        unscaled: Known = () if is_scaled else self._unscaled()
        for numbers, members in together.items():
            yield members, (*unscaled, *(self._clipped[number][1] for number in numbers))

    def _unscaled(self) -> Known:
        """Return the factor by which a scaler takes its scale out of gradients; none without a scale."""
        tensor = self._tensor
        if tensor is not None and not devices.may_look(tensor):
            return (_inverse(tensor),)
        scale = self()
        return () if scale in (0.0, 1.0) else (float(_inverse(torch.tensor(scale, device="cpu"))),)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, **options: Any
    ) -> torch.Tensor:
        """Clip as PyTorch does, and note by what; returns the total norm, shape ``[]``."""
        own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        total = torch.nn.utils.clip_grad_norm_(own, max_norm, **options)
        if is_sharded(total):
            return total  # each rank scales its shards; a compressor finds the factor
        coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        known = float(coefficient) if devices.may_look(coefficient) else coefficient
        self._clipped.append((frozenset(map(id, own)), known))
        return total

    def end_step(self) -> None:
        """Forget the step's clipping."""
        self._clipped.clear()


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """As ``GradScaler.unscale_`` computes it: a float32."""
    return scale.double().reciprocal().float()
