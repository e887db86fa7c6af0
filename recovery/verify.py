"""Proof that a run can be rebuilt: every checksum, then replay from snapshot to snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowdiff.errors import DamagedFile, ReplayMismatch, RunInUse, RunMismatch, StepNotFound
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.fetching import fetch_all, temporary_folder
from lowdiff.persistence.object_store import ObjectStore, is_url
from lowdiff.persistence.paths import RunFolder, staging_to_read
from lowdiff.recovery.damage import Finding, judge, lost_after
from lowdiff.recovery.engine import Progress, look_again, reporting
from lowdiff.recovery.in_memory import (
    MemoryPlan,
    carry_out_in_memory,
    plan_in_memory,
    with_steps_in_memory,
)
from lowdiff.recovery.legs import Outcome, Replayed, gaps, legs_of, newest_recoverable, prove
from lowdiff.recovery.plan import plan_recovery, recoverable, usable_snapshots
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.sizing import check_memory

_LOOKS = 3


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
    """What `verify` checked and found.

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
    snapshot of a life that attached other objects only what it inherited is compared. What replicas
    of a dead trainer left in memory is rebuilt, too. Damage is reported, never raised.

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
        NewerFormat, OlderFormat: If a lowdiff of another format version wrote a file.
        NotEnoughMemory: If two states do not fit: what is replayed, and what it is compared with.
    """
    root = staging_to_read(staging)
    if not is_url(run):
        return _verify(RunFolder(Path(run)), root, str(run), options, progress)
    with temporary_folder() as folder:
        fetch_all(ObjectStore(str(run)), folder, shards=True)
        report = _verify(folder, root, str(run), options, progress)

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
    options: ReplayOptions | None,
    progress: Progress | None,
) -> VerifyReport:
    catalog = _look(folder, root)
    failures, notes = judge(folder, catalog, check_all=True)
    legs = legs_of(catalog)
    check_memory(max((leg.loaded_bytes for leg in legs), default=0))
    replays: list[Replayed] = []
    total = sum(leg.last - leg.base.step for leg in legs)
    done = 0
    for leg in legs:
        own = reporting(options, progress, done, total)
        outcome = prove(folder, root, catalog, leg, own)
        replays += [outcome.replayed] if outcome.replayed else []
        failures += [outcome.failure] if outcome.failure else []
        notes += [outcome.note] if outcome.note else []
        done += leg.last - leg.base.step
    memory, left_out = _in_memory(folder, root, catalog, options or ReplayOptions())
    failures += [left_out.failure] if left_out.failure else []
    notes += [left_out.note] if left_out.note else []
    failures += (
        lost_after(catalog, newest_recoverable(catalog)) if legs else _nothing_recoverable(catalog)
    )
    return VerifyReport(
        run=run,
        run_id=catalog.run_id,
        checked=_checked(folder, catalog),
        snapshots=tuple(sorted({s.step for s in usable_snapshots(catalog)})),
        replays=tuple(replays),
        recoverable=tuple(with_steps_in_memory(recoverable(catalog), memory)),
        in_memory=memory,
        failures=tuple(failures),
        notes=(*notes, *_elsewhere(catalog, options or ReplayOptions())),
    )


def _look(folder: RunFolder, root: Path) -> Catalog:
    """Everything, compared with its checksums, which takes a while: a live run goes on meanwhile.

    A snapshot that came after differentials were listed makes those that lead to it look lost, and
    so does retention that was at them. So a gap counts if another look still has it, at what led
    to the snapshots of the look before: within a life, a writer makes that durable before them.
    """
    catalog = scan(folder, [root], check_all=True)
    for _ in range(_LOOKS):
        if legs_of(catalog) and not gaps(catalog):
            break
        known = {s.folder for s in catalog.snapshots} | {e.path.parent for e in catalog.damage}
        now = scan(folder, [root], check_all=True)
        before = replace(now, snapshots=tuple(s for s in now.snapshots if s.folder in known))
        # Retention begins with the oldest: while the newest is there, so is all that follows it.
        if _newest_snapshot(before) >= max(_newest_snapshot(catalog), 0):
            return before
        catalog = now
    return catalog


def _newest_snapshot(catalog: Catalog) -> int:
    return max((snapshot.step for snapshot in usable_snapshots(catalog)), default=-1)


def _in_memory(
    folder: RunFolder, root: Path, catalog: Catalog, options: ReplayOptions
) -> tuple[tuple[int, int] | None, Outcome]:
    """The steps that replicas left in memory, rebuilt; and why, if they cannot be."""

    def act(seen: Catalog) -> MemoryPlan | None:
        plan = plan_in_memory(seen, None)
        if plan is not None:
            carry_out_in_memory(seen, plan, options)
        return plan

    try:
        plan = look_again(folder, root, catalog, act, check_all=True)
    except (DamagedFile, ReplayMismatch, RunMismatch) as error:
        what = f"what replicas left in memory cannot be used: {error}"
        return None, Outcome(Finding(what))
    except RunInUse as error:
        return None, Outcome(note=Finding(f"what replicas left in memory was not read: {error}"))
    return (None if plan is None else plan.range), Outcome()


def _checked(folder: RunFolder, catalog: Catalog) -> Checked:
    return Checked(
        fences=len(list(folder.fences())),
        incarnations=len(folder.incarnations()),
        shards=sum(len(list(path.glob("rank-*.json"))) for _, _, path in folder.snapshots()),
        segments=len(list(folder.segments())),
        chunks=sum(len(stage.chunks()) for stage in catalog.staging),
        records=sum(records.num_differentials for records in catalog.records.values()),
    )


def _nothing_recoverable(catalog: Catalog) -> list[Finding]:
    try:
        plan_recovery(catalog)
    except StepNotFound as error:
        return [Finding(str(error))]
    return []


def _elsewhere(catalog: Catalog, options: ReplayOptions) -> list[Finding]:
    """What of this machine may round differently."""
    recorded = {
        f"torch {life.fence.environment.torch_version} on {life.fence.environment.device}"
        for life in catalog.incarnations.values()
    }
    device = options.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    here = f"torch {torch.__version__} on {kind}"
    return [
        Finding(f"trained with {other}, replayed with {here}: last bits may differ")
        for other in sorted(recorded - {here})
    ]
