"""Measurements of an incarnation: pages in staging while it runs, then a document for the tuner."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, LowDiffError
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.mapped_file import Page, PageReader
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.document import read_json, write_json

#: Kinds of samples of one process, and samples of each kind, chosen so that all fit on its page.
_KINDS = 9
WINDOW = 36
_DECISIONS = 200


class Recorder:
    """Recent measurements of one process. One thread records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._page = Page(path)
        self._samples: dict[str, deque[float]] = {}
        self._facts: dict[str, float | str] = {}

    def observe(self, name: str, value: float) -> None:
        """Add a sample; the oldest beyond ``WINDOW`` is dropped."""
        self._samples.setdefault(name, deque(maxlen=WINDOW)).append(value)
        assert len(self._samples) <= _KINDS

    def set_facts(self, **facts: float | str) -> None:
        """Replace single values, by name."""
        self._facts |= facts

    def samples(self) -> dict[str, tuple[float, ...]]:
        """Return recent samples by name."""
        return {name: tuple(values) for name, values in self._samples.items()}

    def facts(self) -> dict[str, float | str]:
        """Return single values by name."""
        return dict(self._facts)

    def reopen(self) -> None:
        """Create the page again after it was removed."""
        self._page = Page(self._path)
        self.publish()

    def publish(self) -> None:
        """Replace the content for readers of the page."""
        self._page.publish({"samples": self.samples(), "facts": self._facts})


def read_recorded(path: Path) -> tuple[dict[str, tuple[float, ...]], dict[str, float | str]]:
    """Return samples and facts on the page of a `Recorder`; empty before the first are published."""
    try:
        content = PageReader(path).read()
    except FileNotFoundError:
        return {}, {}
    return content.get("samples", {}), content.get("facts", {})


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one rank in one incarnation of a run.

    Attributes:
        ended: ``"closed"``; ``"failed"``, with an exception; ``"died"``; empty while the
            incarnation runs, or if its machine was lost.
        samples: Recent samples by name; durations in seconds, sizes in bytes.
        facts: Single values by name, of trainer and writer.
        decisions: Decisions of the tuner, oldest first.
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
    """Replace the document of an incarnation."""
    path = folder.measurements(measured.incarnation, measured.rank)
    make_directory(path.parent)
    write_json(path, asdict(measured))


def read_measurements(path: Path) -> Measurements:
    """Read the document of an incarnation.

    Raises:
        DamagedFile: If the document is damaged.
    """
    document = read_json(path)
    try:
        _check(document)
        return Measurements(**document)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DamagedFile(path, f"no measurements ({error!r})") from error


def _check(document: Mapping[str, Any]) -> None:
    """Refuse values that lowdiff never writes."""
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
    """Read the pages of a staging folder; a warning names what is lost of a dead incarnation's."""
    decisions: list[dict[str, Any]] = []
    try:
        if staging.decisions.exists():
            decisions = read_json(staging.decisions)["decisions"]
    except LowDiffError as error:
        if ended:
            Code.MEASUREMENTS_INCOMPLETE.warn(
                f"measurements are incomplete: decisions of the tuner are lost: {error}",
                rank=staging.rank,
            )
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
    """Replace a staging folder's decisions; only the newest are kept."""
    write_json(path, {"decisions": decisions[-_DECISIONS:]})


def read_all_measurements(folder: RunFolder, run_id: str, rank: int) -> list[Measurements]:
    """Return one rank's measurements of all incarnations, oldest first, without damaged ones."""
    found = []
    for path in folder.all_measurements():
        try:
            measured = read_measurements(path)
        except (LowDiffError, OSError) as error:
            Code.MEASUREMENTS_INCOMPLETE.warn(f"measurements are passed over: {error}")
            continue
        if measured.run_id == run_id and measured.rank == rank:
            found.append(measured)
    return found


#: Number of buckets, for quantities from ``first`` to ``first * 2 ** (BUCKETS - 2)``; larger ones
#: are counted in the last bucket.
BUCKETS = 32


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Content of a histogram at one moment.

    Attributes:
        first: Inclusive upper bound of the first bucket; each further bound is twice as large.
        counts: Observations per bucket, ``BUCKETS`` of them; the last has no upper bound.
        sum: Sum of all observations.
        max: The largest observation, 0 before the first.
    """

    first: float
    counts: tuple[int, ...]
    sum: float
    max: float

    @property
    def count(self) -> int:
        """Return the number of observations."""
        return sum(self.counts)

    @property
    def bounds(self) -> tuple[float, ...]:
        """Return the inclusive upper bounds of the buckets."""
        return (*(self.first * 2.0**i for i in range(BUCKETS - 1)), math.inf)

    def quantile(self, q: float) -> float:
        """Estimate a quantile to within a factor of two; return 0 without observations.

        Values below ``first`` are known less exactly: they lie between 0 and ``first``.
        """
        wanted = q * self.count
        seen = 0
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and seen + count >= wanted:
                high = min(bound, self.max)
                return low + (high - low) * max(0.0, wanted - seen) / count
            seen += count
            low = bound
        return 0.0

    def document(self) -> dict[str, Any]:
        """Return plain values; ``buckets`` are ``(upper bound, observations up to it)`` pairs."""
        total = 0
        buckets = []
        for bound, count in zip(self.bounds, self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return {
            "count": total,
            "sum": self.sum,
            "max": self.max,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "buckets": buckets,
        }


class Histogram:
    """Counts observations. One thread observes; others may read ``value()``."""

    def __init__(self, start: HistogramValue) -> None:
        self._first = start.first
        self._counts = list(start.counts)
        self._sum = start.sum
        self._max = start.max

    def observe(self, quantity: float) -> None:
        """Add one observation, which is not negative."""
        mantissa, exponent = math.frexp(quantity / self._first)
        # An exact power of two belongs to the bucket that ends at this bound.
        index = exponent - (mantissa == 0.5)
        self._counts[min(max(index, 0), BUCKETS - 1)] += 1
        self._sum += quantity
        self._max = max(self._max, quantity)

    def value(self) -> HistogramValue:
        """Return the observations so far."""
        return HistogramValue(self._first, tuple(self._counts), self._sum, self._max)


#: Empty, for durations from a microsecond; those over 18 minutes share the last bucket.
SECONDS = HistogramValue(1e-6, (0,) * BUCKETS, 0.0, 0.0)
#: Empty, for sizes from 64 bytes; those over 64 GiB share the last bucket.
BYTES = HistogramValue(64.0, (0,) * BUCKETS, 0.0, 0.0)
#: Empty, for numbers of steps.
STEPS = HistogramValue(1.0, (0,) * BUCKETS, 0.0, 0.0)
