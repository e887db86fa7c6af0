"""Whose a staging folder is: a copied run folder shares its run id, but not its memory.

Every staging folder names the run folder it was made for. Another folder with the same run id may
use it only if that one is gone, because then it was moved; a copy of the staging folder itself
belongs to whoever holds it. It names its life as well: where the run went on without it, from a
store, the run folder may know another life under the same number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lowdiff.errors import LowDiffError, NotARun, StorageError
from lowdiff.persistence.durable import read_json, write_json
from lowdiff.persistence.fences import life_of, read_run_id
from lowdiff.persistence.paths import RunFolder, StagingFolder


@dataclass(frozen=True, slots=True)
class Owner:
    """Where a staging folder was made, for which run folder, and in which life.

    Attributes:
        run: The run folder, without symbolic links.
        run_place: Device and inode of the run folder.
        staging_place: Device and inode of the staging folder.
        life: As in the fences of its incarnation; "" where these name none.
    """

    run: str
    run_place: Sequence[int]
    staging_place: Sequence[int]
    life: str = ""

    @classmethod
    def read(cls, stage: StagingFolder) -> Owner | None:
        """What the folder says; None if its trainer died before it could, or it cannot be read."""
        try:
            return cls(**read_json(stage.owner))
        except (FileNotFoundError, StorageError, TypeError):
            return None


def claim(stage: StagingFolder, folder: RunFolder, life: str = "") -> None:
    """Write into a new staging folder whose it is."""
    run = os.path.realpath(folder.root)
    write_json(stage.owner, asdict(Owner(run, _place(folder.root), _place(stage.root), life)))


def staging_of_run(staging_root: Path, folder: RunFolder, run_id: str) -> list[StagingFolder]:
    """Staging folders on this machine of this very run folder, oldest incarnation first.

    Without those of a life other than the one that the run folder knows under their number. One of
    which it knows nothing counts: its fences may be on their way.
    """
    return [
        stage
        for stage in StagingFolder.all_of_run(staging_root, run_id)
        if not _belongs_to_another(stage, folder, run_id)
    ]


def is_known(stage: StagingFolder, folder: RunFolder) -> bool:
    """Whether the run folder knows the life of a staging folder, as far as that names one.

    It does not where the run went on from an older state: then what is staged is of no use to it.
    """
    owner = Owner.read(stage)
    if owner is None or not owner.life:
        return True
    return life_of(folder, stage.incarnation, stage.rank) == owner.life


def _belongs_to_another(stage: StagingFolder, folder: RunFolder, run_id: str) -> bool:
    owner = Owner.read(stage)
    if owner is None:
        return False
    return _is_of_another_folder(owner, stage, folder, run_id) or (
        life_of(folder, stage.incarnation, stage.rank) not in (None, owner.life)
    )


def _is_of_another_folder(
    owner: Owner, stage: StagingFolder, folder: RunFolder, run_id: str
) -> bool:
    if list(owner.staging_place) != _place(stage.root):
        return False
    if owner.run == os.path.realpath(folder.root) or list(owner.run_place) == _place(folder.root):
        return False
    try:
        return read_run_id(RunFolder(Path(owner.run))) == run_id
    except NotARun:
        return False
    except (LowDiffError, OSError):
        return True  # something is there, and it may be the run


def _place(path: Path) -> list[int]:
    try:
        found = path.stat()
    except FileNotFoundError:  # adopted and removed while it was looked at
        return []
    return [found.st_dev, found.st_ino]
