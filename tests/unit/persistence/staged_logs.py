"""Staging logs with records whose content follows from their step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import RecordKind, RecordRef
from lowdiff.persistence.format.sections import read_sections
from lowdiff.persistence.staging.log import LogTail, StagingLog, staged_records
from lowdiff.types import Section

ROOT = Path(__file__).parents[3]


RUN_ID = "00112233445566778899aabbccddeeff"


CHUNK = 4096


ITEMS = 98  # makes records of 504 bytes, of which 8 fill a chunk


def folder_in(root: Path, incarnation: int = 0, rank: int = 0) -> StagingFolder:
    folder = StagingFolder.of(root, RUN_ID, incarnation, rank)
    folder.root.mkdir(parents=True, exist_ok=True)
    return folder


def log_in(folder: StagingFolder, cap_bytes: int = 1 << 20) -> StagingLog:
    return StagingLog(folder, run_id=RUN_ID, world_size=1, chunk_bytes=CHUNK, cap_bytes=cap_bytes)


def payload(step: int, num_items: int = ITEMS) -> list[Section]:
    return [Section("values/float32", "planes", np.full(num_items, step, np.uint32))]


def append(log: StagingLog, step: int, *, durable: int = -1, num_items: int = ITEMS) -> int | None:
    meta = b"step %d" % step
    return log.append(
        RecordKind.DIFFERENTIAL, step, meta, payload(step, num_items), durable_step=durable
    )


def check(record: RecordRef, num_items: int = ITEMS) -> int:
    """Its step, after comparing its content with what ``append`` wrote for that step."""
    step = record.header.step
    (section,) = read_sections(record.sections, Codec(), coded=False)
    assert bytes(record.meta) == b"step %d" % step
    np.testing.assert_array_equal(section.data, payload(step, num_items)[0].data)
    return step


def steps(folder: StagingFolder) -> list[int]:
    found = (record for _, record in staged_records(folder))
    return [check(r) for r in found if r.header.kind is RecordKind.DIFFERENTIAL]


def drained(tail: LogTail) -> list[RecordRef]:
    return list(iter(tail.next, None))


def ahead(log: StagingLog, step: int, parts: Sequence[int], *, durable: int = -1) -> bool:
    """Stage a payload of so many items in parts ahead, and then the record, as one ``append``."""
    for part, num_items in enumerate(parts):
        section = Section(f"part {part}", "planes", np.full(num_items, step, np.uint32))
        if not log.append_ahead([section], durable_step=durable):
            return False
    meta = b"step %d" % step
    return log.append(RecordKind.DIFFERENTIAL, step, meta, (), durable_step=durable) is not None


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


#: Stages one step after the other, and prints each.
TRAINER = """
import sys
from pathlib import Path
import numpy as np
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.types import Section

folder = StagingFolder.of(Path(sys.argv[1]), sys.argv[2], 0, 0)
folder.root.mkdir(parents=True)
log = StagingLog(folder, run_id=sys.argv[2], world_size=1, chunk_bytes=4096, cap_bytes=1 << 30)
step = 0
while True:
    step += 1
    data = Section("values/float32", "planes", np.full(98, step, np.uint32))
    log.append(RecordKind.DIFFERENTIAL, step, b"step %d" % step, [data], durable_step=step - 30)
    print(step, flush=True)
"""
