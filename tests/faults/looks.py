"""Readers beside a training at full speed: of what it writes and removes, nothing may look lost."""

from __future__ import annotations

import time
from pathlib import Path

from lowdiff.demo.launch import is_alive
from lowdiff.errors import LowDiffError
from lowdiff.recovery import recover
from lowdiff.recovery.verify import verify
from tests.faults.kills import wait_for_writers
from tests.faults.outcome import Outcome
from tests.faults.victim import ONE_WORKER, describe, digest_of
from tests.faults.zygote import Zygote, reported, wait_for_end

_LIFE_STEPS = 1000


def looks(folder: Path, rounds: int, *, snapshot: str = "atomic", seed: int = 0) -> Outcome:
    """Verify and recover a live run ``rounds`` times, every other time as another machine sees it.

    Args:
        folder: For the runs.
        rounds: How often.
        snapshot: How the runs take their full snapshots.
        seed: Not used: what is met is a matter of time.
    """
    words = "rolling snapshots" if snapshot == "rolling" else "full snapshots"
    outcome = Outcome(f"verify and recover beside a training at full speed, {words}", seed)
    zygote = Zygote()
    try:
        with outcome.timed():
            lives = 0
            while outcome.rounds < rounds:
                lives += 1
                life = folder / f"{snapshot}-{lives}"
                life.mkdir(parents=True)
                (pid,) = zygote.spawn(life, _LIFE_STEPS, snapshot=snapshot)
                _watch(life, pid, rounds, outcome)
    finally:
        zygote.close()
        wait_for_writers(folder)
    return outcome


def _watch(life: Path, pid: int, rounds: int, outcome: Outcome) -> None:
    """Look until the life or the campaign ends; then compare with what the life says."""
    while is_alive(pid) and not reported(life, 0):
        time.sleep(0.005)
    recovered = {}
    while is_alive(pid) and outcome.rounds < rounds:
        place = ("staging", "elsewhere")[outcome.rounds % 2]
        try:
            report = verify(life / "run", life / place, options=ONE_WORKER)
            for finding in report.failures:
                outcome.lose(f"{life.name}, {place}: {finding.message}")
            state = recover(life / "run", staging=life / place, options=ONE_WORKER)
        except LowDiffError as error:
            outcome.lose(f"{life.name}, {place}: {describe(error)}")
        else:
            recovered[state.step] = digest_of(state)
        outcome.rounds += 1
        outcome.found[place] += 1
    wait_for_end(pid, life)
    said = {step: found for word, step, found in reported(life, 0) if word != "closed"}
    assert said.get(_LIFE_STEPS), (life / "output.0").read_text()[-2000:]
    for step, found in recovered.items():
        if said[step] != found:
            outcome.lose(f"{life.name}: step {step} came back with other bits")
