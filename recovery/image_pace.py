"""Which images a replica makes for the disk where that does not take all that are due."""

from __future__ import annotations

from lowdiff.persistence.replica_status import ReplicaSettings

#: Intervals between images at most, so that a disk which stood still is not left idle for as long again.
_LARGEST_STRIDE = 16


class ImagePace:
    """One rank's: every image that is due, or every second, fourth, ... one.

    Each replica goes by its own disk, but a snapshot is one only with every rank's image of a step. So
    whoever has to leave one out makes only those of multiples of twice the interval from then on: what
    the slower ranks make, all make, because the multiples of a larger stride are also those of a
    smaller one.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._stride = 1
        self._made = -1

    def takes(self, step: int, *, is_free: bool) -> bool:
        """Whether to make the image of a step; asked at every step of which one is due.

        Args:
            step: The step.
            is_free: Whether the image before is durable.
        """
        every, kept = self._settings.image_every, self._settings.keep_every
        if is_free and step - self._made <= self._stride * every // 2:
            self._stride = max(1, self._stride // 2)  # it took less than half of the time there is
        is_its_turn = bool(every) and step % (self._stride * every) == 0
        if not (is_its_turn or (kept and step % kept == 0)):
            return False
        if is_free:
            self._made = step
        else:
            self._stride = min(2 * self._stride, _LARGEST_STRIDE)
        return is_free
