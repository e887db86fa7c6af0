"""A process that writes an index over and over; it loads no torch."""

from __future__ import annotations

from pathlib import Path

from lowdiff.persistence.segment_index import Sealed, write_index


def write_for_ever(folder: Path, run_id: str, entries: list[Sealed]) -> None:
    """Until it is killed."""
    while True:
        write_index(folder, run_id, 0, entries)
