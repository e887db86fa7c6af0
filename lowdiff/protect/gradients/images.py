"""Images that stay in memory for gradients to lead on from; some of them become durable."""

from __future__ import annotations

import os

from lowdiff.commit.images import Images
from lowdiff.commit.storage import Look, Trainer
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.files.paths import NUM_KEPT, StagingFolder
from lowdiff.persistence.format.image import ImageFile
from lowdiff.persistence.staging.status import SavedStatus, StatusPage


class Slots:
    """Two images of a rank's share, which take turns: the newer one stays while the older one is written over.

    A mark goes before its image is written over, so whoever recovers finds only whole ones.

    Args:
        folder: Where they lie; none is there yet.
    """

    def __init__(self, folder: StagingFolder) -> None:
        self._folder = folder
        self._marks: list[ImageMark | None] = [None] * NUM_KEPT
        self._files = [ImageFile(folder.kept(slot)) for slot in range(NUM_KEPT)]
        self._pages = [
            StatusPage(folder.kept_saved(slot), SavedStatus()) for slot in range(NUM_KEPT)
        ]

    @property
    def marks(self) -> list[ImageMark]:
        """Of the images that are whole."""
        return [mark for mark in self._marks if mark is not None]

    @property
    def next(self) -> int:
        """The slot that the next image takes: an empty one, or that of the older image."""
        steps = [-1 if mark is None else mark.step for mark in self._marks]
        return steps.index(min(steps))

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed an image that is whole, or the page that says so."""
        folder = self._folder
        files = (f(mark.slot) for mark in self.marks for f in (folder.kept, folder.kept_saved))
        return not all(map(os.path.exists, files))

    def mark_of(self, slot: int) -> ImageMark | None:
        """Return the mark of a slot's image."""
        return self._marks[slot]

    def clear(self, slot: int) -> ImageFile:
        """Have a slot's image count no more; returns the file for the next one."""
        self._set(slot, None)
        return self._files[slot]

    def mark(self, mark: ImageMark) -> None:
        """Have an image count that is whole."""
        self._set(mark.slot, mark)

    def _set(self, slot: int, mark: ImageMark | None) -> None:
        self._marks[slot] = mark
        self._pages[slot].update(image=mark)

    def release(self) -> None:
        """Keep no file mapped."""
        for file in self._files:
            file.release()


class KeptImages(Images):
    """Snapshots that lie in two slots, of which the writer is told where they are to become durable."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._slots = Slots(trainer.folder)
        self._slot, self._is_due, self._due_step = 0, True, -1

    @property
    def due_step(self) -> int:
        """See `Images`."""
        return self._due_step

    @property
    def oldest_step(self) -> int:
        """Step of the older image: gradients up to it lead nowhere. -1 before the first."""
        return min((mark.step for mark in self._slots.marks), default=-1)

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed what recovery begins from."""
        return self._slots.is_gone

    @property
    def bytes_held(self) -> int:
        """Bytes of both."""
        return sum(mark.bytes for mark in self._slots.marks)

    def is_free(self, look: Look, *, is_due: bool) -> bool:
        """See `Images`: one at a time is on its way to the disk, and is not written over."""
        older = self._slots.mark_of(self._slots.next)
        is_in_the_way = older is not None and older.step == self._due_step
        is_durable = look.writer.durable_snapshot >= self._due_step
        return is_durable or not (is_due or is_in_the_way)

    def begin(self, step: int, *, is_due: bool) -> None:
        """See `Images`."""
        self._slot, self._is_due = self._slots.next, is_due
        self._file = self._slots.clear(self._slot)
        super().begin(step, is_due=is_due)

    def show(self, size: int, checksum: int) -> ImageMark:
        """See `Images`: one that stays in memory settles nothing that is owed to a disk."""
        is_owed = self.is_owed and not self._is_due
        mark = super().show(size, checksum)
        self.is_owed = is_owed
        return mark

    def _publish(self, size: int, checksum: int) -> ImageMark:
        """See `Images`: the writer is told of those that are to be durable."""
        mark = ImageMark(self.step, size, checksum, self._slot)
        self._slots.mark(mark)
        if self._is_due:
            self._tell(mark)
        return mark

    def _tell(self, mark: ImageMark) -> None:
        self._due_step = mark.step
        self._trainer.page.update(image=mark)

    def make_due(self) -> None:
        """See `Images`."""
        mark = self._slots.mark_of(self._slot)
        if mark is not None and not self._is_due:
            self._tell(mark)
        self._is_due = True

    def give_up_due(self, durable_snapshot: int) -> None:
        """Let the next image take the place of one that does not become durable; another one is owed to the disk."""
        # Before it is written over: the writer passes over it.
        self._trainer.page.update(image=None)
        self._due_step = durable_snapshot
        self.is_owed = True

    def begin_anew(self, durable_snapshot: int) -> None:
        """See `Images`: in memory there is none any more."""
        self.step = self.staged_step = self._due_step = -1
        self.is_owed = True
        self._slots = Slots(self._trainer.folder)

    def release(self) -> None:
        """See `Images`."""
        self._slots.release()
