"""ckpt-chaos as it is, but trainings are forked from a process that has loaded torch, which costs most of a short one.

``python -m tests.chaos.tool run ... -- python -m MODULE ...``; the module has a ``main`` and arms its victim itself, as
`seat` does, because ckpt-chaos's ``sitecustomize`` runs only where Python starts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import IO, Any

from tests.background import ForkedProcess, Zygote


def main() -> int:
    """Run the tool; return its exit status."""
    from ckpt_chaos import byo, cli

    zygote = Zygote()

    def start(
        command: list[str], *, stdout: IO[Any], stderr: int = 0, **where: Any
    ) -> ForkedProcess:
        process = zygote.start(command, stdout=stdout, **where)
        process.stdin.close()
        return process

    def run(command: list[str], env: dict[str, str], cwd: str, timeout: int) -> tuple[int, str]:
        with tempfile.TemporaryFile() as output:
            process = start(command, stdout=output, env=env, cwd=cwd)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                return -9, "TIMEOUT"
            output.seek(0)
            return code, output.read().decode(errors="replace")

    changed: Any = byo
    changed._run = run
    changed.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    try:
        return int(cli.main(sys.argv[1:]))
    finally:
        zygote.close()


if __name__ == "__main__":
    sys.exit(main())
