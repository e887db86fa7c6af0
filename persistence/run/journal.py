"""Retention's journal: the run's policy, the steps that retention removed, and the user's pins.

Losing ``retention.json`` loses no step; `verify` would only report removed steps as lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowdiff.errors import ConfigError, DamagedFile
from lowdiff.persistence.files.durable import fsync_directory, make_directory
from lowdiff.persistence.files.paths import LABEL, RunFolder
from lowdiff.persistence.format.document import read_json, write_json
from lowdiff.types import Retention


@dataclass(frozen=True, slots=True)
class Collected:
    """Differentials that retention has removed, or was about to remove when its process died.

    Attributes:
        ranges: ``(incarnation, first, last)``, inclusive, ascending, without overlaps.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()

    def holds(self, incarnation: int, step: int) -> bool:
        """Return whether the differential of a step may be missing."""
        return any(
            owner == incarnation and first <= step <= last for owner, first, last in self.ranges
        )

    def __or__(self, others: Iterable[tuple[int, int, int]]) -> Collected:
        """Return these ranges together with others."""
        merged: list[tuple[int, int, int]] = []
        for owner, first, last in sorted([*self.ranges, *others]):
            if merged and merged[-1][0] == owner and first <= merged[-1][2] + 1:
                merged[-1] = (owner, merged[-1][1], max(last, merged[-1][2]))
            else:
                merged.append((owner, first, last))
        return Collected(tuple(merged))


@dataclass(frozen=True, slots=True)
class Pin:
    """A step that the user keeps.

    Attributes:
        incarnation: Incarnation that owns the step. If the run goes back before the step, the same
            number later means another step.
    """

    label: str
    step: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of ``retention.json``.

    Attributes:
        policy: Policy of the newest trainer; None if it keeps everything or has written none.
    """

    policy: Retention | None = None
    collected: Collected = Collected()


def read_journal(folder: RunFolder, run_id: str) -> Journal:
    """Read ``retention.json``; return an empty journal if there is none.

    Raises:
        DamagedFile: If the file is damaged.
    """
    path = folder.retention_file
    try:
        document = read_json(path)
    except FileNotFoundError:
        return Journal()
    try:
        if document["run_id"] != run_id:
            raise DamagedFile(path, "it belongs to another run")
        policy = document["policy"]
        ranges = [tuple(map(int, entry)) for entry in document["collected"]]
        return Journal(
            None if policy is None else Retention(**policy),
            Collected() | [(owner, first, last) for owner, first, last in ranges],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(path, f"not a journal of retention ({error!r})") from error


def write_policy(folder: RunFolder, run_id: str, policy: Retention | None) -> None:
    """Write a trainer's policy durably."""
    _change(folder, run_id, lambda journal: replace(journal, policy=policy))


def write_collected(folder: RunFolder, run_id: str, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Write durably which steps are about to be removed."""
    _change(folder, run_id, lambda journal: replace(journal, collected=journal.collected | ranges))


def _change(folder: RunFolder, run_id: str, change: Callable[[Journal], Journal]) -> None:
    before: Journal | None = None
    with contextlib.suppress(DamagedFile):  # each change writes everything that still matters
        before = read_journal(folder, run_id)
    after = change(before or Journal())
    if after == before and folder.retention_file.exists():
        return
    content: dict[str, Any] = {
        "run_id": run_id,
        "policy": None if after.policy is None else asdict(after.policy),
        "collected": [list(entry) for entry in after.collected.ranges],
    }
    write_json(folder.retention_file, content)


def check_label(label: str) -> None:
    """Refuse a label that cannot be a file name.

    Raises:
        ConfigError: If the label is refused.
    """
    if not LABEL.fullmatch(label):
        raise ConfigError(
            f"a label is 1 to 100 letters, digits, '_', '-' or '.', the first no '-' or '.', "
            f"got {label[:120]!r}"
        )


def write_pin(folder: RunFolder, run_id: str, pin: Pin) -> None:
    """Pin a step durably; an existing pin of this label moves."""
    check_label(pin.label)
    path = folder.pin(pin.label)
    make_directory(path.parent)
    write_json(path, {"run_id": run_id, **asdict(pin)})


def check_pinned(folder: RunFolder, label: str) -> None:
    """Refuse a label that no pin has.

    Raises:
        ConfigError: If there is no such pin.
    """
    check_label(label)
    if not folder.pin(label).is_file():
        there = ", ".join(name for name, _ in folder.pins()) or "none"
        raise ConfigError(f"{folder.root} has no pin {label!r}; there are: {there}")


def remove_pin(folder: RunFolder, label: str) -> None:
    """Remove a pin.

    Raises:
        ConfigError: If there is no such pin.
    """
    check_pinned(folder, label)
    folder.pin(label).unlink(missing_ok=True)
    fsync_directory(folder.pin(label).parent)


def read_pins(folder: RunFolder, run_id: str, label: str | None = None) -> list[Pin]:
    """Return the pins by label: all of them, or the one with the label if there is one.

    Raises:
        DamagedFile: If a pin is damaged, so that the step it keeps is unknown.
    """
    return [
        pin
        for name, path in folder.pins()
        if label in (None, name) and (pin := _read_pin(path, run_id, name)) is not None
    ]


def _read_pin(path: Path, run_id: str, label: str) -> Pin | None:
    try:
        document = read_json(path)
    except FileNotFoundError:  # removed a moment ago
        return None
    if (document.pop("run_id", None), document.get("label")) != (run_id, label):
        raise DamagedFile(path, "it belongs to another run, or is another pin")
    try:
        return Pin(label, int(document["step"]), int(document["incarnation"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(path, f"not a pin ({error!r})") from error
