"""The parts of the GPU day, each for itself: a part gets a bench, and returns its figures."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import lowdiff
from benches.gpt import GPT
from benches.gpu.killed import digest_of
from benches.gpu.training import (
    ARMS,
    AUDITED_STEPS,
    CHECKPOINTED,
    DENSITY,
    MODELS,
    NEVER,
    Arm,
    best_of,
    checkpointed,
    host_waits,
    rates,
)
from benches.harness import overhead
from benches.hooked import Hooked
from lowdiff import testing
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual, Scaled
from lowdiff.compressors.flat import reading_on, selection_on
from lowdiff.compressors.flat.selection import (
    Entries,
    Operands,
    Segment,
    Selection,
    TorchSelection,
    table_of,
)
from lowdiff.compressors.sparse import MagnitudeSelector
from lowdiff.core import devices
from lowdiff.core.layout import layout_of
from lowdiff.protocols import Compressor, Reducer
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.types import Block, Layout

ROOT = Path(__file__).parents[2]
#: Steps between the full snapshots of which ``snapshot_over_none`` gives the mean cost.
SNAPSHOT_EVERY = 50
#: Arms whose steps take seconds, with what they leave to be done; they have a turn in every third round, of one step.
SLOW = {"gradients"}
LEAST_ROUNDS = 8
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part works with.

    Attributes:
        device: With its number.
        smoke: Whether sizes only try the bench itself.
        seed: Of all that is random.
        folder: For runs.
        staging: For what lies in memory.
        until: When it is ended, on the monotonic clock.
    """

    device: torch.device
    smoke: bool
    seed: int
    folder: Path
    staging: Path
    until: float

    @property
    def model(self) -> str:
        """The model's name."""
        return "tiny" if self.smoke else "gpt2-small"

    def arm(self, name: str, every: int = NEVER) -> Arm:
        """Build an arm, with all that happens in its first steps behind it."""
        arm = Arm(self.device, *MODELS[self.model], self.seed)
        if name == "hook":
            arm.after = Hooked(arm.ddp, TopK(DENSITY)).end_step
        elif name != "none":
            run, staged = self.folder / name, self.staging / name
            checkpointed(arm, run, staged, every, **CHECKPOINTED[name])
        arm.run(AUDITED_STEPS)
        return arm


def of_machine(bench: Bench) -> Figures:
    """Say what the machine is, and how fast it moves bytes and starts kernels."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "missing"
    device = bench.device
    return {
        "device": devices.name_of(device),
        "cuda": str(torch.version.cuda),
        "triton": triton,
        **rates(device, (1 << 20) if bench.smoke else (1 << 30)),
    }


def of_bits(bench: Bench) -> Figures:
    """Compare whole buckets on the device with single parameters on the CPU; and what PowerSGD decodes to there."""
    small = (1, 64, 4096, 65_537)
    cases, selections = 0, set[str]()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        lengths = small if bench.smoke else (*small, 1 << 20)
        if dtype == torch.float32 and not bench.smoke:
            lengths = (*lengths, 38_597_376)
        layout = layout_of(
            (f"p{i}", torch.nn.Parameter(torch.empty(n, dtype=dtype)))
            for i, n in enumerate(lengths)
        )
        compressor = TopK(DENSITY, dense_below=64)
        ranks = bound_twice(compressor, layout, bench.device)
        selection = selection_on(bench.device, {dtype})
        reading = reading_on(bench.device, selection, {dtype})
        selections |= {type(selection).__name__, type(reading).__name__}
        for step, scale in ((1, 1.0), (2, 1.0), (3, 1024.0), (4, 3.7)):
            drawn = torch.Generator().manual_seed(bench.seed + step)
            # Half widths and rounded numbers have many equal ones.
            gradient = torch.randn(sum(lengths), generator=drawn).mul_(64).round_().div_(7 / scale)
            here, there = (
                stepped(*rank, gradient.to(where, dtype, copy=True), lengths, step, scale)
                for rank, where in zip(ranks, (torch.device("cpu"), bench.device), strict=True)
            )
            for name, own in here.items():
                if not torch.equal(own.view(torch.uint8), there[name].view(torch.uint8)):
                    raise AssertionError(f"{name} of {dtype} differs in step {step}")
            cases += len(here)
    return {
        "cases": cases,
        "selection": ", ".join(sorted(selections)),
        "powersgd_decodes": low_rank_decodes(bench),
    }


def bound_twice(
    compressor: Compressor, layout: Layout, device: torch.device
) -> list[tuple[Reducer, RotatingResidual]]:
    """Bind a compressor on the CPU, where it takes single parameters; and on a device, where it takes whole buckets."""
    kept = compressor.residual_layout(layout)
    here, there = (RotatingResidual.zeros(kept, place) for place in (torch.device("cpu"), device))
    found = [(compressor.bind(layout, here, None), here)]
    with testing.whole_buckets():
        found.append((compressor.bind(layout, there, None), there))
    return found


def stepped(
    reducer: Reducer,
    residual: RotatingResidual,
    buffer: torch.Tensor,
    lengths: Sequence[int],
    step: int,
    scale: float,
    factor: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Make a step of one bucket, clipped by a factor; all that comes of it, on the CPU."""
    residual.loss_scale = Scaled(scale)
    reducer.begin(stamp_of(0, step))
    gradients = list(buffer.split(list(lengths)))
    reducer.reduce(range(len(lengths)), gradients, buffer).wait()
    by = torch.full((), factor, device=buffer.device)
    buffer.mul_(by)
    reducer.consume(gradients, factors=(by,))
    residual.settle()
    found = {"the average": buffer.cpu()}
    for section in reducer.payload().sections:
        found[section.name] = torch.from_numpy(section.data.copy())
    residual.advance()
    return found | {f"residual of {n}": owed.cpu() for n, owed in residual.named().items()}


