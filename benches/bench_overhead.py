"""What a checkpoint at every step costs: the same training with and without it.

    python -m benches.bench_overhead --out DIR [--smoke]

Both arms compress gradients with the same TopK, and feed what they did not send back; only one
has a ``Checkpointer``. They take turns step by step, in ABBA order, in one process: equal models,
equal optimizers, equal batches. A twin of the arm without checkpoints is measured in the same way
(A/A), and what that finds is subtracted. The trainer has one core and one thread, the writer the
other cores. Every turn finds the caches filled by another model, in all arms alike. Half of the
records are encoded during a step of the other arm, which then bears the cost to memory bandwidth.

At the end the last step is recovered by replaying every differential from step 0: it must equal
the live state bit for bit, and so must the twin, which had the same batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import nn

import lowdiff
from benches import ending
from benches.corpus import batch_for_step, load_corpus
from benches.gpt import GPT, GPTConfig
from benches.harness import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    RED,
    Pair,
    Result,
    abba,
    arguments,
    dots,
    excess,
    machine,
    overhead,
    pin,
    timed,
    write,
)  # fmt: skip
from benches.runs import Places, places, plan_from
from lowdiff.compressors import TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import flat, layout_of
from lowdiff.model.watch import Watch
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.search import carry_out
from lowdiff.testing import parts_of, wait_until
from lowdiff.types import Payload

#: Mode of ``watch`` and key of its bound -> target.
TARGETS = {
    ("live", "overhead_upper95"): 0.05,
    ("recovery", "overhead_watch_recovery_upper95"): 0.03,
}
TARGET = TARGETS["live", "overhead_upper95"]
_MODEL = GPTConfig(layers=6, heads=6, width=384, dropout=0.0)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64, dropout=0.0)
_NEVER = 1 << 40

#: A full snapshot, of a copy of its bytes.
SNAPSHOT_TARGET = 2.5

#: Checksums of optimizer state, of the time of a step.
STATE_TARGET = 0.005

Batch = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def state_looks() -> Iterator[list[float]]:
    """Seconds of each look at what optimizers keep; A/B cannot tell so little."""
    seconds: list[float] = []
    look = Watch.look_at_states

    def timed_look(watch: Watch, indices: Iterable[int]) -> dict[int, int]:
        started = time.perf_counter()
        found = look(watch, indices)
        seconds.append(time.perf_counter() - started)
        return found

    with patch.object(Watch, "look_at_states", timed_look):
        yield seconds


class Compression:
    """Compresses a plain module's gradients as a session does, and does no more than that."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, compressor: Compressor
    ) -> None:
        layout = layout_of(model.named_parameters())
        self.seconds: list[float] = []
        self._parameters = list(model.parameters())
        kept = compressor.residual_layout(layout)
        self._residual = RotatingResidual.zeros(kept, torch.device("cpu"))
        self._reducer = compressor.bind(layout, self._residual, None)
        self._step = 0
        self._reducer.begin(1)
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        started = time.perf_counter()
        for i, parameter in enumerate(self._parameters):
            assert parameter.grad is not None
            gradient = flat(parameter.grad)
            self._reducer.reduce([i], [gradient], gradient).wait()
        self.seconds.append(time.perf_counter() - started)

    def payload(self, consumed: Sequence[torch.Tensor | None]) -> Payload:
        """What would be staged of the gradients that the optimizer consumed."""
        self._reducer.consume(consumed)
        return self._reducer.payload()

    def end_step(self) -> None:
        """What is left of a commit."""
        self._residual.settle()
        self._residual.advance()
        self._step += 1
        self._reducer.begin(self._step + 1)


class Trainee:
    """A model in training.

    It has made one step with a dense gradient, because second moments of exactly 0 are the mark
    of a run's first steps: MKL's square root takes six times as long for them.
    """

    def __init__(self, config: GPTConfig, first: Batch, *, seed: int, fused: bool) -> None:
        torch.manual_seed(seed)  # every arm starts with the same weights
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused or None)
        self.end_step: Callable[[], None] = lambda: None
        self.losses: list[float] = []
        self.step(first)

    def step(self, batch: Batch) -> float:
        """Make one step; seconds."""
        return timed(lambda: self._step(*batch))

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.end_step()
        self.losses.append(loss.item())

    def assert_sane(self) -> None:
        """A bench of a model that does not learn would measure nothing."""
        assert self.losses[-1] < self.losses[0] < 10, self.losses
        assert self.losses[-1] > 1, "a loss this low says that the model sees its targets"
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.count_nonzero(), name


