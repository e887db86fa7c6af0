"""What a replica tells its trainer, the writer of its images, and recovery."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lowdiff.persistence.detached import ProcessSettings
from lowdiff.persistence.page import ImageMark, Page, PageReader, fitting, with_mark
from lowdiff.persistence.paths import StagingFolder

_ERROR_BYTES = 1000


def has_replica(stage: StagingFolder) -> bool:
    """Whether the state of that life is kept by a replica, and its log is only what followed."""
    return stage.replica_status.exists()


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


class ReplicaPage:
    """The replica's end."""

    def __init__(self, path: Path) -> None:
        self._page = Page(path)
        self.status = read_replica_status(path)

    def update(self, **changes: object) -> None:
        """Change some fields and publish them together."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        error = fitting(self.status.error, _ERROR_BYTES)
        self._page.publish({**asdict(self.status), "error": error})


class ReplicaReader:
    """The other end; keeps the page mapped."""

    def __init__(self, path: Path) -> None:
        self._page = PageReader(path)

    def read(self) -> ReplicaStatus:
        """The newest whole status."""
        content = self._page.read()
        return ReplicaStatus(**with_mark(content)) if content else ReplicaStatus()


def read_replica_status(path: Path) -> ReplicaStatus:
    """What a replica said last.

    Raises:
        FileNotFoundError: If there was none.
    """
    return ReplicaReader(path).read()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings(ProcessSettings):
    """All a replica needs to know.

    Attributes:
        image_every: Steps between images for the disk, all ranks alike; 0 for none.
        keep_every: The same for images that are kept for ever; 0 for none.
        waits: Whether it waits for the writer where the next image is due and the last one is not
            durable yet; else it goes on, and that image is left out.
        imports: Modules of registered optimizers.
        optimizers: Module, qualified name and granularity of each such optimizer of the run.
        scalar_state: Entries of their state that hold one number.
        import_path: Where they are looked for after everything else: the trainer's own folders, in
            order. Empty where nothing is imported.
    """

    image_every: int
    keep_every: int
    waits: bool
    imports: tuple[str, ...] = ()
    optimizers: tuple[Sequence[str], ...] = ()
    scalar_state: tuple[str, ...] = ()
    import_path: tuple[str, ...] = ()

    def is_image_due(self, step: int) -> bool:
        """Whether the disk gets an image of this step, on all ranks alike."""
        return any(every and step % every == 0 for every in (self.image_every, self.keep_every))

    @classmethod
    def from_json(cls, text: str) -> ReplicaSettings:
        """What ``to_json`` made."""
        return cls(**json.loads(text))
