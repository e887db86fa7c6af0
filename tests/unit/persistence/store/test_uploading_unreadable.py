"""Files of a run that cannot be read: what still goes up, and what is said of the rest."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.staging.measurements import Recorder
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusPage, WriterStatus
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.uploader import Uploader
from lowdiff.testing import limits
from tests.unit.persistence.writers import (
    append,
    log_of,
    settings_in,
    stage_snapshot,
    wait_until,
    writing,
)

FIRST, SECOND = "i000000-s0000000001.seg", "i000000-s0000000003.seg"


@contextmanager
def unreadable(
    *names: str, times: float = math.inf, then: Callable[[Path], object] = lambda _: None
) -> Iterator[list[Path]]:
    """Files of these names fail as on a bad sector, so often; yields those that did.

    Args:
        names: Of the files.
        times: How often.
        then: Called with each that has failed.
    """
    opened, failed = Path.open, list[Path]()

    def refused(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name in names and len(failed) < times:
            failed.append(path)
            then(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", refused)
        yield failed


def lead_nowhere(shard: Path, elsewhere: Path) -> None:
    """Whoever opens it, in whichever language, gets an error other than that it is not there."""
    shard.rename(elsewhere)
    shard.symlink_to(shard)


def written(settings: WriterSettings, steps: range, snapshot: int | None = None) -> None:
    """Make steps of a life durable, in a segment of their own."""
    settings.staging.root.mkdir(parents=True, exist_ok=True)
    log = log_of(settings)
    with writing(replace(settings, store=None)) as writer:
        for step in steps:
            append(log, step)
        wait_until(writer, lambda status: status.durable_step == steps[-1])
        if snapshot is not None:
            stage_snapshot(log, snapshot, 100)
            wait_until(writer, lambda status: status.durable_snapshot == snapshot)


def uploaded(settings: WriterSettings, durable: int) -> WriterStatus:
    """What a writer says that uploads all it can and ends."""
    page = StatusPage(settings.staging.status, WriterStatus(durable))
    uploader = Uploader(settings, page, Recorder(settings.staging.measured_by_writer))
    uploader.adopted()
    uploader.end()
    with limits(upload_retry_seconds=0.0):
        asyncio.run(uploader.run())
    return page.status


def segments_in(store: ObjectStore) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in store.sizes("segments"))


@pytest.fixture(scope="module")
def two_lives(tmp_path_factory: pytest.TempPathFactory) -> WriterSettings:
    """Of a second life that begins with step 6, and has steps 7 and 8; the first has two segments."""
    root = tmp_path_factory.mktemp("two-lives")
    first = settings_in(root, batch_size=1)
    written(first, range(1, 3))
    (first.staging.root / "log-00000000.chunk").unlink()
    written(first, range(3, 7))
    second = replace(first, incarnation=1, base_step=6)
    written(second, range(7, 9))
    return second


@pytest.fixture
def settings(two_lives: WriterSettings, tmp_path: Path) -> WriterSettings:
    """Of a copy of them."""
    shutil.copytree(two_lives.run, tmp_path / "run")
    shutil.copytree(two_lives.staging_root, tmp_path / "staging")
    return replace(
        two_lives,
        run=f"{tmp_path}/run",
        staging_root=f"{tmp_path}/staging",
        store=f"file://{tmp_path}/store",
    )


def test_a_segment_that_cannot_be_read_holds_up_no_other_life(settings: WriterSettings) -> None:
    store = ObjectStore(settings.store or "", make=True)
    with unreadable(FIRST):
        status = uploaded(settings, 8)
    assert FIRST in status.remote_error
    assert "Input/output error" in status.remote_error
    assert segments_in(store) == [SECOND, "i000001-s0000000007.seg"]
    assert status.remote_step == -1, "what leads to them is not there"
    again = uploaded(settings, 8)
    assert segments_in(store) == [FIRST, SECOND, "i000001-s0000000007.seg"]
    assert (again.remote_step, again.remote_error) == (8, "")


def test_steps_after_a_snapshot_of_their_life_need_no_segment_before(
    settings: WriterSettings,
) -> None:
    for path in settings.staging.root.glob("log-*"):
        path.unlink()
    written(settings, range(9, 10), snapshot=9)
    with unreadable(FIRST, SECOND):
        status = uploaded(settings, 9)
    assert (status.remote_snapshot, status.remote_step) == (9, 9)
    assert FIRST in status.remote_error


def test_what_follows_an_unreadable_segment_of_this_life_is_not_said_to_be_there(
    settings: WriterSettings,
) -> None:
    with unreadable("i000001-s0000000007.seg"):
        status = uploaded(settings, 8)
    assert status.remote_step == 6
    assert "i000001-s0000000007.seg" in status.remote_error


def test_a_segment_that_cannot_be_read_any_more_is_no_trouble_once_it_is_there(
    settings: WriterSettings,
) -> None:
    assert uploaded(settings, 8).remote_step == 8
    with unreadable(FIRST):
        status = uploaded(settings, 8)
    assert (status.remote_step, status.remote_error) == (8, "")


def test_a_snapshot_that_cannot_be_read_holds_up_no_other(
    settings: WriterSettings, tmp_path: Path
) -> None:
    for step, path in ((9, "log-00000000.chunk"), (10, "log-00000000.chunk")):
        (settings.staging.root / path).unlink()
        written(settings, range(step, step + 1), snapshot=step)
    shard = settings.folder.snapshot(1, 9) / "rank-0000.safetensors"
    lead_nowhere(shard, tmp_path / "elsewhere")
    status = uploaded(settings, 10)
    assert status.remote_snapshot == 10
    assert "i000001-s0000000009" in status.remote_error


def test_steps_without_the_snapshot_that_they_follow_are_not_said_to_be_there(
    tmp_path: Path,
) -> None:
    settings = settings_in(tmp_path, store=f"file://{tmp_path}/store", batch_size=1)
    written(settings, range(1, 3), snapshot=0)
    shard = settings.folder.snapshot(0, 0) / "rank-0000.safetensors"
    lead_nowhere(shard, tmp_path / "elsewhere")
    status = uploaded(settings, 2)
    assert (status.remote_snapshot, status.remote_step) == (-1, -1)
    assert "i000000-s0000000000" in status.remote_error
    shard.unlink()
    (tmp_path / "elsewhere").rename(shard)
    again = uploaded(settings, 2)
    assert (again.remote_snapshot, again.remote_step, again.remote_error) == (0, 2, "")


def test_a_file_that_could_not_be_read_once_is_tried_again(settings: WriterSettings) -> None:
    with unreadable(FIRST, times=1) as failed:
        status = uploaded(settings, 8)
    assert failed
    assert (status.remote_step, status.remote_error) == (8, "")


def test_what_was_removed_before_it_could_be_read_stays_missing(settings: WriterSettings) -> None:
    with unreadable(SECOND, times=1, then=Path.unlink) as failed:
        status = uploaded(settings, 8)
    assert failed
    assert (status.remote_step, status.remote_error) == (-1, "")


def test_trouble_with_segments_holds_up_no_snapshot(
    settings: WriterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in settings.staging.root.glob("log-*"):
        path.unlink()
    written(settings, range(9, 10), snapshot=9)

    async def upload(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "run/segments")

    monkeypatch.setattr("lowdiff.persistence.store.uploader.Uploader._upload_segments", upload)
    status = uploaded(settings, 9)
    assert (status.remote_snapshot, status.remote_step) == (9, -1)
    assert "Permission denied: 'run/segments'" in status.remote_error
