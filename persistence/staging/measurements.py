"""Measurements of an incarnation: pages in staging while it lives, then a document for the tuner."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lowdiff.errors import DamagedFile, LowDiffError
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.files.shared_page import Page, PageReader
from lowdiff.persistence.format.document import read_json, write_json

_logger = logging.getLogger(__name__)


#: Kinds of samples of one process, and how many of each are kept, so that all fit on its page.
_KINDS = 9
WINDOW = 36
_DECISIONS = 200


class Recorder:
    """One process's recent measurements. One thread records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._page = Page(path)
        self._samples: dict[str, deque[float]] = {}
        self._facts: dict[str, float | str] = {}

    def observe(self, name: str, value: float) -> None:
        """Add a sample; the oldest of ``WINDOW`` goes."""
        self._samples.setdefault(name, deque(maxlen=WINDOW)).append(value)
        assert len(self._samples) <= _KINDS

    def note(self, **facts: float | str) -> None:
        """Replace single values."""
        self._facts |= facts

    def samples(self) -> dict[str, tuple[float, ...]]:
        """Recent samples by name."""
        return {name: tuple(values) for name, values in self._samples.items()}

    def facts(self) -> dict[str, float | str]:
        """Single values by name."""
        return dict(self._facts)

    def reopen(self) -> None:
        """Make the page anew: somebody removed it."""
        self._page = Page(self._path)
        self.publish()

    def publish(self) -> None:
        """Replace what readers of the page find."""
        self._page.publish({"samples": self.samples(), "facts": self._facts})


def read_recorded(path: Path) -> tuple[dict[str, tuple[float, ...]], dict[str, float | str]]:
    """Samples and facts on the page of a `Recorder`; empty while nobody published any."""
    try:
        content = PageReader(path).read()
    except FileNotFoundError:
        return {}, {}
    return content.get("samples", {}), content.get("facts", {})


@dataclass(frozen=True, slots=True)
class Measurements:
    """One rank's measurements of one life of a run.

    Attributes:
        ended: ``"closed"``; ``"failed"``, with an exception; ``"died"``; empty while it lives, or
            when its machine was lost.
        samples: Recent samples by name; durations in seconds, sizes in bytes.
        facts: Single values by name, of trainer and writer.
        decisions: What the tuner decided, oldest first.
    """

    run_id: str
    incarnation: int
    rank: int
    world_size: int
    ended: str
    samples: Mapping[str, Sequence[float]]
    facts: Mapping[str, float | str]
    decisions: Sequence[Mapping[str, Any]] = ()


def write_measurements(folder: RunFolder, measured: Measurements) -> None:
    """Replace a life's document."""
    path = folder.measurements(measured.incarnation, measured.rank)
    make_directory(path.parent)
    write_json(path, asdict(measured))


def read_measurements(path: Path) -> Measurements:
    """Read a life's document.

    Raises:
        DamagedFile: If it is not whole.
    """
    document = read_json(path)
    try:
        _check(document)
        return Measurements(**document)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DamagedFile(path, f"no measurements ({error!r})") from error


def _check(document: Mapping[str, Any]) -> None:
    """Refuse what only a stranger would write."""
    if document.keys() != {field.name for field in fields(Measurements)}:
        raise ValueError(f"it has the fields {sorted(document)}")
    for name in ("incarnation", "rank", "world_size"):
        if type(document[name]) is not int or not 0 <= document[name] < 1 << 31:
            raise ValueError(f"{name} is {document[name]!r:.40}")
    for name, values in document["samples"].items():
        if not isinstance(name, str) or not all(map(_is_amount, values)):
            raise ValueError(f"samples of {name!r:.40}")
    for name, value in document["facts"].items():
        if not isinstance(name, str) or not (isinstance(value, str) or _is_amount(value)):
            raise ValueError(f"{name!r:.40} is {value!r:.40}")
    if not all(isinstance(decision, dict) for decision in document["decisions"]):
        raise TypeError("a decision is no object")


def _is_amount(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def gather_measurements(
    staging: StagingFolder, run_id: str, world_size: int, *, ended: str
) -> Measurements:
    """What is on the pages of a staging folder now; at a life's end, what is lost of it is said."""
    decisions: list[dict[str, Any]] = []
    try:
        if staging.decisions.exists():
            decisions = read_json(staging.decisions)["decisions"]
    except LowDiffError as error:
        if ended:
            text = "rank %d: measurements are incomplete: decisions of the tuner are lost: %s"
            _logger.warning(text, staging.rank, error)
    samples: dict[str, tuple[float, ...]] = {}
    facts: dict[str, float | str] = {}
    for page in (staging.measured_by_trainer, staging.measured_by_writer):
        more_samples, more_facts = read_recorded(page)
        samples |= more_samples
        facts |= more_facts
    said = str(facts.pop("ended", ""))
    return Measurements(
        run_id=run_id,
        incarnation=staging.incarnation,
        rank=staging.rank,
        world_size=world_size,
        ended=said or ended,
        samples=samples,
        facts=facts,
        decisions=decisions,
    )


def write_decisions(path: Path, decisions: Sequence[Mapping[str, Any]]) -> None:
    """Replace a staging folder's decisions; the newest are kept."""
    write_json(path, {"decisions": decisions[-_DECISIONS:]})


def read_all_measurements(folder: RunFolder, run_id: str, rank: int) -> list[Measurements]:
    """One rank's measurements of all lives, oldest first; damaged ones are passed over."""
    found = []
    for path in folder.all_measurements():
        try:
            measured = read_measurements(path)
        except (LowDiffError, OSError) as error:
            _logger.warning("measurements are passed over: %s", error)
            continue
        if measured.run_id == run_id and measured.rank == rank:
            found.append(measured)
    return found
