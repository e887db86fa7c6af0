"""The trainer's handle on its replica, which several threads use."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from lowdiff.persistence.files.detached_process import DetachedProcess
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.recovery.replica.handle import ReplicaProcess

pytestmark = pytest.mark.new_processes


class _SlowToStart(ReplicaProcess):
    """A replica whose start is held up."""

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__(settings)
        self.is_starting, self.may_start = threading.Event(), threading.Event()

    def _start(self) -> DetachedProcess:
        self.is_starting.set()
        assert self.may_start.wait(10)
        process = super()._start()
        os.kill(process.pid, signal.SIGSTOP)  # it does not end by itself
        return process


def test_a_replica_that_another_thread_is_just_starting_is_stopped_as_well(tmp_path: Path) -> None:
    settings = ReplicaSettings(
        run=str(tmp_path),
        staging_root=str(tmp_path),
        run_id="0" * 32,
        incarnation=0,
        rank=0,
        world_size=1,
        trainer_pid=os.getpid(),
        image_every=0,
        keep_every=0,
        waits=False,
    )
    settings.staging.root.mkdir(parents=True)
    handle = _SlowToStart(settings)
    starter = threading.Thread(target=handle.status)
    starter.start()
    assert handle.is_starting.wait(10)
    stopper = threading.Thread(target=handle.stop)
    stopper.start()
    stopper.join(0.2)  # it waits for the start
    handle.may_start.set()
    starter.join()
    stopper.join()
    pid = handle.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    handle.status()
    assert (handle.is_stopped, handle.pid, handle.restarts) == (True, pid, 0)
