"""Common parts of the benches: arguments, facts, cores, paired timing, and the files they leave.

A bench is a script with ``main(argv)``. It asserts that what it timed is right, and writes
``<name>.json`` with every raw sample and ``<name>.png`` drawn from it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import lowdiff
from lowdiff.core.numerics import environment_of

INK, MUTED, PALE, BLUE, GREEN, RED = (
    "#1f2933", "#7b8794", "#c3cdd8", "#1f77b4", "#2a9d5c", "#d64545",
)  # fmt: skip

_RESAMPLES = 10_000


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every bench takes.

    Processes that the bench starts keep compiled modules from here on, as a user's do, whatever the shell
    says: one that compiles all of lowdiff anew starts later.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the PNG")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: tests the bench itself")
    parser.add_argument("--seed", type=int, default=0)
    return parser


@dataclass(frozen=True, slots=True)
class Result:
    """Findings of a bench.

    Attributes:
        name: Of the bench, and of its files.
        settings: What was chosen.
        seed: Of everything random.
        machine: ``machine()`` from before the measurement.
        samples: Every raw measurement.
        summary: The named figures that others read.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int
    machine: Mapping[str, Any]
    samples: Mapping[str, Any]
    summary: Mapping[str, Any]


def write(result: Result, out: Path, *panels: Callable[[Axes, Result], None]) -> None:
    """Write both files, and print the summary; the picture has a panel for each way to draw."""
    path = save(result, out, *panels)
    for key, value in result.summary.items():
        print(f"{key:<40} {f'{value:.6g}' if isinstance(value, float) else value}")
    print(path)


def save(result: Result, out: Path, *panels: Callable[[Axes, Result], None]) -> Path:
    """Write both files; the path of the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    record = {
        **asdict(result),
        "machine": {**result.machine, "load_average_after": os.getloadavg()},
        "versions": versions(),
    }
    path = out / f"{result.name}.json"
    # Whole or not at all: a bench that adds to it may be ended at any time.
    following = path.with_suffix(".json.new")
    following.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    following.replace(path)

    def of_result(draw: Callable[[Axes, Result], None]) -> Callable[[Axes], None]:
        return lambda axes: draw(axes, result)

    draw_panels(path.with_suffix(".png"), [of_result(draw) for draw in panels])
    return path


def draw_panels(
    path: Path, panels: Sequence[Callable[[Axes], None]], *, width: float = 9.0
) -> None:
    """Write a picture of panels, two in a row; ``width`` in inches."""
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(width, max(4.2, 3.2 * rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # drawn without pyplot, which would keep global state
    for number, draw in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, min(2, len(panels)), number)
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(PALE)
        axes.tick_params(colors=MUTED, labelcolor=INK)
        axes.set_axisbelow(True)
    figure.savefig(path)


def machine() -> dict[str, Any]:
    """Facts about the machine, and how busy it is now."""
    environment = environment_of(torch.device("cpu"))
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": environment.processor,
        "cpu_capability": environment.cpu_capability,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    commit = ""
    with contextlib.suppress(OSError):  # a machine without git
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    return {
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "mkl": environment_of(torch.device("cpu")).mkl,
        "lowdiff": lowdiff.__version__,
        "commit": commit or "unknown",
        **{name: version(name) for name in ("torch", "numpy", "zstandard", "crc32c")},
    }


def two_core_scaling() -> float:
    """Measure what a second core is worth here: throughput of two busy processes over that of one.

    2.0 on an idle machine with two cores of its own; about 1.0 where both are one shared core, and
    then no program can show what it gains from two workers.
    """
    spin = [sys.executable, "-c", "sum(i * i for i in range(6_000_000))"]

    def seconds(count: int) -> float:
        started = time.perf_counter()
        running = [subprocess.Popen(spin) for _ in range(count)]
        for process in running:
            process.wait()
        return time.perf_counter() - started

    rounds = [2 * seconds(1) / seconds(2) for _ in range(5)]
    return statistics.median(rounds)


def pin(cores: Iterable[int], pid: int | None = None) -> None:
    """Keep a process and all its threads on some cores; the calling process by default.

    For the calling process, first of all: threads that are started later inherit it, torch's too.
    """
    tasks = os.listdir(f"/proc/{os.getpid() if pid is None else pid}/task")
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task), cores)


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes; it starts without garbage of what came before."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


_Turn = TypeVar("_Turn")
#: A figure of the arm in question and of its baseline, seconds mostly.
Pair = tuple[float, float]


def abba(arm: Callable[[], _Turn], baseline: Callable[[], _Turn]) -> Iterator[tuple[_Turn, _Turn]]:
    """Two pairs, baseline-arm then arm-baseline, so that a steady drift cancels."""
    first = baseline()
    yield arm(), first
    second = arm()
    yield second, baseline()


def dots(axes: Axes, height: float, values: Sequence[float], colour: str) -> None:
    """Values as dots around a height, and their median as a bar."""
    spread = [height + 0.25 * (i % 9 - 4) / 4 for i in range(len(values))]
    axes.plot(sorted(values), spread, "o", color=colour, markersize=4, alpha=0.6)
    median = statistics.median(values)
    axes.plot([median, median], [height - 0.38, height + 0.38], color=colour, linewidth=2.5)


def excess(pairs: Sequence[Pair]) -> list[float]:
    """``(arm - baseline) / baseline`` of every pair."""
    return [(arm - baseline) / baseline for arm, baseline in pairs]


@dataclass(frozen=True, slots=True)
class Overhead:
    """An arm's overhead, less what the same method finds between two equal arms (A/A).

    Attributes:
        median: Median excess of the pairs minus that of the A/A pairs.
        upper95: Bootstrap 95th percentile of it: the one-sided upper bound.
        null_median: Median excess of the A/A pairs.
    """

    median: float
    upper95: float
    null_median: float


def overhead(pairs: Sequence[Pair], null_pairs: Sequence[Pair], *, seed: int) -> Overhead:
    """Estimate an overhead; pairs are resampled whole, both kinds independently."""
    rng = np.random.default_rng(seed)
    values, null = np.array(excess(pairs)), np.array(excess(null_pairs))

    def medians(of: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        drawn = rng.integers(of.size, size=(_RESAMPLES, of.size))
        return np.asarray(np.median(of[drawn], axis=1))

    return Overhead(
        median=float(np.median(values) - np.median(null)),
        upper95=float(np.percentile(medians(values) - medians(null), 95)),
        null_median=statistics.median(null.tolist()),
    )
