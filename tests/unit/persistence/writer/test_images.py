"""Which images wait to be persisted where a trainer and its replica both make them."""

from __future__ import annotations

from pathlib import Path

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.files.shared_page import ImageMark
from lowdiff.persistence.staging.status import ReplicaStatus, StatusPage, TrainerStatus
from lowdiff.persistence.writer.images import newer_images


def test_of_two_of_one_step_the_trainers_counts_and_the_oldest_comes_first(tmp_path: Path) -> None:
    staging = StagingFolder.of(tmp_path, "00112233445566778899aabbccddeeff", 0, 0)
    staging.root.mkdir(parents=True)
    assert newer_images(staging, -1) == []
    trainer = TrainerStatus(1, 20, 20, 0.0, preempted=False, image=ImageMark(20, 5, 2))
    StatusPage(staging.trainer_status, trainer)
    assert [(i.step, i.image) for i in newer_images(staging, 10)] == [(20, staging.snapshot)]
    replica = StatusPage(staging.replica_status, ReplicaStatus())
    replica.update(image=ImageMark(20, 5, 1))
    assert [(i.step, i.image) for i in newer_images(staging, 10)] == [(20, staging.snapshot)]
    replica.update(image=ImageMark(30, 5, 3))
    found = [(i.step, i.image) for i in newer_images(staging, 10)]
    assert found == [(20, staging.snapshot), (30, staging.replica_image)]
    assert [i.step for i in newer_images(staging, 20)] == [30]
    assert newer_images(staging, 30) == []
