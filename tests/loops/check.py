"""Kills a loop, recovers and resumes it, and compares every committed step bit for bit.

The same loop runs twice: once without interruption, once killed by SIGKILL and started again. A step
is committed if all ranks returned from its commit. The step in flight may be there or not, and a
write after the last commit before the kill belongs to no committed step.

``watch="live"`` demands, with a compressor:

- every step from 0 to the newest committed one is recovered, with the bits of the uninterrupted run;
- ``attach`` resumes at the newest committed step or the one in flight, with these bits;
- with ``residual="exact"`` every later step has the bits of the uninterrupted run.

Without a compressor only the newest step and those of snapshots can be recovered. A step that is lost
is named in a warning and counted apart; a recovered state is exact all the same.

``watch="recovery"`` demands that every state is exact or refused by a LowDiffError, and that
the run resumes at some step with the bits of that step. The same goes for gradients that are written
through ``.grad.data``. Where it resumes before the newest committed step, the residual is an older
one, so what follows is compared with this life's own steps alone.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.background import torch_loaded
from tests.loops.generate import Loop
from tests.loops.lives import has_watch, live, recover_steps

#: No life and no recovery takes so long, whatever else the machine does.
_PATIENCE_SECONDS = 100.0
#: A loop that takes longer is reported; others may run beside it.
SLOW_SECONDS = 90.0
#: After one rank died the others have so long until they die as well.
_LONELY_SECONDS = 0.05

#: What a life reported: word -> step -> digests, by rank.
Report = list[dict[str, dict[int, dict[str, str]]]]


@dataclass(frozen=True)
class Verdict:
    """What came of a loop.

    Attributes:
        kind: ``"good"``, ``"named"`` (good, but a step was lost and named), ``"wrong"``
            (other bits), ``"lost"`` (a committed step cannot be recovered), ``"stuck"`` (the run cannot
            go on), ``"refused"`` (training itself is an error), ``"slow"``, or ``"unequal"``: the
            loop itself does not repeat its bits, the generator's fault.
        reason: Which step, which tensors, which error.
    """

    kind: str
    reason: str = ""
    seconds: float = 0.0


#: What fails first in this list is what a loop is counted as.
KINDS = ("unequal", "refused", "wrong", "stuck", "lost", "named", "good")


class _Found(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason


def check(loop: Loop, folder: Path) -> Verdict:
    """Run a loop in a folder, which is removed afterwards; see the module."""
    started = time.monotonic()
    folder.mkdir(parents=True)
    findings: list[tuple[str, str]] = []
    try:
        _check(loop, folder, findings)
    except _Found as found:
        findings.append((found.kind, found.reason))
    finally:
        _end_writers(folder)
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - started
    if not findings and seconds > SLOW_SECONDS:
        return Verdict("slow", f"{seconds:.0f} s", seconds)
    kind = min((kind for kind, _ in findings), key=KINDS.index, default="good")
    reasons = [f"{kind}: {reason}" for kind, reason in findings]
    return Verdict(kind, "\n    ".join(reasons), seconds)


def _check(loop: Loop, folder: Path, findings: list[tuple[str, str]]) -> None:
    is_live = loop.watch == "live" or not has_watch()
    if loop.write and loop.write.through == "grad.data":
        is_live = False
    whole = _lived(loop, folder, "whole", kills=False)
    first = _lived(loop, folder, "first", kills=True)
    expected = [report["attached"] | report["made"] for report in whole]
    _same_training(first, expected, "in the life that was killed", "unequal")
    committed = min(max([0, *report.get("committed", {})]) for report in first)

    def recovered(begin: int, end: int, expected: list[dict[int, dict[str, str]]]) -> None:
        """See that these steps and the newest come back exactly, or are refused where they may be."""
        lost: dict[int, str] = {}
        for step, came, found in _recovered(loop, folder, [*range(begin, end + 1), None]):
            if not isinstance(found, str):
                for rank in range(loop.ranks):
                    _same(found[rank], expected[rank][came], f"recovered step {came}", rank)
                if came < (end if step is None else step):
                    lost[end] = f"{came} is the newest step"
            elif found.startswith("not a lowdiff error"):
                raise _Found("stuck", found)
            else:
                lost[end if step is None else step] = found
        if lost and is_live and not loop.is_replica:
            first = min(lost)
            what = f"{len(lost)} of steps {begin} to {end}, first {first}: {lost[first]}"
            findings.append(("lost", what))

    recovered(0, committed, expected)
    second = _lived(loop, folder, "second", kills=False)
    resumed = next(iter(second[0]["attached"]))
    if resumed < committed:
        lost = range(resumed + 1, committed + 1)
        is_named = not is_live or (loop.is_replica and _is_named(folder, lost))
        what = f"resumed at {resumed}, but {committed} were committed"
        findings.append(("named" if is_named else "lost", what))
    for rank, report in enumerate(second):
        _same(
            _without_random(report["attached"][resumed]),
            _without_random(expected[rank][resumed]),
            f"resumed at {resumed}",
            rank,
        )
    write = loop.write
    # A write after the commit before the kill is not made again, so training goes on from elsewhere.
    is_missing = write and write.place == "after commit" and resumed and write.fires(resumed - 1)
    # The residuals of steps before the newest are gone.
    is_exact = loop.is_replica or (loop.is_exact and resumed >= committed)
    if is_exact and not is_missing:
        _same_training(second, expected, f"after resuming at {resumed}", "wrong")
    made = [
        {step: state for step, state in old.items() if step <= resumed} | new["made"]
        for old, new in zip(expected, second, strict=True)
    ]
    recovered(max(0, resumed - 1), loop.steps, made)


def _same_training(report: Report, expected: Any, when: str, kind: str) -> None:
    for rank, lines in enumerate(report):
        for step, found in lines.get("made", {}).items():
            _same(found, expected[rank][step], f"trained step {step} {when}", rank, kind)


def _same(
    found: dict[str, str], expected: dict[str, str], what: str, rank: int, kind: str = "wrong"
) -> None:
    names = found.keys() | expected.keys()
    different = sorted(n for n in names if found.get(n) != expected.get(n))
    if different:
        name = different[0]
        raise _Found(
            kind,
            f"{what}, rank {rank}: {len(different)} differ: {', '.join(different[:6])}; "
            f"{name} is {found.get(name)}, was {expected.get(name)}",
        )


def _without_random(state: dict[str, str]) -> dict[str, str]:
    """Generators are restored when the first body begins."""
    return {name: value for name, value in state.items() if name != "random"}


def _is_named(folder: Path, lost: range) -> bool:
    """Whether warnings of the second life name all lost steps."""
    text = "".join(path.read_text() for path in folder.glob("second.*.output"))
    named: set[int] = set()
    for first, last in re.findall(r"steps? (\d+)(?: (?:to|and) (\d+))?", text):
        named.update(range(int(first), int(last or first) + 1))
    return named >= set(lost)


def _lived(loop: Loop, folder: Path, life: str, *, kills: bool) -> Report:
    """Let all ranks live, to the end or until they die; returns what they reported."""
    with _processes(
        [(live, (loop, folder, life, rank, kills)) for rank in range(loop.ranks)]
    ) as processes:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            multiprocessing.connection.wait([p.sentinel for p in processes], timeout=1.0)
            if any(p.exitcode for p in processes):  # one died, or failed
                multiprocessing.connection.wait(
                    [p.sentinel for p in processes if p.is_alive()], timeout=_LONELY_SECONDS
                )
                break
        hangs = time.monotonic() >= deadline
        codes = [p.exitcode for p in processes]
    reports = [_report(folder / f"{life}.{rank}") for rank in range(loop.ranks)]
    good = -signal.SIGKILL if kills else 0
    if hangs or good not in codes or (not kills and set(codes) != {0}):
        errors = [_last_error(folder / f"{life}.{rank}.output") for rank in range(loop.ranks)]
        why = "hangs" if hangs else " | ".join(error for error in errors if error)
        raise _Found("stuck" if life == "second" else "refused", f"{life} life: {why}")
    return reports


def _recovered(
    loop: Loop, folder: Path, steps: Sequence[int | None]
) -> Iterator[tuple[int | None, int, Any]]:
    """Each step, the one that came, and the digests of every rank or the error that refused it."""
    result = folder / "recovered"
    with _processes([(recover_steps, (loop, folder, list(steps), result))]) as (process,):
        process.join(_PATIENCE_SECONDS)
        code = process.exitcode
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    yield from lines
    if code != 0:
        raise _Found("stuck", f"recovery of {steps[len(lines)]} ended with {code}")


@contextmanager
def _processes(jobs: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[Any]]:
    """Processes that have imported torch before they begin; killed at the end."""
    context = torch_loaded()
    processes = [context.Process(target=job, args=arguments) for job, arguments in jobs]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _report(path: Path) -> dict[str, dict[int, dict[str, str]]]:
    found: dict[str, dict[int, dict[str, str]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        word, step, state = json.loads(line)
        found.setdefault(word, {})[step] = state
    return found


def _last_error(output: Path) -> str:
    lines = output.read_text().splitlines() if output.exists() else []
    begins = [i for i, line in enumerate(lines) if line and line[0] not in " \t" and ": " in line]
    return lines[begins[-1]][:400] if begins else "no word"


def _end_writers(folder: Path) -> None:
    """Wait until writers and replicas, which outlive their trainers, have let go of the folder."""
    deadline = time.monotonic() + 10
    while pids := _using(folder):
        if time.monotonic() > deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _using(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes()
            if str(folder).encode() in words and b"lowdiff" in words:
                found.append(int(path.parent.name))
    return found
