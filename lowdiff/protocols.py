"""The seams between folders: small protocols that frozen dataclasses can satisfy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from lowdiff.types import Block, Layout, Payload


#: ``decode(block, out)`` writes one block of the gradient that the optimizer consumed, bit for bit,
#: into ``out``: a flat CPU tensor of the block's length and dtype that holds zeros.
Decoder: TypeAlias = "Callable[[Block, torch.Tensor], None]"


@dataclass(frozen=True, slots=True, eq=False)
class WholePair:
    """Where the residual of several parameters is read, and where the new one goes.

    Attributes:
        parameters: Layout indices.
        source: uint8, all bytes of a slot; `lowdiff.types.ResidualLayout` says which are a parameter's.
        target: Likewise; the same tensor in a second backward pass.
    """

    parameters: Sequence[int]
    source: torch.Tensor
    target: torch.Tensor


class LossScale(Protocol):
    """By what the gradients of a step are multiplied; the residual is not."""

    def __call__(self) -> float:
        """Return it; where it lies on an accelerator and has changed, the host waits for it."""
        ...

    def on(self, device: torch.device) -> torch.Tensor:
        """Return it as a float32 ``[]`` on a device, without waiting."""
        ...


class ResidualStore(Protocol):
    """Store of what a reducer did not send (error feedback), parameter by parameter."""

    @property
    def loss_scale(self) -> LossScale:
        """By what the gradients of this step are multiplied."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the residual lies."""
        ...

    @property
    def layout(self) -> Layout:
        """Layout of the residuals."""
        ...

    def whole_pairs(self, parameters: Iterable[int]) -> Sequence[WholePair]:
        """Do what `pair` does for several parameters, by the state they are in; usually all are in one."""
        ...

    def pair(self, parameter: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(source, target)``: flat residual to add, and where the new one goes.

        Both have the parameter's number of elements, dtype and device; they are the same tensor
        when this parameter was already reduced in the step at hand (a second backward pass).
        """
        ...

    def written(self, parameter: int, *, of: int | None = None) -> None:
        """Tell that ``target`` is complete: it counts once an optimizer consumed the gradient.

        Args:
            parameter: Index into the residual's layout.
            of: The parameter with that gradient, if it is another one.
        """
        ...


class Arriving(Protocol):
    """A copy on its way from a device to where it survives the process."""

    def arrive(self) -> None:
        """Have it count; waits for it."""
        ...


class Departed(Protocol):
    """What optimizers consumed in one step, on its way from the device to the host."""

    @property
    def travels(self) -> bool:
        """Whether payloads are waited for; alike on all ranks, however long they take."""
        ...

    def payload(self, of: int | None = None) -> Payload:
        """Return a rank's share of it; waits for what is not here. See ``Reducer.payload``."""
        ...

    @property
    def has_missed(self) -> bool:
        """Whether an optimizer consumed what the payload lacks; known once that was returned.

        What was changed on an accelerator is noticed when the payload arrives, and then may be gone.
        """
        ...

    def learn(self) -> None:
        """Have steps that begin from now on store more of what was found changed in this one, which has arrived.

        All ranks call it before the same step: what they store must be alike.
        """
        ...


class Reducer(Protocol):
    """A compressor bound to one run: makes the averaged gradient and its payload."""

    def begin(self, stamp: int) -> None:
        """Start a step.

        Args:
            stamp: Travels with every exchange; must agree on all ranks.
        """
        ...

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Compress, exchange and average one bucket in place.

        Args:
            parameters: Layout indices of the parameters in the bucket.
            gradients: Their gradients, flat views into ``buffer`` in the same order.
            buffer: The bucket, one-dimensional; overwritten with the average.

        Returns:
            Future of ``buffer``, complete once every rank's share has been added.
        """
        ...

    def consume(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        factors: tuple[float | torch.Tensor, ...] = (),
    ) -> None:
        """Read this rank's share of what an optimizer is about to consume.

        A gradient that was changed since its exchange in a way that the payload cannot express is
        stored whole for this step, on every rank its range.

        Args:
            gradients: Flat gradient of every parameter of the layout; None where it is absent or
                belongs to another optimizer, which has a call of its own.
            factors: What gradients are known to have been multiplied by since their exchange, in
                order; a hint for compressors that store something else than the values. Numbers that are on
                an accelerator are tensors ``[]``.
        """
        ...

    def skip(self, parameters: Collection[int]) -> None:
        """Take these, by layout index, for not consumed after all: the kernel of a fused optimizer skipped its step."""
        ...

    def payload(self, of: int | None = None) -> Payload:
        """Return a rank's share of what was consumed since ``begin``, without what was handed out before.

        Wait for what is on an accelerator.

        Args:
            of: This rank (None), or a peer: then the payload has the bits of the one that the peer
                makes itself, and nothing is sent for it.

        Raises:
            UsageError: If ``of`` is no peer that ``bind`` was told of.
        """
        ...

    def depart(self) -> Departed:
        """Begin to take off the device what was consumed in this step; nothing waits for it.

        Its payloads are asked for before the next ``begin``.
        """
        ...

    def close(self) -> None:
        """Give back process groups and threads; nothing is reduced after it."""
        ...


class Compressor(Protocol):
    """Settings of a compression method; immutable, comparable, and knows no files."""

    @property
    def name(self) -> str:
        """Short name that recovery looks the compressor up by, in ``compressors/__init__.py``."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Plain values that rebuild this compressor."""
        ...

    def residual_layout(self, layout: Layout) -> Layout:
        """Return the layout of what its reducers keep in the residual store, from step to step.

        Parameters of ``layout`` keep their index there; what is appended is state of the
        compressor's own, and must have the same value on all ranks.

        Raises:
            UnsupportedModel: If a parameter has a dtype that it cannot take.
        """
        ...

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> Reducer:
        """Make the reducer of one run.

        Args:
            layout: The parameters, in the order in which gradients are numbered.
            residual: Keeps what the reducer does not send.
            group: Process group of the ranks; None for a single process.
            peers: Other ranks of the group, whose payloads this rank makes as well. The compressors
                say what memory each costs.
        """
        ...

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Prepare one step's gradient for decoding by block.

        Args:
            payloads: The payloads of all ranks for one step, in rank order.
            layout: The layout they were made for.
        """
        ...
