"""The GPU day: all parts, or one, in at most `SECONDS`.

    make gpu
    python -m benches.gpu --out DIR [--only PART] [--smoke --device cpu]

Each part is a process of its own with a time limit: one that fails or hangs ends no other, and what it found stands in
``gpu.json`` as soon as it has ended, what it printed in ``gpu-PART.log``. Two runs fit into a quarter of an hour. What the
file has of an earlier run of these settings stays until that part succeeds again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from benches.gpu.parts import PARTS, Bench, Figures, summary_of
from benches.gpu.training import alone
from benches.harness import BLUE, Result, arguments, machine, save

SECONDS = 270.0
#: A part is not begun where less is left.
_LEAST_SECONDS = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the parts, or one of them; the exit status."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="the one part to run")
    parser.add_argument("--device", default="cuda", help="cpu tries the bench itself")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--made", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: torch finds no CUDA device here; nothing was measured")
        return 1
    try:
        return _run_part(args) if args.made else _run_all(args)
    except OSError as error:
        print(f"make gpu: {error}")
        return 1


def _run_all(args: argparse.Namespace) -> int:
    facts, until, is_whole = machine(), time.monotonic() + args.seconds, True
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else PARTS:
        seconds = min(PARTS[name][1], until - time.monotonic())
        error = "not run: no time was left"
        if seconds >= _LEAST_SECONDS:
            print(f"{name} ...", flush=True)
            error = _error_of(name, args, seconds)
        if error:
            is_whole = False
            print(f"  {error}", flush=True)
            note(args, name, {"error": error}, facts)
    print(args.out / "gpu.json")
    return 0 if is_whole else 1


def _error_of(name: str, args: argparse.Namespace, seconds: float) -> str:
    """Run a part as a process; why it failed, or nothing."""
    log, temporary = args.out / f"gpu-{name}.log", tempfile.TemporaryDirectory
    until = time.monotonic() + seconds
    with (
        temporary(prefix="lowdiff-gpu-") as made,
        temporary(prefix="lowdiff-gpu-", dir="/dev/shm", ignore_cleanup_errors=True) as staged,
        log.open("w+", encoding="utf-8") as printed,
    ):
        process = subprocess.Popen(
            command_of(name, args, until, made, staged),
            cwd=Path(__file__).parents[2],
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"ended after {seconds:.0f} s; {log} has what it printed"
        printed.seek(0)
        lines = printed.read().splitlines()
    if status == 0:
        print("\n".join(line for line in lines if line.startswith("  ")), flush=True)
        return ""
    return "\n".join(lines[-20:])[-2000:] or f"exit status {status}"


def command_of(
    name: str, args: argparse.Namespace, until: float, made: str, staged: str
) -> list[str]:
    """Return the command of one part, which is told when it will be ended."""
    command = [sys.executable, "-m", "benches.gpu", "--only", name, "--until", str(until)]
    command += ["--made", made, staged, "--out", str(args.out.absolute())]
    command += ["--device", args.device, "--seed", str(args.seed), "--seconds", str(args.seconds)]
    return command + (["--smoke"] if args.smoke else [])


def _run_part(args: argparse.Namespace) -> int:
    """Run one part, and end the process: its trainings are not closed, which takes longer than they do."""
    facts, (made, staged) = machine(), args.made
    device = torch.empty(0, device=args.device).device  # with its number, as tensors have it
    runs = made / "runs"
    runs.mkdir()
    with alone(made, device):
        bench = Bench(device, args.smoke, args.seed, runs, staged, args.until)
        figures = PARTS[args.only][0](bench)
        note(args, args.only, figures, facts)
        for key, value in figures.items():
            if not isinstance(value, dict | list):
                text = f"{value:.6g}" if isinstance(value, float) else value
                print(f"  {key:<34} {text}", flush=True)
        os._exit(0)


def note(args: argparse.Namespace, name: str, figures: Figures, facts: Mapping[str, Any]) -> None:
    """Add what a part found to the JSON, with the time of it; an error leaves figures that are there."""
    path = args.out / "gpu.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    settings = {"smoke": args.smoke, "device": args.device, "model_seed": args.seed}
    parts = before.get("samples", {}) if before.get("settings") == settings else {}
    ended = time.strftime("%Y-%m-%d %H:%M:%S")
    kept = parts.get(name, {}) if "error" in figures else {}
    parts[name] = {**kept, **figures, "ended": ended}
    save(Result("gpu", settings, args.seed, facts, parts, summary_of(parts)), args.out, draw)


def draw(axes: Axes, result: Result) -> None:
    """What each arm takes more than training alone."""
    shown = {key: value for key, value in result.summary.items() if key.endswith("_over_none")}
    axes.barh(list(shown), list(shown.values()), color=BLUE)
    axes.set_xlabel("share of a step")
