"""What optimizers consume of low-rank gradients, compared on the device with what the hook returned.

Verdicts stay there until the commit asks for them: no optimizer step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowdiff.compressors.changes import Known, likeliest_factor
from lowdiff.compressors.flat.matrices import Matrices
from lowdiff.compressors.flat.matrix_operators import Products
from lowdiff.core import devices

#: Entries from which an unknown factor is found, and the gradients that they are from: one may be all zeros.
_SAMPLES, _SAMPLED = 4096, 4
#: Layout index of a matrix that was not asked for.
_NOBODY = -1
_Made = Sequence[tuple[Matrices, torch.Tensor]]


@dataclass(slots=True, eq=False)
class Suspicion:
    """What earlier steps say of later ones.

    Attributes:
        suspects: Layout indices of gradients that were not explained once.
        looks_for_factor: Whether an unknown factor is looked for.
    """

    suspects: set[int] = field(default_factory=set)
    looks_for_factor: bool = False


class Compared:
    """Tells of each gradient whether it is the hook's result, multiplied by known factors.

    After one that is not, an unknown factor is looked for in every step, behind the known ones, as that of PyTorch's own
    clipping; and that gradient is copied from then on, before its optimizer consumes it, in case it is not explained
    again. Each rank compares all of a gradient, so all of them come to the same.

    Args:
        products: Compare.
        rank: Of the approximation.
        shares: Of each rank whose payload is made, this one first: its range of a parameter.
    """

    def __init__(
        self, products: Products, rank: int, shares: Sequence[Callable[[int], slice]]
    ) -> None:
        self._products = products
        self._rank = rank
        self._shares = tuple(shares)
        self._suspicion = Suspicion()
        self.begin()

    def begin(self) -> None:
        """Forget the last step, but for what was not explained in it."""
        #: Layout indices, whether each differs, and by what it was multiplied.
        self._asked: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        #: Layout index -> the ranges that ranks store, in their order: of suspects, and of what has no factors.
        self._copies: dict[int, list[torch.Tensor]] = {}
        self._whole: dict[int, list[torch.Tensor]] = {}
        self._skipped: set[int] = set()

    def skip(self, parameters: Collection[int]) -> None:
        """Take these for explained: no optimizer has consumed them."""
        self._skipped |= {*parameters}

    def consume(self, gradients: Mapping[int, torch.Tensor], made: _Made, factors: Known) -> None:
        """Compare what an optimizer is about to consume.

        Args:
            gradients: Layout index -> flat and whole.
            made: Factors of the step, in the order in which they were made.
            factors: See ``Reducer.consume``.
        """
        of_parameter = {
            m.parameter: place for place, (table, _) in enumerate(made) for m in table.matrices
        }
        latest = {i: of_parameter[i] for i in gradients if i in of_parameter}
        if latest:
            by = self._factors(gradients, made, latest, factors)
            for place in sorted({*latest.values()}):
                own = {i: gradients[i] for i in latest if latest[i] == place}
                self._asked.append(self._compare(own, *made[place], by))
        for i in latest:
            self._copies.pop(i, None)  # a step may be tried again
            self._whole.pop(i, None)
            self._skipped.discard(i)
        suspects = [i for i in latest if i in self._suspicion.suspects]
        self._copies |= self._ranges(gradients, suspects)
        self._whole |= self._ranges(gradients, [i for i in gradients if i not in latest])

    def _ranges(
        self, gradients: Mapping[int, torch.Tensor], parameters: Sequence[int]
    ) -> dict[int, list[torch.Tensor]]:
        """Copy what ranks store of some gradients: as many launches as dtypes."""
        count = len(self._shares)
        copies = devices.copied(
            [gradients[i][share(i)] for i in parameters for share in self._shares]
        )
        return {i: copies[n * count : (n + 1) * count] for n, i in enumerate(parameters)}

    def _factors(
        self,
        gradients: Mapping[int, torch.Tensor],
        made: _Made,
        latest: Mapping[int, int],
        factors: Known,
    ) -> torch.Tensor:
        """Return by what the hook's results are expected to have been multiplied, float32 ``[n]``."""
        device = next(iter(gradients.values())).device
        known = [
            (f if isinstance(f, torch.Tensor) else torch.tensor(f, device="cpu")).float()
            for f in factors
        ]
        known = [factor.to(device, non_blocking=True) for factor in known]
        if self._suspicion.looks_for_factor:
            befores, afters = [], []
            # The widest numbers tell a factor best, and samples are of one dtype.
            widest = max((gradients[i].dtype for i in latest), key=lambda dtype: dtype.itemsize)
            told = [i for i in latest if gradients[i].dtype == widest]
            for i in sorted(told, key=lambda i: gradients[i].numel())[-_SAMPLED:]:
                table, both = made[latest[i]]
                numbers = [matrix.parameter for matrix in table.matrices]
                matrix = table.matrices[numbers.index(i)]
                own = both.split(table.counts)[numbers.index(i)]
                start = gradients[i].numel() // 2
                after = gradients[i][start : start + _SAMPLES // _SAMPLED]
                before = torch.empty_like(after)
                self._products.expand(own, matrix.rows, matrix.columns, self._rank, start, before)
                befores.append(before)
                afters.append(after)
            sample = torch.cat(befores)
            for factor in known:
                sample.mul_(factor)
            known.append(likeliest_factor(sample, torch.cat(afters)))
        return torch.stack(known) if known else torch.empty(0, device=device)

    def _compare(
        self,
        gradients: Mapping[int, torch.Tensor],
        table: Matrices,
        both: torch.Tensor,
        by: torch.Tensor,
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Ask about some of a table's matrices; of the others the address is 0."""
        own = [gradients.get(matrix.parameter) for matrix in table.matrices]
        addresses = torch.tensor([0 if g is None else g.data_ptr() for g in own], device="cpu")
        there = addresses.to(both.device, non_blocking=True)
        kind = next(iter(gradients.values())).dtype
        differs = self._products.compare(there, both, by, kind, table, self._rank)
        numbers = [
            _NOBODY if g is None else m.parameter for g, m in zip(own, table.matrices, strict=True)
        ]
        return numbers, differs, by

    def depart(self, kept: Sequence[Mapping[int, torch.Tensor]]) -> Departure:
        """Begin to copy the verdicts to the host, with what ranks store.

        Args:
            kept: Of each rank, what it has of the factors of each matrix.
        """
        asked, ranges = self._asked, [*self._whole.items(), *self._copies.items()]
        return Departure(asked, self._skipped, kept, ranges, len(self._whole), self._suspicion)


@dataclass(slots=True, eq=False)
class Arrived:
    """What one rank stores of a step, on the host.

    Attributes:
        represented: Layout index -> its part of P and Q, of gradients that were explained, or copied.
        factors: Layout index -> by what the hook's result was multiplied, in this order.
        whole: Layout index -> what was consumed in its range, of those that are not explained.
    """

    represented: dict[int, torch.Tensor] = field(default_factory=dict)
    factors: dict[int, tuple[float, ...]] = field(default_factory=dict)
    whole: dict[int, torch.Tensor] = field(default_factory=dict)


class Departure:
    """Verdicts of one step, and what ranks store of it, on their way to the host in one go.

    Args:
        asked: See `Compared`.
        skipped: Layout indices that no optimizer has consumed.
        kept: Of each rank, by layout index, its part of P and Q.
        ranges: Layout index, and what each rank stores of the gradient: first of those without factors.
        num_whole: How many these are.
        suspicion: Gets what was not explained.

    Attributes:
        strange: Layout indices of gradients that no factor explains, and that were looked for one; once they have arrived.
        has_missed: Whether a gradient was not explained, and not copied.
    """

    def __init__(
        self,
        asked: Sequence[tuple[list[int], torch.Tensor, torch.Tensor]],
        skipped: Collection[int],
        kept: Sequence[Mapping[int, torch.Tensor]],
        ranges: Sequence[tuple[int, Sequence[torch.Tensor]]],
        num_whole: int,
        suspicion: Suspicion,
    ) -> None:
        self.strange: list[int] = []
        self.has_missed = False
        self._numbers = [numbers for numbers, *_ in asked]
        self._skipped = frozenset(skipped)
        self._kept = [[*own] for own in kept]
        self._ranges = [i for i, _ in ranges]
        self._num_whole = num_whole
        self._suspicion = suspicion
        self._has_looked = suspicion.looks_for_factor
        self._fetch = devices.fetch(
            [
                *(tensor for _, differs, by in asked for tensor in (differs, by)),
                *(values for own in kept for values in own.values()),
                *(values for _, of_ranks in ranges for values in of_ranks),
            ]
        )
        self._arrived: list[Arrived] | None = None
        self._unexplained: set[int] = set()

    @property
    def travels(self) -> bool:
        """Whether it is waited for."""
        return self._fetch.travels

    def learn(self) -> None:
        """Have later steps copy what was not explained in this one, and look for a factor."""
        self._suspicion.suspects |= self._unexplained
        self._suspicion.looks_for_factor |= bool(self._unexplained)

    def arrived(self) -> list[Arrived]:
        """Return what each rank stores; waits for it."""
        if self._arrived is None:
            self._arrived = self._arrive(iter(self._fetch.arrived()))
        return self._arrived

    def _arrive(self, values: Iterator[torch.Tensor]) -> list[Arrived]:
        #: Factors of each gradient; None where they do not explain it. Of a step that was tried again the last ones.
        verdicts: dict[int, tuple[float, ...] | None] = {}
        for numbers in self._numbers:
            differs, by = next(values).tolist(), next(values).tolist()
            known = tuple(factor for factor in by if factor != 1.0)
            for i, is_strange in zip(numbers, differs, strict=True):
                verdicts[i] = None if is_strange and i not in self._skipped else known
        verdicts.pop(_NOBODY, None)
        kept = [{i: next(values) for i in own} for own in self._kept]
        ranges = {i: [next(values) for _ in kept] for i in self._ranges}
        whole, copies = self._ranges[: self._num_whole], {*self._ranges[self._num_whole :]}
        strange = {i for i, factors in verdicts.items() if factors is None}
        made = []
        for number, own in enumerate(kept):
            arrived = Arrived(whole={i: ranges[i][number] for i in whole})
            for i, factors in verdicts.items():
                if factors is not None:
                    arrived.represented[i], arrived.factors[i] = own[i], factors
                elif i in copies:
                    arrived.represented[i], arrived.whole[i] = own[i], ranges[i][number]
            made.append(arrived)
        self.has_missed = not strange <= copies
        if self._has_looked:
            self.strange = sorted(strange)
        self._unexplained = strange
        return made
