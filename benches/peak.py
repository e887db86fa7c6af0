"""The most memory that a process held, counted from a moment of its choice. Linux only."""

from __future__ import annotations

from pathlib import Path


class Peak:
    """Counts from when it is made; a process has one at a time."""

    def __init__(self) -> None:
        # The kernel forgets the highest mark; see proc(5), clear_refs.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = _status("VmRSS")

    def bytes(self) -> int:
        """Peak of resident memory above what there was before, mapped files included."""
        return max(0, _status("VmHWM") - self.before)


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found[key].split()[0]) << 10
