"""What checkpointing costs on a GPU: one table of step times, and what lies behind them.

    python -m benches.bench_gpu --out DIR [--models small,medium] [--smoke] [--device cuda]

GPT-2 in bf16 autocast, DDP with one process, trained by five arms that take turns in blocks of
steps: without checkpoints, with the compressed hook alone, with lowdiff's top-k, with LowDiff+ and
with DCP's ``async_save`` at every step. Then: where the host waited for the device (torch's own
count, which misses some), how fast copies to the host are against the link, and how fast a replay
on the device is against its memory. ``ARM_seconds`` is the median of the blocks without a full
snapshot of lowdiff's, ``ARM_mean_seconds`` the mean of all. What a block leaves to be done, DCP's save
or steps that a replica has not applied, is waited for after it: ``ARM_drain_seconds``; a step with its
share of that is ``ARM_drained_seconds``. A ``gpu.json`` of the same settings is added to, so each model
may have a command of its own. Runs lie in the temporary folder (``TMPDIR``), up to 30 GB.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matplotlib.axes import Axes
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches import ending
from benches.gpt import GPT, GPTConfig
from benches.harness import BLUE, Result, arguments, machine, save
from lowdiff.compressors import TopK
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.layout import layout_of
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.step.ddp_hook import HookState, comm_hook

#: Each with its batch: all five arms are on the device at once, which has 80 GB.
MODELS = {
    "gpt2-small": (GPTConfig(50257, 1024, layers=12, heads=12, width=768, dropout=0.0), 16),
    "gpt2-medium": (GPTConfig(50257, 1024, layers=24, heads=16, width=1024, dropout=0.0), 8),
    "tiny": (GPTConfig(256, 32, layers=2, heads=2, width=64, dropout=0.0), 2),
}
ARMS = ("none", "hook", "lowdiff_topk", "lowdiff_plus", "dcp_async")
#: Only what compresses is set beside the compressed hook.
COMPARED = {"none": ARMS[1:], "hook": ("lowdiff_topk",)}
DENSITY = 0.01
#: Bytes that a step of AdamW in float32 reads and writes per element.
ADAM_BYTES = 28
#: First steps, each of which lowdiff audits; in those before the last, DDP and Adam begin.
AUDITED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run of each arm: blocks that count, after one that warms up; DCP's are shorter."""

    rounds: int
    steps: int
    dcp_steps: int
    snapshot_every: int


#: A full snapshot is due within a block that counts, not at its end; none in half a block more.
FULL = Plan(rounds=3, steps=8, dcp_steps=2, snapshot_every=24)
SMOKE = Plan(rounds=1, steps=2, dcp_steps=1, snapshot_every=6)


@dataclass
class Arm:
    """One training: the model in DDP, its optimizer, and what is called around a step."""

    device: torch.device
    config: GPTConfig
    batch: int
    block: int
    seed: int
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    #: Waits for what steps left to be done in the background.
    drain: Callable[[], object] = lambda: None
    #: Steps between full snapshots; 0 for none.
    snapshot_every: int = 0
    done: int = 0
    ddp: DistributedDataParallel = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        with self.device:  # which draws hundreds of millions of weights in no time
            model = GPT(self.config)
            tokens = torch.randint(self.config.vocabulary, (self.batch, self.config.context + 1))
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        self._inputs, self._targets = tokens[:, :-1], tokens[:, 1:]

    def run(self, steps: int) -> None:
        """Make training steps; the host does not wait for them."""
        for _ in range(steps):
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

    arm.before, arm.after = lambda: reducer.begin(arm.done + 1), after


def checkpointed(arm: Arm, checkpointer: lowdiff.Checkpointer, every: int) -> None:
    """Commit every step; draining waits for the replica, if there is one."""

    def drain() -> None:
        until = time.monotonic() + 120
        while (stats := checkpointer.stats()).get("replica_lag_steps", 0) > 1:
            if time.monotonic() > until:
                raise TimeoutError(f"the replica is still behind after two minutes: {stats}")
            time.sleep(0.005)

    checkpointer.attach(arm.ddp, arm.optimizer)
    arm.after, arm.drain, arm.snapshot_every = checkpointer.commit, drain, every


def saved_by_dcp(arm: Arm, folder: Path) -> None:
    """Save with DCP after every step, one save in flight, into two folders by turns."""
    # One writer for all saves: it keeps the pinned memory that the state is copied to.
    writer = dcp.FileSystemWriter(folder, cache_staged_state_dict=arm.device.type == "cuda")
    group = dist.new_group(backend="gloo")
    begin = partial(dcp.async_save, storage_writer=writer, process_group=group)
    saving: list[Any] = []

    def after() -> None:
        finish()
        model, optimizer = get_state_dict(arm.ddp, arm.optimizer)
        state = {"model": model, "optimizer": optimizer}
        saving.append(begin(state, checkpoint_id=folder / f"dcp-{arm.done % 2}"))

    def finish() -> None:
        while saving:
            saving.pop().result()

    arm.after, arm.drain = after, finish


