"""``python -m tests.loops --count 300 --seed 0``: many generated loops; see `check`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benches import ending
from tests.loops.check import Verdict, check
from tests.loops.generate import generate


def main() -> None:
    """Run the loops; exit code 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many loops")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="only these seeds")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--verbose", action="store_true", help="a line for good ones as well")
    args = parser.parse_args()
    seeds = args.only or range(args.seed, args.seed + args.count)
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="loops-") as folder:

        def run(seed: int) -> tuple[int, Verdict]:
            return seed, check(generate(seed), Path(folder) / str(seed))

        jobs = ThreadPoolExecutor(args.jobs)
        try:
            for seed, verdict in jobs.map(run, seeds):
                kinds[verdict.kind] += 1
                if args.verbose or args.only or verdict.kind not in ("good", "named"):
                    words = f"{verdict.kind.upper()} {generate(seed)}"
                    say(f"{words}\n    {verdict.seconds:.1f} s  {verdict.reason[:1200]}")
        finally:
            jobs.shutdown(cancel_futures=True)
    told = "wrong", "lost", "stuck", "refused", "unequal", "slow"
    failed = ", ".join(f"{kind} {kinds[kind]}" for kind in told)
    good = f"good {kinds['good']}, a step lost by name {kinds['named']}"
    say(f"{len(seeds)} loops: {failed}, {good}")
    sys.exit(any(kinds[kind] for kind in told))


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ending.run(main)
