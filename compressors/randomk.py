"""Random entries, the same on every rank; their positions are neither sent nor stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lowdiff.compressors.binned import BinnedReducer, Sent, binned_decoder
from lowdiff.compressors.entries import StoredEntries
from lowdiff.compressors.lane import share
from lowdiff.compressors.sections import listed, pieces, shared_parts
from lowdiff.compressors.settings import SparseSettings, checked_seed
from lowdiff.compressors.sparse import IndexedDecoder, SharedReducer
from lowdiff.core.memory import bits
from lowdiff.protocols import Decoder, Reducer, ResidualStore
from lowdiff.types import Block, Layout, Payload, Section


@dataclass(frozen=True, slots=True)
class RandomK(SparseSettings):
    """Keeps random entries of each parameter and remembers the rest.

    A parameter is cut into ``k`` ranges of (nearly) equal length. From each range, one entry is
    drawn from ``(seed, step, parameter)`` alone: every entry has the same chance, and the positions
    are in ascending order. All ranks draw the same positions, so only values travel: per rank and
    step ``k`` values averaged by a reproducible sum (twice ``k * itemsize`` bytes sent), ``k /
    world_size`` values stored, one residual kept. For each peer, until the next step: ``k /
    world_size`` values.

    Reference: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, Definition 2.1 (rand-k) and
    Algorithm 1; shared randomness as in Vogels et al., "PowerSGD", NeurIPS 2019, appendix G
    (Random K). We draw by ranges, not freely.

    Attributes:
        density: Share of entries kept, in (0, 1].
        dense_below: Parameters with fewer elements are exchanged whole.
        seed: Seed of the positions.
        value_bits: 2 or 4 sends and stores a value as its sign and one of 2 or 8 magnitude bins,
            and error feedback keeps the difference. Codes are not averaged: each rank receives
            those of all ranks, and stores ``k`` codes of its own. None keeps the dtype.

    Raises:
        ConfigError: If a setting is out of range.
    """

    name: ClassVar[str] = "randomk"
    seed: int = 0

    def __post_init__(self) -> None:
        SparseSettings.__post_init__(self)
        checked_seed(self.seed, 63)

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> Reducer:
        """Make the reducer of one run."""
        if self.value_bits is not None:
            return BinnedRandomKReducer(self, layout, residual, group, peers)
        return RandomKReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that draws the positions again and assigns the ranks' stored values.

        With ``value_bits``, it adds what the ranks sent.
        """
        if self.value_bits is not None:
            where = [self._drawn_for(payload, layout) for payload in payloads]
            return binned_decoder(payloads, layout, self.value_bits, where)
        indexed = IndexedDecoder(payloads, layout)
        drawn = shared_parts(
            "drawn", payloads, layout, lambda i: self.kept(layout.parameters[i].numel)
        )
        steps = [s.data for payload in payloads if (s := payload.section("step"))]

        def decode(block: Block, out: torch.Tensor) -> None:
            indexed(block, out)
            if not any(block.parameter in values for values in drawn):
                return
            numel = layout.parameters[block.parameter].numel
            k = self.kept(numel)
            # Indices of every range that the block touches.
            ranges = np.arange(
                max(0, block.start * k // numel - 1), min(k, block.stop * k // numel + 2)
            )
            where = positions(self.seed, int(steps[0][0]), block.parameter, numel, k, ranges)
            inside = (where >= block.start) & (where < block.stop)
            where, ranges = where[inside] - block.start, ranges[inside]
            target = bits(out)
            for rank, values in enumerate(drawn):
                if block.parameter in values:
                    first, last = share(k, rank, len(payloads))
                    mine = (ranges >= first) & (ranges < last)
                    target[where[mine]] = values[block.parameter][ranges[mine] - first]

        return decode

    def drawn(self, step: int, parameter: int, numel: int) -> torch.Tensor:
        """Return all positions that are drawn of a parameter in a step, int64 ``[kept]``."""
        k = self.kept(numel)
        return torch.from_numpy(positions(self.seed, step, parameter, numel, k, np.arange(k)))

    def _drawn_for(self, payload: Payload, layout: Layout) -> dict[int, torch.Tensor]:
        """Return the positions of the codes in a payload, by layout index."""
        step = payload.section("step")
        if step is None or step.data.size != 1:
            return {}
        return {
            i: self.drawn(int(step.data[0]), i, layout.parameters[i].numel)
            for i in listed("binned", payload, layout)
        }


class RandomKReducer(SharedReducer):
    """RandomK bound to one run."""

    compressor: RandomK

    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Draw the positions from seed, step and parameter; see ``SharedReducer.choose``."""
        return {
            i: self.compressor.drawn(self.step, i, total.numel()).to(total.device)
            for i, total in totals.items()
        }

    def sections(self, stored: StoredEntries) -> list[Section]:
        """Return values, without the positions that were drawn; see ``SparseReducer.sections``."""
        drawn = stored.as_selected()
        sections = stored.sections(besides=drawn)
        if drawn:
            sections += [_step_section(self.step), *pieces("drawn", self.layout, drawn)]
        return sections


class BinnedRandomKReducer(BinnedReducer):
    """RandomK with values in few bits, bound to one run."""

    compressor: RandomK

    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Draw the positions from seed, step and parameter; see ``BinnedReducer.choose``."""
        return {
            i: self.compressor.drawn(self.step, i, total.numel()).to(total.device)
            for i, total in totals.items()
        }

    def position_sections(self, kept: Mapping[int, Sequence[Sent]], rank: int) -> list[Section]:
        """Return the step; the positions are drawn again; see ``BinnedReducer.position_sections``."""
        return [_step_section(self.step)]


def _step_section(step: int) -> Section:
    return Section("step", "raw", np.array([step], dtype=np.uint64))


def positions(
    seed: int, step: int, parameter: int, numel: int, k: int, ranges: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the entry drawn from each of ``ranges`` out of ``k`` ranges, in the order of ``ranges``.

    The drawing is part of the log's format: a change makes old runs unreadable.
    """
    starts = ranges * numel // k
    widths = (ranges + 1) * numel // k - starts
    key = np.uint64(0)
    for word in (seed, step, parameter):
        key = _mixed(np.array([key ^ np.uint64(word)], dtype=np.uint64))[0]
    noise = _mixed(ranges.astype(np.uint64) + key)
    drawn: npt.NDArray[np.int64] = starts + (noise % widths.astype(np.uint64)).astype(np.int64)
    return drawn


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return one SplitMix64 step (Steele, Lea and Flood, OOPSLA 2014), element-wise; wraps around."""
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
