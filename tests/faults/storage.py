"""Storage that fails for a while: training goes on, the user is told, and then all is well."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import lowdiff
from lowdiff.demo.launch import child_processes
from tests.faults.outcome import Outcome
from tests.faults.recording import why_not
from tests.faults.victim import (
    TinyTraining,
    Victim,
    checkpointer_for,
    describe,
    digest_of,
    listening,
)
from tests.mounts import CannotMount, tmpfs

TROUBLES = ("full", "read-only", "no permission", "deleted", "I/O error", "clock")
#: The last step before the trouble, and the last that may be committed in it: two batches of two.
_BEFORE, _WITHIN, _AFTER = 6, 10, 17
_PATIENCE_SECONDS = 30.0
_LEFT_BYTES = 4 << 10

_CLOCK = """
import time
_real = time.time
def _backwards():
    return 2_000_000_000 - 3600 * (_real() % 1000)
time.time = _backwards
time.time_ns = lambda: int(_backwards() * 1e9)
"""


class NotHere(Exception):
    """The trouble cannot be made on this machine."""


class Trouble:
    """Something wrong with the disk that a run lives on."""

    def __init__(self, kind: str, disk: Path) -> None:
        self.kind, self.disk = kind, disk
        self._run = disk / "run"
        self._tracer: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        if self.kind == "full":
            free = shutil.disk_usage(self.disk).free
            (self.disk / "filler").write_bytes(bytes(free - _LEFT_BYTES))
        elif self.kind == "no permission":
            for folder in [self._run, *self._run.rglob("*")]:
                folder.chmod(0o500 if folder.is_dir() else 0o400)
        elif self.kind == "deleted":
            self._run.rename(self.disk / "aside")
            shutil.copytree(self.disk / "aside", self.disk / "spare")
            shutil.rmtree(self.disk / "aside")
        elif self.kind == "I/O error":
            self._inject("fsync,fdatasync:error=EIO")
        elif self.kind == "read-only":
            # As after a kernel's own remount; one by hand waits for the trainer's lock file. Staging,
            # which lies elsewhere, can still be opened.
            self._inject("openat:error=EROFS", [p for p in self._run.rglob("*") if p.is_file()])

    def end(self) -> None:
        if self.kind == "full":
            (self.disk / "filler").unlink()
        elif self.kind == "no permission":
            for folder in [self._run, *self._run.rglob("*")]:
                folder.chmod(0o700 if folder.is_dir() else 0o600)
        elif self.kind == "deleted":
            assert not self._run.exists(), "nobody may put another run in its place"
            (self.disk / "spare").rename(self._run)
        elif self._tracer is not None:
            self._tracer.send_signal(signal.SIGINT)
            self._tracer.wait()

    def _inject(self, fault: str, paths: Sequence[Path] = ()) -> None:
        """Let every such system call of the writer fail, or those on some paths."""
        (writer,) = _writers(self.disk)
        words = ["strace", "-f", "-qq", "-o", os.devnull, "-p", str(writer)]
        words += ["-e", f"trace={fault.partition(':')[0]}", "-e", f"inject={fault}"]
        words += [word for path in paths for word in ("-P", str(path))]
        self._tracer = subprocess.Popen(words)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _is_traced(writer):
            assert time.monotonic() < deadline, "strace does not attach to the writer"
            time.sleep(0.01)


def storage_troubles(
    folder: Path, rounds: int = 1, *, kinds: Sequence[str] = TROUBLES, seed: int = 0
) -> Outcome:
    """Let a training run into every trouble, ``rounds`` times."""
    outcome = Outcome(f"storage: {', '.join(kinds)}; then gone", seed)
    missing = []
    with outcome.timed():
        for number in range(rounds):
            for kind in kinds:
                try:
                    _one(kind, folder / f"{kind}-{number}".replace("/", "-").replace(" ", "-"))
                except NotHere as reason:
                    missing.append(f"{kind}: {reason}")
                    continue
                except Exception as error:
                    outcome.lose(f"{kind}: {describe(error)}")
                else:
                    outcome.found[kind] += 1
                outcome.rounds += 1
    outcome.not_run = "; ".join(dict.fromkeys(missing))
    return outcome


def _one(kind: str, folder: Path) -> None:
    """Train into the trouble, through it and on; then every step must come back."""
    with ExitStack() as stack:
        disk = stack.enter_context(_disk(kind, folder))
        said = stack.enter_context(listening())
        _prepare(kind, folder, stack)
        victim = Victim(disk / "run", folder / "staging")
        training = TinyTraining()
        checkpointer = checkpointer_for(victim.run, victim.staging)
        checkpointer.attach(training.model, training.optimizer, **training.stateful)
        _train(checkpointer, training, victim, _BEFORE)
        _wait(checkpointer, lambda stats: stats["durable_step"] == _BEFORE)
        trouble = Trouble(kind, disk)
        trouble.begin()
        _train(checkpointer, training, victim, _WITHIN)
        if kind == "clock":
            trouble.end()
        else:
            _wait(checkpointer, lambda stats: stats["writer_error"])
            # The next commit waits for the disk, and so for somebody who mends it.
            mender = threading.Timer(0.3, trouble.end)
            mender.start()
        _train(checkpointer, training, victim, _AFTER)
        assert kind == "clock" or any("not durable now" in line for line in said), said
        _wait(checkpointer, lambda stats: not stats["writer_error"])
        checkpointer.close()
        for step in range(_AFTER + 1):
            assert digest_of(victim.recovered(step)) == victim.digests[step], step


def _train(
    checkpointer: lowdiff.Checkpointer, training: TinyTraining, victim: Victim, until: int
) -> None:
    victim.digests[training.scheduler.last_epoch] = training.digest()
    for step in range(training.scheduler.last_epoch, until):
        training.step(step)
        checkpointer.commit()
        victim.digests[step + 1] = training.digest()


def _wait(
    checkpointer: lowdiff.Checkpointer, condition: Callable[[dict[str, Any]], object]
) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition(checkpointer.stats()):
        assert time.monotonic() < deadline, checkpointer.stats()
        time.sleep(0.01)


@contextmanager
def _disk(kind: str, folder: Path) -> Iterator[Path]:
    """Where the run lives: a small file system of its own where the trouble needs one."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    if kind != "full":
        yield disk
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(tmpfs(disk, 2))
        except CannotMount as error:
            raise NotHere(str(error)) from error
        yield disk


