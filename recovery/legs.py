"""Replays that together prove a run: from each snapshot to the next one, then to the newest step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from lowdiff.errors import DamagedFile, LowDiffError, NotEnoughMemory, StepNotFound
from lowdiff.persistence.catalog import Catalog, SnapshotSet, complete_snapshots
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.snapshots import Manifest, manifest_file
from lowdiff.recovery.compare import differences, keep_inherited
from lowdiff.recovery.damage import Finding, first_gap, last_kept
from lowdiff.recovery.engine import carry_out, look_again
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.plan import (
    plan_recovery,
    recoverable,
    usable_snapshots,
)
from lowdiff.recovery.replay import ReplayOptions


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay.

    Attributes:
        first: Step of the snapshot it started from.
        last: Step it led to.
        compared: Whether a snapshot of ``last`` was there to compare with, bit for bit. Otherwise
            only the digests that the live run recorded were compared.
    """

    first: int
    last: int
    compared: bool


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One replay to do: from a snapshot to the next one, or to the newest step (None)."""

    base: SnapshotSet
    target: SnapshotSet | None
    last: int

    @property
    def loaded_bytes(self) -> int:
        """What its snapshots take in memory: that which is compared with is a second state."""
        return sum(s.bytes for s in (self.base, self.target) if s is not None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a leg, or of what is in memory.

    Attributes:
        failure: What is wrong; None if nothing is.
        note: What differs because another kind of device trained it, or why nothing is known.
        replayed: What was replayed, if it led where it should.
    """

    failure: Finding | None = None
    note: Finding | None = None
    replayed: Replayed | None = None


def legs_of(catalog: Catalog) -> list[Leg]:
    """All replays to do, in order of steps."""
    snapshots = usable_snapshots(catalog)
    legs = []
    for base, target in pairwise(snapshots):
        last = last_kept(catalog, base.step, target.step)
        if last == target.step:
            legs.append(Leg(base, target, last))
        elif last > base.step:
            legs.append(Leg(base, None, last))
    newest = newest_recoverable(catalog)
    if snapshots and (newest > snapshots[-1].step or not legs):
        legs.append(Leg(snapshots[-1], None, newest))
    return legs


def newest_recoverable(catalog: Catalog) -> int:
    """The newest step that can be rebuilt, -1 if none can."""
    return max((last for _, last in recoverable(catalog)), default=-1)


def gaps(catalog: Catalog) -> list[Finding]:
    """Every gap before a snapshot or the newest step."""
    found = (first_gap(catalog, leg.base.step, leg.last) for leg in legs_of(catalog))
    return [gap for gap in found if gap is not None]


def prove(
    folder: RunFolder, root: Path, catalog: Catalog, leg: Leg, options: ReplayOptions
) -> Outcome:
    """Replay one leg, and compare."""

    def act(seen: Catalog) -> Outcome:
        return _compare(seen, leg, options)

    try:
        gap = first_gap(catalog, leg.base.step, leg.last)
        outcome = Outcome(gap) if gap else look_again(folder, root, catalog, act, check_all=True)
    except DamagedFile as error:
        outcome = Outcome(Finding.of(error))
    except StepNotFound as error:
        outcome = Outcome(Finding(str(error)))
    except NotEnoughMemory:
        raise  # it says nothing about the run
    except LowDiffError as error:
        return Outcome(Finding(str(error)))  # no part of it was missing
    return (outcome.failure and _overtaken(catalog, leg)) or outcome


def _overtaken(catalog: Catalog, leg: Leg) -> Outcome | None:
    """What became of a leg that is not as it was seen: a live run removes and replaces files."""
    changed = [s for s in (leg.base, leg.target) if s is not None and not _is_as_seen(s)]
    if not changed and last_kept(catalog, leg.base.step, leg.last) == leg.last:
        return None
    there = complete_snapshots(RunFolder(catalog.root), catalog.run_id)
    if max((s.step for s in there), default=-1) < max((s.step for s in changed), default=-1):
        # Retention keeps the newest.
        gone = changed[-1].folder
        return Outcome(Finding(f"{gone} was removed, and no later snapshot is there", str(gone)))
    what = "a part of them was removed meanwhile"
    return Outcome(note=Finding(f"steps {leg.base.step} to {leg.last} were not verified: {what}"))


def _is_as_seen(snapshot: SnapshotSet) -> bool:
    """Whether nobody removed it."""
    try:
        return all(
            Manifest.read(manifest_file(snapshot.folder, seen.rank)) == seen
            for seen in snapshot.manifests
        )
    except FileNotFoundError:
        return False
    except DamagedFile:
        return True  # nobody meant to


def _compare(catalog: Catalog, leg: Leg, options: ReplayOptions) -> Outcome:
    overtaken = _overtaken(catalog, leg)
    if overtaken is not None:
        return overtaken
    alone = replace(catalog, snapshots=(leg.base,))
    state = carry_out(alone, plan_recovery(alone, leg.last), options)
    replayed = Replayed(leg.base.step, leg.last, compared=leg.target is not None)
    if leg.target is None:
        return Outcome(replayed=replayed)
    fence = catalog.incarnations[leg.target.incarnation].fence
    expected = load_snapshot(leg.target, fence, options.readers)
    if leg.base.incarnation != leg.target.incarnation:
        keep_inherited(state, expected)
    found = list(differences(state, expected))
    if not found:
        return Outcome(replayed=replayed)
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    different = Finding(
        f"{leg.target.folder}: snapshot {leg.target.step} differs from the replay of snapshot "
        f"{leg.base.step}: {found[0]}{more}",
        str(leg.target.folder),
    )
    trained_on = catalog.incarnations[leg.base.incarnation].fence.environment.device
    if (trained_on == "cpu") != (options.device.type == "cpu"):
        # Another kind of processor rounds differently.
        return Outcome(note=different, replayed=replace(replayed, compared=False))
    return Outcome(different)
