"""From files to a state: scan, and search the way to a step; again where the run is alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from lowdiff.core.events import Code
from lowdiff.errors import ConfigError, DamagedFile, StepNotFound
from lowdiff.persistence.files.paths import RunFolder, staging_to_read, user_path
from lowdiff.persistence.format.image import was_removed
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.persistence.store.fetch import fetch_history, temporary_folder
from lowdiff.recovery.damage import judge
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.reshard import whole
from lowdiff.recovery.search import Act, Progress, Search, load_and_replay
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import whole_number

#: A small run is looked at within milliseconds, and may remove its snapshots as fast.
_LOOKS, _LOOKS_SECONDS = 3, 5.0
_Result = TypeVar("_Result")


def recover(
    run: str | Path,
    step: int | None = None,
    *,
    staging: str | Path | None = None,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
    device: str | torch.device | None = None,
) -> RecoveredState:
    """Rebuild the state of a run at any committed step; the training code is not needed.

    Sharded tensors are put together: the whole model comes back on one machine.

    Args:
        run: The run folder, or the URL of its store. Of a store only the nearest snapshot and the
            differentials after it are read, into a temporary folder (``TMPDIR``).
        step: Which step; None for the newest.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.
        progress: Told about each window of steps.
        device: Where to replay, e.g. ``"cuda"`` for a run that was trained there; the result is on
            the CPU. Instead of the options'.

    Raises:
        ConfigError: If an argument cannot be.
        NotARun: If the folder or store holds no run.
        StoreError: If the store does not answer.
        StepNotFound: If the step cannot be rebuilt; says which can.
        DamagedFile: If the bytes needed are damaged.
        ReplayMismatch: If replay does not reproduce what the live run recorded.
    """
    options = options or ReplayOptions()
    if device is not None:
        options = replace(options, device=_device(device))
    return whole(recover_by(load_and_replay, run, step, staging, options, progress))


def recover_by(
    act: Act,
    run: str | Path,
    step: int | None,
    staging: str | Path | None,
    options: ReplayOptions,
    progress: Progress | None,
) -> RecoveredState:
    """Have the way to a step of a run carried out, around whatever turns out to be damaged.

    Args:
        act: Carries a plan out; called again where another plan takes its place.
        run: See `recover`.
        step: See `recover`.
        staging: See `recover`.
        options: How to replay.
        progress: Told about each window of steps.
    """
    root = staging_to_read(staging)
    step = None if step is None else whole_number("step", step)
    if not is_url(run):
        return _recover_by(act, RunFolder(user_path("run", run)), step, root, options, progress)
    with temporary_folder() as folder:
        snapshots = fetch_history(ObjectStore(str(run)), folder, step)
        try:
            return _recover_by(act, folder, step, root, options, progress)
        except StepNotFound as error:
            # What was fetched is not all there is, and the rest is not worth fetching for this.
            others = {(found, found) for found in snapshots}
            covered = {s for s, _ in others for a, b in error.recoverable if a <= s <= b}
            ranges = sorted({*error.recoverable, *(r for r in others if r[0] not in covered)})
            why = f"{error.why} (elsewhere only snapshots are listed here, not what lies between)"
            raise StepNotFound(str(run), error.step, ranges, why) from error


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device of torch: {error}") from error


def _recover_by(
    act: Act,
    folder: RunFolder,
    step: int | None,
    root: Path,
    options: ReplayOptions,
    progress: Progress | None,
) -> RecoveredState:
    catalog = scan(folder, [root])
    for finding in judge(folder, catalog)[0]:
        Code.RUN_DAMAGED.warn(finding.message)
    search = Search(catalog, step, goes_back=step is None, act=act)

    def look(seen: Catalog) -> RecoveredState:
        search.catalog = seen
        return search.run(options, progress=progress)

    return look_again(folder, root, catalog, look)


def look_again(
    folder: RunFolder,
    staging: Path,
    catalog: Catalog,
    act: Callable[[Catalog], _Result],
    *,
    check_all: bool = False,
) -> _Result:
    """Act on a run that may be alive.

    Its trainer reuses staging memory once that is durable, and its writer removes old snapshots.

    Args:
        folder: The run's folder.
        staging: Root of its staging folders.
        catalog: What was seen of it.
        act: Called with the catalog, and again with a newer one if what it lists is gone.
        check_all: Whether the newer one, too, reads everything.
    """
    looks, deadline = 0, time.monotonic() + _LOOKS_SECONDS
    while True:
        try:
            return act(catalog)
        except DamagedFile as error:
            is_gone = was_removed(error.path)
            if staging not in error.path.parents and not is_gone:
                raise
            looks += 1
            if looks > _LOOKS and not (is_gone and time.monotonic() < deadline):
                raise
        catalog = scan(folder, [staging], check_all=check_all)
