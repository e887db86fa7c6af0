"""The part of a payload that corrects a rebuilt gradient to the one the optimizer consumed.

Every rank is responsible for one range of each parameter (`share`). For its range, a rank stores
nothing if the optimizer consumed exactly the gradient that the hook returned, the factors if the
gradient was only scaled since, and otherwise the consumed values themselves. On the CPU, a checksum
taken when the hook returns shows which gradients are unchanged. In all other cases the rank
rebuilds the hook's result and compares bits.

Sections: ``whole/parameters`` with ``whole/DTYPE`` (consumed values of this rank's ranges) and
``changed/parameters`` with ``changed/factors`` (as many float64 for each as the longest list has,
filled up with 1.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from crc32c import crc32c

from lowdiff.compressors.changes import (
    ChangeWarning,
    Factors,
    equal_bits,
    find_factors,
    multiply,
)
from lowdiff.compressors.lane import share, shares_in
from lowdiff.compressors.sections import factor_sections, factors_of, pieces, shared_parts
from lowdiff.core import devices
from lowdiff.core.memory import bits, byte_view
from lowdiff.core.numerics import flushes_denormals
from lowdiff.protocols import Decoder
from lowdiff.types import Block, Layout, Payload, Section

_SAMPLED = 64


class Consumed:
    """One rank's changes between the hook's results and what the optimizers of one step consumed."""

    def __init__(
        self, layout: Layout, rank: int, world_size: int, warning: ChangeWarning | None = None
    ) -> None:
        self._layout = layout
        self._rank, self._world_size = rank, world_size
        self._factors: dict[int, Factors] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self._represented: set[int] = set()
        self._seals: dict[int, _Seal] = {}
        #: Parameters that were changed in the last step. A seal would be useless for them.
        self._changed: set[int] = set()
        self._warning = ChangeWarning(layout) if warning is None else warning

    def begin(self) -> None:
        """Forget the last step."""
        self._factors.clear()
        self._whole.clear()
        self._represented.clear()
        self._seals.clear()

    @property
    def parameters(self) -> list[int]:
        """Return the parameters that the payload represents.

        This includes parameters for which this rank stores the values of its own range: other ranks
        may need this rank's part to rebuild theirs.
        """
        return sorted(self._represented)

    def share(self, parameter: int) -> slice:
        """Return the range of a parameter's elements that this rank is responsible for."""
        numel = self._layout.parameters[parameter].numel
        return slice(*share(numel, self._rank, self._world_size))

    def unseal(self, parameters: Iterable[int]) -> None:
        """Discard seals before an exchange, which may fail after it replaced representations."""
        for parameter in parameters:
            self._seals.pop(parameter, None)

    def seal(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a checksum of the gradient that the hook returns for a parameter, flat and whole."""
        mine = gradient[self.share(parameter)]
        if parameter in self._changed or not devices.may_look(mine):
            return  # reading an accelerator's gradient would stop the host
        # The bits of a NaN may depend on its place in a block, so only finite gradients get a seal.
        if _is_finite(mine):
            self._seals[parameter] = _Seal.of(mine)

    def take(
        self,
        parameter: int,
        rebuild: Callable[[], torch.Tensor] | None,
        gradient: torch.Tensor,
        factors: Factors,
    ) -> None:
        """Compare one parameter's gradient with what was exchanged.

        Args:
            parameter: Layout index.
            rebuild: Makes this rank's range of the hook's result; None if the hook did not run.
            gradient: Flat and whole, as the optimizer is about to consume it.
            factors: Factors that are known to have been applied since the hook.
        """
        mine = gradient[self.share(parameter)]
        # A step may be tried again after an attempt that was broken off.
        self._whole.pop(parameter, None)
        self._factors.pop(parameter, None)
        if rebuild is not None:
            self._represented.add(parameter)
            found = self._factors_of(parameter, rebuild, mine, factors)
            (self._changed.discard if found == () else self._changed.add)(parameter)
            if found is not None:
                self._factors[parameter] = found
                return
        self._whole[parameter] = mine.detach().clone()

    def _factors_of(
        self,
        parameter: int,
        rebuild: Callable[[], torch.Tensor],
        mine: torch.Tensor,
        factors: Factors,
    ) -> Factors | None:
        seal = self._seals.get(parameter)
        if seal is not None and seal.fits(mine):
            return ()
        if not _is_finite(mine):
            return None
        last = next(reversed(self._factors.values()), ())
        tries = [last, factors, *(factors[:n] for n in range(1, len(factors)))]
        found = find_factors(rebuild(), mine, [f for f in dict.fromkeys(tries) if f])
        if found is None:
            self._warning.say([parameter])
        return found

    def sections(self) -> list[Section]:
        """Return this rank's part of the payload."""
        return factor_sections(self._factors) + pieces("whole", self._layout, self._whole)


@dataclass(frozen=True, slots=True)
class _Seal:
    """Checksum that tells whether a gradient is unchanged.

    Attributes:
        sample: A few elements. A factor changes nearly every one, so scaling at every step is
            noticed even if a checksum collides.
        flushes_denormals: Whether the thread that takes the seal flushes denormals, because a
            rebuilt gradient depends on this setting.
    """

    sample: torch.Tensor
    checksum: int
    flushes_denormals: bool

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _Seal:
        return cls(_sample(gradient).clone(), crc32c(byte_view(gradient)), flushes_denormals())

    def fits(self, gradient: torch.Tensor) -> bool:
        return (
            gradient.dtype == self.sample.dtype
            and equal_bits(_sample(gradient), self.sample)
            and self.checksum == crc32c(byte_view(gradient))
            and self.flushes_denormals == flushes_denormals()
        )


def _sample(values: torch.Tensor) -> torch.Tensor:
    return values[:: max(1, values.numel() // _SAMPLED)]


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN, using that NaN compares as both extremes."""
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


#: Writes one block of the hook's result into a tensor of zeros.
Rebuild = Callable[[Block, torch.Tensor], None]


def corrected(payloads: Sequence[Payload], layout: Layout, rebuild: Rebuild) -> Decoder:
    """Return a decoder that turns the hook's results into the gradients that were consumed."""
    of_rank = list(
        zip(map(factors_of, payloads), shared_parts("whole", payloads, layout), strict=True)
    )

    def decode(block: Block, out: torch.Tensor) -> None:
        numel = layout.parameters[block.parameter].numel
        for rank, there, here in shares_in(block, numel, len(of_rank)):
            factors, whole = of_rank[rank]
            mine, stored = out[here], whole.get(block.parameter)
            if stored is not None:
                bits(mine)[:] = stored[there]
                continue
            rebuild(Block(block.parameter, block.start + here.start, block.start + here.stop), mine)
            multiply(mine, factors.get(block.parameter, ()))

    return decode
