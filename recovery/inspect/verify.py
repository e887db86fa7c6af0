"""Proof that a run can be rebuilt: every checksum, then replay from snapshot to snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowdiff.core import devices
from lowdiff.errors import (
    DamagedFile,
    LowDiffError,
    NotEnoughMemory,
    ReplayMismatch,
    RunInUse,
    RunMismatch,
    StepNotFound,
)
from lowdiff.persistence.files.paths import RunFolder, staging_to_read
from lowdiff.persistence.format.image import Manifest, manifest_file
from lowdiff.persistence.retention.plan import is_valid
from lowdiff.persistence.run.catalog import Catalog, SnapshotSet, complete_snapshots
from lowdiff.persistence.store.client import is_url
from lowdiff.persistence.store.fetch import opened
from lowdiff.recovery.compare import differences
from lowdiff.recovery.damage import Finding, gap_after, judge, lost_after
from lowdiff.recovery.engine import look_again
from lowdiff.recovery.inspect.legs import Leg, legs_of, looked_at, newest_recoverable
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.plan import (
    decisions,
    plan_recovery,
    recoverable,
    spans_of,
    steps_after,
    usable_snapshots,
)
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.sizing import check_memory
from lowdiff.recovery.search import Progress, carry_out, reporting
from lowdiff.recovery.sources.chooser import MemoryPlan, plan_in_memory


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


@dataclass(frozen=True, slots=True)
class Checked:
    """How much was read and checksummed.

    Attributes:
        fences: Files that say which incarnation owns which steps.
        incarnations: How many they are of.
        shards: Snapshot files.
        segments: Files of differentials.
        chunks: Staging files.
        records: Differentials, each once, counted per rank.
    """

    fences: int
    incarnations: int
    shards: int
    segments: int
    chunks: int
    records: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Checks and findings of `verify`.

    Attributes:
        snapshots: Steps of complete snapshots on the run's history.
        replays: In order of steps.
        recoverable: Ranges of steps, both ends inclusive.
        in_memory: First and last of those that were rebuilt from what replicas of a dead trainer
            left in memory, which a reboot ends; None if there are none.
        failures: What is damaged, lost or different; the first difference comes first.
        notes: What looks unfinished but costs no step.
    """

    run: str
    run_id: str
    checked: Checked
    snapshots: tuple[int, ...]
    replays: tuple[Replayed, ...]
    recoverable: tuple[tuple[int, int], ...]
    in_memory: tuple[int, int] | None
    failures: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def steps_replayed(self) -> int:
        """Number of differentials replayed."""
        return sum(replayed.last - replayed.first for replayed in self.replays)

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return {"ok": self.ok, **asdict(self), "steps_replayed": self.steps_replayed}


