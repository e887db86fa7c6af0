"""What ``Checkpointer.stats()`` tells of a run while it is attached."""

from __future__ import annotations

from typing import Any

from lowdiff.counters import writer_document
from lowdiff.opening import Opened


def stats_of(opened: Opened) -> dict[str, Any]:
    """Counters, positions and histograms of this rank; for any thread."""
    session = opened.session
    stager = session.stager
    return {
        "rank": opened.ranks.rank,
        "staging": str(opened.staging.folder.root),
        **stager.counters.document(),
        **writer_document(stager.writer.read_status()),
        **stager.figures(),
        "durable_step": stager.durable_step,
        "snapshot_step": stager.snapshot_step,
        "committed_step": session.committed_step,
        "diverged_ranks": list(session.health.ranks_apart),
        "large_items": session.large_items,
        "writer_pid": stager.writer.pid,
        "writer_restarts": stager.writer.restarts,
    }
