"""What retention writes down: the run's policy, what it has removed, and the user's pins.

Losing ``retention.json`` loses no step: only `verify` would take what was removed for lost.
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
    """Differentials that retention has removed, or was about to when its process died.

    Attributes:
        ranges: ``(incarnation, first, last)``, inclusive, ascending, without overlaps.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()

    def holds(self, incarnation: int, step: int) -> bool:
        """Whether the differential of a step need not be there."""
        return any(
            owner == incarnation and first <= step <= last for owner, first, last in self.ranges
        )

    def __or__(self, others: Iterable[tuple[int, int, int]]) -> Collected:
        """With further ranges."""
        merged: list[tuple[int, int, int]] = []
        for owner, first, last in sorted([*self.ranges, *others]):
            if merged and merged[-1][0] == owner and first <= merged[-1][2] + 1:
                merged[-1] = (owner, merged[-1][1], max(last, merged[-1][2]))
            else:
                merged.append((owner, first, last))
        return Collected(tuple(merged))


@dataclass(frozen=True, slots=True)
class Pin:
    """A step that stays.

    Attributes:
        incarnation: Whose step it is: after going back before it, the same number is another step.
    """

    label: str
    step: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Notes:
    """The content of ``retention.json``.

    Attributes:
        policy: That of the newest trainer; None if it keeps everything or has said nothing.
    """

    policy: Retention | None = None
    collected: Collected = Collected()


def read_notes(folder: RunFolder, run_id: str) -> Notes:
    """What is written down; empty where nothing is.

    Raises:
        DamagedFile: If it is not whole.
    """
    path = folder.retention_file
    try:
        document = read_json(path)
    except FileNotFoundError:
        return Notes()
    try:
        if document["run_id"] != run_id:
            raise DamagedFile(path, "it belongs to another run")
        policy = document["policy"]
        ranges = [tuple(map(int, entry)) for entry in document["collected"]]
        return Notes(
            None if policy is None else Retention(**policy),
            Collected() | [(owner, first, last) for owner, first, last in ranges],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(path, f"not notes of retention ({error!r})") from error


def note_policy(folder: RunFolder, run_id: str, policy: Retention | None) -> None:
    """Write down durably what a trainer keeps."""
    _change(folder, run_id, lambda notes: replace(notes, policy=policy))


def note_collected(folder: RunFolder, run_id: str, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Write down durably what is about to be removed."""
    _change(folder, run_id, lambda notes: replace(notes, collected=notes.collected | ranges))


def _change(folder: RunFolder, run_id: str, change: Callable[[Notes], Notes]) -> None:
    before: Notes | None = None
    with contextlib.suppress(DamagedFile):  # each change says all that still matters
        before = read_notes(folder, run_id)
    after = change(before or Notes())
    if after == before and folder.retention_file.exists():
        return
    content: dict[str, Any] = {
        "run_id": run_id,
        "policy": None if after.policy is None else asdict(after.policy),
        "collected": [list(entry) for entry in after.collected.ranges],
    }
    write_json(folder.retention_file, content)


def check_label(label: str) -> None:
    """Refuse a label that is no name for a file.

    Raises:
        ConfigError: If it is not.
    """
    if not LABEL.fullmatch(label):
        raise ConfigError(
            f"a label is 1 to 100 letters, digits, '_', '-' or '.', the first no '-' or '.', "
            f"got {label[:120]!r}"
        )


def write_pin(folder: RunFolder, run_id: str, pin: Pin) -> None:
    """Pin a step durably; a label that is there already moves."""
    check_label(pin.label)
    path = folder.pin(pin.label)
    make_directory(path.parent)
    write_json(path, {"run_id": run_id, **asdict(pin)})


def check_pinned(folder: RunFolder, label: str) -> None:
    """Refuse a label that pins nothing.

    Raises:
        ConfigError: If there is no such pin.
    """
    check_label(label)
    if not folder.pin(label).is_file():
        there = ", ".join(name for name, _ in folder.pins()) or "none"
        raise ConfigError(f"{folder.root} has no pin {label!r}; there are: {there}")


def remove_pin(folder: RunFolder, label: str) -> None:
    """Unpin.

    Raises:
        ConfigError: If there is no such pin.
    """
    check_pinned(folder, label)
    folder.pin(label).unlink(missing_ok=True)
    fsync_directory(folder.pin(label).parent)


def read_pins(folder: RunFolder, run_id: str, label: str | None = None) -> list[Pin]:
    """Pins by label: all, or the one with a label if it is there.

    Raises:
        DamagedFile: If one is not whole: what it keeps is not known.
    """
    return [
        pin
        for name, path in folder.pins()
        if label in (None, name) and (pin := _read_pin(path, run_id, name)) is not None
    ]


def _read_pin(path: Path, run_id: str, label: str) -> Pin | None:
    try:
        document = read_json(path)
    except FileNotFoundError:  # unpinned a moment ago
        return None
    if (document.pop("run_id", None), document.get("label")) != (run_id, label):
        raise DamagedFile(path, "it belongs to another run, or is another pin")
    try:
        return Pin(label, int(document["step"]), int(document["incarnation"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(path, f"not a pin ({error!r})") from error
