"""Kill a training at every file boundary of its checkpoints, resume it, and compare the end: ckpt-chaos.

``python -m tests.chaos --out docs/results`` writes ``chaos.json``. The tool is fetched from PyPI, one version with one
checksum, into a temporary folder. It ends with status 1 if a training did not come back as its strategy promises, or
if a kill did not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import ending
from benches.harness import machine, versions
from tests.chaos.seat import ARMED, KILLED
from tests.chaos.training import SNAPSHOT_EVERY, STEPS

ROOT = Path(__file__).parents[2]
TOOL = "ckpt-chaos==0.1.8"
_CHECKSUM = "sha256:e9ca99855d94bc0aed230d3e1b221a6eaaa0c0238d4f41b117e28f0b07ce5e90"
#: Most seconds of one training.
_TIMEOUT = 120
_RANDOM = re.compile(r"\b(?:[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{8})(?=\.partial|$)")

CLEAN, CLEANUP, OTHER_WEIGHTS, LOST = "clean", "cleanup", "other_weights", "lost_work"
#: The tool, or the campaign, has not done what it says: never a good sign.
NOT_KILLED = "not_killed"
#: What ckpt-chaos itself ends with a status of 1 for.
_TOOL_FAILS = (CLEANUP, OTHER_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Campaign:
    """Which process of which training is killed.

    Attributes:
        strategy: How the training is protected.
        victim: ``"trainer"``, or a process that lowdiff starts.
        trainer_dies: Whether the trainer is killed at the same moment.
        modes: What becomes of the file, as ckpt-chaos names it: ``before`` it is there, or ``torn``.
        rank: Of two, the rank that is killed; None for a training of one process.
        may_lose: How many steps may have to be made again.
        points: Most kills; where there are more file events, they are spread evenly over them.
    """

    strategy: str
    victim: str = "trainer"
    trainer_dies: bool = True
    modes: str = "before"
    rank: int | None = None
    may_lose: int = 0
    points: int = 100

    @property
    def name(self) -> tuple[str, str]:
        """Which row is this campaign's."""
        return self.strategy, self.killed

    @property
    def killed(self) -> str:
        """Who dies, in words."""
        if self.rank is not None:
            return f"rank {self.rank} of 2"
        return f"{self.victim} and trainer" if self.is_seated and self.trainer_dies else self.victim

    @property
    def is_seated(self) -> bool:
        """Whether the victim is a process that lowdiff starts."""
        return self.victim != "trainer"

    @property
    def command(self) -> list[str]:
        """The training."""
        how = "both" if self.trainer_dies else "alone"
        words = ["tests.chaos.seat", self.victim, how, self.strategy, "{out}"]
        return [sys.executable, "-m", *words]


CAMPAIGNS = (
    Campaign("log", modes="before,torn"),
    Campaign("log", "writer"),
    Campaign("log", "writer", trainer_dies=False),
    # From here on, much of what is killed is the same code again.
    Campaign("replica", modes="before,torn", points=40),
    Campaign("replica", "writer", points=24),
    Campaign("replica", "replica"),
    Campaign("replica", "replica", trainer_dies=False),
    # Where all processes die at once there is only the last snapshot.
    Campaign("survivors", modes="before,torn", may_lose=SNAPSHOT_EVERY, points=40),
    Campaign("survivors", "writer", may_lose=SNAPSHOT_EVERY, points=24),
    Campaign("survivors", rank=0, points=16),
    Campaign("survivors", rank=1, points=16),
)


