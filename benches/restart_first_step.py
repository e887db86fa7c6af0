"""How long a training takes from the start of its processes to the end of its first step.

    python -m benches.restart_first_step ARM FOLDER STEPS [--smoke]

is one process of one arm: ``torch`` resumes by ``torch.load``, ``topk`` and ``replica`` by ``attach``. With
0 steps it resumes and makes one; else it trains so many, and is killed: what it leaves is resumed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from lowdiff import testing
from lowdiff.compressors import TopK

#: 60 million parameters, and a step that is short beside a restart.
_MODEL = GPTConfig(vocabulary=50304, context=64, layers=10, heads=8, width=512)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64)
ARMS = ("torch", "topk", "replica")
_SNAPSHOT_EVERY, _STEPS_AFTER = 20, 10
_STARTED = "LOWDIFF_BENCH_STARTED"


@dataclass(frozen=True, slots=True)
class FirstStep:
    """One restart.

    Attributes:
        seconds: From the start of the processes to the end of rank 0's first step.
        resumed_seconds: Of these, until the state was restored.
        peak_bytes: Most memory that rank 0's process had at a time, staging included as far as it
            is mapped.
    """

    seconds: float
    resumed_seconds: float
    peak_bytes: int


def _train(arm: str, folder: Path, steps: int, config: GPTConfig) -> None:
    rank, world_size = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    gpt = GPT(config)
    model = DistributedDataParallel(gpt) if world_size > 1 else gpt
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocabulary, (1, 17))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    if arm == "torch":
        saved = folder / "saved.pt"
        if steps:
            step()
            if rank == 0:
                state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, saved)
            return
        state = torch.load(saved)
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        resumed = time.time()
        step()
        ended = time.time()
    else:
        checkpointer = lowdiff.Checkpointer(
            folder / "run",
            compressor=TopK(density=0.01) if arm == "topk" else None,
            snapshot_every=_SNAPSHOT_EVERY,
            staging=Path("/dev/shm") / folder.name if Path("/dev/shm").is_dir() else folder / "s",
        )
        checkpointer.attach(model, optimizer)
        resumed = time.time()
        for _ in range(max(1, steps)):
            step()
            checkpointer.commit()
        if steps:
            testing.wait_until(
                checkpointer, lambda stats: stats["durable_snapshot"] >= _SNAPSHOT_EVERY
            )
        ended = time.time()
        testing.kill(checkpointer)  # as `kill -9` of all processes: what is left is resumed
    started = float(os.environ[_STARTED])
    if rank == 0 and not steps:
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
        sys.stdout.write(f"{ended - started} {resumed - started} {peak}\n")
        sys.stdout.flush()


def _launch(arm: str, folder: Path, world_size: int, steps: int, *, smoke: bool) -> str:
    """Start a process a rank, and wait for all of them; what rank 0 says."""
    command = [sys.executable, "-m", "benches.restart_first_step", arm, str(folder), str(steps)]
    command += ["--smoke"] if smoke else []
    port = str(20000 + time.time_ns() % 20000)
    environment = {**os.environ, _STARTED: str(time.time()), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(world_size)
    ]
    said = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    return said[0]


def first_steps(
    folder: Path, world_size: int, rounds: int, *, smoke: bool
) -> dict[str, list[FirstStep]]:
    """Restart each arm in turn, ten steps after its snapshot; by arm."""
    found: dict[str, list[FirstStep]] = {arm: [] for arm in ARMS}
    places = {arm: folder / f"first-{arm}-{world_size}-{os.getpid()}" for arm in ARMS}
    try:
        for arm, place in places.items():
            place.mkdir()
            steps = _SNAPSHOT_EVERY + _STEPS_AFTER
            _launch(arm, place, world_size, steps, smoke=smoke)
        for _ in range(rounds):
            for arm, place in places.items():
                kept = _kept(place)
                said = _launch(arm, place, world_size, 0, smoke=smoke).split()
                found[arm].append(FirstStep(float(said[0]), float(said[1]), int(said[2])))
                _put_back(place, kept)
    finally:
        for place in places.values():
            shutil.rmtree(Path("/dev/shm") / place.name, ignore_errors=True)
    return found


def _kept(place: Path) -> Path:
    """A copy of what a killed training left, because a restart goes on from it."""
    copy = place.with_name(f"{place.name}-kept")
    shutil.copytree(place, copy / "disk", symlinks=True)
    staging = Path("/dev/shm") / place.name
    if staging.exists():
        shutil.copytree(staging, copy / "memory")
    return copy


def _put_back(place: Path, kept: Path) -> None:
    staging = Path("/dev/shm") / place.name
    for target, source in ((place, kept / "disk"), (staging, kept / "memory")):
        if source.exists():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True)
    shutil.rmtree(kept)


def over_torch_save(found: Mapping[str, list[FirstStep]]) -> float:
    """The worse arm's median time over that of ``torch.load``."""
    medians = {arm: statistics.median(f.seconds for f in own) for arm, own in found.items()}
    return max(medians["topk"], medians["replica"]) / medians["torch"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    _train(asked.arm, asked.folder, asked.steps, _SMOKE_MODEL if asked.smoke else _MODEL)
