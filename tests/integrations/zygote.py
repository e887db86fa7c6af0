"""Starts scripts by a fork of a process that has loaded torch and a framework once: that takes seconds of a core.

``python -m tests.integrations.zygote MODULE`` reads a JSON object a line: ``arguments`` of ``MODULE.main``, ``ranks``, ``output`` and ``seconds`` after which all
ranks are killed, if not null. Answers with the exit statuses of the ranks, -9 for SIGKILL. As under torchrun, all
ranks die when one does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from tests.background import fork_processes


def serve(training: ModuleType) -> None:
    """Answer requests until the input ends."""
    training.warm_up()  # what takes long in its first time
    gc.freeze()  # the Trainer collects garbage, which would walk through all modules in every process
    _answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = [_start(training, request, rank, port) for rank in range(request["ranks"])]
        _answer(json.dumps(_wait(pids, request["seconds"])))


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _wait(pids: list[int], seconds: float | None) -> list[int]:
    deadline = time.monotonic() + (1e9 if seconds is None else seconds)
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if any(statuses.values()) or time.monotonic() > deadline:
            for pid in set(pids) - statuses.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [statuses[pid] for pid in pids]


def _start(training: ModuleType, request: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        file = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ranks = request["ranks"]
        if ranks > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0",
            }  # fmt: skip
        torch.set_num_threads(1)
        fork_processes(forks=True)
        training.main(*request["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(import_module(sys.argv[1]))
