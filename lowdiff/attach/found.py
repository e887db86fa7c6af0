"""What an incarnation begins with, as values: what is asked for, what there is, and what was recovered of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lowdiff.attach.discover import agreed_run, fetch_from_store, share_files, shared_out
from lowdiff.attach.memory import node_of
from lowdiff.attach.past import past_of
from lowdiff.attach.resume import Start
from lowdiff.attach.together import Wish
from lowdiff.commit.run_lock import RunLock
from lowdiff.core.placement import Node
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.retention.collect import retention_locked
from lowdiff.persistence.run.catalog import Catalog, next_incarnation, scan
from lowdiff.persistence.writer.handle import WaitingWriter
from lowdiff.settings import Settings
from lowdiff.step.ddp_hook import HookState
from lowdiff.tuner.measured import Past
from lowdiff.types import Decision, Origin


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a trainer asks for.

    Attributes:
        settings: Of the run.
        wish: What is to be restored.
        hook: Of DDP or FSDP; None where neither has one.
        waiting: A writer that was started before, and waits for an incarnation; None for a new one.
    """

    settings: Settings
    wish: Wish
    hook: HookState | None
    waiting: WaitingWriter | None


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What there is of a run, as all its ranks agree.

    Attributes:
        lock: This rank's, on the run.
        catalog: What staging and the run folder hold.
        number: Of the next incarnation, as far as this rank knows.
        left: Folders of dead incarnations in staging memory that this rank's writer adopts.
        has_staged: Whether this machine has anything of the run in staging memory.
        past: What was measured before.
        node: Which ranks are on other nodes.
    """

    lock: RunLock
    catalog: Catalog
    number: int
    left: Sequence[StagingFolder]
    has_staged: bool
    past: Past
    node: Node


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """What an incarnation starts from, in the live objects.

    Attributes:
        start: The step, and what goes on record of it.
        lost_tail: What was decided about lost steps; see `Fence`.
        origin: Where weights were taken from; see `Fence`.
    """

    start: Start
    lost_tail: Decision | None
    origin: Origin | None


def find(asked: Asked, ranks: Ranks, lock: RunLock, held: ExitStack) -> Found:
    """Find out what there is of the run; on all ranks together.

    Args:
        asked: What the trainer asks for.
        ranks: All of them.
        lock: Held by this rank.
        held: Keeps retention from removing what was found, and the files that other ranks sent, until the fences say
            what the base is.
    """
    settings, wish = asked.settings, asked.wish
    run_id, stages, is_in_store = agreed_run(settings, ranks)
    past = past_of(settings, ranks, run_id, stages)
    node = node_of(settings, ranks)
    wait, folder = settings.lock_seconds, settings.folder
    with ranks.together():
        held.enter_context(retention_locked(folder, timeout_seconds=wait, shared=True))
    imported = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="lowdiff-")))
    roots = [settings.staging_root, imported]
    share_files(settings, ranks, run_id, imported)
    if is_in_store:
        is_left = wish.restore == "none"
        fetch_from_store(settings, ranks, wish.own_step, fences_only=is_left)
        share_files(settings, ranks, run_id, imported)
    with ranks.together():
        catalog = scan(folder, roots)
        number = next_incarnation(folder, run_id, roots)
    left = shared_out(settings, ranks, run_id, stages)
    return Found(lock, catalog, number, left, bool(stages), past, node)
