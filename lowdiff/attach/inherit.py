"""The error-feedback residual that a rank goes on with: its own, or of other ranks the mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from lowdiff.compressors import from_settings
from lowdiff.core.events import Code
from lowdiff.core.layout import shares_of, torch_dtype, trained_by
from lowdiff.errors import DamagedFile
from lowdiff.model.binding import Attached
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.sections import max_payload_bytes
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.protocols import Compressor
from lowdiff.recovery.load import parameter_of
from lowdiff.recovery.plan import spans_of
from lowdiff.recovery.state import RecoveredState
from lowdiff.settings import Settings
from lowdiff.step.residual import read_residual
from lowdiff.types import Fence, Layout, ResidualMark

#: An older residual is of little use, and each record on the way to it is read whole.
_MOST_STEPS_BACK = 100
#: How many later steps' residuals are looked for where none before is there.
_MOST_STEPS_ON = 8


def inherit_residual(
    settings: Settings, catalog: Catalog, state: RecoveredState, attached: Attached, ranks: Ranks
) -> None:
    """Leave, of a recovered state's residuals, the one that this rank goes on with.

    With another world size that is the mean over the old ranks: each rank makes that of its share, and
    all exchange them. What another compressor left is taken over where its name and size fit. Where
    shards are divided otherwise, error feedback starts at zero.
    """
    layout, before = attached.layout, state.fence.layout
    if layout != before and any(
        s.ranks or s.is_shard for s in layout.parameters + before.parameters
    ):
        if ranks.rank == 0 and state.step > 0 and _kept(state.fence, 0).parameters:
            Code.RESIDUAL_OF_SNAPSHOT.warn(
                f"the error-feedback residual of step {state.step} is that of other shards, and starts at "
                "zero: the state is exact, the continuation is perhaps not bit-identical",
                rank=ranks.rank,
            )
        state.residuals = [{}]
        return
    old_ranks = len(state.items)  # not those of the snapshot, which may be of an earlier life
    began: dict[str, torch.Tensor] = {}
    is_of_base = len(state.residuals) == old_ranks
    with ranks.together():
        # Else a life with another number of ranks was replayed without its first snapshot: the base is
        # of the life before it, and with the mean of that every rank began.
        for name in {n for residual in state.residuals for n in residual if not is_of_base}:
            owed = [residual[name] for residual in state.residuals if name in residual]
            began[name] = _mean(owed, len(state.residuals))
    began.update(ranks.spread(began))
    if not is_of_base:
        state.residuals = [began] * old_ranks
    is_own = old_ranks == ranks.world_size
    with ranks.together():
        sources = [ranks.rank] if is_own else range(old_ranks)
        found = [_residual_of(settings, catalog, state, rank) for rank in sources]
        mine = {layout.parameters[i].name for i in shares_of(layout, ranks.world_size)[ranks.rank]}
        names = {spec.name for spec in layout.parameters}
        inherited: dict[str, torch.Tensor] = {}
        for spec in settings.compressor.residual_layout(attached.exchanged).parameters:
            owed = [residual[spec.name] for residual in found if spec.name in residual]
            is_fit = all(
                r.numel() == spec.numel and r.dtype == torch_dtype(spec.dtype) for r in owed
            )
            if not owed or not is_fit:
                continue
            if is_own:
                inherited[spec.name] = owed[0]
            elif parameter_of(spec.name, names) in {None, *mine}:
                inherited[spec.name] = _mean(owed, old_ranks)
    if not is_own:
        inherited.update(ranks.spread(inherited))
    state.residuals = [inherited]


def _residual_of(
    settings: Settings, catalog: Catalog, state: RecoveredState, rank: int
) -> dict[str, torch.Tensor]:
    """One old rank's residual at the state's step, by name: from staging, a copy on another node, or its snapshot.

    After the loss of staging, or where a life kept none there, it is the snapshot's, which is
    older; training then continues from the exact state with a slightly different error feedback,
    and says so.
    """
    had_one = any(state.residuals) or bool(_kept(state.fence, rank).parameters)
    # A life that begins takes the residual over, and the memory of the one before it goes; if it
    # dies in attach, it may have none yet. So it may be any of those that begin at this step.
    lives = [span for span in spans_of(catalog) if span.holds(state.step)]
    for life in reversed([span for span in lives if span.incarnation >= state.fence.incarnation]):
        # With another number of ranks it began with the mean, the same on each.
        number, holder = life.incarnation, rank % life.world_size
        kept = _kept(catalog.incarnations[number], holder)
        if not kept.parameters:
            continue
        own = StagingFolder.of(settings.staging_root, catalog.run_id, number, holder)
        # A rank may live on another node than before, and its memory on that one.
        kept_in = [*catalog.staging, *catalog.copies]
        others = [f for f in kept_in if (f.incarnation, f.rank) == (number, holder)]
        oldest = state.base_step + 1 if state.residuals[rank] else 0
        for step, mark in _marks(catalog, number, holder, state.step, oldest):
            tried = (read_residual(stage.residual, kept, mark) for stage in (own, *others))
            found = next((tensors for tensors in tried if tensors is not None), None)
            if found is None:
                continue
            if step != state.step:
                Code.RESIDUAL_OLDER.warn(
                    "the nearest error-feedback residual that memory holds, here or on another node, is that of "
                    f"step {step}, and step {state.step} goes on with it: the state is exact, the "
                    "continuation is perhaps not bit-identical",
                    rank=rank,
                )
            return {s.name: r for s, r in zip(kept.parameters, found, strict=True)}
    if state.base_step != state.step and had_one:
        Code.RESIDUAL_OF_SNAPSHOT.warn(
            f"the error-feedback residual of step {state.step} is not in staging memory; using "
            f"that of snapshot {state.base_step}: the state is exact, the continuation is perhaps "
            "not bit-identical",
            rank=rank,
        )
    elif state.step > 0 and had_one and not state.residuals[rank]:
        Code.RESIDUAL_OF_SNAPSHOT.warn(
            f"the error-feedback residual of step {state.step} is not to be found from here, and starts at "
            "zero: the state is exact, the continuation is perhaps not bit-identical",
            rank=rank,
        )
    return state.residuals[rank]


def _marks(
    catalog: Catalog, number: int, rank: int, newest: int, oldest: int
) -> Iterator[tuple[int, ResidualMark]]:
    """Yield the residuals that records of an incarnation name, with their steps, the nearest before a step first.

    Not all are there: an accelerator's residual is copied every few steps, and another node has that of every few
    steps where the network does not take more.

    Args:
        catalog: Of the run.
        number: The incarnation.
        rank: Whose records.
        newest: The step to begin with; some later ones follow at the end.
        oldest: The last one, unless it is after the newest: the snapshot's residual is not older than this.
    """
    records = catalog.of(number, rank)
    codec = Codec(max_payload_bytes=max_payload_bytes(catalog.incarnations[number].layout))
    oldest = max(oldest, newest - _MOST_STEPS_BACK)
    # Where a copy was far behind its rank, recovery is as well, and slots hold those of later steps alone.
    after = range(newest + 1, newest + 1 + _MOST_STEPS_ON)
    for step in (*range(newest, min(newest, oldest) - 1, -1), *after):
        # Survivors may have saved a step of which a lost rank's record is nowhere.
        mark = None
        if step in records:
            with suppress(DamagedFile):  # damage behind the step that is restored is no matter
                mark = read_differential(records[step], codec).residual
        if mark is not None:
            yield step, mark


def _kept(fence: Fence, rank: int) -> Layout:
    """Return the layout of the residual that the reducer of a rank of an incarnation kept."""
    return compressor_of(fence).residual_layout(trained_by(fence.layout, rank).layout)


def compressor_of(fence: Fence) -> Compressor:
    """Rebuild the compressor of an incarnation."""
    return from_settings(fence.compressor["name"], fence.compressor["settings"])


def _mean(residuals: list[torch.Tensor], num_ranks: int) -> torch.Tensor:
    """Return the residual of each rank after a change of world size; some old ranks may owe nothing.

    Averaged gradients divide by the world size, so the mean keeps what is owed in total.
    """
    return torch.stack(residuals).sum(0) / num_ranks