def verify(
    run: str | Path,
    staging: str | Path | None = None,
    *,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check every checksum of a run, then replay it and compare bit for bit.

    From each snapshot the differentials are replayed up to the next one, and parameters,
    optimizer state, hyper-parameters and items are compared; from the last one, up to the newest
    step. Error-feedback residuals are not compared: a replay does not rebuild them. With the first
    snapshot of a life that was set up otherwise only parameters and optimizer state are compared. What
    replicas of a dead trainer left in memory is rebuilt, too. Damage is reported, never raised.

    Args:
        run: The run folder, or the URL of its store; nothing in it is changed. A store is read
            whole, into a temporary folder (``TMPDIR``) that must have room for it.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.
        progress: Told about each window of steps.

    Raises:
        NotARun: If the folder or store holds no run.
        StoreError: If the store does not answer.
        DamagedFile: If ``run.json`` is damaged, so that nothing else can be read.
        OtherFormat: If a lowdiff of another format version wrote a file.
        NotEnoughMemory: If two states do not fit: what is replayed, and what it is compared with.
    """
    root = staging_to_read(staging)
    with opened(run) as folder:
        report = _verify(folder, root, str(run), options or ReplayOptions(), progress)
        if not is_url(run):
            return report

        def named(findings: Sequence[Finding]) -> tuple[Finding, ...]:
            """With the names that the store knows."""
            here = str(folder.root)
            return tuple(
                replace(
                    found,
                    message=found.message.replace(here, str(run)),
                    path=found.path and found.path.replace(here, str(run)),
                )
                for found in findings
            )

        return replace(report, failures=named(report.failures), notes=named(report.notes))


def _verify(
    folder: RunFolder,
    root: Path,
    run: str,
    options: ReplayOptions,
    progress: Progress | None,
) -> VerifyReport:
    catalog = looked_at(folder, root)
    failures, notes = judge(folder, catalog, check_all=True)
    notes += [Finding(str(decision)) for decision in decisions(catalog)]
    legs = legs_of(catalog)
    # What is compared with is a second state.
    loaded = (sum(s.bytes for s in (leg.base, leg.target) if s is not None) for leg in legs)
    check_memory(max(loaded, default=0))
    total = sum(leg.last - leg.base.step for leg in legs)
    done = 0
    outcomes = []
    for leg in legs:
        own = reporting(options, progress, done, total)
        outcomes.append(_prove(folder, root, catalog, leg, own))
        done += leg.last - leg.base.step
    memory, left_out = _in_memory(folder, root, catalog, options)
    outcomes.append(left_out)
    there = tuple(recoverable(catalog, memory))
    failures += _lost_pins(catalog, there)
    failures += [o.failure for o in outcomes if o.failure is not None]
    notes += [o.note for o in outcomes if o.note is not None]
    if legs:
        lost = lost_after(catalog, newest_recoverable(catalog))
        failures += [] if lost is None else [lost]
    else:
        try:
            plan_recovery(catalog)
        except StepNotFound as error:
            failures.append(Finding(str(error)))
    return VerifyReport(
        run=run,
        run_id=catalog.run_id,
        checked=_checked(folder, catalog),
        snapshots=tuple(sorted({s.step for s in usable_snapshots(catalog)})),
        replays=tuple(o.replayed for o in outcomes if o.replayed is not None),
        recoverable=there,
        in_memory=memory,
        failures=tuple(failures),
        notes=(*notes, *_elsewhere(catalog, options)),
    )


def _lost_pins(catalog: Catalog, there: Sequence[tuple[int, int]]) -> list[Finding]:
    """Return a finding for each pinned step of the run's history that cannot be recovered."""
    spans = spans_of(catalog)
    return [
        Finding(f"step {pin.step}, pinned as {pin.label}, cannot be recovered any more")
        for pin in catalog.pins
        if is_valid(spans, pin) and not any(first <= pin.step <= last for first, last in there)
    ]


def _in_memory(
    folder: RunFolder, root: Path, catalog: Catalog, options: ReplayOptions
) -> tuple[tuple[int, int] | None, _Outcome]:
    """The steps that replicas left in memory, rebuilt; and why, if they cannot be."""

    def act(seen: Catalog) -> MemoryPlan | None:
        plan = plan_in_memory(seen, None)
        if plan is not None:
            carry_out(seen, plan, options)
        return plan

    try:
        plan = look_again(folder, root, catalog, act, check_all=True)
    except (DamagedFile, ReplayMismatch, RunMismatch) as error:
        what = f"what replicas left in memory cannot be used: {error}"
        return None, _Outcome(Finding(what))
    except RunInUse as error:
        return None, _Outcome(note=Finding(f"what replicas left in memory was not read: {error}"))
    return (None if plan is None else plan.range), _Outcome()


def _checked(folder: RunFolder, catalog: Catalog) -> Checked:
    return Checked(
        fences=len(list(folder.fences())),
        incarnations=len(folder.incarnations()),
        shards=sum(len(folder.manifests(path)) for _, _, path in folder.snapshots()),
        segments=len(list(folder.segments())),
        chunks=sum(len(stage.chunks()) for stage in catalog.staging),
        records=sum(records.num_differentials for records in catalog.records.values()),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Outcome of a leg, or of what is in memory.

    Attributes:
        failure: What is wrong; None if nothing is.
        note: What differs because another kind of device trained it, or why nothing is known.
        replayed: What was replayed, if it led where it should.
    """

    failure: Finding | None = None
    note: Finding | None = None
    replayed: Replayed | None = None


def _prove(
    folder: RunFolder, root: Path, catalog: Catalog, leg: Leg, options: ReplayOptions
) -> _Outcome:
    """Replay one leg, and compare."""

    def act(seen: Catalog) -> _Outcome:
        return _compare(seen, leg, options)

    try:
        outcome = (
            _Outcome(leg.gap) if leg.gap else look_again(folder, root, catalog, act, check_all=True)
        )
    except DamagedFile as error:
        outcome = _Outcome(Finding.of(error))
    except StepNotFound as error:
        outcome = _Outcome(Finding(str(error)))
    except NotEnoughMemory:
        raise  # it says nothing about the run
    except LowDiffError as error:
        return _Outcome(Finding(str(error)))  # no part of it was missing
    return (outcome.failure and _overtaken(catalog, leg)) or outcome


def _overtaken(catalog: Catalog, leg: Leg) -> _Outcome | None:
    """Look again at a leg that is not as it was seen: a live run removes and replaces files."""
    changed = [s for s in (leg.base, leg.target) if s is not None and not _is_as_seen(s)]
    reached = leg.base.step + len(steps_after(catalog, leg.base.step, leg.last))
    if not changed and (reached == leg.last or gap_after(catalog, reached)):
        return None
    there = complete_snapshots(RunFolder(catalog.root), catalog.run_id)
    if max((s.step for s in there), default=-1) < max((s.step for s in changed), default=-1):
        # Retention keeps the newest.
        gone = changed[-1].folder
        return _Outcome(Finding(f"{gone} was removed, and no later snapshot is there", str(gone)))
    what = "a part of them was removed meanwhile"
    return _Outcome(note=Finding(f"steps {leg.base.step} to {leg.last} were not verified: {what}"))


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


def _compare(catalog: Catalog, leg: Leg, options: ReplayOptions) -> _Outcome:
    overtaken = _overtaken(catalog, leg)
    if overtaken is not None:
        return overtaken
    alone = replace(catalog, snapshots=(leg.base,))
    state = carry_out(alone, plan_recovery(alone, leg.last), options)
    replayed = Replayed(leg.base.step, leg.last, compared=leg.target is not None)
    if leg.target is None:
        return _Outcome(replayed=replayed)
    fence = catalog.incarnations[leg.target.incarnation]
    expected = load_snapshot(leg.target, fence, options.readers)
    found = list(differences(state, expected))
    if not found:
        return _Outcome(replayed=replayed)
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    different = Finding(
        f"{leg.target.folder}: snapshot {leg.target.step} differs from the replay of snapshot "
        f"{leg.base.step}: {found[0]}{more}",
        str(leg.target.folder),
    )
    trained_on = catalog.incarnations[leg.base.incarnation].environment.device
    if (trained_on == "cpu") != devices.may_look(options.device):
        # Another kind of processor rounds differently.
        return _Outcome(note=different, replayed=replace(replayed, compared=False))
    return _Outcome(different)


def _elsewhere(catalog: Catalog, options: ReplayOptions) -> list[Finding]:
    """Return the facts of this machine that may round differently."""
    recorded = {
        f"torch {fence.environment.torch_version} on {fence.environment.device}"
        for fence in catalog.incarnations.values()
    }
    here = f"torch {torch.__version__} on {devices.name_of(options.device)}"
    return [
        Finding(f"trained with {other}, replayed with {here}: last bits may differ")
        for other in sorted(recorded - {here})
    ]
