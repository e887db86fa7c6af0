"""Things that training hands each step to: its queue, what survivors need, copies on other nodes.

A step goes to the queue first, and what others need of its result travels in the value that is handed on. What is
staged ahead of a step goes to the queue last, which alone waits there, or finds that staging is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.storage import Look
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.protocols import Reducer
from lowdiff.step.states import Sealed
from lowdiff.types import Section


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What an optimizer is about to use.

    Attributes:
        step: The step under way.
        number: Which optimizer step of the loop body it is, from 0.
        sections: The gradients of this rank's share, where they lie now; none where they are staged with the step.
        reducer: Has those of other ranks' shares; None where they are staged with the step.
    """

    step: int
    number: int
    sections: Sequence[Section]
    reducer: Reducer | None


@dataclass(frozen=True, slots=True, eq=False)
class Handed:
    """A step on its way through the sinks.

    Attributes:
        sealed: The step.
        look: At storage; a newer one once a sink has waited.
        checksum: CRC-32C of the body of the record that the queue staged; None where it staged none.
        staged_bytes: Staged so far.
    """

    sealed: Sealed
    look: Look
    checksum: int | None = None
    staged_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A full snapshot that is staged.

    Attributes:
        sealed: The step.
        path: Where this rank's share lies.
        mark: Of that file.
    """

    sealed: Sealed
    path: Path
    mark: ImageMark


class Sink:
    """Takes what training hands on. By default it keeps nothing, and holds nothing up.

    Large because it is all that can be handed on.

    Attributes:
        takes_images_at_once: Whether a snapshot is handed on while the live state is that of its step, which stops
            training. Else one that leaves an accelerator is handed on later, by another thread.
    """

    takes_images_at_once: ClassVar[bool] = False

    def is_gone(self, look: Look) -> bool:
        """Whether somebody removed or damaged what it keeps in staging memory."""
        return False

    def owes_snapshot(self, look: Look) -> bool:
        """Whether only a full snapshot makes further steps of use to it."""
        return False

    def is_as_committed(self) -> bool:
        """Whether nothing wrote, since the last commit, to what it would save; for any thread."""
        return True

    def items(self, step: int) -> Mapping[str, bytes] | None:
        """Return all items as of a step; None where it does not keep them."""
        return None

    def stage_base(self, base: Handed) -> Handed:
        """Take what an incarnation starts from.

        Raises:
            StorageError: If there is no memory.
        """
        return base

    def stage_ahead(self, ahead: Ahead) -> None:
        """Take what an optimizer is about to use, before its step ends."""

    def stage(self, handed: Handed) -> Handed:
        """Take a step, as soon as there is room and little enough is at risk.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            StorageError: If there is no memory, or staging was removed.
        """
        return handed

    def snapshot(self, snapshot: Snapshot) -> None:
        """Take a full snapshot."""

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """Return fields of `RankNews` that say how it stands after a step."""
        return {}

    def hear(self, heard: Sequence[RankNews]) -> None:
        """Note what all ranks said after the step that was staged last."""

    def keep_up(self, step: int) -> None:
        """Wait where what it keeps is too far behind the step that was staged last."""

    def show(self, step: int, committed_step: int, told_step: int) -> int:
        """Say to which step replicas may go on, and tell those of this sink.

        Args:
            step: The newest staged step.
            committed_step: The newest that all ranks have staged.
            told_step: To which step this rank's own replica was allowed to go on before.
        """
        return committed_step

    def begin_anew(self, step: int) -> None:
        """Go on after a step in a folder that was made anew.

        Raises:
            StorageError: If there is no memory for it.
        """

    def figures(self) -> dict[str, Any]:
        """Return parts of ``stats()``; for any thread."""
        return {}
