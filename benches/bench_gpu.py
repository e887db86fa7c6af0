"""What checkpointing costs on a GPU: one table of step times, and what lies behind them.

    python -m benches.bench_gpu --out DIR [--smoke] [--device cuda]

GPT-2 in bf16 autocast, DDP with one process, trained by five arms that take turns in blocks of
steps: without checkpoints, with the compressed hook alone, with lowdiff's top-k at every step, with
LowDiff+ at every step, with DCP's ``async_save`` at every step. Then: how often the host waited for
the training stream (torch's own count), how fast copies to the host are against the link, and how
fast a replay on the device is against its memory. ``--smoke`` runs tiny models, also on a CPU.

It has never run on a GPU yet: no figure of it is known.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.demo.model import GPT, GPTConfig
from lowdiff.hook import HookState, comm_hook
from lowdiff.host_copy import HostCopies
from lowdiff.layout import layout_of
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.verify import verify

MODELS = {
    "gpt2-small": GPTConfig(50257, 1024, layers=12, heads=12, width=768, dropout=0.0),
    "gpt2-medium": GPTConfig(50257, 1024, layers=24, heads=16, width=1024, dropout=0.0),
}
TINY = {"tiny": GPTConfig(256, 32, layers=2, heads=2, width=64, dropout=0.0)}
DENSITY = 0.01
#: Bytes that a step of AdamW in float32 reads and writes per element.
ADAM_BYTES = 28


@dataclass
class Arm:
    """One training: the model in DDP, its optimizer, and what happens around a step.

    Attributes:
        before: Called before each step.
        after: Called after each step.
    """

    device: torch.device
    config: GPTConfig
    batch: int
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    done: int = 0
    ddp: DistributedDataParallel = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(GPT(self.config).to(self.device))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        size = (self.batch, self.config.context + 1)
        tokens = torch.randint(self.config.vocabulary, size).to(self.device)
        self._inputs, self._targets = tokens[:, :-1], tokens[:, 1:]

    def step(self) -> None:
        """One training step; the host does not wait for it."""
        self.before()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.ddp(self._inputs, self._targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.after()
        self.done += 1


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def hooked(arm: Arm) -> None:
    """Compress as lowdiff does, and keep nothing."""
    layout = layout_of(arm.ddp.module.named_parameters())
    compressor = TopK(DENSITY)
    residual = RotatingResidual.zeros(compressor.residual_layout(layout), arm.device)
    reducer = compressor.bind(layout, residual, arm.ddp.process_group)
    state = HookState()
    state.open(reducer, list(arm.ddp.module.parameters()))
    arm.ddp.register_comm_hook(state, comm_hook)

    def after() -> None:
        residual.settle()
        residual.advance()

    arm.before, arm.after = lambda: reducer.begin(arm.done + 1, audit=False), after


def checkpointed(arm: Arm, folder: Path, compressor: TopK | None) -> lowdiff.Checkpointer:
    """Attach a Checkpointer that commits every step."""
    checkpointer = lowdiff.Checkpointer(
        folder / "run", compressor=compressor, staging=folder / "staging", retention=None
    )
    checkpointer.attach(arm.ddp, arm.optimizer)
    arm.after = checkpointer.commit
    return checkpointer


def saved_by_dcp(arm: Arm, folder: Path) -> Callable[[], object]:
    """Save with DCP after every step, one save in flight; returns what ends the last."""
    group = dist.new_group(backend="gloo")
    saving: list[Any] = []

    def after() -> None:
        finish()
        model, optimizer = get_state_dict(arm.ddp, arm.optimizer)
        writer = dcp.FileSystemWriter(folder / f"dcp-{arm.done % 2}", overwrite=True)
        state = {"model": model, "optimizer": optimizer}
        saving.append(dcp.async_save(state, storage_writer=writer, process_group=group))

    def finish() -> None:
        while saving:
            saving.pop().result()

    arm.after = after
    return finish


def step_seconds(arms: dict[str, Arm], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each arm's blocks; arms take turns, every other round backwards."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in list(arms) if number % 2 else reversed(arms):
            settle(arms[name].device)
            started = time.perf_counter()
            for _ in range(steps):
                arms[name].step()
            settle(arms[name].device)
            if number:  # the first round warms up
                samples[name].append((time.perf_counter() - started) / steps)
    return samples


def host_waits(arm: Arm, steps: int) -> float | None:
    """Times per step that the host waited for the training stream; None on a CPU."""
    if arm.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                arm.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in caught) / steps


def copy_rates(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Bytes per second to the host through `HostCopies`, and within the device (read and written)."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    copies = HostCopies(device)

    def to_host() -> None:
        copies.fetch(source)
        copies.wait()

    def within() -> None:
        source.clone()

    rates = []
    for copy in (to_host, within):
        copy()
        settle(device)
        started = time.perf_counter()
        for _ in range(3):
            copy()
        settle(device)
        rates.append(3 * num_bytes / (time.perf_counter() - started))
    return rates[0], 2 * rates[1]


@contextmanager
def process_group(device: torch.device, folder: Path) -> Iterator[None]:
    """One process that trains as many would."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(name: str, config: GPTConfig, args: Namespace, folder: Path) -> dict[str, Any]:
    """All of one model."""
    device = torch.device(args.device)
    batch, rounds, steps = (2, 1, 2) if args.smoke else (16, 10, 20)
    arms = {
        key: Arm(device, config, batch)
        for key in ("none", "hook", "lowdiff_topk", "lowdiff_plus", "dcp_async")
    }
    with ExitStack() as ending:
        hooked(arms["hook"])
        topk = checkpointed(arms["lowdiff_topk"], folder / name / "topk", TopK(DENSITY))
        plus = checkpointed(arms["lowdiff_plus"], folder / name / "plus", None)
        for checkpointer in (topk, plus):
            ending.callback(checkpointer.close)
        ending.callback(saved_by_dcp(arms["dcp_async"], folder / name))
        samples = step_seconds(arms, rounds, steps)
        waits = {key: host_waits(arms[key], steps) for key in ("lowdiff_topk", "lowdiff_plus")}
        stats = plus.stats()
    arm = arms["lowdiff_topk"]
    run, staging = folder / name / "topk" / "run", folder / name / "topk" / "staging"
    replayed = min(arm.done - 1, 50)  # before the second snapshot
    loading, whole = (recover_seconds(run, staging, step, device) for step in (0, replayed))
    report = verify(run, staging, options=ReplayOptions(device=device))
    return {
        "samples": samples,
        "median": {key: statistics.median(found) for key, found in samples.items()},
        # A block in five holds a full snapshot, which the median leaves out.
        "mean": {key: statistics.fmean(found) for key, found in samples.items()},
        "host_waits_per_step": waits,
        "replica": {
            "lag_steps": stats["replica_lag_steps"],
            "drift": stats["replica_drift"],
            "waited": stats["waiting_seconds"],
        },
        "replay_seconds_per_step": (whole - loading) / replayed,
        "elements": sum(p.numel() for p in arm.ddp.parameters()),
        "bit_identical": report.ok and any(replay.compared for replay in report.replays),
    }


