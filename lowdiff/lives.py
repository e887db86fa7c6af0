"""What the lives of a run measured, as the tuner wants it; needs no torch."""

from __future__ import annotations

import logging

from lowdiff.errors import LowDiffError
from lowdiff.persistence.measurements import Measurements, read_measurements
from lowdiff.persistence.paths import RunFolder
from lowdiff.tuner.measured import Life

_logger = logging.getLogger(__name__)


def read_lives(folder: RunFolder, run_id: str, rank: int) -> list[Measurements]:
    """One rank's measurements of all lives, oldest first; damaged ones are passed over."""
    found = []
    for path in folder.all_measurements():
        try:
            measured = read_measurements(path)
        except (LowDiffError, OSError) as error:
            _logger.warning("measurements are passed over: %s", error)
            continue
        if measured.run_id == run_id and measured.rank == rank:
            found.append(measured)
    return found


def life_of(measured: Measurements) -> Life:
    """As the tuner wants it."""
    return Life(measured.incarnation, measured.samples, measured.facts)
