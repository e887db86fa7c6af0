"""Work and output of ``lowdiff gc``. Does not import torch."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lowdiff.cli.output import count, print_json, say, size, span
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.files.trust import check_folder, shared_staging_root
from lowdiff.persistence.retention.collect import (
    carry_out,
    check_snapshots,
    retention_locked,
    take_inventory,
)
from lowdiff.persistence.retention.plan import CollectionPlan, is_valid, plan_collection
from lowdiff.persistence.retention.staging import clear_staging
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import Pin, check_pinned, read_journal, read_pins, remove_pin
from lowdiff.types import Retention

_LOCK_SECONDS = 30.0


def collect_run(
    run: Path, changes: dict[str, Any], unpin: list[str], dry_run: bool, as_json: bool
) -> None:
    """Remove the files that a run's policy, with some changes, does not keep.

    Args:
        run: The run folder.
        changes: Fields of `Retention` -> values that replace the trainer's.
        unpin: Labels of pins to remove first.
        dry_run: Whether to print only what would be removed.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: If neither options nor trainer name a policy, or if a label has no pin.
        RunInUse: If another process holds the run's retention lock.
    """
    folder = RunFolder(run)
    run_id = read_run_id(folder)
    _policy(folder, run_id, changes, unpin)  # raises before minutes are spent on checksums
    checked = check_snapshots(folder, run_id)
    with _locked(folder, dry_run):
        inventory = take_inventory(folder, run_id, checked=checked)
        policy = _policy(folder, run_id, changes, unpin)
        if not dry_run:
            for label in unpin:
                remove_pin(folder, label)
        pins = [pin for pin in read_pins(folder, run_id) if pin.label not in unpin]
        plan = plan_collection(
            inventory, policy or Retention(snapshots=None), pins, now_seconds=time.time()
        )
        if not dry_run:
            carry_out(folder, run_id, plan)
    void = [pin for pin in pins if not is_valid(inventory.spans, pin)]
    if not as_json:
        _print(folder, policy, plan, void, dry_run)
        return
    print_json(
        {
            "run": str(folder.root),
            "dry_run": dry_run,
            "policy": None if policy is None else asdict(policy),
            "removed": [
                {"path": str(r.path), "bytes": r.bytes, "reason": r.reason} for r in plan.removals
            ],
            "kept": [asdict(stretch) for stretch in plan.kept],
            "pins": [{"label": p.label, "step": p.step, "is_void": p in void} for p in pins],
            "bytes_removed": plan.bytes_removed,
            "bytes_kept": plan.bytes_kept,
        }
    )


def _policy(
    folder: RunFolder, run_id: str, changes: dict[str, Any], unpin: list[str]
) -> Retention | None:
    """Return the trainer's policy with the changes; None to remove only pins.

    Raises:
        ConfigError: If neither options nor trainer name a policy, or if a label has no pin.
    """
    for label in unpin:
        check_pinned(folder, label)
    recorded = read_journal(folder, run_id).policy
    if changes:
        # A limit of bytes alone means: keep as many snapshots as fit.
        default = Retention(snapshots=None) if set(changes) == {"total_bytes"} else Retention()
        return replace(recorded or default, **changes)
    if recorded is None and not unpin:
        raise ConfigError(
            f"{folder.root} keeps every step; say what to keep, e.g. --keep-snapshots 2"
        )
    return recorded


@contextmanager
def _locked(folder: RunFolder, dry_run: bool) -> Iterator[None]:
    """Hold the retention lock; alone if files are to be removed."""
    with ExitStack() as held:
        try:
            held.enter_context(
                retention_locked(folder, timeout_seconds=_LOCK_SECONDS, shared=dry_run)
            )
        except OSError as error:
            # A dry run needs no right to write, but a lock does.
            if not dry_run or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
        yield


def _print(
    folder: RunFolder,
    policy: Retention | None,
    plan: CollectionPlan,
    void: list[Pin],
    dry_run: bool,
) -> None:
    for removal in plan.removals:
        name = removal.path.relative_to(folder.root)
        say(f"{_verb(dry_run)} {name} ({size(removal.bytes)}): {removal.reason}")
    for stretch in plan.kept:
        steps = span(stretch.first, "the newest" if stretch.last is None else stretch.last)
        say(f"Kept step {steps}: {stretch.reason}")
    for pin in void:
        say(
            f"Pin {pin.label} keeps nothing: the run went back before step {pin.step}; "
            f"--unpin {pin.label} removes it"
        )
    say(
        f"{_verb(dry_run)} {size(plan.bytes_removed)} in {count(len(plan.removals), 'item')}; "
        f"{size(plan.bytes_kept)} stay"
    )
    limit = None if policy is None else policy.total_bytes
    if limit is not None and plan.bytes_kept > limit:
        say(f"That is more than {size(limit)}: the newest snapshot, pins and kept steps never go")


def clear_memory(
    root: Path | None, run: Path | None, *, force: bool, dry_run: bool, as_json: bool
) -> None:
    """List or remove the staging folders of dead runs.

    Args:
        root: Staging folder of all runs; None for the default one.
        run: The only run to look at; None for all.
        force: Whether to remove also steps that are nowhere else.
        dry_run: Whether to list only.
        as_json: Whether to print JSON.

    Raises:
        UntrustedStaging: If other users could have written there.
        NotARun: If ``run`` is no run and left nothing in staging.
    """
    root = shared_staging_root() if root is None else root
    check_folder(root)
    verdicts = list(clear_staging(root, run=run, force=force, dry_run=dry_run))
    if as_json:
        folders = [{**asdict(v), "path": str(v.path)} for v in verdicts]
        print_json({"staging": str(root), "dry_run": dry_run, "folders": folders})
        return
    for verdict in verdicts:
        what = _verb(dry_run) if verdict.goes else "Kept"
        say(f"{what} {verdict.path} ({size(verdict.bytes)}): {verdict.reason}")
    gone = [verdict for verdict in verdicts if verdict.goes]
    freed = size(sum(verdict.bytes for verdict in gone))
    how = "; to remove it, say `--yes` with a run or with `--all-runs`" if dry_run and gone else ""
    say(f"{_verb(dry_run)} {count(len(gone), 'folder')} of {root}, {freed}{how}")


def _verb(dry_run: bool) -> str:
    return "Would remove" if dry_run else "Removed"
