"""A writer whose trainer died makes durable what ranks that live save for that rank seconds later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.format.image import ImageTensor, manifest_file, stage_image
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import SavedStatus, StatusPage, SurvivorStatus
from lowdiff.persistence.writer.handle import WriterProcess
from tests.processes import is_alive
from tests.unit.persistence.writers import PATIENCE_SECONDS, settings_in, write_here


def survivors_rank(root: Path, rank: int) -> WriterSettings:
    settings = settings_in(root, rank=rank, world_size=2, logs_steps=False)
    StatusPage(settings.staging.survivor_status, SurvivorStatus())
    return settings


@contextmanager
def living_trainer(settings: WriterSettings) -> Iterator[None]:
    lock = FileLock(settings.staging.trainer_lock)
    assert lock.acquire("the trainer of another rank")
    try:
        yield
    finally:
        lock.release()


def save(settings: WriterSettings, step: int) -> None:
    """Save a rank's share as a survivor does."""
    data = np.arange(8, dtype=np.uint8)
    image = ImageTensor("model/w", "U8", (8,), data.data)
    size, checksum = stage_image(settings.staging.survivor_image, [image])
    StatusPage(settings.staging.survivor_saved, SavedStatus(ImageMark(step, size, checksum)))


def ends(writer: WriterProcess) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_alive(writer.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(writer.pid)


def test_what_another_rank_saves_for_the_dead_one_becomes_durable(tmp_path: Path) -> None:
    dead, living = survivors_rank(tmp_path, 0), survivors_rank(tmp_path, 1)
    writer = WriterProcess(dead)
    with living_trainer(living):
        writer.orphan()
        time.sleep(1.0)
        save(dead, 7)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not manifest_file(dead.folder.snapshot(0, 7), 0).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert is_alive(writer.pid)
    began = time.monotonic()
    assert ends(writer)
    assert time.monotonic() - began < 10.0
    assert writer.read_status().closed


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_writer_ends_at_once_where_no_rank_of_its_incarnation_lives(
    tmp_path: Path, incarnation: int
) -> None:
    dead = survivors_rank(tmp_path, 0)
    other = settings_in(tmp_path, rank=1, incarnation=incarnation)
    writer = WriterProcess(dead)
    began = time.monotonic()
    with living_trainer(dead if incarnation == 0 else other):
        writer.orphan()
        assert ends(writer)
    assert time.monotonic() - began < 10.0


def test_a_trainer_that_says_its_end_is_not_waited_for(tmp_path: Path) -> None:
    own, living = survivors_rank(tmp_path, 0), survivors_rank(tmp_path, 1)
    writer = WriterProcess(own)
    with living_trainer(living):
        assert writer.finish(10.0).closed
        assert not is_alive(writer.pid)


def test_survivors_that_save_nothing_are_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    dead, living = survivors_rank(tmp_path, 0), survivors_rank(tmp_path, 1)
    limits(survivors_seconds=1.5)
    began = time.monotonic()
    with living_trainer(living), open(os.devnull) as pipe_of_the_dead:
        write_here(dead, pipe_of_the_dead, monkeypatch)
    assert 1.5 < time.monotonic() - began < PATIENCE_SECONDS
