"""What a run's object store has to do with its beginning: history that this node lacks.

Only rank 0 speaks to the store; from its run folder the others get what they cannot see.
"""

from __future__ import annotations

import logging

from lowdiff.agreement import Ranks
from lowdiff.errors import StoreError
from lowdiff.persistence.fetching import (
    Listing,
    fetch_fences,
    fetch_history,
    read_store_run_id,
)
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.settings import Settings

_logger = logging.getLogger(__name__)


def run_in_store(settings: Settings, ranks: Ranks) -> str | None:
    """Id of the run that the store holds, the same on every rank.

    None if it holds none, if there is no store, or if it does not answer.

    Raises:
        StoreError: If it does not answer, and either no rank has history on its disk, so that
            training might begin afresh by mistake, or ``on_error="raise"``.
    """
    has_history = any(ranks.gather(next(settings.folder.fences(), None) is not None))
    run_id: str | None = None
    with ranks.together():
        if settings.store is not None and ranks.rank == 0:
            try:
                run_id = read_store_run_id(ObjectStore(settings.store))
            except StoreError as error:
                if not has_history or settings.on_error == "raise":
                    raise
                _logger.warning("%s; going on with the history in %s", error, settings.run)
    found: str | None = ranks.gather(run_id)[0]
    return found


def fetch_from_store(
    settings: Settings,
    ranks: Ranks,
    step: int | None,
    *,
    fences_only: bool,
) -> None:
    """Bring what resuming at ``step`` needs into rank 0's run folder.

    Args:
        settings: With a store that holds this run.
        ranks: All of them.
        step: The step to restore; None for the newest.
        fences_only: When nothing is restored, and only the number of the incarnation matters.

    Raises:
        StoreError: If the store stopped answering.
        RunMismatch: If its history parted from that of the run folder.
    """
    assert settings.store is not None
    with ranks.together():
        if ranks.rank == 0:
            store = ObjectStore(settings.store)
            if fences_only:
                fetch_fences(store, settings.folder, Listing.of_store(store))
            else:
                fetch_history(store, settings.folder, step)
