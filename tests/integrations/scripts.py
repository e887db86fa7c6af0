"""Scripts of users that are killed, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


class Scripts:
    """Runs scripts as processes, forked from one that has loaded all they need."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(
        self,
        name: str,
        folder: Path,
        kill: str = "",
        *,
        ranks: int = 1,
        seconds: float | None = None,
        **arguments: Any,
    ) -> list[int]:
        """Run one until its end, or until it is killed; returns the exit status of each rank."""
        folder.mkdir(exist_ok=True)
        request = {
            "arguments": [name, str(folder), json.dumps(arguments), kill],
            "ranks": ranks,
            "seconds": seconds,
            "output": str(folder / "output.txt"),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the server died"
        statuses: list[int] = json.loads(answer)
        return statuses

    def finish(self, name: str, folder: Path, *, ranks: int = 1, **arguments: Any) -> list[Any]:
        """Run one that ends by itself; returns each rank's result."""
        statuses = self.run(name, folder, ranks=ranks, **arguments)
        assert statuses == [0] * ranks, (folder / "output.txt").read_text()[-4000:]
        return [
            torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)
        ]


@contextmanager
def scripts_of(module: str) -> Iterator[Scripts]:
    """Run scripts of a module, which has ``main`` and ``warm_up``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.zygote", module],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    assert server.stdout.readline() == "ready\n"
    yield Scripts(server)
    server.stdin.close()
    server.stdout.close()
    server.wait(60)


def differences(path: str, a: Any, b: Any) -> list[str]:
    """Where two results differ in a bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(
            a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
        )
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in differences(f"{path}.{key}", a[key], b[key])]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in differences(f"{path}[{i}]", x, y)
        ]
    return [] if repr(a) == repr(b) else [f"{path}: {a!r} != {b!r}"]
