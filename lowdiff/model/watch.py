"""Whether anything but the optimizer wrote to a parameter: asked at every step, of every element.

A checksum of each parameter is taken when its optimizer is about to step, when it has stepped, and at
commit. A difference between two of them where no optimizer was at work is somebody else's write. Then
the whole parameter is logged as values, and replay puts it in at the same place; so training goes on,
and the step stays exact. Version counters would not do: writes through ``.data`` pass them by.

Each rank watches its share of the parameters. It also takes the checksums of one other rank's share,
another one at each step, and ranks compare: a write on one rank only is heard of by all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowdiff.attached import Attached
from lowdiff.digests import Looker, in_order, join
from lowdiff.layout import bits, flat, shares_of
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
