"""What a kept gradient entry takes on disk, and how fast it is coded and decoded.

    python -m benches.bench_codec --out DIR [--smoke]

Two kinds of entries, each as float32 and as bfloat16 values:

- ``gradients``: what TopK with error feedback selects, parameter by parameter, while a GPT trains,
  one record a step. The headline figures are of these.
- ``heavy_tailed``: one record of a model of 600 million elements whose gradients are Student's t
  with 3 degrees of freedom, each parameter on a scale of its own.

An entry counts as 8 decoded bytes, position and value, whatever its dtype. Timed is what the writer
and recovery call, for all records one after the other, on one core: ``encode_sections`` and
``read_sections``. On the CPU the selection comes out in ascending order, so nothing is left to sort;
``sort_and_encode`` starts from each record's entries in random order nevertheless. Rates are per
second of processor time: the work never waits, so that is what it takes on a core of its own, also
where neighbours share it; wall time is among the samples. A round that is not counted comes first.
Every round's bytes are decoded and compared.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes

from benches import ending
from benches.bench_overhead import Compression, Trainee
from benches.corpus import batch_for_step, load_corpus
from benches.gpt import GPTConfig
from benches.harness import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    PALE,
    RED,
    Result,
    arguments,
    machine,
    pin,
    write,
)  # fmt: skip
from lowdiff.compressors import TopK
from lowdiff.core.layout import flat
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import encode_sections, read_sections
from lowdiff.types import Bits, Section

TARGET_BYTES = {"float32": 4.4, "bfloat16": 2.4}
TARGET_ENCODE = 7e6
TARGET_DECODE = 300e6
DECODED_BYTES = 8

_MODEL = GPTConfig(layers=6, heads=6, width=384, dropout=0.0)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64, dropout=0.0)

#: Positions, ascending, and bit patterns of the values there.
Record = tuple[Bits, Bits]


def gradients(args: argparse.Namespace) -> tuple[list[Record], int]:
    """Records of consecutive steps of a training, and the number of parameters' elements."""
    config = _SMOKE_MODEL if args.smoke else _MODEL
    tokens = load_corpus().train

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch_for_step(
            tokens, step=step, rank=0, world_size=1, seed=args.seed, batch_size=6,
            context=config.context,
        )  # fmt: skip

    trainee = Trainee(config, batch(1), seed=args.seed, fused=False)
    compression = Compression(trainee.model, trainee.optimizer, TopK(density=args.density))
    parameters = list(trainee.model.parameters())
    records: list[Record] = []

    def end_step() -> None:
        # The gradients are what the optimizer has just consumed.
        consumed = [None if p.grad is None else flat(p.grad) for p in parameters]
        if len(trainee.losses) > args.warm_up_steps:
            indices, values = compression.payload(consumed).sections
            records.append((indices.data, values.data))
        compression.end_step()

    trainee.end_step = end_step
    for step in range(2, 2 + args.warm_up_steps + args.steps):
        trainee.step(batch(step))
    trainee.assert_sane()
    return records, sum(p.numel() for p in parameters)


def heavy_tailed(args: argparse.Namespace) -> tuple[list[Record], int]:
    """One record of a large model, made up."""
    rng = np.random.default_rng(args.seed)
    indices: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.uint32]] = []
    elements = 0
    while elements < args.synthetic_elements:
        size = int(rng.choice([400_000, 1_600_000, 4_000_000]))
        size = min(size, args.synthetic_elements - elements)
        gradient = rng.standard_t(3, size).astype(np.float32)
        gradient *= np.float32(np.exp(rng.normal(-7, 1.5)))
        kept = TopK(density=args.density).kept(size)
        chosen = np.sort(np.argpartition(-np.abs(gradient), kept)[:kept])
        indices.append(chosen + elements)
        values.append(gradient[chosen].view(np.uint32))
        elements += size
    return [(np.concatenate(indices), np.concatenate(values))], elements