class Bench:
    """The three models, and how they take turns."""

    def __init__(self, args: argparse.Namespace, where: Places, watch: str) -> None:
        self.config = _SMOKE_MODEL if args.smoke else _MODEL
        self._args = args
        self._tokens = load_corpus().train
        self._batches = 0
        first = self.batch()
        self.plain, self.twin, self.checked = (
            Trainee(self.config, first, seed=args.seed, fused=args.fused) for _ in range(3)
        )
        compressor = TopK(density=args.density)
        self.compressions = [
            Compression(t.model, t.optimizer, compressor) for t in (self.plain, self.twin)
        ]
        for trainee, compression in zip((self.plain, self.twin), self.compressions, strict=True):
            trainee.end_step = compression.end_step
        self.checkpointer = lowdiff.Checkpointer(
            where.run,
            compressor=compressor,
            snapshot_every=_NEVER,
            batch_size=args.batch_size,
            staging=where.staging,
            retention=None,
            on_error="raise",
            watch=watch,
        )
        self.checkpointer.attach(self.checked.model, self.checked.optimizer)
        self.checked.end_step = self.checkpointer.commit

    @property
    def writer_pid(self) -> int:
        """Process id of the checkpointer's writer."""
        return int(self.checkpointer.stats()["writer_pid"])

    def turns(self) -> tuple[list[Pair], list[Pair]]:
        """Two A/B pairs and two A/A pairs on the same two batches."""
        two = [self.batch(), self.batch()]

        def arm(trainee: Trainee) -> Callable[[], float]:
            batches = iter(two)
            return lambda: trainee.step(next(batches))

        pairs = list(abba(arm(self.checked), arm(self.plain)))
        return pairs, list(abba(arm(self.twin), arm(self.plain)))

    def batch(self) -> Batch:
        """Draw the next one."""
        self._batches += 1
        return batch_for_step(
            self._tokens,
            step=self._batches,
            rank=0,
            world_size=1,
            seed=self._args.seed,
            batch_size=self._args.sequences,
            context=self.config.context,
        )


def snapshots(bench: Bench, count: int) -> tuple[list[float], list[float]]:
    """Take full snapshots, each of another step, while the writer has no other to copy.

    Returns:
        Seconds that each took the training thread, and those of a copy of as many bytes before it: by one
        thread, as the snapshot is, between two arrays that have been written before.
    """
    checkpointer = bench.checkpointer
    seconds, memcpy_seconds = [], []
    stats = checkpointer.stats()
    size = stats["snapshot_bytes"] // stats["snapshots"]
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    for _ in range(count):
        batch = bench.batch()
        bench.checked.step(batch)
        bench.twin.step(batch)  # it is compared with the other at the end
        memcpy_seconds.append(timed(lambda: np.copyto(target, source)))
        before = checkpointer.stats()
        parts_of(checkpointer).session.snapshot(required=True)
        after = wait_until(
            checkpointer, lambda now: now["durable_snapshot"] == now["committed_step"]
        )
        seconds.append(_growth(before, after, "snapshot_seconds"))
    return seconds, memcpy_seconds


def assert_recovered(trainee: Trainee, where: Places) -> int:
    """Replay every differential and compare with the live state; the number of steps."""
    catalog, plan = plan_from(where, base_step=0)
    state = carry_out(catalog, plan, ReplayOptions())
    live = dict(trainee.model.named_parameters())
    for name, tensor in state.tensors().items():
        assert same(tensor, live[name].detach()), f"{name} was not recovered"
    recovered, expected = state.optimizer_state_dict(), trainee.optimizer.state_dict()
    assert same(recovered["state"], expected["state"]), "the optimizer's state was not recovered"
    return state.step


