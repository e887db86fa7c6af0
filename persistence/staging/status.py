"""Status pages of trainer, writer and replica of a rank: one page each, one class for all pages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from lowdiff.persistence.files.mapped_file import ImageMark, Page, PageReader
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.measurements import SECONDS, HistogramValue

#: Longest text on a page, in UTF-8 bytes.
_TEXT_BYTES = 1000
#: Fields whose values are dataclasses.
_PARTS = {"image": ImageMark, "batch_seconds": HistogramValue}


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """Progress of the writer.

    Attributes:
        durable_step: Differentials up to here are fsynced; the base step at the start, -1 before
            the writer publishes anything.
        durable_snapshot: Step of the newest fsynced snapshot of this incarnation, -1 for none.
        first_lost_step: First differential that should be in a segment and is not; valid while no
            durable snapshot is at or after `lost_step`.
        lost_step: Newest such differential, -1 for none; later steps need a snapshot to be usable.
        lost_image: Step of a snapshot that was removed or damaged in staging before it was durable, -1 for none.
        segment_bytes: Bytes of differentials written, with framing.
        snapshot_bytes: Bytes of snapshots written.
        batches: Durable writes of differentials.
        batch_seconds: Time from the start of each write to its fsync, with failed attempts.
        retries: Writes or fsyncs that failed and were repeated.
        error: Newest error, empty if there is none.
        adopted: Whether the content of the folders of `WriterSettings.adopts` is durable.
        remote_step: Differentials up to here, and all they build on, are in the store; -1 before
            the base step is there, or without a store.
        remote_snapshot: Step of the newest snapshot of this incarnation in the store, -1 for none.
        remote_bytes: Bytes uploaded.
        remote_retries: Uploads that failed and were or will be repeated.
        remote_error: Reason why uploads do not go on now, empty if they do.
        closed: True once everything staged before the trainer's end is durable.
    """

    durable_step: int = -1
    durable_snapshot: int = -1
    first_lost_step: int = -1
    lost_step: int = -1
    lost_image: int = -1
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
        """Return the last step that is fsynced together with all steps since a durable snapshot."""
        is_broken = self.durable_snapshot < self.lost_step
        return min(self.durable_step, self.first_lost_step - 1) if is_broken else self.durable_step

    @property
    def settled_snapshot(self) -> int:
        """Return the step up to which no snapshot is waited for: it is durable, or was lost in staging."""
        return max(self.durable_snapshot, self.lost_image)

    def lost_before(self, first: int) -> dict[str, int]:
        """Return changes once differentials from ``first`` on are durable and earlier ones are lost.

        A differential is lost if it was dropped, or damaged in staging memory.
        """
        if first <= self.durable_step + 1:
            return {}
        is_new = self.durable_snapshot >= self.lost_step  # otherwise an earlier gap is still open
        since = self.durable_step + 1 if is_new else self.first_lost_step
        return {"first_lost_step": since, "lost_step": first - 1}

    def with_errors(self, *more: str) -> WriterStatus:
        """Return this status with more errors; empty texts are ignored."""
        error = "; ".join(filter(None, (self.error, *more)))
        return self if error == self.error else replace(self, error=error)


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """Progress of one rank's trainer.

    Attributes:
        pid: Process id; 0 before the trainer publishes anything.
        step: Newest staged step, -1 before the first.
        settled_step: Newest step that a replica may go on to, because no rank goes back behind it: all ranks
            have staged it and, where nodes keep copies, so have these, or it is some steps old.
        committed_at_unix_seconds: When it staged its newest step.
        preempted: Whether it was told to stop soon.
        image: Its newest snapshot in staging; None before the first.
        end_step: The step whose image it waits for before it ends; -1 while it goes on.
    """

    pid: int = 0
    step: int = -1
    settled_step: int = -1
    committed_at_unix_seconds: float = 0.0
    preempted: bool = False
    image: ImageMark | None = None
    end_step: int = -1


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Progress of a replica.

    Attributes:
        step: Step of the state that the replica holds; -1 before the first image.
        consumed_step: Records up to here are no longer needed: applied, or of no use.
        generation: Number of the file that holds its state, -1 for none.
        image_step: Step of the newest trainer's image that it took over.
        applied_steps: Steps applied since its process started.
        apply_seconds: Time spent on these steps.
        error: Reason for waiting for a fresh image, or a failure that is being retried; empty if
            there is none.
        forgot: Whether the error explains a missing state, which the trainer's next image replaces.
        drift: Largest difference of a parameter's element between the replica's state and the
            newest trainer's image of the same step; infinite if a value is not finite, None before
            the first.
        image: Its own newest image, for the disk; None before the first.
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

    def asks_for_image(self, newest_step: int) -> bool:
        """Return whether it holds no state although it has taken over the trainer's newest image."""
        return self.generation < 0 and self.image_step >= newest_step >= 0


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """Progress of the process that publishes weights.

    Attributes:
        version: The newest version that it published; 0 before the first.
        step: Step of that version; -1 before.
        versions: Versions that it published.
        bytes: Bytes of their parts.
        seconds: Time spent on them: to follow the run, to compare and to write.
        error: Why nothing is published now; empty if all is well.
    """

    version: int = 0
    step: int = -1
    versions: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SurvivorStatus:
    """What a rank's survivor knows of a failure.

    Attributes:
        seen_at_unix_seconds: When its thread last looked; a process that is stopped looks no more.
        is_waiting: Whether its main thread waits for other ranks.
        ready_step: Step whose state the rank could save when it noticed a failure; -1 before.
    """

    seen_at_unix_seconds: float = 0.0
    is_waiting: bool = False
    ready_step: int = -1


