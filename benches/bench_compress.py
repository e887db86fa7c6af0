"""What compression costs: time, bytes on the wire and in the log, memory.

    python -m benches.bench_compress --out DIR [--smoke]

Two parts:

- ``topk``: TopK's selection over the real list of GPT-2-small's parameters (124 million elements),
  against ``torch.topk`` of the magnitudes of each parameter that is not exchanged whole, at density
  1 %, one thread, taking turns parameter by parameter. The same entries are chosen; where magnitudes
  at the threshold are equal, either choice is right, and only then may they differ.
- every compressor and PyTorch's hooks: two ranks on this machine train one step of some of
  GPT-2-small's blocks under DDP; the gradient is a given one, so backward costs next to nothing. Timed
  is backward with the hook (``hook_seconds``, less that of the plain all-reduce's model with a hook that
  does nothing), reading and staging at the step (``consume_seconds``) and decoding all ranks' payloads
  (``decode_seconds``); all per million elements. Bytes on the wire are those a rank hands to
  ``torch.distributed``; stored ones are counted after the codec, per rank. Scratch is how far resident
  memory rises in backward, less what it does with the hook that does nothing, in units of a bucket's
  capacity; measured in processes of its own, where gradients are kept from step to step, and every
  tensor of 64 KiB is a mapping of its own, so that what is freed counts no longer.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benches import ending
from benches.harness import BLUE, INK, MUTED, PALE, Result, arguments, machine, write
from benches.hooked import Hooked, in_ranks
from benches.peak import Peak
from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.compressors.changes import equal_bits
from lowdiff.compressors.sparse import MagnitudeSelector
from lowdiff.core.layout import torch_dtype
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import encode_sections, read_sections
from lowdiff.protocols import Compressor
from lowdiff.types import Block, Layout, Payload

TARGET_SPEEDUP = 5.0
_DENSITY = 0.01
_BUCKET_MB = 8
_MAPPED_BYTES = 64 << 10

#: Compressors by the name they have in the figures.
OURS: dict[str, Compressor] = {
    "topk 1 %": TopK(_DENSITY),
    "topk 1 % 2 bits": TopK(_DENSITY, value_bits=2),
    "topk 3 % 2 bits": TopK(3 * _DENSITY, value_bits=2),
    "topk 10 % 2 bits": TopK(10 * _DENSITY, value_bits=2),
    "cyclic topk 3 % 2 bits": CyclicTopK(3 * _DENSITY, value_bits=2),
    "randomk 3 %": RandomK(3 * _DENSITY),
    "powersgd 2": PowerSGD(2),
    "powersgd 4": PowerSGD(4),
    "powersgd 8": PowerSGD(8),
    "8 bits": Quantize(8),
    "4 bits": Quantize(4),
    "cast bfloat16": Cast(torch.bfloat16),
    "cast float16": Cast(torch.float16),
}
TORCHS = ("torch allreduce", "torch powerSGD 4", "torch bf16", "torch fp16")


def gpt2_shapes(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The parameters of GPT-2, tied embedding once."""
    block = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (1024, width), *block * layers, (width,), (width,)]


def select(args: argparse.Namespace) -> tuple[dict[str, list[float]], bool]:
    """Seconds of both selections over the whole list, several rounds."""
    shapes = gpt2_shapes(2, 64, 500) if args.smoke else gpt2_shapes(12, 768, 50257)
    compressor, selector = TopK(_DENSITY), MagnitudeSelector()
    generator = torch.Generator().manual_seed(args.seed)
    seconds: dict[str, list[float]] = {"topk": [], "torch": []}
    same = True
    for counted in range(-1, args.rounds):
        ours = theirs = 0.0
        for shape in shapes:
            gradient = torch.randn(torch.Size(shape).numel(), generator=generator)
            k = compressor.kept(gradient.numel())
            if k == gradient.numel():
                continue
            started = time.perf_counter()
            expected = torch.topk(gradient.abs(), k, sorted=False).indices
            between = time.perf_counter()
            chosen = selector.select(gradient, k)
            ours += time.perf_counter() - between
            theirs += between - started
            same &= _same_choice(gradient, expected, chosen)
        if counted >= 0:
            seconds["topk"].append(ours)
            seconds["torch"].append(theirs)
    return seconds, same