def measure(args: argparse.Namespace, where: Places, cores: Sequence[int], watch: str) -> Result:
    """Take all turns under one ``watch`` mode, check the outcome, and work out the figures."""
    facts = machine()
    pin(cores[:1])
    torch.set_num_threads(1)
    bench = Bench(args, where, watch)
    first_snapshot = wait_until(bench.checkpointer, lambda now: now["durable_snapshot"] == 0)
    writer = bench.writer_pid
    pin(cores[1:] or cores, writer)  # it was born on the trainer's core

    for _ in range(args.warm_up_pairs // 2):
        bench.turns()
    before = bench.checkpointer.stats()
    for compression in bench.compressions:
        compression.seconds.clear()
    pairs: list[Pair] = []
    null_pairs: list[Pair] = []
    with state_looks() as state_seconds:
        for done in range(0, args.pairs, 2):
            measured, null = bench.turns()
            pairs += measured
            null_pairs += null
            if done % 10 == 0:
                print(f"pair {done} of {args.pairs}: {pairs[-1][0]:.3f} s, {pairs[-1][1]:.3f} s")
    after = bench.checkpointer.stats()
    assert bench.writer_pid == writer, "the writer died and was started again, on the wrong core"

    snapshot_seconds, memcpy_seconds = snapshots(bench, args.snapshots)
    bench.checkpointer.close()
    final = bench.checkpointer.stats()
    for trainee in (bench.plain, bench.twin, bench.checked):
        trainee.assert_sane()
    for twin, checked in zip(
        bench.twin.model.parameters(), bench.checked.model.parameters(), strict=True
    ):
        assert same(twin.detach(), checked.detach()), "checkpointing changed training"
    pin(cores)
    steps = assert_recovered(bench.checked, where)
    assert steps == final["steps"] == args.warm_up_pairs + args.pairs + args.snapshots

    elements = sum(p.numel() for p in bench.checked.model.parameters())
    estimate = overhead(pairs, null_pairs, seed=args.seed)
    compression_ms = 1000 * statistics.fmean(
        seconds for compression in bench.compressions for seconds in compression.seconds
    )
    # A plain module is compressed inside the checkpointer's hook, and counted there.
    thread_ms = 1000 * _growth(before, after, "training_thread_seconds") / args.pairs
    step_seconds = statistics.median(plain for _, plain in pairs)
    snapshot = statistics.median(snapshot_seconds)
    return Result(
        name="overhead",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": elements,
            "snapshot_every": _NEVER,
            "optimizer": "AdamW, gradients clipped at norm 1",
            "trainer_core": cores[0],
            "writer_cores": list(cores[1:] or cores),
        },
        seed=args.seed,
        machine=facts,
        samples={
            "checkpointed_and_plain_seconds": pairs,
            "twin_and_plain_seconds": null_pairs,
            "snapshot_seconds": snapshot_seconds,
            "memcpy_seconds": memcpy_seconds,
            "stats": final,
        },
        summary={
            "overhead_median": estimate.median,
            "overhead_upper95": estimate.upper95,
            "null_median": estimate.null_median,
            "step_seconds": step_seconds,
            "state_checksum_share": statistics.fmean(state_seconds) / step_seconds,
            "state_checksum_ms_largest": 1000 * max(state_seconds),
            "parameters": elements,
            "training_thread_ms_per_step": thread_ms - compression_ms,
            "training_thread_ms_per_million_elements": (thread_ms - compression_ms)
            / (elements / 1e6),
            "compression_ms_per_step": compression_ms,
            "waiting_seconds": _growth(before, after, "waiting_seconds"),
            "staged_bytes_per_step": _growth(before, after, "staged_bytes") / args.pairs,
            "durable_bytes_per_step": final["durable_bytes"] / final["steps"],
            "snapshot_training_thread_seconds": snapshot,
            "snapshot_first_seconds": first_snapshot["snapshot_seconds"],
            "snapshot_over_memcpy": snapshot / statistics.median(memcpy_seconds),
            "snapshot_first_over_memcpy": first_snapshot["snapshot_seconds"]
            / statistics.median(memcpy_seconds),
            "snapshot_bytes": final["snapshot_bytes"] // final["snapshots"],
            "bit_identical": True,  # asserted above
        },
    )


