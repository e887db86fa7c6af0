"""Bytes that a day of steps takes in the log with each compressor."""

from __future__ import annotations

from dataclasses import dataclass

from lowdiff.tuner.units import readable_bytes

_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Logged:
    """Bytes per element of the model and step, coded, as `benches/bench_compress.py` and docs/compressors.md have them.

    Attributes:
        compressor: As it is given to a Checkpointer.
        once: Of all ranks together, whatever their number.
        each: Of each rank besides.
    """

    compressor: str
    once: float
    each: float

    def bytes_per_day(self, elements: float, ranks: int, step_seconds: float) -> float:
        """Return what all ranks write, without snapshots.

        Args:
            elements: Parameters of the model.
            ranks: Number of ranks.
            step_seconds: Of one step, with what lowdiff adds to it.
        """
        return elements * (self.once + self.each * ranks) * _DAY_SECONDS / step_seconds


#: PowerSGD's are those of GPT-2-small's matrices; wider ones take less.
LOGGED = (
    Logged("PowerSGD(4)", 0.029, 0.0),
    Logged("TopK(0.01)", 0.0, 0.040),
    Logged("TopK(0.01, value_bits=2)", 0.0, 0.013),
    Logged("TopK(0.03, value_bits=2)", 0.0, 0.029),
    Logged("TopK(0.1, value_bits=2)", 0.0, 0.077),
    Logged("CyclicTopK(0.03, value_bits=2)", 0.025, 0.0045),
    Logged("Quantize(4)", 0.0, 0.43),
    Logged("Quantize(8)", 0.0, 0.94),
    Logged("Cast(torch.bfloat16)", 1.36, 0.0),
)
#: Heads of `logged_cells`.
LOGGED_HEADS = ("compressor", "log a day, all ranks")


def logged_per_day(elements: float, ranks: int, step_seconds: float) -> dict[str, float]:
    """Return the bytes a day of every compressor; nothing for a model of unknown size, 0 elements."""
    if not elements:
        return {}
    return {one.compressor: one.bytes_per_day(elements, ranks, step_seconds) for one in LOGGED}


def logged_cells(elements: float, ranks: int, step_seconds: float) -> list[tuple[str, str]]:
    """Return the same as text, in the order of `LOGGED_HEADS`."""
    found = logged_per_day(elements, ranks, step_seconds)
    return [(compressor, readable_bytes(size)) for compressor, size in found.items()]
