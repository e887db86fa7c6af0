"""How an incarnation ends when nothing failed: with a snapshot that all ranks take together."""

from __future__ import annotations

import logging

from lowdiff.errors import StorageError
from lowdiff.opening import Opened

_logger = logging.getLogger(__name__)

_MEET_SECONDS = 60.0


def take_last_snapshot(opened: Opened) -> bool:
    """Make staging memory, which alone holds the newest residual, unnecessary.

    Returns:
        Whether a snapshot of the last step was staged on every rank.
    """
    if not opened.ranks.meet(_MEET_SECONDS):
        _logger.warning(
            "another rank did not reach close() within %.0f s, so no last snapshot is taken; "
            "the next attach resumes from the last commit, with the help of %s",
            _MEET_SECONDS,
            opened.staging.root,
        )
        return False
    if all(opened.ranks.gather(opened.session.is_as_committed())):
        error = ""
        try:
            opened.session.snapshot(required=True)
        except StorageError as failure:
            error = str(failure)
        failures = list(filter(None, opened.ranks.gather(error)))
        if failures:
            _logger.warning(
                "no last snapshot is taken: %s; the next attach resumes with the help of %s",
                failures[0],
                opened.staging.root,
            )
        return not failures
    _logger.warning(
        "the model changed after its last commit (step %d), so no last snapshot is taken; "
        "the next attach resumes from that commit, with the help of %s",
        opened.session.step,
        opened.staging.root,
    )
    return False
