"""SIGKILL of trainer, replica or both, at random instants: the newest committed step is in memory."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lowdiff.demo.launch import child_processes
from lowdiff.recovery import recover
from tests.faults.kills import Campaign, carried_out, described, wait_for_writers
from tests.faults.outcome import Outcome
from tests.faults.victim import ONE_WORKER, digest_of
from tests.faults.zygote import Zygote


class ReplicaCampaign(Campaign):
    """Lives without compression, whose replicas die as well."""

    def _kill(self, kind: str, pids: Sequence[int]) -> None:
        """``"writer"`` is the replica here; the writer of its images dies with every trainer."""
        children = [child for pid in pids for child in child_processes(pid)]
        replicas = [child for child in children if "lowdiff.recovery.replica.main" in _words(child)]
        victims = {"trainer": list(pids), "writer": replicas, "both": [*pids, *children]}
        for pid in victims[kind]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _recover(self, what: str, target: Path, last: int) -> None:
        wait_for_writers(target)
        state = recover(target / "run", staging=target / "staging", options=ONE_WORKER)
        if state.step < last:
            self.outcome.lose(f"{what}: step {last} was committed, {state.step} is the newest")
        if digest_of(state) != self.reference[0][state.step]:
            self.outcome.lose(f"{what}: step {state.step} came back with other bits")


def replica_kills(
    folder: Path, rounds: int, *, world_size: int = 1, engine: str = "host", seed: int = 0
) -> Outcome:
    """Kill a run without compression ``rounds`` times; begin another life where it ends."""
    words = described(world_size, engine)
    tried = f"SIGKILL of trainer, replica or both at random instants, {words}"
    outcome = Outcome(tried, seed)
    zygote = Zygote()
    until = 150 + 45 * rounds
    place, chance = folder / f"of-{world_size}-{engine}", random.Random(seed)
    campaign = ReplicaCampaign(zygote, place, world_size, until, outcome, chance, "replica", engine)
    return carried_out(campaign, rounds, folder)


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