@dataclass
class Judged:
    """What came of a campaign.

    Attributes:
        strategy: See `Campaign`.
        killed: Who died, in words.
        may_lose: See `Campaign`.
        operations: How many file operations the victim makes in a training that nobody kills.
        kills: How many trainings were killed and resumed.
        verdicts: Verdict -> how many of them.
        most_lost: Most steps that one of them had to make again.
        attach_failed: In how many ``attach`` raised an error, because the process that it had started was killed.
        boundaries: File operation that was killed -> how often.
        failed: What must not happen, a line each.
        seconds: How long it took.
    """

    strategy: str
    killed: str
    may_lose: int
    operations: int = 0
    kills: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    most_lost: int = 0
    attach_failed: int = 0
    boundaries: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def judge(campaign: Campaign, folder: Path, tool_status: int) -> Judged:
    """Read what the tool left of a campaign.

    Args:
        campaign: Which.
        folder: The tool's, with a folder of each kill and one of the control.
        tool_status: Its exit status, which has to agree.
    """
    judged = Judged(campaign.strategy, campaign.killed, campaign.may_lose)
    events = folder / "reference" / f"events.log.rank{campaign.rank or 0}"
    judged.operations = len(events.read_text().splitlines()) if events.exists() else 0
    paths = sorted(folder.glob("pt_[0-9]*"))
    for path in paths:
        result = folder / path.name / "result.json"
        record = json.loads(result.read_text()) if result.exists() else {}
        verdict, ended = _verdict(campaign, path, record)
        judged.kills += 1
        judged.verdicts[verdict] += 1
        if verdict == NOT_KILLED:
            judged.failed.append(f"{path.name}: {record.get('label', 'no result')} did not kill")
            continue
        where = " ".join(killed_at(path, campaign, record))
        judged.boundaries[where] += 1
        resumed = record["outcome"]["resumed_from_step"]
        lost = ended - resumed if verdict == LOST else 0
        judged.most_lost = max(judged.most_lost, lost)
        if not campaign.trainer_dies and record["rc"] != 0:
            judged.attach_failed += 1
            if _first_life(path, 0)[1:]:
                judged.failed.append(f"{path.name}: the training ended with its {campaign.killed}")
        if verdict in _TOOL_FAILS or lost > campaign.may_lose:
            judged.failed.append(
                f"{path.name}: {verdict} at {where}; step {ended} had ended, resumed from {resumed}: "
                f"{record.get('resume_tail', '')[-1000:]}"
            )
    control = folder / "pt_control" / "result.json"
    found = json.loads(control.read_text()) if control.exists() else {"rc": None, "outcome": {}}
    if found["rc"] != 0 or found["outcome"].get("weights_diff") != 0:
        judged.failed.append(f"two trainings that nobody killed ended otherwise: {found}")
    if not paths:
        judged.failed.append("nothing was killed")
    has_failed = any(judged.verdicts[verdict] for verdict in _TOOL_FAILS)
    if tool_status != int(has_failed):
        judged.failed.append(f"ckpt-chaos ended with status {tool_status}, unlike these verdicts")
    return judged


def _verdict(campaign: Campaign, path: Path, record: Mapping[str, Any]) -> tuple[str, int]:
    """Return the verdict of a kill, and the newest step that had ended on all ranks before it."""
    num_ranks = 1 if campaign.rank is None else 2
    ended = min(_ended(_first_life(path, rank)) for rank in range(num_ranks))
    if not record or not _was_killed(campaign, path, record):
        return NOT_KILLED, ended
    outcome = record["outcome"]
    if outcome["raised"] is not None:
        return CLEANUP, ended
    if outcome["weights_diff"] != 0 or outcome["resumed_from_step"] is None:
        return OTHER_WEIGHTS, ended
    return (LOST if outcome["resumed_from_step"] < ended else CLEAN), ended


def _was_killed(campaign: Campaign, path: Path, record: Mapping[str, Any]) -> bool:
    """Whether the victim died: by ckpt-chaos's mark in its events, and by how it ended."""
    if not killed_at(path, campaign, record):
        return False
    if campaign.is_seated:
        ended = Path(f"{path}/out.victim")
        return ended.exists() and ended.read_text() == str(KILLED)
    # Of two ranks the status is that of the first that failed.
    return bool(record["rc"]) if campaign.rank is not None else record["rc"] == KILLED


def killed_at(path: Path, campaign: Campaign, record: Mapping[str, Any]) -> list[str]:
    """Return the file operation that was killed: its kind, the file without what is random, and the mode."""
    number, mode = record["point"]
    log = path / f"events.log.rank{campaign.rank or 0}"
    for line in log.read_text().splitlines() if log.exists() else ():
        event, kind, name, _ = line.split("\t")
        if int(event) == number:
            return [kind, _RANDOM.sub("*", name), *(() if mode == "before" else (mode,))]
    return []


