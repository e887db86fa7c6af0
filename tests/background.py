"""Writers and replicas by fork: Python, NumPy and torch are loaded once, not by each of them anew.

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
import time
import traceback
from contextlib import ExitStack, suppress
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

from typing_extensions import Self

from lowdiff import testing
from lowdiff.persistence.files import detached_process as detached
from lowdiff.persistence.files.detached_process import DetachedProcess

MODULES = ("lowdiff.persistence.writer.main", "lowdiff.recovery.replica.main")
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
        forks: Fork it from this process, which has started no thread yet; else from one that has
            loaded torch.
    """

    def __init__(self, *, forks: bool = False) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        self._forked: list[ForkedProcess] = []
        if forks:
            if os.fork() == 0:
                _serve(theirs)
        else:
            torch_loaded().Process(target=_serve, args=(theirs,), daemon=True).start()
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
        zygotes = [Zygote(forks=True)] if forks else []

        def start(command: list[str], **options: Any) -> ForkedProcess | DetachedProcess:
            if os.getpid() != trainer:
                return DetachedProcess(command, **options)  # the zygote is no child of this fork
            if not zygotes:  # only who needs it waits until torch is loaded
                zygotes.append(Zygote())
                atexit.register(zygotes[0].close)
            return zygotes[0].start(command, **options)

        detached.DetachedProcess = start  # type: ignore[assignment, misc]


def _serve(requests: socket.socket) -> None:
    """The zygote's whole life; never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _close_all_but(requests.fileno())
        for module in MODULES:
            import_module(module)
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2)
            if not message:
                break
            between = os.fork()
            if between == 0:
                me = os.getpid()
                if os.fork() == 0:
                    _begin(requests, me, json.loads(message), *descriptors)
                os._exit(0)  # the child is the trainer's from here on
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _begin(
    answers: socket.socket, between: int, request: dict[str, Any], stdin: int, output: int
) -> None:
    """The forked process's whole life; never returns."""
    code = 1
    try:
        while os.getppid() == between:
            time.sleep(0.0002)
        answers.send(str(os.getpid()).encode())
        os.dup2(stdin, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _close_all_but(2)
        sys.stdin = os.fdopen(0, closefd=False)
        os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = import_module(request["module"]).main(request["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(max(3, kept + 1), os.sysconf("SC_OPEN_MAX"))
