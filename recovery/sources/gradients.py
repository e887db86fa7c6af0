"""What strategy gradients holds of a rank: two images of its share, and the gradients since the older one."""

from __future__ import annotations

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.run.records import RankRecords
from lowdiff.recovery.sources.copies import with_copies
from lowdiff.recovery.sources.folders import kept_images
from lowdiff.recovery.sources.source import Source


def _in_own_folder(stage: StagingFolder, records: RankRecords) -> list[Source]:
    # Images of a copy are listed with all copies.
    return [] if stage.keeper is not None else list(kept_images(stage, records))


held_by_gradients = with_copies(_in_own_folder, replays_shares=True)
