"""The state from one source per rank: each share is loaded, brought to the common step and joined to the others."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowdiff.core.events import Code
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery.load import empty_state, load_constants, merge
from lowdiff.recovery.plan import PlannedStep
from lowdiff.recovery.replay.optimizers import settle_kernels
from lowdiff.recovery.replay.replayer import ReplayOptions, step_through
from lowdiff.recovery.sources.chooser import MemoryPlan
from lowdiff.recovery.state import RecoveredState


def shares_joined(
    catalog: Catalog, plan: MemoryPlan, options: ReplayOptions
) -> tuple[RecoveredState, bool]:
    """Return all ranks' shares at the common step, and whether only whole tensors reproduce the run's bits.

    The tensors of replicas are private views of their files, which stay as they are: reading costs no copy.

    Raises:
        DamagedFile: If a source is not what was published.
        ReplayMismatch: If a step on the way to the common one does not replay.
    """
    settle_kernels()
    fence = catalog.incarnations[plan.incarnation]
    loaded = [source.load(fence) for source in plan.sources]
    for rank, source in enumerate(plan.sources):
        if source.doubt:
            Code.ITEMS_INHERITED.warn(source.doubt, rank=rank, step=source.step)
    # What one replica has seen of its share holds for all of the state.
    is_whole = options.whole or any(needs_whole for _, needs_whole in loaded)
    options = replace(options, whole=is_whole, device=torch.device("cpu"))
    state = empty_state(plan.common, fence)
    for source, (share, _) in zip(plan.sources, loaded, strict=True):
        own_steps = [
            PlannedStep(step, plan.incarnation, (source.records,))
            for step in range(share.step + 1, plan.common + 1)
        ]
        for _ in step_through(share, own_steps, fence, options):
            pass
        merge(state, share)
    constants = load_constants(RunFolder(catalog.root), fence)
    state.items = [{**constants, **items} for items in state.items]
    return state, is_whole
