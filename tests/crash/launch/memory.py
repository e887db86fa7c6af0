"""Trains 1,000 steps and writes, as JSON, what trainer and writer hold in memory on the way.

``SCRIPT FOLDER``
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.demo.launch import child_processes

#: Last steps of the two windows that are compared; what is held comes and goes inside them.
EARLY, LATE = 300, 1000
WINDOW_STEPS = 100


def memory_bytes(pid: int) -> dict[str, int]:
    """Resident memory of a process, and what of it is neither in a file nor in staging."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB", text, re.MULTILINE))
    return {name: int(kib) * 1024 for name, kib in found.items()}


def least(samples: list[dict[str, int]]) -> dict[str, int]:
    """The smallest of each kind."""
    return {kind: min(sample[kind] for sample in samples) for kind in samples[0]}


def main(folder: Path) -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", compressor=TopK(0.02), snapshot_every=50, staging=folder / "staging"
    )
    checkpointer.attach(model, optimizer)
    trainer = os.getpid()
    (writer,) = child_processes(trainer)
    all_held: dict[int, dict[str, list[dict[str, int]]]] = {
        end: {"trainer": [], "writer": []} for end in (EARLY, LATE)
    }
    for step in checkpointer.steps(until=LATE):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for end, samples in all_held.items():
            if end - WINDOW_STEPS <= step < end:
                samples["trainer"].append(memory_bytes(trainer))
                samples["writer"].append(memory_bytes(writer))
    checkpointer.close()
    held = {end: {who: least(s) for who, s in samples.items()} for end, samples in all_held.items()}
    (folder / "memory.json").write_text(json.dumps(held))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
