"""A source: what one rank's share of the state can be rebuilt from, beside complete snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.records import RankRecords
from lowdiff.recovery.load import load_shard
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import Fence


@dataclass(frozen=True, slots=True)
class Source:
    """One rank's share of the state, in an image.

    Attributes:
        path: The file.
        step: The step of the share.
        reach: The step of its furthest part: the least one that the share can be brought to.
        records: The rank's records, if a share is replayed by them alone; empty if not.
        items: The items, if the image was saved without them; None if it has them.
        doubt: What the user should know of these items.
    """

    path: Path
    step: int
    reach: int
    records: RankRecords = field(default_factory=RankRecords)
    items: Mapping[str, bytes] | None = None
    doubt: str = ""

    def load(self, fence: Fence) -> tuple[RecoveredState, bool]:
        """Return the share in private memory, and whether only whole tensors reproduce the run's bits.

        Raises:
            DamagedFile: If the file is not what was published.
            ReplayMismatch: If a step that was begun does not replay.
        """
        share = load_shard(self.path, self.step, fence)
        if self.items is not None:
            share.items = [{name: data for name, data in self.items.items() if data}]
        return share, False


#: Returns what a strategy holds of a rank while nobody writes it. Adds to its last argument the steps that were
#: saved and cannot be had, with the reason.
Held = Callable[[Catalog, Fence, int, dict[int, str]], list[Source]]
