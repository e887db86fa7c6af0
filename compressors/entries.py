"""The entries of a step that one rank stores: this one, or a peer whose payload it makes as well.

The same code makes a rank's payload there and on its peers. Both read the same gradient at the same
positions, so both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from lowdiff.compressors.changes import Factors, Known, find_factors, has_foreign_entries, read
from lowdiff.compressors.lane import share
from lowdiff.compressors.sections import factor_sections, pieces
from lowdiff.core import devices
from lowdiff.core.layout import INT_OF_BYTES
from lowdiff.core.memory import array_of, bits
from lowdiff.types import Layout, Section

#: Positions inside a parameter that a rank stores, and the values at these positions.
Entries = tuple[torch.Tensor, torch.Tensor]
#: ``exchanged(parameter, range)``: positions in the range that any rank exchanged; None for all of them.
Exchanged = Callable[[int, slice], "list[torch.Tensor] | None"]


class StoredEntries:
    """One rank's selection of a step, and what the optimizers consumed there.

    Attributes:
        rank: Whose entries these are.
        foreign: Layout index -> the rank's range of a gradient that has entries no rank exchanged.
    """

    def __init__(self, layout: Layout, rank: int, world_size: int) -> None:
        self._layout = layout
        self.rank = rank
        self._world_size = world_size
        #: Layout index -> positions that the rank stores. A whole parameter is divided into shares.
        self._selected: dict[int, torch.Tensor] = {}
        #: `_selected` as it was in earlier backward passes of this step.
        self._earlier: dict[int, torch.Tensor] = {}
        self._consumed: dict[int, Entries] = {}
        self.foreign: dict[int, torch.Tensor] = {}
        self._narrow: dict[int, torch.Tensor] = {}
        #: Layout index -> entries consumed as narrow values, and the factors that give the final
        #: ones.
        self._consumed_narrow: dict[int, Entries] = {}
        self._factors: dict[int, Factors] = {}

    def begin(self) -> None:
        """Forget the last step."""
        self._selected.clear()
        self._earlier.clear()
        self._consumed.clear()
        self.foreign.clear()
        self._narrow.clear()
        self._consumed_narrow.clear()
        self._factors.clear()

    def share(self, count: int) -> slice:
        """Return the rank's range of ``count`` elements that are divided over all ranks."""
        return slice(*share(count, self.rank, self._world_size))

    def select(self, parameter: int, positions: torch.Tensor) -> None:
        """Store these positions of a parameter, plus earlier passes' positions that are still in use.

        DDP keeps the previous pass's gradient if no rank used the parameter in the last pass.

        Args:
            parameter: Layout index.
            positions: int64, ascending.
        """
        earlier = self._selected.get(parameter)
        if earlier is not None:
            known = self._earlier.get(parameter)
            self._earlier[parameter] = earlier if known is None else torch.cat([known, earlier])
        self._selected[parameter] = positions

    def round(self, parameter: int, rounded: torch.Tensor) -> None:
        """Keep the narrow values of an average that was rounded as a whole."""
        self._narrow[parameter] = rounded[self._positions(parameter, rounded.numel())].clone()

    def consume(self, gradients: Sequence[torch.Tensor | None], factors: Known) -> set[int]:
        """Take what an optimizer consumes; return the parameters of which everything is stored."""
        fresh = {i: self._own(i, g) for i, g in enumerate(gradients) if g is not None}
        strange: set[int] = set()
        if fresh and not _all_finite(fresh.values()):
            # Clipping by a NaN norm turns every entry NaN, including entries that no rank selected.
            for i, (_, values) in fresh.items():
                whole = gradients[i]
                if whole is not None and not bool(values.isfinite().all()):
                    fresh[i] = (torch.arange(whole.numel(), device=whole.device), whole.clone())
                    strange.add(i)
        numbers = read(factors) if self._narrow else ()
        for i, entries in fresh.items():
            self.put(i, entries, self._narrow.get(i), numbers)
        return strange

    def put(
        self, parameter: int, entries: Entries, narrow: torch.Tensor | None, factors: Factors
    ) -> None:
        """Store entries that an optimizer consumed.

        Args:
            parameter: Layout index.
            entries: As they were read, here or by somebody else.
            narrow: What the values were rounded to before factors multiplied them.
            factors: See ``Reducer.consume``.
        """
        values = entries[1]
        # A step may be tried again behind one that was broken off.
        self._consumed_narrow.pop(parameter, None)
        self._factors.pop(parameter, None)
        if narrow is not None and narrow.numel() == values.numel():
            self._keep_narrow(parameter, (entries[0], narrow), values, factors)
        self._consumed[parameter] = entries

    def keep_foreign(self, gradients: Mapping[int, torch.Tensor], exchanged: Exchanged) -> None:
        """Store the rank's range of every gradient that has entries no rank exchanged.

        Gradients on an accelerator are not examined: reading them would stop the host.
        """
        for i, gradient in gradients.items():
            self.foreign.pop(i, None)  # a step may be tried again behind one that was broken off
            if not devices.may_look(gradient):
                continue
            mine = self.share(gradient.numel())
            positions = exchanged(i, mine)
            if positions is None:
                continue
            if has_foreign_entries(gradient[mine], positions):
                self.foreign[i] = gradient[mine].clone()

    def _keep_narrow(
        self, parameter: int, narrow: Entries, values: torch.Tensor, known: Factors
    ) -> None:
        last = next(reversed(self._factors.values()), ())
        tries = dict.fromkeys([last, *(known[: n + 1] for n in reversed(range(len(known))))])
        if not bool(values.isfinite().all()):
            return
        found = find_factors(narrow[1].to(values.dtype), values, [f for f in tries if f])
        if found is not None:
            self._factors[parameter] = found
            self._consumed_narrow[parameter] = narrow

    def _own(self, parameter: int, gradient: torch.Tensor) -> Entries:
        """Return the positions that the rank stores of a parameter, and the final values there."""
        positions = self._positions(parameter, gradient.numel())
        if isinstance(positions, slice):
            values = gradient[positions].clone()
            return torch.arange(positions.start, positions.stop, device=gradient.device), values
        earlier = self._earlier.get(parameter)
        if earlier is not None:
            filled = gradient.view(INT_OF_BYTES[gradient.element_size()])[earlier] != 0
            union = torch.cat([positions, earlier[filled]]).unique()  # ascending
            positions = union if union.numel() > positions.numel() else positions
        return positions, gradient.index_select(0, positions)

    def _positions(self, parameter: int, numel: int) -> torch.Tensor | slice:
        selected = self._selected.get(parameter)
        if selected is not None and selected.numel() < numel:
            return selected
        return self.share(numel)

    def as_selected(self) -> dict[int, torch.Tensor]:
        """Return the values of the parameters of which exactly the last selection was consumed."""
        return {
            i: values
            for i, (own, values) in self._consumed.items()
            if i in self._selected and own is self._selected[i]
        }

    def sections(self, besides: Mapping[int, object] | None = None) -> list[Section]:
        """Return the rank's entries, but for those of the parameters ``besides``."""
        left_out = {*self._consumed_narrow, *(besides or ())}
        full = {i: entries for i, entries in self._consumed.items() if i not in left_out}
        sections = self._indexed("", full)
        if self._consumed_narrow:
            sections += self._indexed("narrow/", self._consumed_narrow)
            sections += factor_sections(self._factors)
        return sections

    def foreign_sections(self) -> list[Section]:
        """Return the rank's ranges of gradients that have entries no rank exchanged."""
        return pieces("whole", self._layout, self.foreign)

    def _indexed(self, prefix: str, entries: Mapping[int, Entries]) -> list[Section]:
        """Return entries as sections ``PREFIXindices/DTYPE`` and ``PREFIXvalues/DTYPE``."""
        sections: list[Section] = []
        for dtype in self._layout.dtypes:
            chosen = [
                (spec.offset, *entries[i])
                for i, spec in self._layout.of_dtype(dtype)
                if i in entries
            ]
            if chosen:
                indices = torch.cat([own for _, own, _ in chosen])
                parts = indices.split([own.numel() for _, own, _ in chosen])
                for (offset, _, _), part in zip(chosen, parts, strict=True):
                    part += offset
                indices, values = devices.on_host(
                    [indices, torch.cat([own for _, _, own in chosen])]
                )
                sections += [
                    Section(f"{prefix}indices/{dtype}", "ascending", array_of(indices)),
                    Section(f"{prefix}values/{dtype}", "planes", bits(values)),
                ]
        return sections


def _all_finite(parts: Iterable[Entries]) -> bool:
    """Return whether no value is NaN or infinite; True on an accelerator, where the host would stop."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for _, values in parts:
        by_dtype.setdefault(values.dtype, []).append(values)
    return all(
        not devices.may_look(values[0]) or bool(torch.cat(values).isfinite().all())
        for values in by_dtype.values()
    )