def low_rank_decodes(bench: Bench) -> bool:
    """Whether PowerSGD's payloads decode on the CPU to the bits that the device's optimizer consumed.

    Raises:
        AssertionError: If whole buckets on the device do not even come near to the CPU's.
    """
    shapes = [(300, 500), (70,), (1024, 768)]
    layout = layout_of(
        (f"p{i}", torch.nn.Parameter(torch.empty(shape))) for i, shape in enumerate(shapes)
    )
    lengths = [spec.numel for spec in layout.parameters]
    compressor = PowerSGD(4)
    ranks = bound_twice(compressor, layout, bench.device)
    is_exact = True
    for step in (1, 2, 3):
        gradient = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(step))
        averages = []
        for (reducer, residual), device in zip(
            ranks, (torch.device("cpu"), bench.device), strict=True
        ):
            buffer = gradient.to(device, copy=True)
            stepped(reducer, residual, buffer, lengths, step, 1.0, 1.0 if step == 1 else 0.37)
            averages.append(buffer.cpu())
            payload = reducer.payload()
            if reducer.depart().has_missed:
                is_exact = False
                continue
            decode = compressor.decoder([payload], layout)
            rebuilt = torch.zeros_like(gradient)
            for i, part in enumerate(rebuilt.split(lengths)):
                decode(Block(i, 0, part.numel()), part)
            is_exact &= torch.equal(rebuilt, averages[-1])
        torch.testing.assert_close(*averages, rtol=1e-2, atol=1e-2)
    return is_exact


