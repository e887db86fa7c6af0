"""Power failures: every moment of a recorded training, with what was not fsynced gone or torn."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

from lowdiff.errors import LowDiffError
from tests.faults.disk import VARIANTS
from tests.faults.outcome import Outcome
from tests.faults.recording import Player, record, why_not
from tests.faults.victim import Victim, describe, digest_of

ROOT = Path(__file__).parents[2]
BATCH_SIZE = 2


def power_failures(folder: Path, steps: int, *, every: int = 1, seed: int = 0) -> Outcome:
    """Record a training of so many steps; fail at every ``every``-th change of its disk.

    At most two batches may be lost, counted from what the trainer had said was committed.
    """
    outcome = Outcome(
        "power failure at every change of the disk, unsynced bytes gone or torn", seed
    )
    outcome.not_run = why_not()
    if outcome.not_run:
        return outcome
    chance = random.Random(seed)
    (folder / "root").mkdir(parents=True)
    command = [sys.executable, "-m", "tests.faults.powered", str(folder), str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with outcome.timed():
        calls = record(command, folder, environment)
        player, victim = Player(folder / "root"), Victim(folder / "left/run", folder / "none")
        marks = {
            call: call.data[0].decode().split()
            for call in calls
            if call.path == str(folder / "marks") and call.name == "write"
        }
        victim.digests = {int(step): found for step, found in marks.values()}
        committed, changes = -1, 0
        for call in calls:
            if call in marks:
                committed = int(marks[call][0])
            elif player.play(call):
                changes += 1
                for variant in VARIANTS if changes % every == 0 else ():
                    left = folder / "left"
                    left.mkdir()
                    player.disk.after_power_failure(left, variant, chance)
                    what = f"{variant}, after {call.name} of {call.path} (change {changes})"
                    _judge(outcome, victim, committed, variant, what)
                    shutil.rmtree(left)
        outcome.found["changes of the disk"] = changes
        assert committed == steps, "the recorded training did not come to its end"
    return outcome


def _judge(outcome: Outcome, victim: Victim, committed: int, variant: str, what: str) -> None:
    outcome.rounds += 1
    try:
        state = victim.recovered()
    except LowDiffError as error:
        if committed < 0:  # `attach` has not returned yet
            outcome.found[f"{variant}: before attach returned: {type(error).__name__}"] += 1
        else:
            outcome.lose(f"{what}: {committed} steps were committed: {describe(error)}")
        return
    except Exception as error:
        outcome.lose(f"{what}: {describe(error)}")
        return
    if digest_of(state) != victim.digests[state.step]:
        outcome.lose(f"{what}: step {state.step} came back with other bits")
    elif committed - state.step > 2 * BATCH_SIZE:
        outcome.lose(f"{what}: {committed} steps were committed, {state.step} came back")
    else:
        lost = max(0, committed - state.step)
        outcome.found[f"{variant}: {lost} steps lost"] += 1
