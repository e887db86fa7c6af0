"""Every fault campaign at full size, and one report: ``make soak``.

``python -m tests.faults.soak --out docs/results`` writes soak.json and soak.md. It ends with status 1
if anything was lost. ``--smoke`` runs every campaign at toy size; ``--minutes`` scales them all so
that they take about so long. Each has a process of its own, ``--jobs`` of them at a time. Both files
are written after every campaign, and ``--resume`` leaves out those that they hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

import lowdiff
from benches import ending
from lowdiff.core.numerics import environment_of
from tests.faults.damage import cuts, flips, make_victims, resumptions
from tests.faults.fuzz import fuzz, fuzz_guided
from tests.faults.kills import kills
from tests.faults.looks import looks
from tests.faults.node_losses import node_losses
from tests.faults.outcome import Outcome
from tests.faults.power import power_failures
from tests.faults.replica_kills import replica_kills
from tests.faults.storage import storage_troubles
from tests.faults.stranger import HOSTILE, mutations, strangers
from tests.faults.survivor_kills import LARGE_HIDDEN, survivor_kills

#: About what the full size takes on two busy cores.
FULL_MINUTES = 90.0
_SMOKE = 0.004


Campaigns: TypeAlias = "dict[str, Callable[[], Outcome]]"


def campaigns(folder: Path, scale: float, seed: int) -> Campaigns:
    """All of them by name, with everything they need but a call; ``scale`` 1 is the full size."""
    victims = cache(lambda: make_victims(folder))

    def segment() -> Path:
        return next(victims()[0].run.rglob("*.seg"))

    def size(full: int, least: int = 1) -> int:
        return max(least, round(full * scale))

    every = max(1, round(1 / scale))
    fuzzed_seconds = round(600 * min(scale, 1.0))
    hostile = list(HOSTILE)[: size(len(HOSTILE), 2)]
    killed, replicas, survivors = (folder / n for n in ("kills", "replicas", "survivors"))
    nodes = partial(node_losses, folder / "nodes", seed=seed)
    return {
        "kills": lambda: kills(killed, size(200, 3), seed=seed),
        "kills of 2 ranks": lambda: kills(killed, size(50, 2), world_size=2, seed=seed),
        "replicas": lambda: replica_kills(replicas, size(100, 2), seed=seed),
        "replicas of 2 ranks": lambda: replica_kills(
            replicas, size(30, 1), world_size=2, seed=seed
        ),
        "survivors of 2 ranks": lambda: survivor_kills(
            survivors, size(150, 10), world_size=2, seed=seed
        ),
        "survivors of 3 ranks": lambda: survivor_kills(
            survivors, size(120, 10), world_size=3, seed=seed
        ),
        "survivors of large states": lambda: survivor_kills(
            survivors, size(10, 3), world_size=2, hidden=LARGE_HIDDEN, seed=seed
        ),
        "survivors killed in their save": lambda: survivor_kills(
            survivors, size(30, 2), world_size=3, places=("save",), seed=seed
        ),
        "2 nodes with a log": lambda: nodes(size(18, 2), strategy="cast", size=2),
        "2 nodes with gradients": lambda: nodes(size(18, 2), strategy="gradients", size=2),
        "2 nodes with a replica": lambda: nodes(size(18, 2), strategy="replica", size=2),
        "3 nodes with shards": lambda: nodes(size(18, 2), strategy="sharded", size=3),
        "2 nodes, one disk": lambda: nodes(size(9, 2), strategy="cast", size=2, shares_disk=True),
        "3 nodes with error feedback": lambda: nodes(size(18, 2), strategy="topk", size=3),
        "3 nodes with residuals": lambda: nodes(size(10, 2), strategy="replicated", size=3),
        "4 nodes with a log": lambda: nodes(size(18, 2), strategy="cast", size=4),
        "4 nodes, 3 copies": lambda: nodes(size(9, 2), strategy="replica", size=4, copies=3),
        **late_campaigns(folder, size, seed),
        "looks": lambda: looks(folder / "looks", size(2000, 4)),
        "looks at replicas": lambda: looks(folder / "looks", size(1000, 4), kind="replica"),
        "cuts": lambda: cuts(victims(), every=every, seed=seed),
        "flips": lambda: flips(victims(), size(10_000, 50), seed=seed),
        "resumptions": lambda: resumptions(victims(), size(400, 4), folder, seed=seed),
        "power": lambda: power_failures(
            folder / "power", size(60, 10), every=min(every, 20), seed=seed
        ),
        "storage": lambda: storage_troubles(folder / "storage", size(10), seed=seed),
        "strangers": lambda: strangers(victims()[0], folder / "strangers", kinds=hostile),
        "mutations": lambda: mutations(victims()[0], size(20_000, 50), seed=seed),
        "fuzz": lambda: fuzz(segment(), size(20_000, 100), seconds=fuzzed_seconds, start=seed),
        "guided fuzz": lambda: fuzz_guided(segment(), folder, fuzzed_seconds),
    }


def late_campaigns(folder: Path, size: Callable[..., int], seed: int) -> Campaigns:
    """Those of every strategy whose steps arrive late, as from an accelerator.

    Args:
        folder: Where they may write.
        size: Scales a number of rounds; takes the least one as well.
        seed: Of everything random.
    """
    late: dict[str, Any] = {"engine": "late", "seed": seed}
    killed, replicas, survivors = (folder / n for n in ("kills", "replicas", "survivors"))
    nodes = partial(node_losses, folder / "nodes", engine="late", seed=seed)
    return {
        "late kills": lambda: kills(killed, size(80, 3), **late),
        "late kills of 2 ranks": lambda: kills(killed, size(50, 2), world_size=2, **late),
        "late kills of 3 ranks": lambda: kills(killed, size(20, 1), world_size=3, **late),
        "late replicas": lambda: replica_kills(replicas, size(40, 2), **late),
        "late replicas of 2 ranks": lambda: replica_kills(
            replicas, size(20, 1), world_size=2, **late
        ),
        "late replicas of 3 ranks": lambda: replica_kills(
            replicas, size(10, 1), world_size=3, **late
        ),
        "late survivors of 2 ranks": lambda: survivor_kills(
            survivors, size(60, 10), world_size=2, **late
        ),
        "late survivors of 3 ranks": lambda: survivor_kills(
            survivors, size(40, 10), world_size=3, **late
        ),
        "2 nodes with a late log": lambda: nodes(size(18, 2), strategy="cast", size=2),
        "2 nodes with late residuals": lambda: nodes(size(9, 2), strategy="replicated", size=2),
        "2 nodes with a late replica": lambda: nodes(size(18, 2), strategy="replica", size=2),
    }


def run(
    scale: float, seed: int, jobs: int, done: dict[str, Outcome], save: Callable[[], None]
) -> None:
    """Run every campaign that is not done yet, some at a time; save after each."""
    missing = [title for title in campaigns(Path(), scale, seed) if title not in done]
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(in_a_process, title, scale, seed): title for title in missing}
        for future in as_completed(running):
            outcome = done[running[future]] = future.result()
            sys.stderr.write(
                f"{outcome.tried}: {outcome.rounds} rounds, {len(outcome.lost)} lost, "
                f"{outcome.seconds:.0f} s {outcome.not_run}\n"
            )
            save()


def in_a_process(title: str, scale: float, seed: int) -> Outcome:
    """One campaign, run by this module in another process."""
    # In memory where there is room: the campaigns write and delete thousands of small files. A node
    # has a /dev/shm of its own, in which it would not find the folder.
    is_in_memory = Path("/dev/shm").is_dir() and "nodes" not in title
    place = "/dev/shm" if is_in_memory else None
    with TemporaryDirectory(prefix="lowdiff-soak-", dir=place) as folder:
        words = ["--campaign", title, "--minutes", str(scale * FULL_MINUTES), "--seed", str(seed)]
        command = [sys.executable, "-m", "tests.faults.soak", *words, "--out", folder]
        status = subprocess.run(command, check=False).returncode
        if status not in (0, 1):  # 1: something was lost, and the outcome says what
            raise RuntimeError(f"campaign {title!r} ended with status {status}")
        return read(json.loads((Path(folder) / "soak.json").read_text()))[title]


def report(done: Mapping[str, Outcome], *, scale: float, seed: int) -> dict[str, Any]:
    """The JSON document."""
    outcomes = done.values()
    environment = environment_of(torch.device("cpu"))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    names = ("torch", "numpy", "zstandard", "crc32c", "safetensors", "hypothesis")
    return {
        "lost": sum(len(outcome.lost) for outcome in outcomes),
        "rounds": sum(outcome.rounds for outcome in outcomes),
        "scale": scale,
        "seed": seed,
        "seconds": round(sum(outcome.seconds for outcome in outcomes)),
        "machine": {
            "processor": environment.processor,
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {
            "python": platform.python_version(),
            "lowdiff": lowdiff.__version__,
            "commit": commit.stdout.strip() or "unknown",
            **{name: version(name) for name in names},
        },
        "campaigns": [
            {"name": name, **vars(outcome), "found": dict(outcome.found)}
            for name, outcome in done.items()
        ],
    }


def read(document: Mapping[str, Any]) -> dict[str, Outcome]:
    """The outcomes of a report."""
    rows = ({**row, "found": Counter(row["found"])} for row in document["campaigns"])
    return {row.pop("name"): Outcome(**row) for row in rows}


def markdown(document: dict[str, Any]) -> str:
    """The same for readers."""
    machine, versions = document["machine"], document["versions"]
    lines = [
        f"{document['rounds']} rounds, **{document['lost']} lost**, in "
        f"{document['seconds'] / 60:.1f} minutes at {document['scale']:.3g} of the full size, seed "
        f"{document['seed']}; {machine['cores']} cores of {machine['processor']}, "
        f"{machine['system']}; " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        "",
        "| what was tried | rounds | how it ended | lost |",
        "|---|---|---|---|",
    ]
    for row in document["campaigns"]:
        ends = ", ".join(f"{name} {count}" for name, count in sorted(row["found"].items()))
        not_run = f"; not run: {row['not_run']}" if row["not_run"] else ""
        lines.append(f"| {row['tried']} | {row['rounds']} | {ends}{not_run} | {len(row['lost'])} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write both files, and say by the exit status whether anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--minutes", type=float, help="about how long it may take")
    parser.add_argument("--smoke", action="store_true", help="toy size")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    parser.add_argument("--jobs", type=int, default=2, help="campaigns at a time")
    parser.add_argument("--campaign", help="only this one, in this process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    scale = _SMOKE if args.smoke else 1.0
    if args.minutes is not None:
        scale = args.minutes / FULL_MINUTES
    torch.set_num_threads(1)
    logging.getLogger("lowdiff").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of libraries that are fed with junk
    path = args.out / "soak.json"
    done = read(json.loads(path.read_text())) if args.resume and path.exists() else {}

    def save() -> None:
        titles = campaigns(Path(), scale, args.seed)
        ordered = {title: done[title] for title in titles if title in done}
        document = report(ordered, scale=scale, seed=args.seed)
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(document))

    if args.campaign:
        done[args.campaign] = campaigns(args.out, scale, args.seed)[args.campaign]()
        save()
    else:
        run(scale, args.seed, args.jobs, done, save)
    return 1 if any(outcome.lost for outcome in done.values()) else 0


if __name__ == "__main__":
    ending.run(lambda: sys.exit(main()))