def timed_blocks(arms: Mapping[str, Arm], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each arm's blocks took; arms take turns, every other round backwards."""
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in list(arms) if number % 2 else reversed(list(arms)):
            arm, first, every = arms[name], arms[name].done, arms[name].snapshot_every
            settle(arm.device)
            started = time.perf_counter()
            arm.run(arm.block)
            settle(arm.device)
            ended = time.perf_counter()
            arm.drain()
            if number:  # the first round warms up
                block = {
                    "steps": arm.block,
                    "seconds_per_step": (ended - started) / arm.block,
                    "drain_seconds": time.perf_counter() - ended,
                    "holds_snapshot": every > 0 and arm.done // every > first // every,
                }
                blocks[name].append(block)
    return blocks


def host_waits(arm: Arm, steps: int) -> dict[str, float]:
    """Make steps; times per step that the host waits for the device, by file and line."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            arm.run(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "called a synchronizing" in str(w.message)]
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
    return {place: count / steps for place, count in places.most_common()}


def copy_rates(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Bytes per second to the host, as lowdiff copies and at best, and within the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.empty_like(source, device="cpu", pin_memory=device.type == "cuda")

    over_the_link = partial(pinned.copy_, source, non_blocking=True)
    ways: list[Callable[[], object]] = [source.cpu, over_the_link, source.clone]
    rates = []
    for copy in ways:
        copy()
        settle(device)
        started = time.perf_counter()
        for _ in range(3):
            copy()
        settle(device)
        rates.append(3 * num_bytes / (time.perf_counter() - started))
    return {
        "copy_to_host_bytes_per_second": rates[0],
        "copy_to_host_against_the_link": rates[0] / rates[1],
        "memory_bytes_per_second": 2 * rates[2],  # read and written
    }


def train(arms: Mapping[str, Arm], plan: Plan, folder: Path, staging: Path) -> dict[str, Any]:
    """Everything that is measured while the arms train."""
    every, plus, saved = plan.snapshot_every, arms["lowdiff_plus"], arms["dcp_async"]
    counted = arms if plus.device.type == "cuda" else {}
    with ExitStack() as ending:
        hooked(arms["hook"])
        # With a writer in trouble every figure would be doubtful.
        made = partial(lowdiff.Checkpointer, snapshot_every=every, retention=None, on_error="raise")
        logged = made(folder / "topk", staging=staging / "topk", compressor=TopK(DENSITY))
        replicated = made(folder / "plus", staging=staging / "plus")
        for arm, checkpointer in ((arms["lowdiff_topk"], logged), (plus, replicated)):
            ending.callback(checkpointer.close)
            checkpointed(arm, checkpointer, every)
        for arm in arms.values():
            arm.run(AUDITED_STEPS - 1)
        audited = {name: host_waits(arm, 1) for name, arm in counted.items()}
        saved_by_dcp(saved, folder)
        ending.callback(saved.drain)
        blocks = timed_blocks(arms, plan.rounds)
        waits = {k: host_waits(arm, max(1, arm.block // 2)) for k, arm in counted.items()}
        stats = replicated.stats()
    return {
        "blocks": blocks,
        "host_waits": waits,
        "audited_host_waits": {k: v for k, v in audited.items() if k.startswith("lowdiff")},
        "replica": {k: v for k, v in stats.items() if k.startswith(("replica_", "waiting_"))},
        "elements": sum(p.numel() for p in plus.ddp.parameters()),
    }


def measure(arms: dict[str, Arm], plan: Plan, folder: Path, staging: Path) -> dict[str, Any]:
    """All of one model: what each arm costs, and recovering top-k's run. Empties ``arms``."""
    device = arms["none"].device
    found = train(arms, plan, folder, staging)
    arms.clear()
    gc.collect()  # models are in reference cycles with their hooks
    torch.cuda.empty_cache()
    run, staged = folder / "topk", staging / "topk"
    # Both ends have optimizer state, and begin with the run's first snapshot.
    seconds: dict[int, list[float]] = {1: [], plan.snapshot_every - 1: []}
    for number in range(3):
        for step, taken in seconds.items():
            started = time.perf_counter()
            lowdiff.recover(run, step, staging=staged, device=device)
            if number:  # the first round warms up
                taken.append(time.perf_counter() - started)
    report = verify(run, staged, options=ReplayOptions(device=device))
    return found | {
        "recover_seconds": seconds,
        "failures": [failure.message for failure in report.failures],
        "bit_identical": report.ok and any(replay.compared for replay in report.replays),
    }


def figures_of(found: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """Named figures of what `measure` and `copy_rates` found."""
    figures: dict[str, Any] = {"bit_identical": found["bit_identical"]}
    for arm, blocks in found["blocks"].items():
        plain = [b["seconds_per_step"] for b in blocks if not b["holds_snapshot"]]
        other = [b["seconds_per_step"] for b in blocks if b["holds_snapshot"]]
        usual = statistics.median(plain or other)
        figures[f"{arm}_seconds"] = usual
        figures[f"{arm}_mean_seconds"] = statistics.fmean(plain + other)
        if plain and other:
            figures[f"{arm}_snapshot_seconds"] = (max(other) - usual) * blocks[0]["steps"]
        if arm in ("lowdiff_plus", "dcp_async"):
            drained = [b["seconds_per_step"] + b["drain_seconds"] / b["steps"] for b in blocks]
            figures[f"{arm}_drain_seconds"] = statistics.median(b["drain_seconds"] for b in blocks)
            figures[f"{arm}_drained_seconds"] = statistics.median(drained)
    for base, compared in COMPARED.items():
        for arm, kind in [(arm, kind) for arm in compared for kind in ("", "_mean")]:
            ratio = figures[f"{arm}{kind}_seconds"] / figures[f"{base}{kind}_seconds"]
            figures[f"{arm}{kind}_over_{base}"] = ratio - 1
    for kind in ("host_waits", "audited_host_waits"):
        for arm, places in found[kind].items():
            figures[f"{arm}_{kind}_per_step"] = sum(places.values())
    figures |= {f"lowdiff_plus_{key}": value for key, value in found["replica"].items()}
    (first, short), (last, long) = ((n, min(s)) for n, s in found["recover_seconds"].items())
    replay = (long - short) / (last - first)
    bound = found["elements"] * ADAM_BYTES / rates["memory_bytes_per_second"]
    figures["replay_with_decoding_seconds_per_step"] = replay
    figures["replay_memory_bound_seconds_per_step"] = bound
    figures["replay_with_decoding_over_memory_bound"] = replay / bound
    return figures


def show(figures: Mapping[str, Any]) -> None:
    """Print lines of the table at once: the command may not last until the next."""
    for key, value in figures.items():
        print(f"{key:<66} {f'{value:.6g}' if isinstance(value, float) else value}", flush=True)


def draw(axes: Axes, result: Result) -> None:
    """Seconds per step, as bars."""
    shown = tuple(f"/{arm}_seconds" for arm in ARMS)
    bars = {key: value for key, value in result.summary.items() if key.endswith(shown)}
    axes.barh(list(bars), list(bars.values()), color=BLUE)
    axes.set_xlabel("seconds per step (median)")


def main(argv: list[str] | None = None) -> None:
    """Measure one model after the other; print and save what is found of each at once."""
    parser = arguments(__doc__)
    parser.add_argument("--models", default="small,medium", help="sizes of GPT-2, by comma")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    plan = SMOKE if args.smoke else FULL
    chosen = ["tiny"] if args.smoke else [f"gpt2-{size}" for size in args.models.split(",")]
    if not set(chosen) <= set(MODELS):
        parser.error(f"--models takes small and medium, by comma, got {args.models!r}")
    facts = machine()
    device = torch.empty(0, device=args.device).device  # with its number, as tensors have it
    on_cuda = device.type == "cuda"
    name_of_device = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    batches = {name: batch for name, (_, batch) in MODELS.items()}
    settings = {"device": name_of_device, "density": DENSITY, "batches": batches, **asdict(plan)}
    path = args.out / "gpu.json"
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if before.get("settings") != settings:
        before = {"samples": {}, "summary": {}}
    samples, summary = before["samples"], before["summary"]
    with ExitStack() as ending:
        temporary = tempfile.TemporaryDirectory
        made = Path(ending.enter_context(temporary(prefix="bench-gpu-")))
        staged = Path(ending.enter_context(temporary(prefix="lowdiff-bench-", dir="/dev/shm")))
        store = dist.FileStore(str(made / "store"), 1)
        dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=0, world_size=1)
        ending.callback(dist.destroy_process_group)
        rates = copy_rates(device, (1 << 20) if args.smoke else (1 << 30))
        show(rates)
        for name in chosen:
            arms = {key: Arm(device, *MODELS[name], plan.steps, args.seed) for key in ARMS}
            arms["dcp_async"].block = plan.dcp_steps
            samples[name] = found = measure(arms, plan, made / name, staged / name)
            named = {f"{name}/{k}": v for k, v in figures_of(found, rates).items()}
            show(named)
            kept = {k: v for k, v in summary.items() if not k.startswith(f"{name}/")}
            summary = kept | rates | named
            summary["bit_identical"] = all(one["bit_identical"] for one in samples.values())
            save(Result("gpu", settings, args.seed, facts, samples, summary), args.out, draw)
            for folder in (made / name, staged / name):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    ending.run(lambda: main(sys.argv[1:]))