def _same_choice(gradient: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """The same indices, but for a choice among equal magnitudes at the threshold."""
    theirs = theirs.sort().values
    if torch.equal(theirs, ours):
        return True
    left, right = gradient[theirs].abs().sort(), gradient[ours].abs().sort()
    above = left.values > left.values[0]
    return torch.equal(left.values, right.values) and torch.equal(
        theirs[left.indices[above]].sort().values, ours[right.indices[above]].sort().values
    )


class Given(nn.Module):
    """Parameters whose gradient is given: backward costs one multiplication."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """A number whose gradient is the given one."""
        total = torch.zeros(())
        for parameter, gradient in zip(self.parts, gradients, strict=True):
            total = total + torch.dot(parameter.flatten(), gradient.flatten())
        return total


def ranks_job(
    rank: int, world_size: int, args: argparse.Namespace, *, keeps_gradients: bool
) -> dict[str, Any]:
    """Measure every compressor and hook on one of the ranks."""
    shapes = gpt2_shapes(1, 64, 300)[2:] if args.smoke else gpt2_shapes(args.layers, 768, 1)[2:]
    generator = torch.Generator().manual_seed(args.seed + rank)
    gradients = [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]
    elements = sum(g.numel() for g in gradients)
    arms = {name: Hooked(Given(shapes), c, bucket_mb=_BUCKET_MB) for name, c in OURS.items()}
    models = {name: arm.ddp for name, arm in arms.items()}
    models |= {name: _theirs(name, shapes) for name in TORCHS}
    models["nothing"] = _theirs("nothing", shapes)
    samples: dict[str, Any] = {name: {"hook_seconds": []} for name in models}
    for counted in range(-2, args.rounds):
        gc.collect()
        for name, ddp in models.items():
            ddp.zero_grad(set_to_none=not keeps_gradients)
            loss = ddp(gradients)
            dist.barrier()
            with _wire() as wire:
                peak = Peak()
                started = time.perf_counter()
                loss.backward()
                seconds = time.perf_counter() - started
                scratch = peak.bytes()
            sample = samples[name]
            if name in arms:
                found = _stored(arms[name], OURS[name], rank)
                if counted >= 0:
                    for key, value in found.items():
                        sample.setdefault(key, []).append(value)
                arms[name].end_step()
            if counted >= 0:
                sample["hook_seconds"].append(seconds)
                sample["scratch_bytes"] = max(sample.get("scratch_bytes", 0), scratch)
                sample["wire_bytes"] = wire[0]
    return {"elements": elements, "samples": samples}


def _theirs(name: str, shapes: Sequence[tuple[int, ...]]) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Given(shapes), bucket_cap_mb=_BUCKET_MB)
    group = ddp.process_group
    if name == "torch powerSGD 4":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, lambda state, bucket: _power_sgd(state, bucket))
    elif name != "torch allreduce":
        hook = {
            "torch bf16": default_hooks.bf16_compress_hook,
            "torch fp16": default_hooks.fp16_compress_hook,
            "nothing": _nothing,
        }[name]
        # DDP refuses bf16_compress_hook by its name on a CPU, though it works.
        ddp.register_comm_hook(group, lambda state, bucket: hook(state, bucket))
    return ddp


def _power_sgd(
    state: powerSGD_hook.PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, one bucket after the other.

    It starts collectives in callbacks of others, in whatever order these end on a rank: with several
    buckets under way, Gloo matches those of different buckets, and the process is aborted.
    """
    done: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    done.wait()
    return done


def _nothing(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _stored(arm: Hooked, compressor: Compressor, rank: int) -> dict[str, float]:
    """Read, code and decode one step's payload; checks the bits."""
    started = time.perf_counter()
    payload = arm.payload()
    consumed = time.perf_counter() - started
    codec = Codec()
    coded = encode_sections(payload.sections, codec)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, coded)
    sections = [read_sections(memoryview(data), codec, coded=True) for data in everyone]
    payloads = [Payload(own) for own in sections]
    started = time.perf_counter()
    rebuilt = _decoded(compressor, payloads, arm.layout)
    decoded = time.perf_counter() - started
    for own, live in zip(rebuilt, arm.gradients(), strict=True):
        assert live is not None
        assert equal_bits(own, live), "what is stored is not what was consumed"
    return {
        "consume_seconds": consumed,
        "decode_seconds": decoded,
        "stored_bytes": float(len(coded)),
        "raw_bytes": float(payload.bytes),
    }


def _decoded(
    compressor: Compressor, payloads: Sequence[Payload], layout: Layout
) -> list[torch.Tensor]:
    decode = compressor.decoder(payloads, layout)
    found = []
    for i, spec in enumerate(layout.parameters):
        out = torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype))
        for start in range(0, spec.numel, 1 << 18):
            stop = min(start + (1 << 18), spec.numel)
            decode(Block(i, start, stop), out[start:stop])
        found.append(out)
    return found