def of_profile(bench: Bench) -> Figures:
    """Take a step apart, of training alone and of the log: launches, busy time of the device, waits of the host."""
    figures: Figures = {}
    for name in ("none", "hook", "log"):
        arm = bench.arm(name)
        # The residual is copied at every sixteenth step.
        waits = host_waits(arm, 2 if bench.smoke else 16)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if bench.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            seconds = arm.seconds(1)
        on_device = [
            event
            for event in profile.events()
            if event.device_type == torch._C._autograd.DeviceType.CUDA
            # Ranges that cover kernels which are counted by themselves.
            and not getattr(event, "is_user_annotation", False)
        ]
        largest = sorted(profile.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
        figures |= {
            f"{name}_host_waits": sum(waits.values()),
            f"{name}_waits_by_place": waits,
            f"{name}_launches": len(on_device),
            f"{name}_busy_seconds": sum(e.self_device_time_total for e in on_device) / 1e6,
            f"{name}_profiled_step_seconds": seconds,
            f"{name}_largest_on_host": {e.key: e.self_cpu_time_total / 1e6 for e in largest[:20]},
        }
    return figures | {
        "host_waits": figures["log_host_waits"] - figures["none_host_waits"],
        "hook_launches": figures["hook_launches"] - figures["none_launches"],
        "step_launches": figures["log_launches"] - figures["none_launches"],
    }


def of_rotation(bench: Bench) -> Figures:
    """Let all arms take turns with training alone, as often as there is time for."""
    block, most = (1, 2) if bench.smoke else (6, 60)
    # A second one like the first: what the method sees where nothing differs.
    arms = {"again": bench.arm("none"), **{name: bench.arm(name) for name in ARMS}}
    taken: dict[str, list[float | None]] = {name: [] for name in arms}
    slowest = 0.0
    for number in range(most):
        began = time.monotonic()
        for name in list(arms) if number % 2 else reversed(arms):
            if name in SLOW and number % 3:
                taken[name].append(None)
                continue
            taken[name].append(arms[name].seconds(1 if name in SLOW else block))
            arms[name].drain()
        slowest = max(slowest, time.monotonic() - began)
        if time.monotonic() + slowest + 2 > bench.until:
            break
    return {"block_steps": block, "seconds": taken, **compared(taken, bench.seed)}


def compared(taken: Mapping[str, Sequence[float | None]], seed: int) -> Figures:
    """Compare arms with training alone, round by round.

    Args:
        taken: Arm -> seconds of a step in each round; None where it had no turn.
        seed: Of the bootstrap.
    """
    figures: Figures = {"rounds": len(taken["none"])}

    def pairs(name: str, base: str) -> list[tuple[float, float]]:
        both = zip(taken[name], taken[base], strict=True)
        return [(arm, plain) for arm, plain in both if arm is not None and plain is not None]

    null = pairs("again", "none")
    for name in ARMS:
        figures[f"{name}_seconds"] = statistics.median(s for s in taken[name] if s is not None)
    for name, base in [*((name, "none") for name in ARMS[1:]), ("log", "hook")]:
        own = pairs(name, base)
        found = overhead(own, null, seed=seed)
        figures[f"{name}_over_{base}"] = found.median
        if len(own) >= LEAST_ROUNDS:  # of fewer a bootstrap says nothing
            figures[f"{name}_over_{base}_upper95"] = found.upper95
    return figures | {"null_median": overhead(null, null, seed=seed).null_median}


def of_kernels(bench: Bench) -> Figures:
    """Time selecting the largest hundredth of every tensor of the model in several ways, beside a copy as the floor."""
    with torch.device("meta"):
        shapes = [p.numel() for p in GPT(MODELS[bench.model][0]).parameters()]
    gradient = torch.randn(sum(shapes), device=bench.device)
    residual, following = torch.randn_like(gradient), torch.empty_like(gradient)
    selector = MagnitudeSelector()

    def by_parameter() -> None:
        torch.add(gradient, residual, out=following)
        for part in following.split(shapes):
            chosen = selector.select(part, max(1, len(part) // 100))
            part.index_select(0, chosen)
            part.index_fill_(0, chosen, 0.0)

    compressor = TopK(DENSITY)
    ends = list(accumulate(shapes))
    segments = [
        Segment(i, end - n, n, end - n, compressor.kept(n, None))
        for i, (n, end) in enumerate(zip(shapes, ends, strict=True))
    ]
    scale = torch.ones((), device=bench.device)

    def by_bucket(selection: Selection) -> Callable[[], None]:
        table = table_of(segments, selection.block, bench.device)
        entries = Entries.empty(table.num_entries, gradient.dtype, bench.device)
        operands = Operands(gradient, residual, following, scale, scale)
        return lambda: selection(operands, table, entries)

    def one_threshold() -> None:
        torch.add(gradient, residual, out=following)
        chosen = following.abs().topk(max(1, len(following) // 100), sorted=False).indices
        following.index_select(0, chosen.sort().values)
        following.index_fill_(0, chosen, 0.0)

    def floor() -> None:
        torch.add(gradient, residual, out=following)
        gradient.zero_()

    ways = {
        "by_parameter": by_parameter,
        "one_threshold": one_threshold,
        "by_bucket_torch": by_bucket(TorchSelection()),
        "by_bucket": by_bucket(selection_on(bench.device, {torch.float32})),
        "floor": floor,
    }
    return {f"{name}_seconds": best_of(bench.device, way) for name, way in ways.items()}


def of_snapshot(bench: Bench) -> Figures:
    """Compare steps with a full snapshot, each taken when the one before is durable, with those without."""
    every, count = (3, 2) if bench.smoke else (4, 4)
    plain, arm = bench.arm("none"), bench.arm("log", every)
    usual = [plain.seconds(1) for _ in range(3 if bench.smoke else 10)]
    single: dict[bool, list[float]] = {True: [], False: []}
    while len(single[True]) < count and (time.monotonic() + 8 < bench.until or not single[True]):
        arm.drain()
        seconds = arm.seconds(1)
        single[arm.done % every == 0].append(seconds)
    extra = statistics.median(single[True]) - statistics.median(single[False])
    return {
        "snapshot_seconds": extra,
        "snapshot_over_none": extra / SNAPSHOT_EVERY / statistics.median(usual),
        "steps_with_one": single[True],
        "steps_without": single[False],
    }


def of_recovery(bench: Bench) -> Figures:
    """Kill a training, recover its bits, and time a replay against loading a snapshot."""
    every, more = (4, 2) if bench.smoke else (101, 9)
    run, staged = bench.folder / "killed" / "run", bench.staging / "killed"
    words = [run, staged, bench.device, bench.model, bench.seed, every + more, every]
    command = [sys.executable, "-m", "benches.gpu.killed", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if ended.returncode != -9:
        raise AssertionError(f"the training was to be killed, and ended so: {ended.stderr[-2000:]}")
    recover = partial(lowdiff.recover, run, staging=staged, device=bench.device)
    newest = recover()
    found = digest_of(newest.parameters, newest.optimizers[0].state)
    expected = (run.parent / "digest").read_text(encoding="utf-8")
    if newest.step != every + more or found != expected:
        raise AssertionError(f"other bits came back at step {newest.step}")
    seconds = {}
    for step in (every, every - 1):  # a snapshot; all differentials since the first one
        started = time.perf_counter()
        recover(step)
        devices.settle(bench.device)
        seconds[step] = time.perf_counter() - started
    report = verify(run, staged, options=ReplayOptions(device=bench.device))
    if not (report.ok and any(replay.compared for replay in report.replays)):
        raise AssertionError(f"a replay does not meet the snapshot behind it: {report.failures}")
    return {
        "bit_identical": True,
        "steps": every - 1,
        "load_seconds": seconds[every],
        "recover_seconds": seconds[every - 1],
        "recovery_over_load": seconds[every - 1] / seconds[every],
    }


def of_tests(bench: Bench) -> Figures:
    """Run the tests that need a GPU."""
    # The others are not even imported: they need more packages.
    marked = re.compile(r"^\s*(@|pytestmark = )?pytest\.mark\.gpu\b", re.MULTILINE)
    place = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if marked.search(path.read_text(encoding="utf-8"))
    ][: 1 if bench.smoke else None]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *place]
    left = max(1.0, bench.until - time.monotonic() - 2)
    ended = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=left
    )
    print(ended.stdout[-8000:], ended.stderr[-2000:], flush=True)
    counts = counts_in(ended.stdout)
    if ended.returncode not in (0, 5) or (bench.device.type == "cuda" and not counts["passed"]):
        raise AssertionError(f"exit status {ended.returncode}: {counts}")
    return dict(counts)


def counts_in(output: str) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from what pytest prints last."""
    last = (output.strip().splitlines() or [""])[-1]
    found = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    return {word: found.get(word, 0) for word in ("passed", "failed", "skipped")}


#: Part -> what it does, and after how many seconds it is ended; the most important first.
PARTS: dict[str, tuple[Callable[[Bench], Figures], float]] = {
    "machine": (of_machine, 25),
    "bits": (of_bits, 45),
    "profile": (of_profile, 35),
    "rotation": (of_rotation, 90),
    "kernels": (of_kernels, 25),
    "snapshot": (of_snapshot, 40),
    "recovery": (of_recovery, 75),
    "tests": (of_tests, 120),
}
#: Figure of the summary -> the part that has it.
SUMMARY = {
    **dict.fromkeys([f"{name}_over_none" for name in ARMS[1:]], "rotation"),
    **dict.fromkeys(["log_over_hook", "none_seconds"], "rotation"),
    "snapshot_over_none": "snapshot",
    "host_waits": "profile",
    **dict.fromkeys(["hook_launches", "step_launches"], "profile"),
    "recovery_over_load": "recovery",
    "bit_identical": "recovery",
}


def summary_of(parts: dict[str, Figures], names: Sequence[str] = tuple(SUMMARY)) -> Figures:
    """Return the figures that others read, of the parts that have run."""
    return {
        name: parts[SUMMARY[name]][name] for name in names if name in parts.get(SUMMARY[name], {})
    }
