"""Images that stay in memory for gradients to lead on from; some of them become durable."""

from __future__ import annotations

from lowdiff.commit.images import Images
from lowdiff.commit.storage import Look, Trainer
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.files.paths import NUM_KEPT
from lowdiff.persistence.format.image import ImageFile
from lowdiff.persistence.staging.status import SavedStatus, StatusPage


class KeptImages(Images):
    """Two images of a rank's share, which take turns: the newer one stays while the older one is written over.

    A mark goes before its image is written over, so whoever recovers finds only whole ones.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._due_step = -1
        self._make()

    def _make(self) -> None:
        """Begin without an image, in a folder that has none."""
        folder = self._trainer.folder
        self._marks: list[ImageMark | None] = [None] * NUM_KEPT
        self._files = [ImageFile(folder.kept(slot)) for slot in range(NUM_KEPT)]
        self._pages = [
            StatusPage(folder.kept_saved(slot), SavedStatus()) for slot in range(NUM_KEPT)
        ]
        self._slot = 0
        self._is_due = True

    @property
    def due_step(self) -> int:
        """See `Images`."""
        return self._due_step

    @property
    def oldest_step(self) -> int:
        """Step of the older image: gradients up to it lead nowhere. -1 before the first."""
        return min((mark.step for mark in self._marks if mark is not None), default=-1)

    @property
    def bytes_held(self) -> int:
        """Bytes of both."""
        return sum(mark.bytes for mark in self._marks if mark is not None)

    def is_free(self, look: Look, *, is_due: bool) -> bool:
        """See `Images`: one at a time is on its way to the disk, and is not written over."""
        is_durable = look.writer.durable_snapshot >= self._due_step
        return is_durable or not (is_due or self._is_due_next)

    @property
    def _is_due_next(self) -> bool:
        """Whether the next image takes the place of the one that is to be durable."""
        older = self._marks[self._older]
        return older is not None and older.step == self._due_step

    def give_up_due(self, durable_snapshot: int) -> None:
        """Let the next image take the place of one that does not become durable; another one is owed to the disk."""
        self._trainer.page.update(
            image=None
        )  # before it is written over: the writer passes over it
        self._due_step = durable_snapshot
        self.is_owed = True

    @property
    def _older(self) -> int:
        """The slot that the next image takes: an empty one, or that of the older image."""
        return min(
            range(NUM_KEPT),
            key=lambda slot: -1 if (mark := self._marks[slot]) is None else mark.step,
        )

    def begin(self, step: int, *, is_due: bool) -> None:
        """See `Images`."""
        self._slot = self._older
        self._mark(None)
        self._file = self._files[self._slot]
        self._is_due = is_due
        super().begin(step, is_due=is_due)

    def _mark(self, mark: ImageMark | None) -> None:
        self._marks[self._slot] = mark
        self._pages[self._slot].update(image=mark)

    def _publish(self, size: int, checksum: int) -> ImageMark:
        """See `Images`: the writer is told of those that are to be durable."""
        mark = ImageMark(self.step, size, checksum, self._slot)
        self._mark(mark)
        if self._is_due:
            self._tell(mark)
        return mark

    def _tell(self, mark: ImageMark) -> None:
        self._due_step = mark.step
        self._trainer.page.update(image=mark)

    def show(self, size: int, checksum: int) -> ImageMark:
        """See `Images`: one that stays in memory settles nothing that is owed to a disk."""
        is_owed = self.is_owed and not self._is_due
        mark = super().show(size, checksum)
        self.is_owed = is_owed
        return mark

    def make_due(self) -> None:
        """See `Images`."""
        mark = self._marks[self._slot]
        if mark is not None and not self._is_due:
            self._tell(mark)
        self._is_due = True

    def begin_anew(self, durable_snapshot: int) -> None:
        """See `Images`: in memory there is none any more."""
        self.step = self.staged_step = self._due_step = -1
        self.is_owed = True
        self._make()

    def release(self) -> None:
        """See `Images`."""
        for file in self._files:
            file.release()
