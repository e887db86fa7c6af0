"""A process that forks others on demand: it has loaded their modules once.

It loads no torch by itself: a process that has not is forked in a tenth of the time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any


def serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Load modules, and fork processes that run their ``main`` until nobody asks any more; never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _close_all_but(requests.fileno())
        for module in modules:
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


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
