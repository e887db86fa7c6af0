"""Runs that benches make and read back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.paths import RunFolder
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery


@dataclass(frozen=True, slots=True)
class Places:
    """Where a bench's run lives.

    Attributes:
        run: Run folder, on the disk of the bench's output folder; its parent may hold more.
        staging: Staging folder, in memory.
    """

    run: Path
    staging: Path


@contextmanager
def places(out: Path) -> Iterator[Places]:
    """Folders for one run, removed at the end."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="files-", dir=out) as files,
        tempfile.TemporaryDirectory(prefix="lowdiff-bench-", dir="/dev/shm") as staging,
    ):
        yield Places(Path(files).absolute() / "run", Path(staging))


def plan_from(where: Places, base_step: int) -> tuple[Catalog, RecoveryPlan]:
    """The way to the run's newest step from an older snapshot than recovery would choose.

    ``close`` takes a snapshot of the last step, from which there would be nothing to replay.
    """
    catalog = scan(RunFolder(where.run), [where.staging])
    only_base = tuple(s for s in catalog.snapshots if s.step == base_step)
    assert only_base, f"{where.run} holds no snapshot of step {base_step}"
    catalog = replace(catalog, snapshots=only_base)
    return catalog, plan_recovery(catalog)
