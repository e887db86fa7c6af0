"""Writers and replicas by fork: what they import is loaded once, not by each of them anew.

They are what ``start_detached`` makes otherwise: children of the trainer in sessions of their own,
told through a pipe, ended by SIGKILL. To load torch costs a replica two seconds of a core.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from typing_extensions import Self

from lowdiff import testing
from lowdiff.persistence.files import detached_process as detached
from lowdiff.persistence.files.detached_process import DetachedProcess
from tests.zygote import serve

ROOT = Path(__file__).parents[1]
WRITER = "lowdiff.persistence.writer.main"
MODULES = (WRITER, "lowdiff.recovery.replica.main")
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_starting = threading.Lock()
#: For as long as a process of the tests lives.
_limits = ExitStack()


def torch_loaded() -> ForkServerContext:
    """What starts a process by a fork of one that has loaded torch and lowdiff, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loaded"])
    with _starting:  # the environment is that of all threads
        before = os.environ.get("OPENBLAS_NUM_THREADS")
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else NumPy starts threads when it is loaded
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["OPENBLAS_NUM_THREADS"]
            if before is not None:
                os.environ["OPENBLAS_NUM_THREADS"] = before
    return context


class ForkedProcess:
    """A child of this process that its zygote has forked, as far as a ``Popen`` of it is used."""

    def __init__(self, pid: int, stdin: Any) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """See ``subprocess.Popen.poll``."""
        with self._waiting:
            if self.returncode is None:
                try:
                    ended, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # a test waited for it by itself
                    ended, status = self.pid, 0
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See ``subprocess.Popen.wait``."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # a test waited for it by itself
                descriptor = os.pidfd_open(self.pid)
                try:
                    select.select([descriptor], [], [], timeout)
                finally:
                    os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        """See ``subprocess.Popen.kill``."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.wait()


class Zygote:
    """A child process that forks this process's writers and replicas.

    Args:
        forks: Fork it from this process, which has started no thread yet.
        writes: Start it anew, without torch: for writers only. Else it is forked from one that has loaded torch.
    """

    def __init__(self, *, forks: bool = False, writes: bool = False) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        self._forked: list[ForkedProcess] = []
        if forks:
            if os.fork() == 0:
                serve(theirs, MODULES)
        elif writes:
            given = theirs.fileno()
            words = [sys.executable, "-m", "tests.zygote", str(given), WRITER]
            # Else NumPy would start threads, beside which a fork is none.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            self._process = DetachedProcess(words, pass_fds=[given], cwd=ROOT, env=environment)
        else:
            torch_loaded().Process(target=serve, args=(theirs, MODULES), daemon=True).start()
        theirs.close()

    def start(self, command: list[str], **options: Any) -> ForkedProcess:
        """What ``DetachedProcess(command, **options)`` would start."""
        theirs, ours = os.pipe()
        request = {
            "module": command[2],
            "arguments": command[3:],
            "cwd": options["cwd"],
            "env": options["env"],
        }
        with self._asking:
            for forked in self._forked:
                forked.poll()
            adopt = ctypes.CDLL(None).prctl
            adopt(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                descriptors = [theirs, options["stdout"].fileno()]
                socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)
                pid = int(self._ours.recv(64))
            finally:
                adopt(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
                os.close(theirs)
            forked = ForkedProcess(pid, os.fdopen(ours, "wb", buffering=0))
            self._forked = [f for f in self._forked if f.returncode is None] + [forked]
        return forked

    def close(self) -> None:
        """End it; what it forked goes on."""
        self._ours.close()


def fork_processes(*, forks: bool = False) -> None:
    """Have every later writer and replica of this process forked, by a zygote that ends with it.

    Not where coverage is measured, which counts only processes that are started anew. Also, no attach of this
    process looks for a fifth of a second whether another machine takes the lease at the same moment.
    """
    _limits.enter_context(testing.limits(lease_look_seconds=0.005))
    if "coverage" not in sys.modules:
        trainer = os.getpid()
        #: By whether it forks writers only.
        zygotes = dict.fromkeys((False, True), Zygote(forks=True)) if forks else {}

        def start(command: list[str], **options: Any) -> ForkedProcess | DetachedProcess:
            if os.getpid() != trainer:
                return DetachedProcess(command, **options)  # the zygote is no child of this fork
            writes = command[2] == WRITER
            if writes not in zygotes:  # only who needs it waits until its modules are loaded
                zygotes[writes] = Zygote(writes=writes)
                atexit.register(zygotes[writes].close)
            return zygotes[writes].start(command, **options)

        detached.DetachedProcess = start  # type: ignore[assignment, misc]