@dataclass(frozen=True, slots=True)
class SavedStatus:
    """What was saved for a rank after a failure.

    Attributes:
        image: Image of its share; None before.
        maker: Rank that saved it for a rank on another node, without items; -1 for a rank of the node.
        takes_buffers: Whether rank 0's buffers overwrite those of that rank before their next use.
        alike: Bits of the kinds of items that all ranks had alike, as they told each other last.
        alike_step: The step after which they did: that of the image, or the one before; -1 for neither.
    """

    image: ImageMark | None = None
    maker: int = -1
    takes_buffers: bool = False
    alike: int = 0
    alike_step: int = -1


_Status = TypeVar(
    "_Status",
    bound=WriterStatus
    | TrainerStatus
    | ReplicaStatus
    | PublisherStatus
    | SurvivorStatus
    | SavedStatus,
)


class StatusPage(Generic[_Status]):
    """Page of a process that publishes its progress; it works without readers."""

    def __init__(self, path: Path, status: _Status) -> None:
        self._page = Page(path)
        self._names = [field.name for field in fields(status)]
        self.status = status
        self.update()

    def update(self, **changes: object) -> None:
        """Change some fields and publish them together; long texts are cut to fit."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self._page.publish({name: _plain(getattr(self.status, name)) for name in self._names})


def _plain(value: Any) -> Any:
    """Return a field's value as numbers, short texts, and dictionaries of them."""
    if isinstance(value, str):
        return value.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")
    if isinstance(value, ImageMark | HistogramValue):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


class StatusReader(Generic[_Status]):
    """Reader of a page; keeps the page mapped."""

    def __init__(self, path: Path, kind: type[_Status]) -> None:
        self._page = PageReader(path)
        self._content: dict[str, Any] = {}
        self._status = kind()

    def read(self) -> _Status:
        """Return the newest whole status; a default one before the first."""
        content = self._page.read()
        if content is not self._content:
            parts = {
                name: part(**content[name]) for name, part in _PARTS.items() if content.get(name)
            }
            self._status = replace(self._status, **content | parts)
            self._content = content
        return self._status


def read_status(path: Path, kind: type[_Status]) -> _Status:
    """Return the last status of a process; a default one without a page or without content."""
    try:
        return StatusReader(path, kind).read()
    except FileNotFoundError:
        return kind()


class Backoff:
    """Rests between two looks at what another process publishes, each twice as long as the last.

    Training shares its cores with those who look: a look every 5 ms takes 3 % of a core.
    """

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._first, self._longest = first_seconds, longest_seconds
        self._seconds = first_seconds

    def next_seconds(self) -> float:
        """Return how long to rest now."""
        seconds = self._seconds
        self._seconds = min(2 * seconds, self._longest)
        return seconds

    def reset(self) -> None:
        """Begin with the first rest again, because something was new."""
        self._seconds = self._first


class Complaints:
    """Errors of several tasks of the writer, combined in one field of its page."""

    def __init__(self, page: StatusPage[WriterStatus], field: str) -> None:
        self._page = page
        self._field = field
        self._errors: dict[str, str] = {}

    def report(self, task: str, error: str) -> None:
        """Publish the errors of all tasks; a task's success clears only its own error."""
        self._errors[task] = error
        text = "; ".join(filter(None, self._errors.values()))
        if text != getattr(self._page.status, self._field):
            self._page.update(**{self._field: text})


def state_step(stage: StagingFolder) -> int:
    """Return the newest step whose state is in memory as a whole, -1 for none."""
    guests = map(stage.guest_saved, stage.saved_guests())
    pages = (stage.survivor_saved, *guests, *(path for _, path in stage.kept_pages()))
    images = [read_status(page, SavedStatus).image for page in pages]
    if not is_log(stage):
        images.append(read_status(stage.trainer_status, TrainerStatus).image)
    steps = [image.step for image in images if image is not None]
    return max([read_status(stage.replica_status, ReplicaStatus).step, *steps])


def is_log(stage: StagingFolder) -> bool:
    """Return whether steps lie here that become durable; else a log is a replica's queue, or leads on from images here."""
    is_of_survivors = stage.survivor_status.exists() and not stage.chunks()
    return not (stage.replica_status.exists() or stage.ring.exists() or is_of_survivors)


def holds_state(stage: StagingFolder) -> bool:
    """Return whether a state may lie in memory as a whole: a replica's, one that survivors saved, a copy."""
    return not is_log(stage) or stage.keeper is not None
