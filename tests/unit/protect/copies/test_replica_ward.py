"""What one rank keeps for another, where that rank is late or ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowdiff.commit.run_lock import StagingArea
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.values import encode
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import ReplicaStatus
from lowdiff.protect.copies import wards
from lowdiff.protect.copies.copies import Copies
from lowdiff.protect.copies.line import Receiver
from lowdiff.protect.copies.note import Note
from lowdiff.protect.copies.wards import ReplicaWard, Ward
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.step.states import Sealed
from lowdiff.testing import parts_of, wait_until
from tests.crash.pool import Pool
from tests.unit.protect.copies.test_copies import Said, Training
from tests.unit.protect.copies.test_replicated import is_held


def test_no_image_is_made_with_items_of_an_earlier_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StagingFolder.copy_of(tmp_path / "staging", "0" * 32, 0, 1, 0)
    area = StagingArea(folder, RunFolder(tmp_path / "run"), "0" * 32)
    ward = ReplicaWard(
        area,
        cast("Live", SimpleNamespace(rank=0)),
        cast("StagingLog", None),
        cast(
            "ReplicaProcess",
            SimpleNamespace(read_status=lambda: SimpleNamespace(image_step=0), stop=lambda: None),
        ),
    )
    ended: Any = SimpleNamespace(head=lambda: None)
    ward.receive(cast("Receiver", ended))  # the rank ended before it told of step 5
    sealed: Any = SimpleNamespace(differential=SimpleNamespace(step=5))
    with caplog.at_level(logging.WARNING, "lowdiff"):
        ward.stage_image(cast("Sealed", sealed))
    assert "is behind" in caplog.text
    assert ward.copied_step == ward.held_step == -1
    assert not folder.snapshot.exists()
    ward.close(removes=False)


def test_an_image_that_is_written_over_is_not_published_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank tells its items of step 1 only while the image of step 2 is made, in the same slot."""
    folder = StagingFolder.copy_of(tmp_path / "staging", "0" * 32, 0, 1, 0)
    area = StagingArea(folder, RunFolder(tmp_path / "run"), "0" * 32)
    ward = Ward(area, cast("Live", SimpleNamespace(rank=0)), cast("StagingLog", None))

    def tell(step: int) -> None:
        message = Note(step, False, encode({"items": {}}), [], 0, {})
        heads: Any = iter([SimpleNamespace(is_image=False, generation=0), None])
        said: Any = SimpleNamespace(head=lambda: next(heads), note=lambda _: message.encoded())
        ward.receive(cast("Receiver", said))

    def share(step: int, *_: Any) -> list[Any]:
        if step == 2:
            tell(1)
            assert ward.copied_step == -1
        return []

    def stage(step: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(
                wards, "share_of_items", lambda *_: SimpleNamespace(images=lambda: share(step))
            )
            sealed: Any = SimpleNamespace(differential=SimpleNamespace(step=step))
            ward.stage_image(cast("Sealed", sealed))

    stage(1)
    stage(2)
    assert ward.copied_step == -1
    tell(2)
    assert ward.copied_step == 2
    ward.close(removes=True)


def test_a_replica_that_died_before_it_took_an_image_is_replaced_though_no_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    limits(copy_waiting_steps=3)
    folder = StagingFolder.copy_of(tmp_path / "staging", "0" * 32, 0, 1, 0)
    area = StagingArea(folder, RunFolder(tmp_path / "run"), "0" * 32)
    looked_after: list[bool] = []

    class Dead:
        def read_status(self) -> ReplicaStatus:
            return ReplicaStatus()

        def begin(self) -> None:
            looked_after.append(True)

        def stop(self) -> None:
            """End nothing."""

    ward = ReplicaWard(
        area,
        cast("Live", SimpleNamespace(rank=0)),
        cast("StagingLog", SimpleNamespace()),
        cast("ReplicaProcess", Dead()),
    )
    base, is_over = Note(0, False, encode({"items": {}}), [], 0, {}), threading.Event()
    heads = iter([SimpleNamespace(is_image=False, generation=0)])

    def head() -> Any:
        found = next(heads, None)
        if found is None:
            is_over.wait(60)
        return found

    silent_after_base: Any = SimpleNamespace(head=head, note=lambda _: base.encoded())
    telling = threading.Thread(target=ward.receive, args=(silent_after_base,))
    telling.start()
    monkeypatch.setattr(wards, "share_of_items", lambda *_: SimpleNamespace(images=list))
    sealed: Any = SimpleNamespace(differential=SimpleNamespace(step=0))
    ward.stage_image(cast("Sealed", sealed))
    assert ward.copied_step == 0
    assert not looked_after
    for step in range(1, 5):
        ward.hold(step, ())  # the rank tells nothing more, so no more is kept
    ward.stage_image(cast("Sealed", sealed))
    is_over.set()
    telling.join()
    ward.close(removes=True)
    assert looked_after


def forgetful(rank: int, world_size: int, folder: str) -> tuple[list[str], int]:
    """The replica of rank 0's copy of rank 1 dies, and its state is damaged before another one starts."""
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    training = Training(rank, folder, None, snapshot_every=1000)
    training.train(0, 1, 2)
    wait_until(training.checkpointer, partial(is_held, 3))
    if rank == 0:
        sinks = parts_of(training.checkpointer).protection.sinks
        (copies,) = (sink for sink in sinks if isinstance(sink, Copies))
        (ward,) = copies.wards
        assert isinstance(ward, ReplicaWard)
        (copy,) = (s for s in StagingFolder.all(training.staging) if s.keeper is not None)
        wait_until(training.checkpointer, partial(_has_state, ward))
        os.kill(ward.replica.pid, signal.SIGSTOP)
        generation = ward.replica.read_status().generation
        copy.replica_state(generation).write_bytes(b"")
        os.kill(ward.replica.pid, signal.SIGKILL)
        wait_until(training.checkpointer, partial(_is_noticed, ward))
    training.train(3)
    if rank == 0:  # a thread of its own receives step 3 and finds that out
        wait_until(training.checkpointer, partial(_owes, ward))
    training.train(4, 5)
    wait_until(training.checkpointer, partial(is_held, 6))
    training.train(6, 7)
    replicated = training.checkpointer.stats()["replicated_step"]
    training.checkpointer.close()
    logging.getLogger("lowdiff").removeHandler(said)
    return [text for text in said.texts if "LD901" in text], replicated


def _has_state(ward: ReplicaWard, _: dict[str, Any]) -> bool:
    return ward.replica.read_status().generation >= 0


def _owes(ward: Ward, _: dict[str, Any]) -> bool:
    return ward.owes_snapshot


def _is_noticed(ward: ReplicaWard, _: dict[str, Any]) -> bool:
    """Whether another replica has started and found no state; the ward looks after it only with steps."""
    ward.replica.begin()
    return ward.replica.read_status().forgot


def test_a_replica_without_a_state_gets_an_image_before_steps_count_again(
    pool: Pool, tmp_path: Path
) -> None:
    (said, first), (none, second) = pool.run(forgetful, 2, str(tmp_path))
    assert "no copy of rank 1's steps is kept until the next full snapshot" in said[0]
    assert "its replica here has no state" in said[0]
    assert not none
    assert min(first, second) >= 6
