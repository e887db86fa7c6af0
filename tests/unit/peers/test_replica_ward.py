"""A copy of a rank without a compressor, when that rank ends."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowdiff.commit.run_lock import StagingArea
from lowdiff.model.tracked import Live
from lowdiff.peers.line import Receiver
from lowdiff.peers.wards import ReplicaWard
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.step.states import Sealed


def test_no_image_is_made_with_items_of_an_earlier_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StagingFolder.copy_of(tmp_path / "staging", "0" * 32, 0, 1, 0)
    area = StagingArea(folder, RunFolder(tmp_path / "run"), "0" * 32)
    ward = ReplicaWard(
        area,
        cast("Live", SimpleNamespace(rank=0)),
        cast("StagingLog", None),
        cast("ReplicaProcess", SimpleNamespace(read_status=lambda: SimpleNamespace(image_step=0))),
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
