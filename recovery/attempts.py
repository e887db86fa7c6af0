"""What goes wrong in a replay: blocks that do not reproduce the live bits, and what fits no optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lowdiff.errors import DamagedFile, LowDiffError, ReplayMismatch
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.state import RecoveredState
from lowdiff.recovery.unit import UNREPLAYABLE, is_out_of_means

_logger = logging.getLogger(__name__)


@contextmanager
def unfit_is_damaged(root: Path, what: str) -> Iterator[None]:
    """What fits no optimizer is damaged; that a machine has nothing left says nothing about it.

    Checksums hold for whatever a stranger has written.

    Args:
        root: The run's folder.
        what: What is replayed.

    Raises:
        DamagedFile: Instead of what the optimizer says.
    """
    try:
        yield
    except LowDiffError:
        raise
    except UNREPLAYABLE as error:
        if is_out_of_means(error):
            raise
        raise DamagedFile(root, f"{what} cannot be replayed ({error!r:.200})") from error


def in_blocks_or_whole(
    attempt: Callable[[ReplayOptions], RecoveredState], options: ReplayOptions
) -> RecoveredState:
    """Recover, checked against the digests that the live run recorded.

    Where blocks do not reproduce them (an unusual kernel or thread count), all is done once more with
    parameters replayed whole.

    Args:
        attempt: Does it, from the beginning.
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
