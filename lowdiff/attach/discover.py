"""What there is of a run, as all its ranks together see it: its identity, staging and files.

Only rank 0 speaks to the store; from its run folder the others get what they cannot see.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import ConfigError, RunInUse, RunMismatch, StoreError
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.files.trust import shared_staging_root
from lowdiff.persistence.run.fences import (
    create_run,
    known_run_id,
    life_of,
    new_run_id,
    newest_staging,
)
from lowdiff.persistence.run.frozen_parameters import sweep_constants
from lowdiff.persistence.run.owner import (
    claim_moved,
    copies_of_run,
    is_known,
    staging_of_run,
)
from lowdiff.persistence.staging.status import SavedStatus, is_log, read_status
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.fetch import Listing, fetch_fences, fetch_history, read_store_run_id
from lowdiff.recovery.replica.file import note_kernel, sound_files
from lowdiff.settings import Settings

_SHARED = ("incarnations", "snapshots", "segments", "constants")


def agreed_run(settings: Settings, ranks: Ranks) -> tuple[str, list[StagingFolder], bool]:
    """The run's identity, what this machine has of it in staging, and if the store holds it.

    No dead writer works on any more.
    """
    folder = settings.folder
    with ranks.together():
        known = known_run_id(folder)
    ids = {run_id for run_id in ranks.gather(known) if run_id is not None}
    if len(ids) > 1:
        raise RunMismatch(
            f"the ranks' folders {settings.run} belong to different runs; bring them together, or give "
            "all ranks a new folder"
        )
    remote_id = _run_in_store(settings, ranks)
    if ids and remote_id not in (None, *ids):
        raise RunMismatch(
            f"{settings.store} holds another run than {settings.run}; give each run its own URL"
        )
    proposal = ranks.gather(new_run_id())[0]
    roots = set(ranks.gather(os.path.realpath(settings.staging_root)))
    run_id = remote_id or (ids.pop() if ids else proposal)
    with ranks.together():
        create_run(folder, run_id)
        sweep_constants(folder)  # nobody writes any before all ranks have been here
        _refuse_to_lose_staged(settings, run_id, roots)
        stages = _wait_for_writers(settings, run_id)
    return run_id, stages, remote_id is not None


def _run_in_store(settings: Settings, ranks: Ranks) -> str | None:
    """Id of the run that the store holds, the same on every rank.

    None if it holds none, if there is no store, or if it does not answer.

    Raises:
        StoreError: If it does not answer, and either no rank has history on its disk, so that
            training might begin afresh by mistake, or ``on_error="raise"``.
    """
    has_history = any(ranks.gather(next(settings.folder.fences(), None) is not None))
    run_id: str | None = None
    with ranks.together():
        if settings.store is not None and ranks.rank == 0:
            try:
                run_id = read_store_run_id(ObjectStore(settings.store))
            except StoreError as error:
                if not has_history or settings.on_error == "raise":
                    raise
                Code.STORE_NOT_ASKED.warn(f"{error}; going on with the history in {settings.run}")
    found: str | None = ranks.gather(run_id)[0]
    return found


def fetch_from_store(
    settings: Settings,
    ranks: Ranks,
    step: int | None,
    *,
    fences_only: bool,
) -> None:
    """Bring what resuming at ``step`` needs into rank 0's run folder.

    Args:
        settings: With a store that holds this run.
        ranks: All of them.
        step: The step to restore; None for the newest.
        fences_only: When nothing is restored, and only the number of the incarnation matters.

    Raises:
        StoreError: If the store stopped answering.
        RunMismatch: If its history parted from that of the run folder.
    """
    assert settings.store is not None
    with ranks.together():
        if ranks.rank == 0:
            store = ObjectStore(settings.store)
            if fences_only:
                fetch_fences(store, settings.folder, Listing.of_store(store))
            else:
                fetch_history(store, settings.folder, step)


def _refuse_to_lose_staged(settings: Settings, run_id: str, roots: Collection[str]) -> None:
    """Steps that lie in another folder would be void if this incarnation began without them.

    Args:
        settings: Of this rank.
        run_id: The run.
        roots: Where all ranks have their staging now.

    Raises:
        ConfigError: If the default folder holds steps of the run, or the one that the newest
            incarnation had.
    """
    usual = shared_staging_root()
    others = {usual, *(Path(root) for root in newest_staging(settings.folder) if root not in roots)}
    for root in sorted(others - {settings.staging_root}):
        if staging_of_run(root, settings.folder, run_id):
            how = "without staging=" if root == usual else f"with staging={root}"
            raise ConfigError(
                f"steps of {settings.run} are staged in {root}, and staging={settings.staging_root} "
                f"would leave them behind; attach {how} once, or give them up with "
                f"`lowdiff gc {settings.run} --staging --staging-folder {root} --force --yes`"
            )


def shared_out(
    settings: Settings, ranks: Ranks, run_id: str, stages: Sequence[StagingFolder]
) -> list[StagingFolder]:
    """Return what this rank's writer adopts of the folders of dead incarnations on this machine.

    One of the ranks that see a folder adopts it: the rank that made it, if that sees it now. A folder
    counts for nothing, and stays, where the run has gone on elsewhere from an older step; it is named
    in a warning.
    """
    with ranks.together():
        copies = copies_of_run(settings.staging_root, settings.folder, run_id)
        known = [stage for stage in (*stages, *copies) if is_known(stage, settings.folder)]
    for stage in stages:
        if stage not in known:
            Code.STAGING_OF_OTHER_HISTORY.warn(
                f"what is staged in {stage.root} is of a life {stage.incarnation} that "
                f"{settings.run} knows nothing of: the run went on without it. It stays there; "
                "remove that folder to give it up",
            )
    seen: list[list[str]] = ranks.gather([stage.root.name for stage in known])
    mine = []
    for stage in known:
        seers = [rank for rank, names in enumerate(seen) if stage.root.name in names]
        heir = stage.rank if stage.rank in seers else seers[stage.rank % len(seers)]
        if heir == ranks.rank:
            mine.append(stage)
    return mine


def _refuse_other_lives(settings: Settings, ranks: Ranks) -> None:
    """Where each node has a run folder, two may know different lives under one number.

    As after one of them had gone on alone; which of the two counts is not for this run to say.
    """
    with ranks.together():
        numbers = {number: rank for number, rank, _ in settings.folder.fences()}
        found = ((n, life_of(settings.folder, n, rank)) for n, rank in numbers.items())
        mine = {n: life for n, life in found if life is not None}
    seen: dict[int, tuple[int, str]] = {}
    for rank, theirs in enumerate(ranks.gather(mine)):
        for number, life in theirs.items():
            first, known = seen.setdefault(number, (rank, life))
            if life != known:
                raise RunMismatch(
                    f"the folders {settings.run} of ranks {first} and {rank} hold different "
                    f"histories: another life {number} each; move the one away whose steps are to "
                    "be given up, and what it staged stays in memory"
                )


def share_files(settings: Settings, ranks: Ranks, run_id: str, imported: Path) -> None:
    """Bring here the files of the run that only other ranks can see.

    Durable files become part of this rank's run folder. Staged ones are needed only now, and go to
    the folder ``imported``.
    """
    if ranks.world_size == 1:
        return
    _refuse_other_lives(settings, ranks)
    with ranks.together():
        fences = sorted(visible_files(settings.run, ("incarnations",)))
    # First, because they say which memory is of the run's own lives.
    ranks.share_files({name: settings.run / name for name in fences}, settings.run, durable=True)
    with ranks.together():
        # What came before all fences did may be of other lives.
        shutil.rmtree(imported / run_id, ignore_errors=True)
        stages = staging_of_run(settings.staging_root, settings.folder, run_id)
        copies = copies_of_run(settings.staging_root, settings.folder, run_id)
    needed = [*_needed_guests(ranks, stages), *_needed_copies(ranks, stages, copies)]
    own = (path for s in stages for path in [*(chunk for _, chunk in s.chunks()), *sound_files(s)])
    chunks = {f"{path.parent.name}/{path.name}": path for path in (*own, *needed) if path.exists()}
    ranks.share_files(chunks, imported / run_id, durable=False)
    with ranks.together():
        for stage in StagingFolder.with_copies_of_run(imported, run_id):
            note_kernel(stage)  # what is torn was not sent
        visible = sorted(visible_files(settings.run))
    for pattern in ("rank-*.json", "*.safetensors", "*.seg"):
        files = {name: settings.run / name for name in visible if fnmatch(name, f"*/{pattern}")}
        ranks.share_files(files, settings.run, durable=True)


def _needed_guests(ranks: Ranks, stages: Sequence[StagingFolder]) -> list[Path]:
    """What was saved here for ranks on other nodes, where nobody else has it: large, and seldom needed.

    Args:
        ranks: All of them.
        stages: Staging folders of the run that this rank sees.
    """
    own, guests = [], []
    with ranks.together():
        for stage in stages:
            image = read_status(stage.survivor_saved, SavedStatus).image
            if image is not None:
                own.append((stage.incarnation, stage.rank, image.step))
            for rank in stage.saved_guests():
                image = read_status(stage.guest_saved(rank), SavedStatus).image
                if image is not None:
                    guests.append((stage, (stage.incarnation, rank, image.step)))
    told = ranks.gather([own, [(stage.root.name, of) for stage, of in guests]])
    there = {tuple(of) for theirs, _ in told for of in theirs}
    holders: dict[tuple[int, ...], str] = {}
    for _, theirs in told:
        for name, of in theirs:
            holders.setdefault(tuple(of), name)
    found = []
    for stage, of in guests:
        if of not in there and holders[of] == stage.root.name:
            found += [stage.guest(of[1]), stage.guest_saved(of[1])]
    return found


def _needed_copies(
    ranks: Ranks, stages: Sequence[StagingFolder], copies: Sequence[StagingFolder]
) -> list[Path]:
    """List the files that are kept here of ranks whose own memory is lost, and the images that go with them.

    A rank that lives on another node than before needs its residual from there.

    Args:
        ranks: All of them.
        stages: Staging folders of the run that this rank sees.
        copies: Those that it sees of ranks on other nodes.
    """
    told = ranks.gather(
        [
            [[stage.incarnation, stage.rank] for stage in stages],
            [[copy.incarnation, copy.rank, copy.root.name] for copy in copies],
        ]
    )
    there = {tuple(of) for own, _ in told for of in own}
    holders: dict[tuple[int, int], str] = {}
    for _, kept in told:
        for incarnation, rank, name in kept:
            if (incarnation, rank) not in there:
                holders.setdefault((incarnation, rank), name)
    lives = {incarnation for incarnation, _ in holders}
    found = []
    with ranks.together():
        for copy in copies:
            if holders.get((copy.incarnation, copy.rank)) == copy.root.name:
                found += [*copy.copied_files(), *sound_files(copy)]
        for stage in stages:
            if stage.incarnation in lives:
                found += [stage.trainer_status, stage.snapshot]
            is_of_rank = stage.rank < len(told)
            if is_of_rank and [stage.incarnation, stage.rank] not in told[stage.rank][0]:
                found.append(stage.residual)
    return found


def _wait_for_writers(settings: Settings, run_id: str) -> list[StagingFolder]:
    """Let the writers of dead trainers finish: until then files still appear and are collected.

    A writer that cannot finish, because the disk is full, is not waited for longer: its records
    are read from staging.

    Returns:
        What this machine has in staging of the run.
    """
    stages = staging_of_run(settings.staging_root, settings.folder, run_id)
    copies = copies_of_run(settings.staging_root, settings.folder, run_id)
    for stage in (*stages, *copies):
        claim_moved(stage, settings.folder)
        # Where there is a replica, the writer only persists what the replica holds in memory.
        for path in (
            (stage.writer_lock, stage.survivor_lock) if is_log(stage) else stage.state_locks
        ):
            lock = FileLock(path)
            if lock.acquire(f"process {os.getpid()}", timeout_seconds=settings.lock_seconds):
                lock.release()
            elif path == stage.writer_lock:
                Code.OLD_WRITER_BUSY.warn(f"{lock.holder()} still works on {stage.root}; going on")
            else:
                raise RunInUse(stage.root, lock.holder(), settings.lock_seconds)
    return stages


def visible_files(run: Path, folders: Sequence[str] = _SHARED) -> Iterator[str]:
    """Names of the files of a run that ranks share, without those that links lead to.

    The rest of the folder is passed over, and so is what goes while it is listed: the folder may
    be a disk's root, and a life before this one still collects.
    """
    for folder in folders:
        for parent, _, names in os.walk(run / folder):
            for path in (Path(parent, name) for name in names):
                if path.is_file() and not path.is_symlink():
                    yield str(path.relative_to(run))
