"""Low-rank gradients: PowerSGD."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from lowdiff.compressors.consumed import corrected
from lowdiff.compressors.feedback import is_used, residuals_of
from lowdiff.compressors.flat import DTYPES, agreed, products_on
from lowdiff.compressors.lane import share
from lowdiff.compressors.represented import RepresentedReducer
from lowdiff.compressors.sections import floats, pieces, shared_parts
from lowdiff.compressors.settings import Settings, checked_size
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.errors import ConfigError, ReplayMismatch
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Block, Layout, ParameterSpec, Payload, Section

_MAX_RANK = 256
#: A larger one does not fit into a program's registers and shared memory.
_MOST_RANK_OF_KERNELS = 8
_WARM_START = "/warm_start"

#: Factors of one parameter: P, ``[matrix_rank, rows]``, and Q, ``[matrix_rank, columns]``.
Factorized = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PowerSGD(Settings):
    """Replaces each gradient matrix by a matrix of low rank, found by one step of power iteration.

    A parameter is viewed as a matrix ``[n, m]`` of its outermost dimension in memory against all
    others. With Q of the last step: P = mean over ranks of M Q, made orthogonal; Q = mean over
    ranks of M^T P. The gradient is P Q^T, summed term by term in a fixed order, so every block of
    it has the same bits. Sums are in rank order. Matrices of half-width parameters are multiplied
    and sent in float32. Per rank and step: ``(n + m) * matrix_rank`` values, each averaged by a
    reproducible sum, ``1 / world_size`` of them stored; one residual and Q kept. Vectors, and
    matrices that would not shrink to half, are averaged and stored as they are. For each peer, until
    the next step: its share of these, as the factors are the same on all ranks.

    Q is kept with the residual and survives the same failures.

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, Algorithms 1 and 2. We orthogonalise with twice
    repeated Gram-Schmidt, each matrix on its own, and restart columns that have vanished.

    Attributes:
        matrix_rank: Rank of the approximation, at least 1.
        dense_below: Parameters with fewer elements are averaged as they are.
        seed: Seed of the first Q.

    Raises:
        ConfigError: If a setting is out of range.
    """

    name: ClassVar[str] = "powersgd"
    matrix_rank: int
    dense_below: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        checked_size("dense_below", "elements", self.dense_below)
        checked_size("matrix_rank", "columns", self.matrix_rank)
        checked_size("seed", "up from 0", self.seed)
        if not 1 <= self.matrix_rank <= _MAX_RANK:
            raise ConfigError(
                f"matrix_rank must be in 1 .. {_MAX_RANK}, got {self.matrix_rank}; 1 to 4 is usual"
            )

    def residual_layout(self, layout: Layout) -> Layout:
        """Return one residual per parameter, followed by Q of every factorised parameter."""
        specs = list(residuals_of(layout).parameters)
        for i in self.factorized(layout):
            spec = layout.parameters[i]
            shape = (self.matrix_rank, matrix_of(spec)[1])
            name, dtype = spec.name + _WARM_START, _wide(spec.dtype)
            specs.append(ParameterSpec(name, shape, (shape[1], 1), dtype, specs[-1].stop))
        return Layout(tuple(specs))

    def factorized(self, layout: Layout) -> list[int]:
        """Return the layout indices of the parameters that factors shrink to half or less."""
        found = []
        for i, spec in enumerate(layout.parameters):
            n, m = matrix_of(spec)
            small = spec.numel < self.dense_below or self.matrix_rank > min(n, m)
            if not small and 2 * (n + m) * self.matrix_rank <= spec.numel:
                found.append(i)
        return found

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> PowerSGDReducer:
        """Make the reducer of one run."""
        products = None
        dtypes = {torch_dtype(dtype) for dtype in layout.dtypes}
        if self.matrix_rank <= _MOST_RANK_OF_KERNELS and dtypes <= DTYPES:
            products = agreed(
                products_on(residual.device, self.matrix_rank, dtypes), residual.device, group
            )
        if products is not None:
            from lowdiff.compressors.flat.powersgd import (  # it imports this module
                FlatPowerSGDReducer,
            )

            return FlatPowerSGDReducer(self, layout, residual, group, peers, products=products)
        return PowerSGDReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that joins the ranks' shares of P and Q and adds up the terms."""
        factors = self._read(payloads, layout)

        def rebuild(block: Block, out: torch.Tensor) -> None:
            if block.parameter not in factors:
                raise ReplayMismatch("the payloads lack the factors of a gradient")
            write_low_rank(factors[block.parameter], block.start, block.stop, out)

        return corrected(payloads, layout, rebuild)

    def _read(self, payloads: Sequence[Payload], layout: Layout) -> dict[int, Factorized]:
        specs = layout.parameters
        shares = shared_parts(
            "low_rank", payloads, layout, lambda i: sum(matrix_of(specs[i])) * self.matrix_rank
        )
        if any(own.keys() != shares[0].keys() for own in shares):
            raise ReplayMismatch("a rank's payload lacks its share of a gradient's factors")
        found = {}
        for i in shares[0]:
            dtype = torch_dtype(_wide(specs[i].dtype))
            values = floats(np.concatenate([own[i] for own in shares]), dtype)
            found[i] = split_factors(values, specs[i], self.matrix_rank)
        return found


