"""Runs of small segments with an index of them, and what a bad disk does to them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lowdiff.persistence.catalog import scan
from lowdiff.persistence.fences import create_run
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.segment_file import SegmentFile
from lowdiff.persistence.segment_index import INDEX_NAME, Sealed, read_index
from lowdiff.persistence.snapshots import shard_file
from tests.persistence.made_runs import RUN_ID, began, segment, stage

BATCHES = [[1, 2], [3, 4], [5, 6], [7]]


def indexed(root: Path, batches: Sequence[Sequence[int]] = BATCHES) -> RunFolder:
    """A run with an index of all its segments, if small runs are worth one."""
    run = made(root, batches)
    scan(run)
    assert set(index_of(run)) == {(0, batch[0]) for batch in batches}
    return run


def made(root: Path, batches: Sequence[Sequence[int]], incarnation: int = 0) -> RunFolder:
    """A run whose segments are at rest."""
    run = RunFolder(root)
    create_run(run, RUN_ID)
    if incarnation == 0:
        began(run)
        shard_file(run.snapshot(0, 0), 0).touch()
    staging = root.parent / f"staging-{incarnation}"
    log = stage(staging, sorted({step for batch in batches for step in batch}), incarnation)
    for batch in batches:
        is_unbroken = batch == list(range(batch[0], batch[-1] + 1))
        age(segment(run, log, batch, seals=is_unbroken))
    shutil.rmtree(staging)
    return run


def age(path: Path, seconds: float = 60.0) -> None:
    """Let a file have been changed some time ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def index_of(run: RunFolder) -> dict[tuple[int, int], Sealed]:
    """What the index of rank 0 claims."""
    return dict(read_index(run.segments_of(0), RUN_ID, 0, 0))


def index_file(run: RunFolder) -> Path:
    """Rank 0's."""
    return run.segments_of(0) / INDEX_NAME


def records_end(path: Path) -> int:
    """Where the footer of a sealed segment starts."""
    trailer = SegmentFile(path).trailer
    assert trailer is not None
    return trailer.start


def tampered(path: Path, data: bytes) -> None:
    """Change a file as a bad disk does: neither its length nor its time tells."""
    found = path.stat()
    assert len(data) == found.st_size
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
