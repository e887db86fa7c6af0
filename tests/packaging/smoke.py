"""A user's first hour, with the lowdiff that an environment has: ``PYTHON smoke.py [RUN]``, anywhere but in the repository.

Three processes train on a plain DataLoader: one to its end, one that is killed after three committed steps, and one
that resumes there. With a run folder as argument nothing is trained: where there is no torch, the
command line reads what another Python wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

#: Steps of a run, and after how many of them one is killed.
STEPS, KILLED_AFTER = 6, 3


def train(folder: Path, *, is_killed: bool) -> None:
    """Train in this process; prints the weights."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import lowdiff
    from lowdiff.compressors import TopK

    assert lowdiff.__file__ is not None
    assert Path(sys.prefix) in Path(lowdiff.__file__).parents, lowdiff.__file__
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
    with lowdiff.Checkpointer(
        folder / "run", compressor=TopK(0.1), staging=folder / "staging"
    ) as checkpointer:
        step = checkpointer.attach(model, optimizer, loader=loader)
        print("resumed at", step)  # noqa: T201
        for step, (inputs,) in zip(checkpointer.steps(STEPS), loader, strict=False):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_killed and step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
    print([p.tolist() for p in model.parameters()])  # noqa: T201


def ran(*words: str | Path, code: int = 0) -> list[str]:
    """Run a command; returns its lines."""
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if result.returncode != code:
        _fail(f"{' '.join(map(str, words))}: exit {result.returncode}\n{result.stderr}")
    return result.stdout.splitlines()


def _fail(text: str) -> NoReturn:
    sys.exit(f"{sys.version.split()[0]}: {text}")


def main(run: Path | None) -> None:
    """Check all, and print one line."""
    command = Path(sys.executable).with_name("lowdiff")
    (version,) = ran(command, "--version")
    if ran(sys.executable, "-m", "lowdiff", "--version") != [version]:
        _fail("python -m lowdiff tells another version")
    what = "no torch: command line only"
    if run is None:
        folder = Path.cwd()
        whole, killed = folder / "whole", folder / "killed"
        expected = ran(sys.executable, __file__, "whole", whole)
        ran(sys.executable, __file__, "killed", killed, code=-signal.SIGKILL)
        found = ran(sys.executable, __file__, "whole", killed)
        if found != [f"resumed at {KILLED_AFTER}", *expected[1:]]:
            _fail(f"{found} instead of {expected}")
        ran(command, "recover", killed / "run", "--out", folder / "weights.safetensors")
        run, what = killed / "run", "killed and resumed with the same bits"
    if not any("killed" in line or str(STEPS) in line for line in ran(command, "inspect", run)):
        _fail("inspect does not tell the step")
    print(f"Python {sys.version.split()[0]}: {version}, {what}")  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:2] in (["whole"], ["killed"]):
        train(Path(sys.argv[2]), is_killed=sys.argv[1] == "killed")
    else:
        main(Path(sys.argv[1]) if sys.argv[1:] else None)