class PowerSGDReducer(RepresentedReducer[torch.Tensor]):
    """PowerSGD bound to one run; holds P and Q as one flat tensor per parameter."""

    compressor: PowerSGD

    def __init__(
        self,
        compressor: PowerSGD,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> None:
        super().__init__(compressor, layout, residual, group, peers)
        worth = compressor.factorized(layout)
        self._q_of = {i: len(layout.parameters) + k for k, i in enumerate(worth)}

    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """See ``RepresentedReducer``."""
        rank = self.compressor.matrix_rank
        return sum(
            sum(matrix_of(self.layout.parameters[i])) * rank if i in self._q_of else g.numel()
            for i, g in gradients.items()
        )

    def average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        """See ``RepresentedReducer``."""
        dense = {i: g for i, g in gradients.items() if i not in self._q_of}
        sent: dict[int, torch.Tensor] = {}
        ps: dict[int, torch.Tensor] = {}
        for i, gradient in gradients.items():
            if i in self._q_of:
                total = self.feedback.total(i, gradient)
                matrix = total.view(matrix_of(self.layout.parameters[i]))
                wide = matrix.to(torch_dtype(_wide(self.layout.parameters[i].dtype)))
                sent[i] = wide if is_used(gradient) else torch.zeros_like(wide)
                ps[i] = self._start(i) @ sent[i].T
        self.lane.mean_of(dense | ps)
        for p in ps.values():
            orthogonalize(p)
        qs = {i: ps[i] @ sent[i] for i in ps}
        self.lane.mean_of(qs)
        for i, q in qs.items():
            factors = torch.cat([ps[i].flatten(), q.flatten()])
            for stored in self.stored:
                stored.held[i] = factors  # the same on all ranks, of which each stores a share
            gradient = gradients[i]
            made = low_rank((ps[i], q), 0, gradient.numel(), gradient)
            self.feedback.sent_in_pieces(i, made)
            self._keep_start(i, q)

    def _start(self, parameter: int) -> torch.Tensor:
        """Return the last Q, ``[matrix_rank, columns]``, its rows of length 1; random where it is zero."""
        last, _ = self.residual.pair(self._q_of[parameter])
        q = last.view(self.compressor.matrix_rank, -1)
        norms = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        # An overflow that no scaler skipped must not stay in Q for ever.
        usable = norms.isfinite() & (norms > 0)
        if devices.may_look(q) and bool(usable.all()):
            return q.div(norms)
        drawn = starts_of(self.compressor, parameter, q.shape[1], q.dtype)
        return torch.where(usable, q.div(norms), drawn.to(q.device))

    def _keep_start(self, parameter: int, q: torch.Tensor) -> None:
        """Keep Q for the next step's start; rows that are zero, as for unused parameters, stay."""
        last, target = (t.view_as(q) for t in self.residual.pair(self._q_of[parameter]))
        target.copy_(torch.where(q.any(1, keepdim=True), q, last))
        self.residual.written(self._q_of[parameter], of=parameter)

    def rebuilt(self, parameter: int, held: torch.Tensor, share: slice) -> torch.Tensor:
        """See ``RepresentedReducer``."""
        spec = self.layout.parameters[parameter]
        numel, dtype = share.stop - share.start, torch_dtype(spec.dtype)
        out = torch.empty(numel, dtype=dtype, device=held.device)
        factors = split_factors(held, spec, self.compressor.matrix_rank)
        write_low_rank(factors, share.start, share.stop, out)
        return out

    def sections(self, kept: Mapping[int, torch.Tensor], rank: int) -> list[Section]:
        """Return a rank's share of P and Q; see ``RepresentedReducer``."""
        world_size = self.lane.world_size
        mine = {i: own[slice(*share(own.numel(), rank, world_size))] for i, own in kept.items()}
        return pieces("low_rank", self.layout, mine)


def starts_of(
    compressor: PowerSGD, parameter: int, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the Q that a parameter starts with, ``[matrix_rank, columns]``, its rows of length 1, on the CPU."""
    generator = torch.Generator().manual_seed(compressor.seed + 1_000_003 * parameter)
    shape = compressor.matrix_rank, columns
    drawn = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    return drawn.div_(torch.linalg.vector_norm(drawn, dim=1, keepdim=True))


def matrix_of(spec: ParameterSpec) -> tuple[int, int]:
    """Return rows and columns of a parameter as a matrix in memory order, with contiguous rows."""
    if not spec.shape or not spec.numel:
        return 1, spec.numel
    rows = spec.shape[max(range(len(spec.shape)), key=lambda d: (spec.strides[d], -d))]
    return rows, spec.numel // rows


#: Elements computed at a time on the CPU, so that they stay in a core's cache. On a device, one launch
#: computes all.
_PIECE_ELEMENTS = 1 << 17


def orthogonalize(rows: torch.Tensor) -> torch.Tensor:
    """Make the rows of ``[matrix_rank, length]`` orthonormal in place, in order; zeros stay zero."""
    for k in range(rows.shape[0]):
        row = rows[k]
        before = torch.linalg.vector_norm(row)
        for _ in range(2 if k else 0):  # once is not enough where rows are nearly dependent
            row.sub_((rows[:k] @ row) @ rows[:k])
        norm = torch.linalg.vector_norm(row)
        # The remainder of a dependent row is rounding error and has no direction.
        lost = norm <= before * (16 * torch.finfo(rows.dtype).eps)
        row.copy_(torch.where(lost, torch.zeros_like(row), row / norm))
    return rows


def low_rank(
    factors: Factorized, start: int, stop: int, out: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Write elements ``start`` to ``stop`` of P Q^T, in row order, into ``out``, piece by piece.

    Terms are added to each element in their order: unlike a matrix product, every element's bits are
    the same in any block.

    Yields:
        Where in ``out`` a piece lies, when it is written, and the piece.
    """
    p, q = factors
    m = q.shape[1]
    most = min(_PIECE_ELEMENTS, stop - start) if devices.may_look(out) else stop - start
    is_wide = out.dtype == p.dtype
    sums = out if is_wide else torch.empty(most, dtype=p.dtype, device=p.device)
    done = 0
    while done < stop - start:
        row, column = divmod(start + done, m)
        left_over = min(stop - start - done, most)
        if column or left_over < m:
            num_rows, num_columns = 1, min(m - column, left_over)
        else:
            num_rows, num_columns = left_over // m, m
        size = num_rows * num_columns
        place = slice(done, done + size)
        piece = out[place]
        total = (piece if is_wide else sums[:size]).view(num_rows, num_columns)
        rows = p[:, row : row + num_rows, None].unbind()
        columns = q[:, column : column + num_columns].unbind()
        torch.mul(rows[0], columns[0], out=total)
        for left, right in zip(rows[1:], columns[1:], strict=True):
            total.addcmul_(left, right)
        if not is_wide:
            piece.copy_(total.view(-1))
        done += size
        yield place, piece


def write_low_rank(factors: Factorized, start: int, stop: int, out: torch.Tensor) -> None:
    """Write all that `low_rank` writes piece by piece."""
    deque(low_rank(factors, start, stop, out), maxlen=0)


def split_factors(values: torch.Tensor, spec: ParameterSpec, matrix_rank: int) -> Factorized:
    """Return P and Q from the flat tensor that holds one after the other."""
    n, m = matrix_of(spec)
    p, q = values.split([matrix_rank * n, matrix_rank * m])
    return p.view(matrix_rank, n), q.view(matrix_rank, m)


def _wide(dtype: str) -> str:
    """Return the dtype in which a parameter's factors are computed, sent and stored."""
    return "float64" if dtype == "float64" else "float32"
