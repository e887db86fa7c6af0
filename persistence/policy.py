"""How much of a run's past is kept."""

from __future__ import annotations

from dataclasses import dataclass

from lowdiff.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps of a run stay; a step stays if any rule keeps it.

    The *window* are the newest snapshots and every step after the oldest of them. The newest
    snapshot, what is after it, and pinned steps stay whatever the rules say.

    Attributes:
        snapshots: The window holds at least so many of the newest snapshots; None for all.
        every_steps: Each step that is a multiple of this stays for ever; None for no such steps.
            The trainer takes a snapshot at each, which then stays alone, without differentials.
        age_hours: The window also holds every snapshot younger than this.
        total_bytes: The window shrinks until all that stays, of all ranks, fits into so many
            bytes. Kept and pinned steps count but never go.

    Raises:
        ConfigError: If a value cannot work.
    """

    snapshots: int | None = 2
    every_steps: int | None = None
    age_hours: float | None = None
    total_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.snapshots is not None and self.snapshots < 1:
            raise ConfigError(
                f"retention keeps at least 1 snapshot, got {self.snapshots}; None keeps all"
            )
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"every_steps counts steps, at least 1, got {self.every_steps}")
        if self.age_hours is not None and not self.age_hours > 0:
            raise ConfigError(f"age_hours must be positive, got {self.age_hours}")
        if self.total_bytes is not None and self.total_bytes < 1:
            raise ConfigError(f"total_bytes must be positive, got {self.total_bytes}")

    def last_kept_step(self, first: int, last: int) -> int | None:
        """Largest step in ``first ... last``, inclusive, that is kept for ever; None for none."""
        if self.every_steps is None:
            return None
        step = last - last % self.every_steps
        return step if step >= max(first, 1) else None
