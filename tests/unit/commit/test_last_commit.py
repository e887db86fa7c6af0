"""What happens between the last commit and ``close()``, and what the last snapshot holds then."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.files.mapped_file import Page
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop, wait_until


@pytest.mark.parametrize("compressor", [TopK(0.1), None], ids=["topk", "replica"])
def test_a_scheduler_moved_after_the_last_commit_is_neither_half_saved_nor_in_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compressor: TopK | None
) -> None:
    loop = Loop(tmp_path, settings={"compressor": compressor})
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)
    loop.attach(scheduler=scheduler)
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    scheduler.step()  # an epoch's end, after the last commit
    expected = loop.weights()
    loop.checkpointer.close()
    assert "no last snapshot" not in caplog.text
    # As after a reboot: the snapshot alone leads to the end.
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "nowhere")
    assert (state.step, state.base_step) == (3, 3)
    assert same(dict(state.model_state_dict()), expected)
    assert state.stateful["scheduler"]["last_epoch"] == 0
    assert state.optimizer_state_dict()["param_groups"][0]["lr"] == 1e-2


def test_gradients_cleared_after_the_last_commit_are_no_difference(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
        loop.optimizer.zero_grad()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").held == tuple(range(6))
    assert not verify(tmp_path / "run").failures


def test_staging_memory_outlives_a_close_whose_last_snapshot_was_damaged_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Loop(tmp_path / "whole")
    whole.run(8)
    loop = Loop(tmp_path)
    loop.attach()
    wait_until(lambda: loop.checkpointer.stats()["durable_snapshot"] == 0)
    pid = loop.checkpointer.stats()["writer_pid"]
    os.kill(pid, signal.SIGSTOP)
    finish = WriterProcess.finish

    def damaged(writer: WriterProcess, timeout_seconds: float) -> WriterStatus:
        (stage,) = StagingFolder.all(tmp_path / "staging")
        Page(stage.trainer_status).publish({})
        os.kill(pid, signal.SIGCONT)
        return finish(writer, timeout_seconds)

    monkeypatch.setattr(WriterProcess, "finish", damaged)
    for number in range(4):
        loop.step(number)
        loop.checkpointer.commit()
    loop.checkpointer.close()
    monkeypatch.undo()
    assert "the last snapshot was damaged in memory on rank 0" in caplog.text
    assert list(StagingFolder.all(tmp_path / "staging"))
    after = Loop(tmp_path)
    assert after.run(8) == 4
    assert same(after.weights(), whole.weights())
    assert not list(StagingFolder.all(tmp_path / "staging"))
