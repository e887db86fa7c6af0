"""Files cut short at every byte and bits flipped at random: an exact step or a named error."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lowdiff.errors import LowDiffError
from lowdiff.testing import limits
from tests.faults.outcome import Outcome
from tests.faults.victim import (
    TinyTraining,
    Victim,
    checkpointer_for,
    describe,
    listening,
    live,
    verdict,
)

#: A chunk is preallocated; so small a one can be cut at each of its bytes.
CHUNK_BYTES = 1 << 14
#: Longer files are cut at some bytes only.
_LARGEST_BYTES = 64 << 10


def make_victims(folder: Path) -> list[Victim]:
    """A closed run, and one whose second life was killed with records in staging only."""
    closed = Victim(folder / "closed/run", folder / "closed/staging")
    live(closed, 12)
    killed = Victim(folder / "killed/run", folder / "killed/staging")
    with limits(staging_chunk_bytes=CHUNK_BYTES):
        live(killed, 8, end="kill")
        live(killed, 13, end="kill")
    with TemporaryDirectory(dir=folder) as aside:
        reference = Victim(Path(aside) / "run", Path(aside) / "staging")
        live(reference, 20)
    for victim in (closed, killed):
        assert victim.digests.items() <= reference.digests.items()
        victim.digests = reference.digests
    return [closed, killed]


def kind_of(path: Path) -> str:
    """What a file is for."""
    if path.parent.parent.name == "incarnations":
        return "fence"
    if path.parent.name == "measurements":
        return "measurements"
    suffixes = {".json": "manifest", ".safetensors": "shard", ".seg": "segment", ".chunk": "chunk"}
    return "run.json" if path.name == "run.json" else suffixes.get(path.suffix, path.name)


def newest_of_each_kind(victim: Victim) -> list[Path]:
    """The last file of every kind: what a dying process or machine was writing."""
    newest = {kind_of(path): path for path in victim.files()}
    return [path for path in newest.values() if 0 < path.stat().st_size <= _LARGEST_BYTES]


def cuts(victims: Sequence[Victim], *, every: int = 1, seed: int = 0) -> Outcome:
    """Cut the last file of each kind at every byte, or at every ``every``-th."""
    where = "every byte" if every == 1 else f"every {every}th byte"
    outcome = Outcome(f"the last file of each kind cut at {where}", seed)
    with outcome.timed(), _quiet():
        for victim in victims:
            for path in newest_of_each_kind(victim):
                with kept(path) as data:
                    for length in range(seed % every, len(data), every):
                        os.truncate(path, length)
                        _judge(outcome, victim, f"{kind_of(path)} cut at {length}")
                        path.write_bytes(data)
    return outcome


def flips(victims: Sequence[Victim], rounds: int, *, seed: int = 0) -> Outcome:
    """Flip one bit of one file, each file as often as another, in each round."""
    outcome = Outcome("one bit flipped in a file of a run", seed)
    chance = random.Random(seed)
    with outcome.timed(), _quiet():
        for number in range(rounds):
            victim = victims[number % len(victims)]
            path = chance.choice([path for path in victim.files() if path.stat().st_size])
            with kept(path) as data:
                # A chunk is mostly room for more: aim at what has been written.
                position = chance.randrange(len(data.rstrip(b"\0")) or len(data))
                changed = bytearray(data)
                changed[position] ^= 1 << chance.randrange(8)
                path.write_bytes(changed)
                _judge(outcome, victim, f"{kind_of(path)} flipped at {position}")
    return outcome


@contextmanager
def kept(path: Path) -> Iterator[bytes]:
    """A file's content, put back in the end."""
    data = path.read_bytes()
    try:
        yield data
    finally:
        path.write_bytes(data)


def _judge(outcome: Outcome, victim: Victim, what: str) -> None:
    outcome.rounds += 1
    try:
        found = verdict(victim)
        # The newest step of a closed run is a snapshot; the one before it needs the segments.
        verdict(victim, victim.newest - 1)
    except Exception as error:
        outcome.lose(f"{what}: {describe(error)}")
        return
    outcome.found[f"{re.sub(' .*', '', what)}: {found}"] += 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Recovery says what it passes over; ten thousand times is too often."""
    logger = logging.getLogger("lowdiff")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def resumptions(victims: Sequence[Victim], rounds: int, folder: Path, *, seed: int = 0) -> Outcome:
    """Damage one file, cut or flipped, then let training go on: exact, said, or refused."""
    outcome = Outcome("one file cut, flipped or deleted, then training resumed", seed)
    chance = random.Random(seed)
    with outcome.timed():
        for number in range(rounds):
            original = victims[number % len(victims)]
            victim = original.copied(folder / f"resumed-{number}")
            paths = newest_of_each_kind(victim)
            path = paths[number // len(victims) % len(paths)]
            what = f"{kind_of(path)} {_damage(path, chance)}"
            outcome.rounds += 1
            try:
                found = resumption(victim)
            except Exception as error:
                outcome.lose(f"{what}: {describe(error)}")
            else:
                outcome.found[f"{kind_of(path)}: {found}"] += 1
            shutil.rmtree(folder / f"resumed-{number}")
    return outcome


def _damage(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    position = chance.randrange(len(data.rstrip(b"\0")) or len(data))
    # Whoever deletes staging loses what a reboot loses; nobody could tell the difference.
    ways = ["cut", "flipped"] if kind_of(path) == "chunk" else ["cut", "flipped", "deleted"]
    way = chance.choice(ways)
    if way == "cut":
        os.truncate(path, position)
    elif way == "flipped":
        data[position] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    else:
        path.unlink()
    return f"{way} at {position}"


def resumption(victim: Victim) -> str:
    """What `attach` makes of a broken run; it must say so if it goes back.

    Raises:
        AssertionError: If it went on from other bits, or lost steps without a word.
        Exception: Whatever `attach` raised that is no `LowDiffError`.
    """
    training = TinyTraining()
    checkpointer = checkpointer_for(victim.run, victim.staging)
    with listening() as said:
        try:
            resumed = checkpointer.attach(training.model, training.optimizer, **training.stateful)
        except LowDiffError as error:
            return type(error).__name__
        assert training.digest() == victim.digests[resumed], f"other bits at step {resumed}"
        for step in checkpointer.steps(victim.newest + 3):
            training.step(step)
        checkpointer.close()
    continues = training.digest() == victim.digests[victim.newest + 3]
    if resumed == victim.newest and continues:
        return "exact"
    # A record that is broken where a dying process may have torn it is no damage.
    assert said or resumed == victim.newest - 1, (
        f"resumed at step {resumed} of {victim.newest}, "
        f"{'exactly' if continues else 'not exactly'}, without a word"
    )
    return ("earlier" if resumed < victim.newest else "exact state") + (
        "" if continues else ", other residual"
    )
