"""The parts of the GPU day, each for itself: a part gets a bench, and returns its figures."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lowdiff
from benches.gpt import GPT
from benches.gpu.killed import digest
from benches.gpu.training import (
    ARMS,
    AUDITED_STEPS,
    CHECKPOINTED,
    MODELS,
    NEVER,
    Arm,
    best_of,
    checkpointed,
    hooked,
    host_waits,
    rates,
)
from benches.harness import overhead
from lowdiff.compressors.sparse import MagnitudeSelector
from lowdiff.core import devices
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replay.replayer import ReplayOptions

ROOT = Path(__file__).parents[2]
#: Steps between the full snapshots of which ``snapshot_over_none`` gives the mean cost.
SNAPSHOT_EVERY = 50
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
        until: By when to be done, on the monotonic clock.
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
            hooked(arm)
        elif name != "none":
            run, staged = self.folder / name, self.staging / name
            checkpointed(arm, run, staged, every, **CHECKPOINTED[name])
        arm.run(AUDITED_STEPS)
        return arm

    def has_seconds(self, seconds: float) -> bool:
        """Whether so much is left of the part's time."""
        return time.monotonic() + seconds < self.until


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
    """Compare what the device selects with what the CPU's selector does."""
    sizes = (1, 64, 4096, 65_537) if bench.smoke else (1, 64, 4096, 65_537, 1 << 20, 38_597_376)
    same_places = cases = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in sizes:
            generator = torch.Generator().manual_seed(bench.seed + size)
            values = torch.randn(size, generator=generator).to(dtype)
            k = max(1, size // 100)
            here = MagnitudeSelector().select(values, k)
            there = MagnitudeSelector().select(values.to(bench.device), k).cpu()
            if not bool((there.diff() > 0).all()):
                raise AssertionError(f"positions of {size} {dtype} do not ascend: {there}")
            largest = [values[chosen].abs().sort().values for chosen in (here, there)]
            if not torch.equal(*largest):
                raise AssertionError(f"of {size} {dtype} the device selects other magnitudes")
            cases += 1
            same_places += torch.equal(here, there)
    # Among equal magnitudes the device may choose others, which half widths have.
    return {"cases": cases, "same_magnitudes": cases, "same_positions": same_places}


def of_profile(bench: Bench) -> Figures:
    """Take one step of the log apart: launches, busy time of the device, waits of the host."""
    arm = bench.arm("log")
    try:
        waits = host_waits(arm, 4)
        on_cuda = bench.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if on_cuda else []
        with torch.profiler.profile(activities=kinds) as profile:
            seconds = arm.seconds(1)
        events = [
            e for e in profile.events() if e.device_type == torch._C._autograd.DeviceType.CUDA
        ]
        busy = sum(event.self_device_time_total for event in events)
        largest = sorted(profile.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
    finally:
        arm.close()
    return {
        "host_waits": sum(waits.values()),
        "host_waits_by_place": waits,
        "launches": len(events),
        "busy_seconds": busy / 1e6,
        "profiled_step_seconds": seconds,
        "largest_on_host": {e.key: e.self_cpu_time_total / 1e6 for e in largest[:20]},
    }


def of_rotation(bench: Bench) -> Figures:
    """Let all arms take turns with training alone, as often as there is time for."""
    block, most = (1, 2) if bench.smoke else (6, 40)
    arms = {name: bench.arm(name) for name in ARMS}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    try:
        started = time.monotonic()
        for number in range(most):
            for name in ARMS if number % 2 else ARMS[::-1]:
                arm = arms[name]
                taken[name].append(arm.seconds(block))
                arm.drain()
            each = (time.monotonic() - started) / (number + 1)
            if not bench.has_seconds(1.5 * each + 5):
                break
    finally:
        for arm in arms.values():
            arm.close()
    plain = taken["none"]
    # Two halves of the baseline are compared as any arm is: what the method sees where nothing differs.
    null = list(zip(plain[::2], plain[1::2], strict=False)) or [(1.0, 1.0)]
    figures: Figures = {"rounds": len(plain), "block_steps": block, "seconds": taken}
    for name in ARMS:
        figures[f"{name}_seconds"] = statistics.median(taken[name])
    for name, base in [*((n, "none") for n in ARMS[1:]), ("log", "hook")]:
        pairs = list(zip(taken[name], taken[base], strict=True))
        found = overhead(pairs, null, seed=bench.seed)
        figures[f"{name}_over_{base}"] = found.median
        figures[f"{name}_over_{base}_upper95"] = found.upper95
    return figures


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

    def flat() -> None:
        torch.add(gradient, residual, out=following)
        chosen = following.abs().topk(max(1, len(following) // 100), sorted=False).indices
        following.index_select(0, chosen.sort().values)
        following.index_fill_(0, chosen, 0.0)

    def floor() -> None:
        torch.add(gradient, residual, out=following)
        gradient.zero_()

    ways = {"by_parameter": by_parameter, "flat": flat, "floor": floor}
    return {f"{name}_seconds": best_of(bench.device, way) for name, way in ways.items()}


def of_snapshot(bench: Bench) -> Figures:
    """Compare the steps around full snapshots with training alone."""
    every = 3 if bench.smoke else 8
    plain, arm = bench.arm("none"), bench.arm("log", every)
    try:
        usual = statistics.median(plain.seconds(1) for _ in range(3 if bench.smoke else 10))
        single: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(2 * every):
            seconds = arm.seconds(1)
            single[arm.done % every == 0].append(seconds)
        extra = max(single[True]) - statistics.median(single[False])
    finally:
        arm.close()
    return {
        "snapshot_seconds": extra,
        "snapshot_over_none": extra / SNAPSHOT_EVERY / usual,
        "steps_with_one": single[True],
        "steps_without": single[False],
    }


def of_recovery(bench: Bench) -> Figures:
    """Kill a training, recover its bits, and time the replay against loading a snapshot."""
    steps = 4 if bench.smoke else 100
    run, staged = bench.folder / "killed" / "run", bench.staging / "killed"
    words = [run, staged, bench.device, bench.model, bench.seed, steps]
    command = [sys.executable, "-m", "benches.gpu.killed", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if ended.returncode != -9:
        raise AssertionError(f"the training was to be killed, and ended so: {ended.stderr[-2000:]}")
    seconds = {}
    for step in (0, steps):
        started = time.perf_counter()
        state = lowdiff.recover(run, step, staging=staged, device=bench.device)
        devices.settle(bench.device)
        seconds[step] = time.perf_counter() - started
    weights = state.model_state_dict()
    with torch.device("meta"):
        names = [name for name, _ in GPT(MODELS[bench.model][0]).named_parameters()]
    expected = (run.parent / "digest").read_text(encoding="utf-8")
    is_same = digest({name: weights[name] for name in names}) == expected
    report = verify(run, staged, options=ReplayOptions(device=bench.device))
    if not (is_same and report.ok):
        raise AssertionError(f"other bits came back: {is_same=}, {report.failures}")
    return {
        "bit_identical": True,
        "steps": steps,
        "load_seconds": seconds[0],
        "recover_seconds": seconds[steps],
        "recovery_over_load": seconds[steps] / seconds[0],
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
    last = (ended.stdout.strip().splitlines() or [ended.stderr[-300:]])[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    if ended.returncode not in (0, 5) or counts.get("failed"):
        raise AssertionError(f"{last}\n{ended.stdout[-4000:]}")
    return {word: counts.get(word, 0) for word in ("passed", "failed", "skipped")}


#: Part -> what it does, and after how many seconds it is ended; the most important first.
PARTS: dict[str, tuple[Callable[[Bench], Figures], float]] = {
    "machine": (of_machine, 25),
    "bits": (of_bits, 30),
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
    "launches": "profile",
    "recovery_over_load": "recovery",
    "bit_identical": "recovery",
}


def summary_of(parts: dict[str, Figures], names: Sequence[str] = tuple(SUMMARY)) -> Figures:
    """Return the figures that others read, of the parts that have run."""
    return {
        name: parts[SUMMARY[name]][name] for name in names if name in parts.get(SUMMARY[name], {})
    }
