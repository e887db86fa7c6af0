"""This tree against another commit under one bench: is it slower, and how well is that known?

    python -m benches.against COMMIT BENCH --out DIR [--rounds 5] [--keys KEY ...] [-- OPTIONS OF THE BENCH]

``BENCH`` is a module's name, ``bench_codec`` say. The other commit gets a work tree of its own. Both run whole,
in turns and in ABBA order, each by its own bench; the other commit runs against itself as well (A/A), and what
that finds is subtracted. For each figure that both have: both medians, the median difference as a fraction of
the other's, less that of A/A, and the 95th percentile of it. Whether more is better, the figure's name says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes

from benches import ending
from benches.harness import (
    BLUE,
    INK,
    MUTED,
    Pair,
    Result,
    abba,
    arguments,
    excess,
    machine,
    overhead,
    save,
)

ROOT = Path(__file__).parents[1]
Figures = dict[str, float]


@contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """A work tree of a commit, removed at the end.

    Raises:
        SystemExit: If git does not know the commit.
    """
    with tempfile.TemporaryDirectory(prefix="lowdiff-against-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        added = [*git, "add", "--detach", "--quiet", str(tree), commit]
        result = subprocess.run(added, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"no work tree of {commit!r}: {result.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)


def run(tree: Path, bench: str, options: Sequence[str]) -> Figures:
    """Run a bench of a tree; return the numbers of its summary.

    Raises:
        SystemExit: If it fails.
    """
    with tempfile.TemporaryDirectory(prefix="lowdiff-against-") as out:
        words = [sys.executable, "-m", f"benches.{bench}", "--out", out, *options]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        result = subprocess.run(
            words, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        found = list(Path(out).glob("*.json"))
        if result.returncode or len(found) != 1:
            sys.exit(f"{bench} of {tree} ended with {result.returncode}: {result.stderr[-2000:]}")
        summary = json.loads(found[0].read_text(encoding="utf-8"))["summary"]
    return {key: float(value) for key, value in summary.items() if type(value) in (int, float)}


def measure(args: argparse.Namespace, other: Path) -> Result:
    """Let both trees take turns."""
    facts = machine()
    runs: dict[str, list[Figures]] = {"this": [], "other": []}

    def turn(arm: str) -> Figures:
        runs[arm].append(run(ROOT if arm == "this" else other, args.bench, args.options))
        print(f"{arm} run {len(runs[arm])}", flush=True)
        return runs[arm][-1]

    pairs: list[tuple[Figures, Figures]] = []
    null_pairs: list[tuple[Figures, Figures]] = []
    for _ in range(args.rounds):
        pairs += abba(lambda: turn("this"), lambda: turn("other"))
        null_pairs += abba(lambda: turn("other"), lambda: turn("other"))
    known = set.intersection(*(set(figures) for own in runs.values() for figures in own))
    keys = [k for k in runs["this"][0] if k in known and (not args.keys or k in args.keys)]
    summary = {}
    for key in keys:
        of_key = [_of(key, both) for both in pairs], [_of(key, both) for both in null_pairs]
        if any(baseline == 0 for both in of_key for _, baseline in both):
            continue  # a fraction of nothing says nothing
        found = overhead(*of_key, seed=args.seed)
        summary[f"{key}/this"] = statistics.median(figures[key] for figures in runs["this"])
        summary[f"{key}/other"] = statistics.median(figures[key] for figures in runs["other"])
        summary[f"{key}/difference"] = found.median
        summary[f"{key}/upper95"] = found.upper95
        summary[f"{key}/null"] = found.null_median
    return Result(
        name="against",
        settings={
            "commit": args.commit,
            "bench": args.bench,
            "options": args.options,
            "rounds": args.rounds,
        },
        seed=args.seed,
        machine=facts,
        samples={**runs, "pairs": pairs, "null_pairs": null_pairs},
        summary=summary,
    )


def _of(key: str, both: tuple[Figures, Figures]) -> Pair:
    return both[0][key], both[1][key]


def table(result: Result) -> str:
    """Return a line for each figure."""
    lines = [
        f"{'figure':<44} {'this':>12} {'other':>12} {'difference':>11} {'upper 95 %':>11} {'A/A':>8}"
    ]
    for key in dict.fromkeys(name.rpartition("/")[0] for name in result.summary):
        this, other, difference, upper, null = (
            result.summary[f"{key}/{word}"]
            for word in ("this", "other", "difference", "upper95", "null")
        )
        lines.append(
            f"{key:<44} {this:>12.5g} {other:>12.5g} {difference:>+11.2%} {upper:>+11.2%} {null:>+8.2%}"
        )
    return "\n".join(lines)


def draw(axes: Axes, result: Result) -> None:
    """Every pair's difference as a dot, A/A below."""
    keys = list(dict.fromkeys(name.rpartition("/")[0] for name in result.summary))
    for row, key in enumerate(reversed(keys)):
        for height, kind, colour in ((row, "null_pairs", MUTED), (row + 0.4, "pairs", BLUE)):
            values = excess([_of(key, both) for both in result.samples[kind]])
            axes.plot(
                [100 * v for v in values], [height] * len(values), "o", color=colour, markersize=4
            )
    axes.axvline(0, color=MUTED, linewidth=1.0)
    axes.set_yticks(range(len(keys)), list(reversed(keys)))
    axes.set_xlabel("difference in %; grey: the other commit against itself", color=INK)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = words[words.index("--") + 1 :] if "--" in words else []
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("commit", help="of which a work tree is made")
    parser.add_argument("bench", help="name of a module of benches, bench_codec say")
    parser.add_argument("--rounds", type=int, default=5, help="of two pairs, and two A/A pairs")
    parser.add_argument("--keys", nargs="*", help="figures of its summary; all by default")
    args = parser.parse_args(words[: len(words) - len(options) - 1] if "--" in words else words)
    args.options = [*options, *(["--smoke"] if args.smoke else [])]
    args.rounds = 1 if args.smoke else args.rounds
    with work_tree(args.commit) as other:
        result = measure(args, other)
    path = save(result, args.out, draw)
    print(table(result))
    print(path)


if __name__ == "__main__":
    ending.run(main)
