"""A file that cannot be read at all costs the steps in it, and no others."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowdiff
from lowdiff.errors import StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.damage import judge
from lowdiff.recovery.inspect.inspection import forecast
from lowdiff.recovery.inspect.verify import verify
from tests.unit.recovery.training import Trained, train


class Unreadable:
    """Makes the system refuse to open some files, as with no permission or a broken disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: dict[Path, int] = {}
        self.asked: dict[Path, int] = {}
        really_open, really_stat = Path.open, Path.stat

        def open_or_refuse(path: Path, *arguments: Any, **options: Any) -> Any:
            self._refuse(path, self.opened)
            return really_open(path, *arguments, **options)

        def stat_or_refuse(path: Path, **options: Any) -> os.stat_result:
            self._refuse(path, self.asked)
            return really_stat(path, **options)

        monkeypatch.setattr(Path, "open", open_or_refuse)
        monkeypatch.setattr(Path, "stat", stat_or_refuse)

    def _refuse(self, path: Path, refused: dict[Path, int]) -> None:
        if path in refused:
            raise OSError(refused[path], os.strerror(refused[path]), str(path))


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Unreadable:
    return Unreadable(monkeypatch)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("number", "also_asked"), [(errno.EACCES, False), (errno.EIO, False), (errno.ESTALE, True)]
)
def test_a_segment_that_cannot_be_read_costs_only_its_own_steps(
    closed: Trained, tmp_path: Path, unreadable: Unreadable, number: int, also_asked: bool
) -> None:
    closed.copied(tmp_path).run.rename(tmp_path / "run")
    copy = replace(closed, run=tmp_path / "run", staging=tmp_path / "staging")
    segment = copy.segment(1)
    unreadable.opened[segment] = number
    if also_asked:  # of a file that another machine has replaced
        unreadable.asked[segment] = number
    assert same(
        dict(lowdiff.recover(copy.run, 11, staging=copy.staging).model_state_dict()),
        dict(closed.models[11]),
    )
    plan = forecast(copy.run, 11, copy.staging)
    assert (plan.base, plan.differentials) == (10, 1)
    report = verify(copy.run, copy.staging)
    assert report.failures[0].path == str(segment)
    assert "cannot be read" in report.failures[0].message
    assert (5, 12) in report.recoverable
    with pytest.raises(StepNotFound, match="step 1 is missing"):
        lowdiff.recover(copy.run, 1, staging=copy.staging)
    assert min(train(tmp_path, 13).models) == 12, "training goes on, too"


def test_a_chunk_of_staging_memory_that_cannot_be_read_is_named(
    crashed: Trained, tmp_path: Path, unreadable: Unreadable
) -> None:
    copy = crashed.copied(tmp_path)
    folder = RunFolder(copy.run)
    first = scan(folder, [copy.staging]).staging[0].chunks()[0][1]
    unreadable.opened[first] = errno.EIO
    failures, _ = judge(folder, scan(folder, [copy.staging]))
    assert [failure.path for failure in failures] == [str(first)]
    assert "cannot be read" in failures[0].message
    assert lowdiff.recover(copy.run, staging=copy.staging).step == 9