def rounded(records: Sequence[Record]) -> list[Record]:
    """The same with values rounded to bfloat16."""
    found = []
    for indices, values in records:
        floats = torch.from_numpy(values.view(np.float32))
        halves = floats.to(torch.bfloat16).view(torch.uint16).numpy()
        found.append((indices, halves))
    return found


def sections(record: Record, dtype: str) -> tuple[Section, Section]:
    """What a rank stages of such a step."""
    indices, values = record
    return (
        Section(f"indices/{dtype}", "ascending", indices),
        Section(f"values/{dtype}", "planes", values),
    )


def rounds(records: Sequence[Record], dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Encode, sort and encode, and decode everything, several times; raw seconds."""
    codec = Codec()
    rng = np.random.default_rng(args.seed)
    shuffled = []
    for indices, values in records:
        order = rng.permutation(indices.size)
        shuffled.append((indices[order], values[order]))
    coded: list[bytes] = []
    decoded: list[tuple[Section, ...]] = []

    def encode() -> None:
        coded[:] = [encode_sections(sections(record, dtype), codec) for record in records]

    def sort_and_encode() -> None:
        coded.clear()
        for indices, values in shuffled:
            order = np.argsort(indices)
            coded.append(encode_sections(sections((indices[order], values[order]), dtype), codec))

    def decode() -> None:
        decoded[:] = [read_sections(memoryview(data), codec, coded=True) for data in coded]

    clocks = ("processor", "wall")
    seconds: dict[str, list[float]] = {
        f"{name}_{clock}_seconds": []
        for name in ("encode", "sort_and_encode", "decode")
        for clock in clocks
    }
    for counted in range(-1, args.rounds):
        for work in (encode, sort_and_encode):
            took = {work.__name__: clocked(work), "decode": clocked(decode)}
            for (indices, values), (left, right) in zip(records, decoded, strict=True):
                assert np.array_equal(left.data, indices), "positions came back changed"
                assert np.array_equal(right.data, values), "values came back changed"
            if counted >= 0:
                for name, durations in took.items():
                    for clock, duration in zip(clocks, durations, strict=True):
                        seconds[f"{name}_{clock}_seconds"].append(duration)
    return {
        "entries": sum(indices.size for indices, _ in records),
        "records": len(records),
        "coded_bytes": sum(map(len, coded)),
        **seconds,
    }


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of processor and of wall time that one call takes."""
    gc.collect()
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - processor, time.perf_counter() - wall


def figures(sample: dict[str, Any]) -> dict[str, float]:
    """Bytes an entry, and median, slowest and fastest round as rates."""
    entries = sample["entries"]
    found = {"bytes_per_entry": sample["coded_bytes"] / entries}
    for name, unit, amount in (
        ("encode", "entries_per_second", entries),
        ("sort_and_encode", "entries_per_second", entries),
        ("decode", "bytes_per_second", DECODED_BYTES * entries),
    ):
        seconds = sample[f"{name}_processor_seconds"]
        found[f"{name}_{unit}"] = amount / statistics.median(seconds)
        found[f"{name}_{unit}_slowest"] = amount / max(seconds)
        found[f"{name}_{unit}_fastest"] = amount / min(seconds)
    return found


def measure(args: argparse.Namespace) -> Result:
    """Make the entries on all cores, then time everything on one."""
    facts = machine()
    cores = sorted(os.sched_getaffinity(0))
    made = {"gradients": gradients(args), "heavy_tailed": heavy_tailed(args)}
    pin(cores[-1:])
    gc.freeze()  # what is loaded is not looked through before each measurement
    samples: dict[str, dict[str, Any]] = {}
    for kind, (records, _) in made.items():
        samples[f"{kind}_float32"] = rounds(records, "float32", args)
        samples[f"{kind}_bfloat16"] = rounds(rounded(records), "bfloat16", args)
    pin(cores)
    of = {name: figures(sample) for name, sample in samples.items()}
    headline, heavy = of["gradients_float32"], of["heavy_tailed_float32"]
    return Result(
        name="codec",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "core": cores[-1],
            "elements": {kind: elements for kind, (_, elements) in made.items()},
            "decoded_bytes_per_entry": DECODED_BYTES,
        },
        seed=args.seed,
        machine=facts,
        samples=samples,
        summary={
            "bytes_per_entry_float32": headline["bytes_per_entry"],
            "bytes_per_entry_bfloat16": of["gradients_bfloat16"]["bytes_per_entry"],
            **{key: value for key, value in headline.items() if key != "bytes_per_entry"},
            "heavy_tailed_bytes_per_entry_float32": heavy["bytes_per_entry"],
            "heavy_tailed_bytes_per_entry_bfloat16": of["heavy_tailed_bfloat16"]["bytes_per_entry"],
            "heavy_tailed_encode_entries_per_second": heavy["encode_entries_per_second"],
            "heavy_tailed_decode_bytes_per_second": heavy["decode_bytes_per_second"],
            "bit_identical": True,  # asserted in every round
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """Rates as multiples of their targets, slowest to fastest round, and bytes in the labels."""
    of = {name: figures(sample) for name, sample in result.samples.items()}
    rates = (
        ("encode_entries_per_second", TARGET_ENCODE, BLUE, "encode"),
        ("sort_and_encode_entries_per_second", TARGET_ENCODE, MUTED, "sort and encode"),
        ("decode_bytes_per_second", TARGET_DECODE, GREEN, "decode"),
    )
    names = list(reversed(of))
    for row, name in enumerate(names):
        for place, (key, target, colour, label) in enumerate(rates):
            height = row + 0.25 * (1 - place)
            median = of[name][key] / target
            ends = [of[name][f"{key}_slowest"] / target, of[name][f"{key}_fastest"] / target]
            axes.barh(height, median, 0.22, color=colour, label=label if row == 0 else None)
            axes.plot(ends, [height, height], color=INK, linewidth=1.2)
    axes.axvline(1, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_yticks(
        range(len(names)),
        [
            f"{name.replace('_', ' ')}\n{of[name]['bytes_per_entry']:.2f} bytes an entry"
            for name in names
        ],
    )
    axes.set_xlabel(
        f"times the target: {TARGET_ENCODE / 1e6:.0f} million entries/s encoded, "
        f"{TARGET_DECODE / 1e6:.0f} MB/s of entries decoded; one core; line: all rounds",
        color=INK,
    )
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    summary = result.summary
    axes.set_title(
        f"A kept entry takes {summary['bytes_per_entry_float32']:.2f} bytes with float32 values, "
        f"{summary['bytes_per_entry_bfloat16']:.2f} with bfloat16",
        loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=50, help="recorded steps of the training")
    parser.add_argument("--warm-up-steps", type=int, default=50, help="steps before those")
    parser.add_argument("--synthetic-elements", type=int, default=600_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.warm_up_steps, args.rounds = 4, 8, 2
        args.synthetic_elements = 400_000
    result = measure(args)
    write(result, args.out, draw)
    if args.smoke:
        return  # nothing this small says how fast anything is
    summary = result.summary
    for key, target in (
        ("bytes_per_entry_float32", TARGET_BYTES["float32"]),
        ("bytes_per_entry_bfloat16", TARGET_BYTES["bfloat16"]),
    ):
        good = summary[key] <= target
        print(f"{key} {summary[key]:.2f}, at most {target}: {'met' if good else 'MISSED'}")
    for key, target in (
        ("encode_entries_per_second", TARGET_ENCODE),
        ("sort_and_encode_entries_per_second", TARGET_ENCODE),
        ("decode_bytes_per_second", TARGET_DECODE),
    ):
        good = summary[key] >= target
        print(f"{key} {summary[key]:.3g}, at least {target:.3g}: {'met' if good else 'MISSED'}")


if __name__ == "__main__":
    ending.run(main)
