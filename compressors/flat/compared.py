"""What optimizers consume of low-rank gradients, compared on the device with what the hook returned.

Verdicts stay there until the commit asks for them: no optimizer step waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from lowdiff.compressors.changes import Known, likeliest_factor
from lowdiff.compressors.flat.matrices import Matrices
from lowdiff.compressors.flat.matrix_operators import Products
from lowdiff.compressors.represented import Represented
from lowdiff.core import devices

#: Entries from which an unknown factor is found, and the gradients that they are from: one may be all zeros.
_SAMPLES, _SAMPLED = 4096, 4
#: Layout index of a matrix that was not asked for.
_NOBODY = -1
_Made = Sequence[tuple[Matrices, torch.Tensor]]


class Compared:
    """Tells of each gradient whether it is the hook's result, multiplied by known factors.

    After one that is not, an unknown factor is looked for in every step, behind the known ones, as that of PyTorch's own
    clipping; and that gradient is copied from then on, before its optimizer consumes it, in case it is not explained
    again. Each rank compares all of a gradient, so all of them come to the same.

    Args:
        products: Compare.
        rank: Of the approximation.
        stored: What ranks store of the step, this rank first.

    Attributes:
        has_missed: Whether a gradient was not explained, and not copied.
    """

    def __init__(
        self, products: Products, rank: int, stored: Iterable[Represented[torch.Tensor]]
    ) -> None:
        self._products = products
        self._rank = rank
        self._stored = tuple(stored)
        self._looks_for_factor = False
        self._suspects: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Forget the last step, but for what was not explained in it."""
        self.has_missed = False
        #: Layout indices, whether each differs, and by what it was multiplied.
        self._asked: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        #: Layout index -> the ranges that ranks store, in the order of ``stored``.
        self._copies: dict[int, list[torch.Tensor]] = {}
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
            self._skipped.discard(i)
        suspects = [i for i in latest if i in self._suspects]
        self._copies |= self._ranges(gradients, suspects)
        plain = [i for i in gradients if i not in latest]
        for i, ranges in self._ranges(gradients, plain).items():
            for stored, values in zip(self._stored, ranges, strict=True):
                stored.consumed.put_whole(i, values)

    def _ranges(
        self, gradients: Mapping[int, torch.Tensor], parameters: Sequence[int]
    ) -> dict[int, list[torch.Tensor]]:
        """Copy what ranks store of some gradients: as many launches as dtypes."""
        count = len(self._stored)
        copies = devices.copied(
            [gradients[i][s.consumed.share(i)] for i in parameters for s in self._stored]
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
        if self._looks_for_factor:
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

    def arrive(self) -> list[int]:
        """Wait for the verdicts, once a step, and store what follows from them.

        Returns:
            Layout indices of gradients that no factor explains.
        """
        asked, self._asked = self._asked, []
        arrived = iter(devices.fetched([t for _, differs, by in asked for t in (differs, by)]))
        #: Factors of each gradient; None where they do not explain it. Of a step that was tried again the last ones.
        verdicts: dict[int, tuple[float, ...] | None] = {}
        for numbers, *_ in asked:
            differs, by = next(arrived).tolist(), next(arrived).tolist()
            known = tuple(factor for factor in by if factor != 1.0)
            for i, is_strange in zip(numbers, differs, strict=True):
                verdicts[i] = None if is_strange and i not in self._skipped else known
        verdicts.pop(_NOBODY, None)
        for i, factors in verdicts.items():
            self._store(i, factors)
        strange = {i for i, factors in verdicts.items() if factors is None}
        self.has_missed |= not strange <= self._copies.keys()
        self._suspects |= strange
        looked = self._looks_for_factor
        self._looks_for_factor |= bool(strange)
        return sorted(strange) if looked else []

    def _store(self, parameter: int, factors: tuple[float, ...] | None) -> None:
        """Have all ranks store factors, or what was copied, if anything."""
        copies = self._copies.get(parameter)
        for number, stored in enumerate(self._stored):
            if factors is not None:
                stored.consumed.put(parameter, factors)
            elif copies is not None:
                stored.consumed.put_whole(parameter, copies[number], has_representation=True)