def recover_seconds(run: Path, staging: Path, step: int, device: torch.device) -> float:
    """How long it takes to recover a step on the device."""
    started = time.perf_counter()
    lowdiff.recover(run, step, staging=staging, device=device)
    return time.perf_counter() - started


def summary_of(found: dict[str, Any], device: torch.device, smoke: bool) -> dict[str, Any]:
    """Named figures, as they stand in the table."""
    link, memory = copy_rates(device, (1 << 20) if smoke else (1 << 30))
    summary: dict[str, Any] = {
        "bit_identical": all(one["bit_identical"] for one in found.values()),
        "copy_to_host_bytes_per_second": link,
        "memory_bytes_per_second": memory,
    }
    for name, one in found.items():
        for arm, seconds in one["median"].items():
            summary[f"{name}/{arm}_seconds"] = seconds
            summary[f"{name}/{arm}_over_hook"] = seconds / one["median"]["hook"] - 1
            summary[f"{name}/{arm}_mean_over_hook"] = one["mean"][arm] / one["mean"]["hook"] - 1
        for arm, waits in one["host_waits_per_step"].items():
            summary[f"{name}/{arm}_host_waits_per_step"] = waits
        summary |= {f"{name}/replica_{key}": value for key, value in one["replica"].items()}
        bound = one["elements"] * ADAM_BYTES / memory
        summary[f"{name}/replay_over_memory_bound"] = one["replay_seconds_per_step"] / bound
    return summary


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, write the JSON, and the PNG where matplotlib is at hand."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the PNG")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: tests the bench itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as made:
        folder = Path(made)
        with process_group(device, folder):
            models = TINY if args.smoke else MODELS
            found = {n: measure(n, config, args, folder) for n, config in models.items()}
            summary = summary_of(found, device, args.smoke)
    samples = {name: one["samples"] for name, one in found.items()}
    settings = {"device": str(device), "density": DENSITY, "smoke": args.smoke}
    if importlib.util.find_spec("matplotlib") is None:  # a machine lent for the measurement
        for key, value in summary.items():
            print(f"{key:<40} {value}")
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"settings": settings, "samples": samples, "summary": summary}
        (args.out / "gpu.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return
    from benches.harness import BLUE, Result, machine, write

    def draw(axes: Any, result: Result) -> None:
        bars = {k: v for k, v in result.summary.items() if k.endswith("_seconds")}
        axes.barh(list(bars), list(bars.values()), color=BLUE)
        axes.set_xlabel("seconds per step (median)")

    write(Result("gpu", settings, args.seed, machine(), samples, summary), args.out, draw)


if __name__ == "__main__":
    main(sys.argv[1:])
