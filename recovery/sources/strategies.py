"""What each strategy holds of a rank, by the name in the fence."""

from __future__ import annotations

from collections.abc import Mapping

from lowdiff.recovery.sources.copies import nothing_else, with_copies
from lowdiff.recovery.sources.log import held_by_log
from lowdiff.recovery.sources.replica import in_replica_folder
from lowdiff.recovery.sources.source import Held
from lowdiff.recovery.sources.survivors import held_by_survivors

HELD: Mapping[str, Held] = {
    "log": held_by_log,
    "gradients": with_copies(nothing_else, replays_shares=True),
    "replica": with_copies(in_replica_folder, replays_shares=True),
    "survivors": held_by_survivors,
}
