"""The trainer's handle on its replica, which several threads use."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.files.detached_process import DetachedProcess, start_detached
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.recovery.replica import handle as replica_process
from lowdiff.recovery.replica.handle import ReplicaProcess

pytestmark = pytest.mark.new_processes


def test_a_replica_that_another_thread_is_just_starting_is_stopped_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_starting, may_start = threading.Event(), threading.Event()

    def start_late(*arguments: Any, **environment: Any) -> DetachedProcess:
        is_starting.set()
        assert may_start.wait(10)
        process = start_detached(*arguments, **environment)
        os.kill(process.pid, signal.SIGSTOP)  # it does not end by itself
        return process

    monkeypatch.setattr(replica_process, "start_detached", start_late)
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
    handle = ReplicaProcess(settings)
    starter = threading.Thread(target=handle.begin)
    starter.start()
    assert is_starting.wait(10)
    stopper = threading.Thread(target=handle.stop)
    stopper.start()
    stopper.join(0.2)  # it waits for the start
    may_start.set()
    starter.join()
    stopper.join()
    pid = handle.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    handle.tend()
    assert (handle.is_stopped, handle.pid, handle.restarts) == (True, pid, 0)
