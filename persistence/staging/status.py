"""What trainer, writer and replica of a rank tell each other: one page each, and one class for all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.files.shared_page import ImageMark, Page, PageReader
from lowdiff.persistence.staging.histogram import SECONDS, HistogramValue

#: So long may a text on a page become, in UTF-8.
_TEXT_BYTES = 1000
#: Fields that are values of their own.
_PARTS = {"image": ImageMark, "batch_seconds": HistogramValue}


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """What the writer has done.

    Attributes:
        durable_step: Differentials up to here are fsynced; the base step at the start, -1 while
            the writer has said nothing.
        durable_snapshot: Step of the newest fsynced snapshot of this incarnation, -1 for none.
        first_lost_step: First of the differentials that are not in segments, and were to be; it
            counts while no durable snapshot is behind `lost_step`.
        lost_step: Newest of these, -1 for none: what follows needs a snapshot to be of use.
        segment_bytes: Bytes of differentials written, framing included.
        snapshot_bytes: Bytes of snapshots written.
        batches: Durable writes of differentials.
        batch_seconds: How long each took to be fsynced, failed attempts included.
        retries: Attempts to write or fsync that failed and were made again.
        error: What went wrong last, empty when all is well.
        adopted: Whether what earlier incarnations left in the folders of `WriterSettings.adopts` is
            durable.
        remote_step: Differentials up to here, and all they build on, are in the store; -1 before
            the base step is, or without a store.
        remote_snapshot: Step of the newest snapshot of this incarnation in the store, -1 for none.
        remote_bytes: Bytes uploaded.
        remote_retries: Uploads that failed and were or will be repeated.
        remote_error: Why uploads do not go on now, empty when all is well.
        closed: True once everything staged before the trainer's end is durable.
    """

    durable_step: int = -1
    durable_snapshot: int = -1
    first_lost_step: int = -1
    lost_step: int = -1
    segment_bytes: int = 0
    snapshot_bytes: int = 0
    batches: int = 0
    batch_seconds: HistogramValue = SECONDS
    retries: int = 0
    error: str = ""
    adopted: bool = False
    remote_step: int = -1
    remote_snapshot: int = -1
    remote_bytes: int = 0
    remote_retries: int = 0
    remote_error: str = ""
    closed: bool = False

    @property
    def unbroken_step(self) -> int:
        """Differentials up to here are fsynced, and a snapshot that is durable leads to each."""
        is_broken = self.durable_snapshot < self.lost_step
        return min(self.durable_step, self.first_lost_step - 1) if is_broken else self.durable_step

    def lost_before(self, first: int) -> dict[str, int]:
        """What changes once differentials from ``first`` on are durable and some before never will be.

        They were dropped, or damaged in staging memory.
        """
        if first <= self.durable_step + 1:
            return {}
        is_new = self.durable_snapshot >= self.lost_step  # else an earlier gap is still open
        since = self.durable_step + 1 if is_new else self.first_lost_step
        return {"first_lost_step": since, "lost_step": first - 1}

    def with_errors(self, *more: str) -> WriterStatus:
        """The same with what else is wrong; empty texts say nothing."""
        error = "; ".join(filter(None, (self.error, *more)))
        return self if error == self.error else replace(self, error=error)


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """How far the trainer of one rank is.

    Attributes:
        pid: Its process; 0 while the trainer has said nothing.
        step: Newest staged step, -1 before the first.
        committed_step: Newest step that it knows to be staged on all ranks.
        committed_at_unix_seconds: When it staged its newest step.
        preempted: Whether it was told to stop soon.
        image: Its newest snapshot in staging; None before the first.
    """

    pid: int = 0
    step: int = -1
    committed_step: int = -1
    committed_at_unix_seconds: float = 0.0
    preempted: bool = False
    image: ImageMark | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """How far a replica is.

    Attributes:
        step: The step whose state it holds; -1 before the first image.
        consumed_step: Records up to here are not needed any more: applied, or of no use.
        generation: Number of the file that holds its state, -1 for none.
        image_step: Step of the newest trainer's image that it took over.
        applied_steps: Steps applied since its process started.
        apply_seconds: Time spent on them.
        error: Why it waits for a fresh image, or what it cannot do now and tries again; empty when
            all is well.
        forgot: Whether the error is why it has no state, which the trainer's next image mends.
        drift: Largest difference of an element of the parameters from the newest trainer's image of a
            step that it held itself; infinite where a value is not finite, None before the first.
        image: The newest image of its own, for the disk; None before the first.
    """

    step: int = -1
    consumed_step: int = -1
    generation: int = -1
    image_step: int = -1
    applied_steps: int = 0
    apply_seconds: float = 0.0
    error: str = ""
    forgot: bool = False
    drift: float | None = None
    image: ImageMark | None = None


_Status = TypeVar("_Status", bound=WriterStatus | TrainerStatus | ReplicaStatus)


class StatusPage(Generic[_Status]):
    """The page of the process that says how far it is; nobody has to listen."""

    def __init__(self, path: Path, status: _Status) -> None:
        self._page = Page(path)
        self.status = status
        self.update()

    def update(self, **changes: object) -> None:
        """Change some fields and publish them together; long texts are cut, so that all fits."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        content: dict[str, Any] = {}
        for field in fields(self.status):  # as `asdict` does, which would look into every number
            value = getattr(self.status, field.name)
            if field.name in _PARTS and value is not None:
                value = asdict(value)
            elif isinstance(value, str):
                value = value.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")
            content[field.name] = value
        self._page.publish(content)


class StatusReader(Generic[_Status]):
    """The other end; keeps the page mapped."""

    def __init__(self, path: Path, kind: type[_Status]) -> None:
        self._page = PageReader(path)
        self._content: dict[str, Any] = {}
        self._status = kind()

    def read(self) -> _Status:
        """The newest whole status; one of defaults while there is none."""
        content = self._page.read()
        if content is not self._content:
            parts = {
                name: part(**content[name]) for name, part in _PARTS.items() if content.get(name)
            }
            self._status = replace(self._status, **content | parts)
            self._content = content
        return self._status


def read_status(path: Path, kind: type[_Status]) -> _Status:
    """What a process said last; one of defaults if there is no page, or nothing on it."""
    try:
        return StatusReader(path, kind).read()
    except FileNotFoundError:
        return kind()


class Complaints:
    """What several tasks of the writer complain of, together in one field of its page."""

    def __init__(self, page: StatusPage[WriterStatus], field: str) -> None:
        self._page = page
        self._field = field
        self._errors: dict[str, str] = {}

    def report(self, task: str, error: str) -> None:
        """Publish the errors of all tasks: the success of one says nothing about another."""
        self._errors[task] = error
        text = "; ".join(filter(None, self._errors.values()))
        if text != getattr(self._page.status, self._field):
            self._page.update(**{self._field: text})


def has_replica(stage: StagingFolder) -> bool:
    """Whether the state of that life is kept by a replica, and its log is only what followed."""
    return stage.replica_status.exists()
