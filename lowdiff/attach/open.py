"""How an incarnation begins: lock, agree, recover, fence, and only then stage."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from lowdiff.attach.begin import Incarnation, Opened, begin
from lowdiff.attach.found import Asked, Found, Recovered, find
from lowdiff.attach.lost_steps import lost_until, settle_lost_steps
from lowdiff.attach.memory import agree_on_memory
from lowdiff.attach.resume import class_of, load_start
from lowdiff.attach.together import recover_together, say_what_is_left, source_of
from lowdiff.commit.images import constant_images
from lowdiff.commit.meter import RecoveryClock
from lowdiff.commit.run_lock import RunLock
from lowdiff.compressors import refuse_unknown
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.numerics import environment_of
from lowdiff.errors import ConfigError, StorageError, UnsupportedModel
from lowdiff.model.averages import followed_names
from lowdiff.model.binding import Attached, ddp_of, hyper_parameters
from lowdiff.model.items import Stateful, with_extra_states
from lowdiff.model.ranks import Ranks, refuse_disagreement
from lowdiff.model.sharding import is_sharded, refuse_ranks_outside
from lowdiff.model.tracked import Given, watch
from lowdiff.persistence.files.trust import check_folder
from lowdiff.persistence.run.fences import (
    new_life,
    refuse_strange_entries,
    write_fence,
    write_missing_fences,
)
from lowdiff.persistence.run.frozen_parameters import write_constants
from lowdiff.persistence.run.journal import write_policy
from lowdiff.protect import strategy_of
from lowdiff.recovery.replay.optimizers import is_registered, settle_kernels
from lowdiff.recovery.replay.proof import refuse_unbuildable
from lowdiff.settings import Settings
from lowdiff.types import Fence
from lowdiff.version import __version__

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@contextmanager
def meeting(model: torch.nn.Module) -> Iterator[Ranks]:
    """The ranks that train a model together, left again if the body fails.

    They are found before the model is looked at, so that all hear what one of them refuses.

    Raises:
        ConfigError: If several processes train without DDP, and nothing is sharded.
    """
    ranks = Ranks(_training_group(model))
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


def _training_group(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """The group of all ranks that train the model: in DDP, over which gradients are averaged."""
    if not isinstance(model, torch.nn.Module):
        return None  # it is refused when it is looked at
    ddp = ddp_of(model)
    if ddp is not None:
        group: dist.ProcessGroup = ddp.process_group
        return group
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        sharded = [parameter for parameter in model.parameters() if is_sharded(parameter)]
        for parameter in sharded:
            refuse_ranks_outside(parameter, dist.get_world_size())
        if sharded:
            return dist.group.WORLD
        raise ConfigError(
            f"{dist.get_world_size()} processes train a model without DistributedDataParallel, so "
            "nobody averages its gradients; wrap it in DDP, or shard it by fully_shard, before attach"
        )
    return None


@contextmanager
def _named_disk_errors(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS and not _is_on_the_way(settings.run, error.filename):
            raise  # of the user's own objects, perhaps
        raise StorageError(
            f"{settings.run} cannot be opened: {error}. Free space there or correct its "
            "permissions, and attach again; what is in it stays as it is"
        ) from error


def _is_on_the_way(run: Path, file: object) -> bool:
    """Whether a file is the run folder, one of its parents, or a file in it."""
    path = Path(os.fsdecode(file)) if isinstance(file, str | bytes) else None
    return path is not None and (path == run or path in run.parents or run in path.parents)


def open_session(
    asked: Asked, attached: Attached, stateful: Mapping[str, Stateful], ranks: Ranks
) -> Opened:
    """Begin an incarnation on every rank together.

    Args:
        asked: What the trainer asks for.
        attached: What is trained.
        stateful: What is attached besides.
        ranks: Those that train it.

    Raises:
        RunInUse: If a live trainer holds the run.
        RunMismatch: If its history belongs to another model or optimizer.
        StepNotFound: If ``step`` cannot be recovered.
        StorageError: If the run folder or staging memory is full, read-only or broken.
    """
    settle_kernels()
    settings = asked.settings
    with _named_disk_errors(settings), ExitStack() as undo:
        with ranks.together():
            given = _accepted(settings, attached, stateful, ranks)
        modes: dict[str, object] = {"watch": settings.watch}
        modes["optimizer_steps"] = settings.optimizer_steps
        modes["lost_steps"] = settings.lost_steps
        if attached.is_sharded:
            modes["replicate"] = attached.replicas is not None
        refuse_disagreement(ranks, settings.compressor, attached.layout, modes)
        lock = RunLock(settings, ranks.rank)
        undo.callback(lock.release)
        with ranks.together():
            refuse_strange_entries(settings.folder)
            lock.acquire()
        with ExitStack() as held:
            found = find(asked, ranks, lock, held)
            recovered = _recovered(asked, given, ranks, found)
            # Only now the objects tell how much they hold.
            memory = agree_on_memory(
                settings, given, ranks, found.node, has_staged=found.has_staged
            )
            fence = _fenced(settings, given, ranks, found, recovered)
        incarnation = Incarnation(fence, recovered.start, memory)
        opened = begin(asked, given, ranks, found, incarnation)
        undo.pop_all()
    return opened


def _accepted(
    settings: Settings, attached: Attached, stateful: Mapping[str, Stateful], ranks: Ranks
) -> Given:
    """Look at what is given, and refuse what cannot be recorded.

    Raises:
        ConfigError: Naming it, and what works instead.
        UnsupportedModel: If an average would be copied shard by shard, or the compressor cannot take a parameter.
        UnsupportedOptimizer: Naming an optimizer that cannot be built, or not there.
    """
    strategy = strategy_of(settings)
    check_folder(settings.staging_root)
    strategy.refuse_model(settings, attached, ranks.world_size)
    if attached.is_sharded:
        _refuse_sharded(settings, stateful)
    given = watch(attached, with_extra_states(stateful, attached.module, attached.device))
    refuse_unknown(settings.compressor)
    settings.compressor.residual_layout(attached.exchanged)  # refuses what it cannot take
    for optimizer, spec in zip(attached.optimizers, attached.specs, strict=True):
        if is_registered(spec):
            refuse_unbuildable(attached.layout, spec, hyper_parameters(optimizer), attached.device)
    if ranks.rank == 0:
        strategy.warn(attached, ranks.world_size)
        _name_frozen(attached)
    return given


def _refuse_sharded(settings: Settings, stateful: Mapping[str, Stateful]) -> None:
    """See that a run with sharded parameters asks for nothing that only whole ones have.

    Raises:
        ConfigError: Naming it, and what works instead.
        UnsupportedModel: If an average would be copied shard by shard.
    """
    if settings.lost_steps == "predict":
        raise ConfigError(
            'lost_steps="predict" needs every rank to hold the whole model; with sharded parameters lost '
            "steps are made again: leave it out"
        )
    for name, thing in stateful.items():
        if isinstance(thing, AveragedModel) and any(map(is_sharded, thing.parameters())):
            raise UnsupportedModel(
                f"{name} averages sharded parameters, which AveragedModel's state dict gathers; keep a "
                "sum of your own over the local shards, or average what `lowdiff recover` writes"
            )


def _recovered(asked: Asked, given: Given, ranks: Ranks, found: Found) -> Recovered:
    """Recover what the incarnation starts from, and load it into the live objects."""
    settings, wish, attached, catalog = asked.settings, asked.wish, given.attached, found.catalog
    with ranks.together():
        is_alone = ranks.world_size == 1
        source = source_of(settings, attached, catalog, wish, is_alone=is_alone)
    state = None
    clock = RecoveryClock()
    if source.restore != "none":
        state = recover_together(source, attached, ranks, clock)
    found.past.facts.update(clock.facts(state))
    lost_tail = None
    if state is not None and source.restore == "all" and source.step is None:
        until = lost_until(ranks, catalog, found.lock.reached, state)
        if until is not None:
            state, lost_tail = settle_lost_steps(settings, attached, catalog, ranks, state, until)
    with ranks.together():
        start = load_start(settings, given, ranks, state, source.restore)
        say_what_is_left(ranks, catalog, wish, start.step, continues=start.continues)
        if found.lock.is_lost(look=True):  # recovery may have taken hours
            raise found.lock.taken_over()
    if lost_tail is not None and lost_tail.chosen:
        start = replace(start, needs_snapshot=True)
    return Recovered(start, lost_tail, source.origin(state))


def _name_frozen(attached: Attached) -> None:
    """Say that what optimizers hold of frozen parameters stays frozen: some are thawed hours later."""
    known = {name for spec in attached.layout.parameters for name in (spec.name, spec.tensor)}
    groups = [names for optimizer in attached.specs for names in optimizer.groups]
    frozen = [name for names in groups for name in names if name not in known]
    if frozen:
        Code.FROZEN_FOR_GOOD.warn(
            f"an attached optimizer holds {len(frozen)} frozen parameters, {frozen[0]!r} among them, which this run "
            "cannot train later: the step at which one gets a gradient is an error. To thaw them later, attach while "
            "they train, and freeze them behind attach, by the step's number: module.requires_grad_(step >= 1000) at "
            "the top of the body. If they stay frozen, give the optimizer what trains: "
            "[p for p in model.parameters() if p.requires_grad]",
            parameters=len(frozen),
        )


def _fenced(
    settings: Settings, given: Given, ranks: Ranks, found: Found, recovered: Recovered
) -> Fence:
    """Return the new incarnation's fence; by then every rank's is durable."""
    catalog, node, start = found.catalog, found.node, recovered.start
    own_names = [sorted(given.stateful), sorted(given.averages)]
    told = ranks.gather(
        [own_names, found.number, new_life(), start.built if ranks.rank == 0 else {}]
    )
    names = [theirs for theirs, *_ in told]
    if any(other != names[0] for other in names):
        raise ConfigError(
            "the ranks attached different objects; every rank attaches all of them, and updates an "
            f"AveragedModel in the same steps: {names}"
        )
    incarnation = max(free for _, free, *_ in told)
    life: str = told[0][2]
    built: dict[str, str] = told[0][3]
    parent = max(catalog.incarnations, default=None) if start.continues else None
    compressor = settings.compressor
    with ranks.together():
        constants = write_constants(settings.folder, constant_images(given.attached))
    if len(set(ranks.gather(constants))) > 1:
        constants = ""  # DDP was told to leave them as they are: every rank stores its own
    attached, stateful = given.attached, given.stateful
    fence = Fence(
        run_id=catalog.run_id,
        incarnation=incarnation,
        parent=parent,
        base_step=start.step,
        rank=ranks.rank,
        world_size=ranks.world_size,
        environment=environment_of(attached.device),
        layout=attached.layout,
        optimizers=attached.specs,
        compressor={"name": compressor.name, "settings": dict(compressor.settings())},
        names=attached.names,
        stateful={name: class_of(thing) for name, thing in stateful.items()},
        averages=followed_names(given.averages, attached.layout),
        constants=constants,
        life=life,
        strategy=settings.strategy,
        version=__version__,
        staging=os.path.realpath(settings.staging_root),
        frozen_shards=attached.frozen_shards.layout,
        lost_tail=recovered.lost_tail,
        origin=recovered.origin,
        built=built,
        draws=attached.draws,
        digests="sum64" if devices.sums_there(attached.device) else "crc32c",
    )
    with ranks.together():  # nobody stages before every rank's fence is durable
        write_fence(settings.folder, fence)
        write_policy(settings.folder, catalog.run_id, settings.retention)
    if node.others:
        places = ranks.gather(fence.staging)
        with ranks.together():
            elsewhere = node.others if node.first == ranks.rank else ()
            others = (replace(fence, rank=rank, staging=places[rank]) for rank in elsewhere)
            write_missing_fences(settings.folder, others)
    return fence
