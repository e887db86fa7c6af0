"""SIGKILL of trainer, writer or both, at random instants, again and again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lowdiff.demo.launch import child_processes
from lowdiff.errors import LowDiffError, StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery import recover
from lowdiff.recovery.plan import recoverable
from tests.faults.outcome import Outcome
from tests.faults.victim import ONE_WORKER, describe, digest_of
from tests.faults.zygote import Zygote, reported
from tests.processes import is_alive

#: What a campaign with that engine says of it.
LATE = ", steps arrive late"
_PATIENCE_SECONDS = 60.0
#: For a life of thousands of steps, on a machine with other work.
_LIFE_SECONDS = 900.0
_KINDS = ("trainer", "writer", "both")
#: One kill in so many may come before `attach` returns, the others come in the middle of training.
_EARLY_KILLS = 4
_EARLY_SECONDS = 1.0
_LATEST_STEP = 40
_DELAY_SECONDS = 0.05


@dataclass
class Campaign:
    """One run that is killed again and again.

    Attributes:
        kind: Of the zygote's `SETTINGS`.
        engine: ``"late"`` where copies come late, as from an accelerator; the uninterrupted life has ``"host"``.
        until: The run's last step; lives are killed before it.
        reference: Per rank: digest of every step in an uninterrupted life.
    """

    zygote: Zygote
    folder: Path
    world_size: int
    until: int
    outcome: Outcome
    chance: random.Random
    kind: str = "topk"
    engine: str = "host"
    reference: list[dict[int, str]] = field(default_factory=list)

    def prepare(self) -> None:
        """Live once without interruption."""
        whole = self.folder / "whole"
        whole.mkdir(parents=True)
        for pid in self.zygote.spawn(whole, self.until, self.world_size, self.kind):
            _wait_for_end(pid, whole)
        for rank in range(self.world_size):
            lines = reported(whole, rank)
            assert lines[-1].word == "closed", (whole / f"output.{rank}").read_text()[-2000:]
            self.reference.append({line.step: line.digest for line in lines[:-1]})

    def round(self, number: int) -> None:
        """Begin or go on with a life, kill something, and look at what is left."""
        target = self.folder / "killed"
        target.mkdir(exist_ok=True)
        kind = _KINDS[number % len(_KINDS)]
        self.outcome.rounds += 1
        # A killed writer's trainer lives on, and is killed in the end of the round as well.
        begin = _size(target)
        pids = self.zygote.spawn(target, self.until, self.world_size, self.kind, self.engine)
        if number % _EARLY_KILLS == 0:
            time.sleep(self.chance.random() * _EARLY_SECONDS)
        else:
            _wait_for_lines(target, begin, 1 + self.chance.randrange(_LATEST_STEP), pids)
            time.sleep(self.chance.random() * _DELAY_SECONDS)
        victims = [self.chance.choice(pids)] if self.chance.random() < 0.5 else pids
        self._kill(kind, victims)
        if kind == "writer":
            time.sleep(self.chance.random() * _DELAY_SECONDS)
        _kill(pids)
        for pid in pids:
            _wait_for_end(pid, target)
        self._check(f"round {number}, {kind}", target)
        self.outcome.found[f"{kind} of {self.world_size}"] += 1

    def _kill(self, kind: str, pids: Sequence[int]) -> None:
        writers = [child for pid in pids for child in child_processes(pid)]
        if kind in ("trainer", "both"):
            _kill(pids)
        if kind in ("writer", "both"):
            _kill(writers)

    def _check(self, what: str, target: Path) -> None:
        committed = []
        for rank in range(self.world_size):
            lines = reported(target, rank)
            committed.append(max((line.committed for line in lines), default=0))
            for line in lines:
                if line.word != "closed" and self.reference[rank].get(line.step) != line.digest:
                    self.outcome.lose(
                        f"{what}: rank {rank} {line.word} step {line.step} with other bits"
                    )
        if not all(reported(target, rank) for rank in range(self.world_size)):
            return  # `attach` has never returned
        last = max(committed)
        try:
            self._recover(what, target, last)
        except LowDiffError as error:
            self.outcome.lose(f"{what}: {last} steps were committed: {describe(error)}")

    def _recover(self, what: str, target: Path, last: int) -> None:
        catalog = scan(RunFolder(target / "run"), [target / "staging"])
        first, newest = recoverable(catalog)[-1]
        if newest < last:
            self.outcome.lose(f"{what}: step {last} was committed, {newest} is the newest")
        for step in {newest, self.chance.randint(first, newest)}:
            try:
                state = recover(
                    target / "run", step, staging=target / "staging", options=ONE_WORKER
                )
            except StepNotFound:
                # The retention of a writer that outlived its trainer may have been faster.
                oldest, _ = recoverable(scan(RunFolder(target / "run"), [target / "staging"]))[-1]
                if step < oldest:
                    continue
                raise
            if digest_of(state) != self.reference[0][step]:
                self.outcome.lose(f"{what}: step {step} came back with other bits")


def kills(
    folder: Path, rounds: int, *, world_size: int = 1, engine: str = "host", seed: int = 0
) -> Outcome:
    """Kill a run of one process, or of several, ``rounds`` times; begin another where it ends."""
    words = described(world_size, engine)
    outcome = Outcome(f"SIGKILL of trainer, writer or both at random instants, {words}", seed)
    zygote = Zygote()
    until = 150 + 45 * rounds
    place = folder / f"of-{world_size}-{engine}"
    chance = random.Random(seed)
    campaign = Campaign(zygote, place, world_size, until, outcome, chance, engine=engine)
    return carried_out(campaign, rounds, folder)


def described(world_size: int, engine: str) -> str:
    """The ranks of a run, and how their steps reach staging, in words."""
    words = "one process" if world_size == 1 else f"{world_size} ranks"
    return words + LATE * (engine == "late")


def carried_out(campaign: Campaign, rounds: int, folder: Path) -> Outcome:
    """Every round of a campaign, and what came of them."""
    try:
        with campaign.outcome.timed():
            campaign.prepare()
            for number in range(rounds):
                campaign.round(number)
    finally:
        campaign.zygote.close()
        wait_for_writers(folder)
    return campaign.outcome


def _size(folder: Path) -> int:
    path = folder / "report.0"
    return path.stat().st_size if path.exists() else 0


def _wait_for_lines(folder: Path, begin: int, count: int, pids: Sequence[int]) -> None:
    """Wait until rank 0 has reported so much more: that it resumed, and then its commits."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _size(folder) == begin or (folder / "report.0").read_bytes()[begin:].count(b"\n") < count:
        text = (folder / "output.0").read_text()[-2000:]
        assert all(is_alive(pid) for pid in pids), text
        assert time.monotonic() < deadline, text
        time.sleep(0.002)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for_end(pid: int, folder: Path) -> None:
    deadline = time.monotonic() + _LIFE_SECONDS
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} of {folder} goes on"
        time.sleep(0.005)


def wait_for_writers(folder: Path) -> None:
    """Writers outlive their trainers; whoever deletes their folder waits for them."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(str(folder).encode() in words for words in _command_lines()):
        assert time.monotonic() < deadline, f"a writer of {folder} goes on"
        time.sleep(0.1)


def _command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes())
    ours = b"lowdiff.persistence.writer.main", b"lowdiff.recovery.replica.main"
    return [words for words in found if any(module in words for module in ours)]