def _first_life(path: Path, rank: int) -> list[str]:
    """Return what the first process of a rank noted; nothing if it did not come so far."""
    journal = Path(f"{path}/out.rank-{rank}")
    lines = journal.read_text().splitlines() if journal.exists() else []
    return lines[: lines.index("begin", 1)] if "begin" in lines[1:] else lines


def _ended(life: Sequence[str]) -> int:
    """Return the newest step that ended in a life; 0 if none did."""
    return max((int(line.split()[1]) for line in life[1:]), default=0)


def fetch_tool(folder: Path) -> None:
    """Install the tool into a folder; nothing else is changed."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{TOOL} --hash={_CHECKSUM}\n")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*pip, "--require-hashes", "--target", str(folder), "-r", str(requirements)], check=True
    )


def run(campaign: Campaign, tool: Path, folder: Path, points: int) -> int:
    """Have the tool kill and resume; return its exit status."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CKPT_CHAOS")}
    environment |= {"PYTHONPATH": f"{tool}{os.pathsep}{ROOT}", "OMP_WAIT_POLICY": "passive"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment[ARMED] = "1"  # but for the victim: see `seat`
    options = []
    if campaign.rank is not None:
        options += ["--ranks", "2", "--crash-rank", str(campaign.rank)]
        # Version 0.1.8 does not pass its own option on, and kills nobody.
        environment["CKPT_CHAOS_CRASH_RANK"] = str(campaign.rank)
    words = [sys.executable, "-m", "tests.chaos.tool", "run", "--modes", campaign.modes]
    words += ["--max-points", str(points), "--timeout", str(_TIMEOUT), "--work", str(folder)]
    words += ["--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/result", *options]
    return subprocess.run(
        [*words, "--", *campaign.command], cwd=ROOT, env=environment, check=False
    ).returncode


def report(judged: Sequence[Judged], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document."""
    return {
        "tool": TOOL,
        "failed": sum(len(row.failed) for row in judged),
        "kills": sum(row.kills for row in judged),
        "seconds": round(sum(row.seconds for row in judged)),
        "settings": {"steps": STEPS, "snapshot_every": SNAPSHOT_EVERY},
        "machine": {**facts, "load_average_after": os.getloadavg()},
        "versions": versions(),
        "campaigns": [
            {**vars(row), "boundaries": dict(sorted(row.boundaries.items()))} for row in judged
        ],
    }


def read(document: Mapping[str, Any]) -> dict[tuple[str, str], Judged]:
    """Return the rows of a document by the names of their campaigns."""
    counted = ("verdicts", "boundaries")
    rows = [
        Judged(**row | {name: Counter(row[name]) for name in counted})
        for row in document["campaigns"]
    ]
    return {(row.strategy, row.killed): row for row in rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run every campaign; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--points", type=int, default=100, help="most kills of a campaign")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of campaigns, from 0")
    parser.add_argument("--resume", action="store_true", help="keep campaigns that the file holds")
    parser.add_argument("--keep", type=Path, help="folder for all runs, which stay there")
    args = parser.parse_args(argv)
    chosen = CAMPAIGNS if args.only is None else [CAMPAIGNS[number] for number in args.only]
    path, facts = args.out / "chaos.json", machine()
    rows = read(json.loads(path.read_text())) if args.resume and path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="lowdiff-chaos-") as temporary:
        tool, home = Path(temporary) / "tool", args.keep or Path(temporary) / "work"
        tool.mkdir()
        fetch_tool(tool)
        for campaign in chosen:
            if campaign.name in rows:
                continue
            folder, began = home / "-".join(campaign.name).replace(" ", "-"), time.monotonic()
            status = run(campaign, tool, folder, min(args.points, campaign.points))
            row = rows[campaign.name] = judge(campaign, folder, status)
            row.seconds = round(time.monotonic() - began, 1)
            args.out.mkdir(parents=True, exist_ok=True)
            known = [rows[other.name] for other in CAMPAIGNS if other.name in rows]
            path.write_text(json.dumps(report(known, facts), indent=1) + "\n")
            print(campaign, dict(row.verdicts), *row.failed, sep="\n    ", flush=True)  # noqa: T201
    return int(any(row.failed for row in rows.values()))


if __name__ == "__main__":
    ending.run(lambda: sys.exit(main()))
