"""Full checkpoints by name: what systems share that save the whole state of every step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def newest_that_loads(
    saved: list[tuple[int, Path]],
    load: Callable[[Path], None],
    broken: tuple[type[BaseException], ...],
) -> int:
    """Load the newest checkpoint that is whole, as a careful user does; its step, or 0.

    Args:
        saved: Steps and paths, newest first.
        load: Brings one back.
        broken: What it raises for one that was not finished.
    """
    for step, path in saved:
        try:
            load(path)
        except broken as reason:
            print(f"{path.name} cannot be loaded: {reason!r:.200}")
        else:
            return step
    return 0


def tensors_only(path: Path) -> Any:
    """``torch.load`` of a state."""
    return torch.load(path, map_location="cpu", weights_only=True)


def remove_old(files: Path, *, keep: int = 2) -> None:
    """Remove all but the newest checkpoints whose name tells their step."""
    named: dict[int, Path] = {}
    for path in files.iterdir():
        digits = path.name.removeprefix("step-").split(".")[0]
        if digits.isdigit():
            named[int(digits)] = path
    for step in sorted(named)[:-keep]:
        if named[step].is_dir():
            shutil.rmtree(named[step])
        else:
            named[step].unlink()
