"""What a log holds of a rank beside its records: images, which count where a rank's log is lost."""

from __future__ import annotations

from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery.sources.copies import with_copies
from lowdiff.recovery.sources.folders import trainer_image
from lowdiff.recovery.sources.source import Source
from lowdiff.types import Fence

_images = with_copies(trainer_image, replays_shares=False)


def held_by_log(
    catalog: Catalog, fence: Fence, rank: int, passed_over: dict[int, str]
) -> list[Source]:
    """Return the images of a rank, if the folder of some rank is gone and other nodes keep copies.

    Otherwise the records lead to all that is committed, and the residuals are there.
    """
    folders = {stage.rank for stage in catalog.staging if stage.incarnation == fence.incarnation}
    has_copies = any(copy.incarnation == fence.incarnation for copy in catalog.copies)
    if len(folders) == fence.world_size or not has_copies:
        return []
    return _images(catalog, fence, rank, passed_over)
