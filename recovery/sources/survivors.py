"""What survivors hold of a rank: images of its share that it or others saved, and the trainer's last image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.records import RankRecords
from lowdiff.persistence.staging.status import SavedStatus, read_status
from lowdiff.recovery.sources.folders import in_own_folder, is_at_rest, is_whole, trainer_image
from lowdiff.recovery.sources.inheritance import items_of_dead, items_of_lost
from lowdiff.recovery.sources.source import Source
from lowdiff.types import Fence


def held_by_survivors(
    catalog: Catalog, fence: Fence, rank: int, passed_over: dict[int, str]
) -> list[Source]:
    """Return the images of a rank: those in its own folder, and at other steps those that other nodes saved."""
    sources = in_own_folder(catalog, fence, rank, RankRecords(), _in_folder)
    stages = [stage for stage in catalog.staging if stage.incarnation == fence.incarnation]
    with suppress(FileNotFoundError):  # a trainer attached just now, and clears a folder
        sources += _guests(stages, rank, {source.step for source in sources}, passed_over)
    return sources


def _in_folder(stage: StagingFolder, records: RankRecords) -> list[Source]:
    images = trainer_image(stage, records)
    mark = read_status(stage.survivor_saved, SavedStatus).image
    if mark is not None and is_whole(stage.survivor_image, mark):
        images.append(Source(stage.survivor_image, mark.step, mark.step))
    return images


def _guests(
    stages: Sequence[StagingFolder], rank: int, steps: set[int], passed_over: dict[int, str]
) -> list[Source]:
    """Return what survivors on other nodes saved for a rank, with items that are inherited.

    Args:
        stages: Folders of the incarnation.
        rank: The rank.
        steps: Steps whose images the rank's own node has, with all items.
        passed_over: See `Held`.
    """
    by_rank = {stage.rank: stage for stage in stages}
    images: dict[int, Source] = {}
    for stage in stages:
        if rank not in stage.saved_guests() or not is_at_rest(stage):
            continue
        saved = read_status(stage.guest_saved(rank), SavedStatus)
        maker = by_rank.get(saved.maker)
        if saved.image is None or maker is None or saved.image.step in {*steps, *images}:
            continue
        step, dead, takes = saved.image.step, by_rank.get(rank), saved.takes_buffers
        if dead is not None and is_at_rest(dead):
            items, doubt = items_of_dead(step, rank, maker, dead, takes_buffers=takes)
        else:
            items, doubt = items_of_lost(step, rank, maker, saved, takes_buffers=takes)
        path = stage.guest(rank)
        if items is not None and is_whole(path, saved.image):
            images[step] = Source(path, step, step, items=items, doubt=doubt)
            continue
        # The mark of an image comes last, so the image was whole once.
        why = doubt if items is None else f"what {path} holds fails its checksum"
        passed_over[step] = (
            f"step {step}, which rank {saved.maker} saved for all, is passed over: of rank {rank}, {why}"
        )
    return list(images.values())