def _prepare(kind: str, folder: Path, stack: ExitStack) -> None:
    """What must be so before the writer starts."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    if kind == "no permission" and os.geteuid() == 0:
        # Root may write anywhere; without this capability it is a user like others.
        if shutil.which("setpriv") is None:
            raise NotHere("root without setpriv may write anywhere")
        script = folder / "python"
        script.write_text(
            "#!/bin/sh\nexec setpriv --bounding-set=-dac_override,-dac_read_search "
            f'{sys.executable} "$@"\n'
        )
        script.chmod(0o755)
        patch.setattr(sys, "executable", str(script))
    elif kind == "clock":
        (folder / "clock").mkdir()
        (folder / "clock/sitecustomize.py").write_text(_CLOCK)
        others = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", f"{folder / 'clock'}{os.pathsep}{others}")
        real = time.time
        patch.setattr(time, "time", lambda: 2e9 - 3600 * (real() % 1000))
    elif kind in ("I/O error", "read-only") and why_not():
        raise NotHere(why_not())


def _writers(disk: Path) -> list[int]:
    text = str(disk / "run").encode()
    return [
        pid
        for pid in child_processes(os.getpid())
        if text in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def _is_traced(pid: int) -> bool:
    text = Path(f"/proc/{pid}/status").read_text()
    return "TracerPid:\t0\n" not in text
