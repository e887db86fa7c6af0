"""Replaying in blocks, and once more in whole tensors where blocks do not reproduce the live bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from lowdiff.errors import ReplayMismatch
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.state import RecoveredState

_logger = logging.getLogger(__name__)


def in_blocks_or_whole(
    attempt: Callable[[ReplayOptions], RecoveredState], options: ReplayOptions
) -> RecoveredState:
    """Recover, checked against the digests that the live run recorded.

    Where blocks do not reproduce them (an unusual kernel or thread count), all is done once more with
    parameters replayed whole.

    Args:
        attempt: Does it, from the beginning. Of a group, it fails for this on all ranks or on none.
        options: How.

    Raises:
        ReplayMismatch: If whole parameters do not reproduce them, either.
    """
    try:
        return attempt(options)
    except ReplayMismatch as error:
        if options.whole:
            raise
        why = str(error)
    # Not in the clause above, and not with the error itself, which holds on to the first state.
    _logger.warning("%s; replaying whole tensors instead of blocks", why)
    if options.movements is not None:
        options.movements.clear()
    return attempt(replace(options, whole=True))