def _of_recovery(key: str) -> str:
    """The name of a figure measured with ``watch="recovery"``."""
    name = key.removeprefix("overhead_")
    return f"watch_recovery_{key}" if name == key else f"overhead_watch_recovery_{name}"


def _growth(before: dict[str, Any], after: dict[str, Any], counter: str) -> float:
    return float(after[counter] - before[counter])


def draw(axes: Axes, result: Result) -> None:
    """Every pair's excess as a dot, A/A below A/B."""
    rows = (
        ("twin_and_plain_seconds", "without against without (A/A)", MUTED),
        ("checkpointed_and_plain_seconds", "with against without", BLUE),
    )
    for height, (key, _, colour) in enumerate(rows):
        dots(axes, height, [100 * value for value in excess(result.samples[key])], colour)
    summary = result.summary
    axes.axvline(100 * TARGET, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"target {100 * TARGET:.0f} %",
        xy=(100 * TARGET, 1.0), xycoords=("data", "axes fraction"), xytext=(5, -3),
        textcoords="offset points", color=RED, va="top", fontsize=9.5,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [label for _, label, _ in rows])
    axes.set_ylim(-0.6, 1.75)
    axes.set_xlabel(
        f"time of a step over that of its pair, excess in %; a step takes "
        f"{summary['step_seconds']:.2f} s; bar: median",
        color=INK,
    )
    good = summary["overhead_upper95"] <= TARGET
    axes.set_title(
        f"A checkpoint at every step costs {100 * summary['overhead_median']:.1f} % of it "
        f"(95 % bound: {100 * summary['overhead_upper95']:.1f} %)",
        loc="left", color=GREEN if good else INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def pair_arguments(description: str) -> argparse.ArgumentParser:
    """Options of benches that compare trainings step by step."""
    parser = arguments(description)
    parser.add_argument("--pairs", type=int, default=60, help="A/B pairs; as many A/A pairs")
    parser.add_argument("--warm-up-pairs", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=8, help="sequences per training batch")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = pair_arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=16, help="differentials per write")
    parser.add_argument("--snapshots", type=int, default=15, help="full snapshots that are timed")
    parser.add_argument("--density", type=float, default=0.01)
    args = parser.parse_args(argv)
    if args.smoke:
        args.pairs, args.warm_up_pairs, args.snapshots = 6, 2, 3
    if args.pairs % 2 or args.warm_up_pairs % 2:
        parser.error("pairs come in twos: ABBA")
    args.out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    with places(Path(args.out)) as where:
        result = measure(args, where, cores, "live")
    with places(Path(args.out)) as where:
        cheap = measure(args, where, cores, "recovery")
    result = replace(
        result,
        summary={**result.summary, **{_of_recovery(k): v for k, v in cheap.summary.items()}},
        samples={**result.samples, "watch_recovery": cheap.samples},
    )
    write(result, args.out, draw)
    for (watch, key), target in TARGETS.items():
        bound = result.summary[key]
        verdict = "met" if bound <= target else "MISSED"
        print(f"watch={watch}: upper 95 % bound {bound:.2%}, target {target:.0%}: {verdict}")
    share = result.summary["state_checksum_share"]
    verdict = "met" if share <= STATE_TARGET else "MISSED"
    print(f"checksums of optimizer state: {share:.2%}, target {STATE_TARGET:.1%}: {verdict}")
    ratio = result.summary["snapshot_over_memcpy"]
    verdict = "met" if ratio <= SNAPSHOT_TARGET else "MISSED"
    print(f"a full snapshot: {ratio:.2f} copies of its bytes, target {SNAPSHOT_TARGET}: {verdict}")
    step = result.summary["step_seconds"]
    if step < 0.3:
        print(f"a step of {step:.3f} s is too short for a figure to quote; 0.3 s is the least")


if __name__ == "__main__":
    ending.run(main)
