"""What optimizers consume of low-rank gradients, compared on the device with what the hook returned.

Verdicts stay there until the commit asks for them: no optimizer step waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lowdiff.compressors.changes import Factors, Known, likeliest_factor
from lowdiff.compressors.flat.matrices import Matrices, Matrix
from lowdiff.compressors.flat.matrix_operators import Products
from lowdiff.compressors.represented import Represented
from lowdiff.core import devices

#: Entries from which an unknown factor is found.
_SAMPLES = 4096
#: A rank's place among those whose payloads are made, and the layout index of a parameter.
_Of = tuple[int, int]
_Made = Sequence[tuple[Matrices, torch.Tensor]]


class Compared:
    """Tells of each gradient whether it is the hook's result, multiplied by known factors.

    After one that is not, an unknown factor is looked for in every step, behind the known ones, as that of PyTorch's own
    clipping; and that gradient is copied in the next step, before its optimizer consumes it, in case it is not explained
    then either.

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
        self._suspects: set[_Of] = set()
        self.begin()

    def begin(self) -> None:
        """Forget the last step, but for what was not explained in it."""
        self.has_missed = False
        self._asked: list[tuple[list[_Of], torch.Tensor, torch.Tensor]] = []
        self._copies: dict[_Of, torch.Tensor] = {}

    def consume(self, gradients: Mapping[int, torch.Tensor], made: _Made, factors: Known) -> None:
        """Compare what an optimizer is about to consume.

        Args:
            gradients: Layout index -> flat and whole.
            made: Factors of the step, in the order in which they were made.
            factors: See ``Reducer.consume``.
        """
        latest = {
            m.parameter: place for place, (table, _) in enumerate(made) for m in table.matrices
        }
        used = {i: latest[i] for i in gradients if i in latest}
        if used:
            by = self._factors(gradients, made, used, factors)
            for place in sorted({*used.values()}):
                own = [i for i in used if used[i] == place]
                self._compare({i: gradients[i] for i in own}, *made[place], by)
        for number, stored in enumerate(self._stored):
            for i in used:
                self._copies.pop((number, i), None)  # a step may be tried again
                if (number, i) in self._suspects:
                    self._copies[number, i] = gradients[i][stored.consumed.share(i)].clone()
        plain = [(stored, i) for stored in self._stored for i in gradients if i not in used]
        of_dtype: dict[torch.dtype, list[tuple[Represented[torch.Tensor], int]]] = {}
        for stored, i in plain:
            of_dtype.setdefault(gradients[i].dtype, []).append((stored, i))
        for members in of_dtype.values():
            parts = [gradients[i][stored.consumed.share(i)] for stored, i in members]
            copied = torch.cat(parts).split([part.numel() for part in parts])
            for (stored, i), values in zip(members, copied, strict=True):
                stored.consumed.put_whole(i, values)

    def _factors(
        self,
        gradients: Mapping[int, torch.Tensor],
        made: _Made,
        used: Mapping[int, int],
        factors: Known,
    ) -> torch.Tensor:
        """Return by what the hook's results are expected to have been multiplied, float32 ``[n]``."""
        device = next(iter(gradients.values())).device
        known = [
            (f if isinstance(f, torch.Tensor) else torch.tensor(f, device="cpu")).float()
            for f in factors
        ]
        known = [factor.to(device, non_blocking=True) for factor in known]
        if not self._looks_for_factor:
            return torch.stack(known) if known else torch.empty(0, device=device)
        smallest = min(used, key=lambda i: gradients[i].numel())
        table, both = made[used[smallest]]
        matrix, own = _of(table, both, smallest)
        after = gradients[smallest][:_SAMPLES]
        before = torch.empty_like(after)
        self._products.expand(own, matrix.rows, matrix.columns, self._rank, 0, before)
        for factor in known:
            before.mul_(factor)
        return torch.stack([*known, likeliest_factor(before, after)])

    def _compare(
        self,
        gradients: Mapping[int, torch.Tensor],
        table: Matrices,
        both: torch.Tensor,
        by: torch.Tensor,
    ) -> None:
        for number, stored in enumerate(self._stored):
            asked = [m.parameter if m.parameter in gradients else None for m in table.matrices]
            ranges = [slice(0, 0) if i is None else stored.consumed.share(i) for i in asked]
            rows = [
                [0 if i is None else gradients[i].data_ptr() for i in asked],
                [own.start for own in ranges],
                [own.stop for own in ranges],
            ]
            there = torch.tensor(rows, device="cpu").to(both.device, non_blocking=True)
            kind = next(iter(gradients.values())).dtype
            differs = self._products.compare(there, both, by, kind, table, self._rank)
            self._asked.append(([(number, -1 if i is None else i) for i in asked], differs, by))

    def arrive(self) -> list[int]:
        """Wait for the verdicts, once a step, and store what follows from them.

        Returns:
            Layout indices of this rank's gradients that no factor explains.
        """
        asked, self._asked = self._asked, []
        if not asked:
            return []
        arrived = iter(devices.fetched([t for _, differs, by in asked for t in (differs, by)]))
        strange: set[_Of] = set()
        for members, *_ in asked:
            differs, by = next(arrived).tolist(), next(arrived).tolist()
            known: Factors = tuple(factor for factor in by if factor != 1.0)
            for of, is_odd in zip(members, differs, strict=True):
                number, i = of
                if i < 0:
                    continue
                consumed = self._stored[number].consumed
                if not is_odd:
                    consumed.put(i, known)
                    continue
                strange.add(of)
                if of in self._copies:
                    consumed.put_whole(i, self._copies[of], has_representation=True)
        self.has_missed |= any(
            number == 0 and (number, i) not in self._copies for number, i in strange
        )
        self._suspects = strange
        looked, self._looks_for_factor = (
            self._looks_for_factor,
            bool(strange) or self._looks_for_factor,
        )
        return sorted(i for number, i in strange if number == 0 and looked)


def _of(table: Matrices, both: torch.Tensor, parameter: int) -> tuple[Matrix, torch.Tensor]:
    """Return a matrix and its factors."""
    parts = zip(table.matrices, both.split(table.counts), strict=True)
    return next((m, own) for m, own in parts if m.parameter == parameter)