@contextmanager
def _wire() -> Iterator[list[int]]:
    """Counts the bytes that this rank sends, by what collectives must move at least."""
    sent = [0]
    group = dist.group.WORLD
    assert group is not None
    others = group.size() - 1
    kept: dict[str, Callable[..., Any]] = {}

    def counting(name: str, share: Callable[..., float]) -> None:
        original = kept[name] = getattr(dist, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            sent[0] += int(share(*arguments))
            return original(*arguments, **options)

        setattr(dist, name, counted)

    counting("all_gather", lambda shares, own, *_: own.nbytes * others)
    counting("all_to_all_single", lambda out, own, *_: own.nbytes * others / (others + 1))
    counting("broadcast", lambda tensor, *_: tensor.nbytes * others / (others + 1))
    counting("all_reduce", lambda tensor, *_: 2 * tensor.nbytes * others / (others + 1))
    try:
        yield sent
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


def scratch_buckets(ranks: Sequence[dict[str, Any]], name: str) -> float:
    """Of the rank that needs most."""
    own = [r["samples"][name]["scratch_bytes"] for r in ranks]
    idle = [r["samples"]["nothing"]["scratch_bytes"] for r in ranks]
    most = max(mine - least for mine, least in zip(own, idle, strict=True))
    return float(max(0, most) / (_BUCKET_MB << 20))


def figures(
    elements: int, ranks: Sequence[dict[str, Any]], mapped: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Of every arm: medians per million elements, bytes per element; the slower rank counts.

    Args:
        elements: Of the model.
        ranks: What each measured.
        mapped: The same where each tensor is a mapping of its own, and gradients are kept.
    """
    millions = elements / 1e6
    idle = _slower(ranks, "nothing", "hook_seconds")
    table: dict[str, dict[str, float]] = {}
    for name in (*OURS, *TORCHS):
        own = [rank["samples"][name] for rank in ranks]
        row = {
            "hook_seconds_per_million": (_slower(ranks, name, "hook_seconds") - idle) / millions,
            "scratch_buckets": scratch_buckets(mapped, name),
        }
        if name != "torch allreduce":  # DDP's own one does not pass through torch.distributed
            row["wire_bytes_per_element"] = statistics.mean(s["wire_bytes"] for s in own) / elements
        else:
            row["wire_bytes_per_element"] = 4.0
        if name in OURS:
            for key in ("consume_seconds", "decode_seconds"):
                row[f"{key}_per_million"] = _slower(ranks, name, key) / millions
            stored = [statistics.median(s["stored_bytes"]) for s in own]
            row["stored_bytes_per_element"] = sum(stored) / elements
        table[name] = row
    return table


def _slower(ranks: Sequence[dict[str, Any]], name: str, key: str) -> float:
    return max(float(statistics.median(rank["samples"][name][key])) for rank in ranks)


def draw(axes: Axes, result: Result) -> None:
    """Time against stored bytes is what a user trades; here side by side."""
    table = result.samples["table"]
    names = list(table)
    places = range(len(names))
    parts = (
        ("hook_seconds_per_million", BLUE, "hook"),
        ("consume_seconds_per_million", MUTED, "read at the step"),
        ("decode_seconds_per_million", PALE, "decode at recovery"),
    )
    left = [0.0] * len(names)
    for key, color, label in parts:
        widths = [max(0.0, 1e3 * table[name].get(key, 0.0)) for name in names]
        axes.barh(places, widths, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, name in zip(places, names, strict=True):
        row = table[name]
        stored = row.get("stored_bytes_per_element")
        text = f" {row['wire_bytes_per_element']:.2f} B sent"
        text += "" if stored is None else f", {stored:.2f} B stored"
        axes.text(left[place], place, text, va="center", color=INK, fontsize=7)
    axes.set_yticks(list(places), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per million elements, two ranks on one machine; bytes per element")
    axes.legend(frameon=False, fontsize=8)
    speedup = result.summary["topk_speedup_vs_torch"]
    axes.set_title(f"selection is {speedup:.1f} times as fast as torch.topk", fontsize=9)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="blocks of GPT-2 that ranks train")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds = 2
    torch.set_num_threads(1)
    before = machine()
    seconds, same = select(args)
    ratios = [t / o for o, t in zip(seconds["topk"], seconds["torch"], strict=True)]
    ranks = in_ranks(2, partial(ranks_job, keeps_gradients=False), args)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(_MAPPED_BYTES)
    mapped = in_ranks(2, partial(ranks_job, keeps_gradients=True), args)
    elements = ranks[0]["elements"]
    table = figures(elements, ranks, mapped)
    speedup = statistics.median(ratios)
    summary: dict[str, Any] = {
        "bit_identical": True,  # asserted in every round
        "same_indices": same,
        "topk_speedup_vs_torch": speedup,
        "topk_speedup_least": min(ratios),
        "topk_target_met": speedup >= TARGET_SPEEDUP,
    }
    for name, row in table.items():
        key = name.replace(" %", "").replace(" ", "_")
        summary |= {f"{key}/{figure}": value for figure, value in row.items()}
    assert same, "the selections differ"
    settings = {"density": _DENSITY, "rounds": args.rounds, "layers": args.layers}
    settings |= {"smoke": args.smoke, "elements": elements, "bucket_mb": _BUCKET_MB}
    samples = {"selection_seconds": seconds, "ranks": ranks, "mapped": mapped, "table": table}
    write(Result("compress", settings, args.seed, before, samples, summary), args.out, draw)


if __name__ == "__main__":
    ending.run(main)
