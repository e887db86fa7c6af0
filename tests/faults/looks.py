"""Readers beside a training at full speed: of what it writes and removes, nothing may look lost."""

from __future__ import annotations

import time
from pathlib import Path

from lowdiff.errors import LowDiffError
from lowdiff.recovery import recover
from lowdiff.recovery.inspect.verify import verify
from tests.faults.kills import wait_for_writers
from tests.faults.outcome import Outcome
from tests.faults.victim import ONE_WORKER, describe, digest_of
from tests.faults.zygote import Zygote, reported
from tests.processes import is_alive

_PATIENCE_SECONDS = 60.0
_LIFE_STEPS = 1000
_WORDS = {
    "topk": "with compression",
    "replica": "without compression",
}


def looks(folder: Path, rounds: int, *, kind: str = "topk") -> Outcome:
    """Verify and recover a live run ``rounds`` times, every other time as another machine sees it.

    Args:
        folder: For the runs.
        rounds: How often.
        kind: Of the zygote's `SETTINGS`.
    """
    tried = f"verify and recover beside a training at full speed, {_WORDS[kind]}"
    outcome = Outcome(tried, seed=0)
    zygote = Zygote()
    recovered: dict[Path, list[tuple[int, str]]] = {}
    try:
        with outcome.timed():
            while outcome.rounds < rounds:
                life = folder / f"{kind}-{len(recovered)}"
                life.mkdir(parents=True)
                (pid,) = zygote.spawn(life, _LIFE_STEPS, kind=kind)
                recovered[life] = _watch(life, pid, rounds, outcome)
    finally:
        zygote.close()
        wait_for_writers(folder)
    for life, found in recovered.items():
        _check(life, found, outcome)
    return outcome


def _watch(life: Path, pid: int, rounds: int, outcome: Outcome) -> list[tuple[int, str]]:
    """Look until the life or the campaign ends; the newest step of each look, and its digest."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not reported(life, 0):
        assert is_alive(pid), _output(life)
        assert time.monotonic() < deadline, _output(life)
        time.sleep(0.005)
    recovered: list[tuple[int, str]] = []
    while outcome.rounds < rounds:
        if not is_alive(pid):
            assert reported(life, 0)[-1].word == "closed", _output(life)
            break
        # The staging memory of another machine is not seen.
        place = ("staging", "elsewhere")[outcome.rounds % 2]
        outcome.rounds += 1
        outcome.found[place] += 1
        committed = reported(life, 0)[-1].committed if place == "staging" else 0
        try:
            report = verify(life / "run", life / place, options=ONE_WORKER)
            state = recover(life / "run", staging=life / place, options=ONE_WORKER)
        except LowDiffError as error:
            outcome.lose(f"{life.name}, {place}: {describe(error)}")
            continue
        for finding in report.failures:
            outcome.lose(f"{life.name}, {place}: {finding.message}")
        newest = min(report.recoverable[-1][1], state.step) if report.recoverable else -1
        if newest < committed:
            outcome.lose(f"{life.name}: step {committed} was committed, {newest} is the newest")
        recovered.append((state.step, digest_of(state)))
    return recovered


def _output(life: Path) -> str:
    return (life / "output.0").read_text()[-2000:]


def _check(life: Path, recovered: list[tuple[int, str]], outcome: Outcome) -> None:
    """Compare what came back with what the life, which has ended, said of those steps."""
    said = {line.step: line.digest for line in reported(life, 0) if line.word != "closed"}
    for step, found in recovered:
        # The last one may have been committed, and the life ended before it said so.
        if said.get(step, found) != found or step > max(said) + 1:
            outcome.lose(f"{life.name}: step {step} came back with other bits")
