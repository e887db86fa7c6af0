"""Short ways to what ``verify`` says."""

from __future__ import annotations

from pathlib import Path

from lowdiff.persistence.format.framing import FileHeader, RecordRef, read_records
from lowdiff.recovery.inspect.verify import VerifyReport, verify
from tests.unit.recovery.training import Trained


def check(trained: Trained) -> VerifyReport:
    return verify(trained.run, trained.staging)


def records_of(path: Path) -> list[RecordRef]:
    view = memoryview(path.read_bytes())
    return list(read_records(view, FileHeader.unpack(view, path)))


def only_failure(report: VerifyReport, path: Path) -> str:
    """The first failure's message, which must name the file."""
    assert not report.ok
    assert report.failures[0].path == str(path)
    assert str(path) in report.failures[0].message
    return report.failures[0].message
