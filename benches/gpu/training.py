"""GPT-2 in bf16 autocast under DDP with one process, and what is hung around its steps: the arms."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.core import devices

#: Each with its batch.
MODELS = {
    "gpt2-small": (GPTConfig(50257, 1024, layers=12, heads=12, width=768, dropout=0.0), 16),
    "tiny": (GPTConfig(256, 32, layers=2, heads=2, width=64, dropout=0.0), 2),
}
DENSITY = 0.01
#: First steps, each of which lowdiff audits; in those before the last, DDP and Adam begin.
AUDITED_STEPS = 3
#: A number of steps that no bench makes.
NEVER = 1_000_000
#: What is compared with training alone -> options of its Checkpointer; None where there is none.
CHECKPOINTED: dict[str, dict[str, Any]] = {
    "log": {"compressor": TopK(DENSITY)},
    "survivors": {"strategy": "survivors"},
    "powersgd": {"compressor": PowerSGD(4)},
    # Without a compressor: whatever strategy that is.
    "gradients": {},
}
ARMS = ("none", "hook", *CHECKPOINTED)


@dataclass
class Arm:
    """One training: the model in DDP, its optimizer, and what is called around a step.

    Attributes:
        after: Called behind each step.
        drain: Waits for what steps left to be done in the background.
    """

    device: torch.device
    config: GPTConfig
    batch: int
    seed: int
    after: Callable[[], object] = lambda: None
    drain: Callable[[], object] = lambda: None
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
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.ddp(self._inputs, self._targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.after()
            self.done += 1

    def seconds(self, steps: int) -> float:
        """Make steps; what one of them took, with all that the device had to do for it."""
        devices.settle(self.device)
        started = time.perf_counter()
        self.run(steps)
        devices.settle(self.device)
        return (time.perf_counter() - started) / steps

    @property
    def elements(self) -> int:
        """Trained elements."""
        return sum(p.numel() for p in self.ddp.parameters())


def checkpointed(arm: Arm, folder: Path, staging: Path, every: int, **options: Any) -> None:
    """Commit every step, with a full snapshot now and then."""
    checkpointer = lowdiff.Checkpointer(
        folder,
        staging=staging,
        snapshot_every=every,
        retention=None,
        on_error="raise",  # with a writer in trouble every figure would be doubtful
        **options,
    )

    is_log = "compressor" in options

    def drain() -> None:
        until = time.monotonic() + 60
        while True:
            stats = checkpointer.stats()
            behind = arm.done - stats["durable_step"] if is_log else 0
            if behind <= 0 and stats.get("replica_lag_steps", 0) <= 1:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"the writer or the replica is behind after a minute: {stats}")
            time.sleep(0.005)

    checkpointer.attach(arm.ddp, arm.optimizer)
    arm.after, arm.drain = checkpointer.commit, drain


def host_waits(arm: Arm, steps: int) -> dict[str, float]:
    """Make steps; times per step that the host waits for the device, by file and line, as far as torch counts them."""
    if arm.device.type != "cuda":
        arm.run(steps)
        return {}
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


def best_of(device: torch.device, work: Callable[[], object], times: int = 5) -> float:
    """Return the least seconds of some calls, each with all that the device has to do for it."""
    work()
    found = []
    for _ in range(times):
        devices.settle(device)
        started = time.perf_counter()
        work()
        devices.settle(device)
        found.append(time.perf_counter() - started)
    return min(found)


def rates(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Measure bytes per second to the host and within the device, and seconds that a launch takes the host."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.empty_like(source, device="cpu", pin_memory=device.type == "cuda")
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    over_the_link = partial(pinned.copy_, source, non_blocking=True)
    return {
        "pageable_bytes_per_second": num_bytes / best_of(device, source.cpu),
        "link_bytes_per_second": num_bytes / best_of(device, over_the_link),
        "memory_bytes_per_second": 2 * num_bytes / best_of(device, source.clone),  # read, written
        "launch_seconds": best_of(device, launches) / 1000,
    }


@contextmanager
def alone(folder: Path, device: torch.device) -> Iterator[None]:
    """A process group of this process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
