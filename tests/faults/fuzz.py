"""Fuzzing of the record reader: whatever the bytes are, records, or an error with a name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lowdiff.errors import LowDiffError
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.framing import (
    FileHeader,
    FileKind,
    RecordHeader,
    RecordKind,
    RecordRef,
    StoredRecord,
    read_records,
)
from tests.faults.outcome import Outcome
from tests.faults.stranger import meta_of, signed
from tests.faults.victim import describe

ROOT = Path(__file__).parents[2]
_PATH = Path("fuzzed.seg")
_HEADER = FileHeader(FileKind.SEGMENT, "00" * 16, 0, 0, 1, 1)
_MAX_PAYLOAD_BYTES = 1 << 20
_BATCH = 2000


def read_all(data: bytes) -> int:
    """Read a framed file to its end, and every record in it; the number of whole differentials."""
    codec = Codec(max_payload_bytes=_MAX_PAYLOAD_BYTES)
    try:
        header = FileHeader.unpack(data, _PATH)
        found = 0
        for record in read_records(memoryview(data), header):
            stored = StoredRecord(record, _PATH, may_change=False)
            read_differential(stored, codec)
            found += 1
        return found
    except LowDiffError:
        return 0


def framed(meta: bytes, sections: bytes) -> bytes:
    """A segment whose one record has this content, and checksums that hold."""
    header = RecordHeader(RecordKind.DIFFERENTIAL, True, 0, 0, 0, 1, 0, 0, 1, 0)
    record = RecordRef(header, 64, memoryview(b""))
    return _HEADER.pack() + signed(record, meta, sections)


def spliced(good: bytes, cut: int, end: int, junk: bytes) -> bytes:
    """Good bytes with some of them replaced."""
    start, stop = sorted((cut % (len(good) + 1), end % (len(good) + 1)))
    return good[:start] + junk + good[stop:]


def inputs(good_meta: bytes, good_sections: bytes) -> st.SearchStrategy[bytes]:
    """Junk; a good file with junk in it; and junk behind checksums that hold."""
    positions, junk = st.integers(0, 1 << 16), st.binary(max_size=40)
    good = framed(good_meta, good_sections)
    return st.one_of(
        st.binary(max_size=400),
        st.builds(spliced, st.just(good), positions, positions, junk),
        st.builds(
            lambda a, b, c, d, e, f: framed(
                spliced(good_meta, a, b, c), spliced(good_sections, d, e, f)
            ),
            positions, positions, junk, positions, positions, junk,
        ),
    )  # fmt: skip


def good_record(segment: Path) -> tuple[bytes, bytes]:
    """Meta and sections of the first record of a real segment."""
    data = segment.read_bytes()
    record = next(read_records(memoryview(data), FileHeader.unpack(data, segment)))
    return meta_of(record), bytes(record.sections)


def fuzz(segment: Path, rounds: int, *, seconds: float = 0.0, start: int = 0) -> Outcome:
    """Let hypothesis look for an unnamed error, for so many inputs and at least so long."""
    outcome = Outcome("fuzzing of the record reader (hypothesis)", start)
    strategy = inputs(*good_record(segment))
    deadline = time.monotonic() + seconds
    with outcome.timed():
        while outcome.rounds < rounds or time.monotonic() < deadline:
            try:
                _batch(strategy, min(rounds, _BATCH), start + outcome.rounds, outcome)()
            except Exception as error:
                outcome.lose(describe(error))
                break
    return outcome


def _batch(
    strategy: st.SearchStrategy[bytes], size: int, number: int, outcome: Outcome
) -> Callable[[], None]:
    @seed(number)
    @settings(
        max_examples=size,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(data: bytes) -> None:
        outcome.rounds += 1
        outcome.found["records read" if read_all(data) else "refused"] += 1

    test: Callable[[], None] = one
    return test


def fuzz_guided(segment: Path, folder: Path, seconds: int) -> Outcome:
    """The same, guided by coverage, where atheris is installed."""
    outcome = Outcome(f"fuzzing of the record reader (atheris, {seconds} s)", seed=1)
    if importlib.util.find_spec("atheris") is None:
        outcome.not_run = "atheris is not installed"
        return outcome
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "good").write_bytes(segment.read_bytes())
    with outcome.timed():
        words = [sys.executable, "-m", "tests.faults.guided", str(corpus)]
        done = subprocess.run(
            [*words, f"-max_total_time={seconds}", "-seed=1", "-print_final_stats=1"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    for line in done.stderr.splitlines():
        if "number_of_executed_units" in line:
            outcome.rounds = int(line.split()[-1])
    if done.returncode:
        outcome.lose(done.stderr[-500:])
    else:
        outcome.found["records read, or refused"] = outcome.rounds
    return outcome
