"""Lives of a training with strategy survivors, in real processes, some of which fail."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import StagingFolder
from tests.crash.launch import survivor
from tests.processes import Script

#: Step at which a training ends.
UNTIL = 10
#: How what a step leaves reaches staging: at once, or late as from an accelerator.
ENGINES = ["host", pytest.param("late", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Lives:
    """What ranks reported, life after life."""

    lines: list[list[dict[str, Any]]]
    output: str

    @property
    def resumed(self) -> list[int]:
        """Where each life began, as rank 0 says."""
        return [line["step"] for line in self.lines[0] if line["word"] == "resumed"]

    def states(self, rank: int) -> dict[int, str]:
        """Step -> state; a later life's replaces an earlier's."""
        return {line["step"]: line["state"] for line in self.lines[rank] if line["word"] != "end"}

    def owed(self, rank: int) -> dict[int, str]:
        """Step -> error feedback; a line of a step that is made is written before the step's commit."""
        return {
            line["step"] - (line["word"] == "made"): line["owed"]
            for line in self.lines[rank]
            if line["word"] != "end"
        }

    def generators(self) -> list[str]:
        """At the end."""
        return [lines[-1]["rng"] for lines in self.lines]


def life(
    folder: Path,
    world_size: int,
    until: int,
    options: Mapping[int, Sequence[object]],
    *,
    number: int,
) -> list[Script]:
    """Start all ranks.

    Args:
        folder: Where run, staging and reports lie.
        world_size: Number of ranks.
        until: Step at which they end.
        options: Rank -> further words of its command line; -1: those of all ranks.
        number: Of the life.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store-{number}"
    return [
        Script(
            survivor.main,
            *[rank, world_size, store, folder, until, *options.get(-1, []), *options.get(rank, [])],
            output=folder / f"output.{rank}",
        )
        for rank in range(world_size)
    ]


def reports(folder: Path, world_size: int) -> Lives:
    """Read what the ranks have reported so far."""
    lines = [
        [json.loads(line) for line in (folder / f"report.{rank}").read_text().splitlines()]
        for rank in range(world_size)
    ]
    output = "".join((folder / f"output.{rank}").read_text() for rank in range(world_size))
    return Lives(lines, output)


@cache
def whole(world_size: int, *options: object) -> Lives:
    """The training without a failure; made once for all tests of a process."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        scripts = life(folder, world_size, UNTIL, {-1: list(options)}, number=0)
        assert [script.wait() for script in scripts] == [0] * world_size, scripts[0].printed()
        return reports(folder, world_size)


def ended(scripts: list[Script], *, stopped: int | None = None) -> None:
    """Wait for all; a stopped one is killed once the others have ended, as a launcher does."""
    for rank, script in enumerate(scripts):
        if rank != stopped:
            script.wait()
    if stopped is not None:
        scripts[stopped].kill()
        scripts[stopped].wait()


def lost(node: Path) -> Callable[[], None]:
    """Remove what a node had in memory, once its writers have ended."""

    def lose() -> None:
        root = node / "staging"
        for stage in StagingFolder.all(root):
            lock = FileLock(stage.writer_lock)
            assert lock.acquire("a test", timeout_seconds=60.0)
            lock.release()
        shutil.rmtree(root)

    return lose
