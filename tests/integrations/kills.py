"""What scripts of users share: they kill themselves where they are told to, and leave what is compared."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch


class Kill:
    """Sends this process a signal when something happens for the n-th time, if it is the last rank.

    Args:
        text: ``PLACE:COUNT``, or ``PLACE:COUNT:SIGNAL`` for another signal than ``SIGKILL``; empty for none.
    """

    def __init__(self, text: str) -> None:
        place, count, number = f"{text or ':0'}:SIGKILL".split(":")[:3]
        is_last = rank() == int(os.environ.get("WORLD_SIZE", "1")) - 1
        self._place, self._left = place, int(count) if is_last else 0
        self._number = signal.Signals[number]

    def happens(self, place: str) -> None:
        """Say that it happens."""
        if place == self._place:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._number)


def rank() -> int:
    """Return this process's rank."""
    return int(os.environ.get("RANK", "0"))


def leave(result: dict[str, Any], folder: str) -> None:
    """Write what is compared to ``FOLDER/result-RANK.pt``, whole or not at all."""
    partial = Path(folder, f"partial-{rank()}.pt")
    torch.save(result, partial)
    partial.replace(Path(folder, f"result-{rank()}.pt"))
