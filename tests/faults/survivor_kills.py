"""Strategy survivors: ranks are killed, stopped or fail, and those that live save the state."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash.launch.survivor_lives import Lives, ended, life, reports
from tests.faults.kills import LATE
from tests.faults.outcome import Outcome
from tests.processes import Script

#: Places of a fault: in a step, at any instant, in the save of another rank's failure.
PLACES = (
    "forward",
    "backward",
    "exchange",
    "between",
    "optimizer",
    "stepped",
    "error",
    "random",
    "save",
    "stop",
)
#: Of a model whose state, with that of AdamW, has more than 100 MB.
LARGE_HIDDEN = 250_000
_STEPS_PER_ROUND = 8
_RANDOM_SECONDS = 0.4
_SNAPSHOT_EVERY = 20
#: A step of a large state, whose every bit is compared, takes up to five seconds on a busy machine.
_LIFE_SECONDS, _LARGE_STEP_SECONDS = 60.0, 10.0


@dataclass
class SurvivorCampaign:
    """A run whose ranks fail again and again.

    Attributes:
        world_size: Number of ranks.
        hidden: Width of the model.
        rounds: Number of failures.
        places: Where they are, in turn.
        engine: Of lives that fail; see `tests.crash.launch.survivor_lives.ENGINES`.
    """

    folder: Path
    world_size: int
    hidden: int
    rounds: int
    places: Sequence[str]
    outcome: Outcome
    chance: random.Random
    engine: str = "host"

    def carry_out(self) -> None:
        """Live once without interruption, then fail in every life but the last."""
        until = _STEPS_PER_ROUND * (self.rounds + 1)
        patience = _LIFE_SECONDS + until * _LARGE_STEP_SECONDS
        words = ["--hidden", self.hidden, "--snapshot-every", _SNAPSHOT_EVERY]
        whole, target = self.folder / "whole", self.folder / "killed"
        for script in life(whole, self.world_size, until, {-1: words}, number=0):
            assert script.wait(patience) == 0, script.printed()[-3000:]
        expected = reports(whole, self.world_size)
        before, said = "", ""
        words += ["--engine", self.engine]
        for number in range(self.rounds):
            place = self.places[number % len(self.places)]
            self._fail(place, target, until, words, number)
            self.outcome.rounds += 1
            self._check(f"round {number - 1}, {before}", said, target, expected)
            before, said = place, reports(target, self.world_size).output
        for script in life(target, self.world_size, until, {-1: words}, number=self.rounds):
            if script.wait(patience) != 0:
                self.outcome.lose(f"the last life failed: {script.printed()[-500:]}")
        self._check(f"round {self.rounds - 1}, {before}", said, target, expected)

    def _fail(self, place: str, target: Path, until: int, words: list[object], number: int) -> None:
        """One life that fails at a place."""
        victim = self.chance.randrange(self.world_size)
        after = self.chance.randrange(1, _STEPS_PER_ROUND - 1)
        options = {-1: [*words, "--hang-seconds", 2]}
        if place == "save":
            other = (victim + 1) % self.world_size
            options |= {
                victim: ["--phase", "backward", "--after", after],
                other: ["--phase", "save"],
            }
        elif place != "random":
            options[victim] = ["--phase", place, "--after", after]
        begun = self._lines(target)
        scripts = life(target, self.world_size, until, options, number=number)
        if place == "random":
            self._wait_for_lines(target, begun + 1 + after, scripts)
            time.sleep(self.chance.random() * _RANDOM_SECONDS)
            scripts[victim].kill()
        ended(scripts, stopped=victim if place == "stop" else None)

    def _check(self, what: str, said: str, target: Path, expected: Lives) -> None:
        """Compare every state that was seen, and look how much the failure before has cost.

        Args:
            what: The life before.
            said: What was printed until its end.
            target: Folder of the run.
            expected: What an uninterrupted run saw.
        """
        found = reports(target, self.world_size)
        for rank in range(self.world_size):
            for line in found.lines[rank]:
                if line["word"] != "end" and line["state"] != expected.states(rank)[line["step"]]:
                    self.outcome.lose(
                        f"after {what}: rank {rank} {line['word']} step {line['step']} with other bits"
                    )
        lives = self._lives_of_rank_0(found)
        if len(lives) < 2:
            return
        made, resumed = max(lives[-2]), lives[-1][0]
        # A body that was made was perhaps not committed.
        if resumed >= made - 1:
            self.outcome.found["at most the open body lost"] += 1
        elif what.endswith("save") and self.world_size == 2:
            self.outcome.found["all ranks died: back to a snapshot"] += 1
        elif any(f"died before it had staged step {made + n}, " in said for n in (0, 1)):
            self.outcome.found["a rank alone had something: back to a snapshot"] += 1
        else:
            self.outcome.lose(f"{what}: {made} was made, {resumed} came back: {said[-600:]}")

    @staticmethod
    def _lives_of_rank_0(found: Lives) -> list[list[int]]:
        lives: list[list[int]] = []
        for line in found.lines[0]:
            if line["word"] == "resumed":
                lives.append([])
            if line["word"] != "end":
                lives[-1].append(line["step"])
        return lives

    def _lines(self, target: Path) -> int:
        report = target / "report.0"
        return len(report.read_text().splitlines()) if report.exists() else 0

    def _wait_for_lines(self, target: Path, count: int, scripts: list[Script]) -> None:
        deadline = time.monotonic() + 60.0
        while self._lines(target) < count and time.monotonic() < deadline:
            if all(script.poll() is not None for script in scripts):
                return
            time.sleep(0.005)


def survivor_kills(
    folder: Path,
    rounds: int,
    *,
    world_size: int,
    hidden: int = 40,
    places: Sequence[str] = PLACES,
    engine: str = "host",
    seed: int = 0,
) -> Outcome:
    """Let a rank of a run fail ``rounds`` times."""
    large = ", a state of more than 100 MB" if hidden >= LARGE_HIDDEN else ""
    how = "is killed, stopped or fails" if places is PLACES else "is killed, another in its save"
    late = LATE * (engine == "late")
    outcome = Outcome(f"survivors: one of {world_size} ranks {how}{large}{late}", seed)
    place = folder / f"of-{world_size}-{hidden}-{len(places)}-{engine}"
    chance = random.Random(seed + world_size)
    campaign = SurvivorCampaign(place, world_size, hidden, rounds, places, outcome, chance, engine)
    with outcome.timed():
        campaign.carry_out()
    return outcome
