"""Whose a staging folder is: a copied run folder shares its run id, but not its memory.

Every staging folder names the run folder it was made for. Another folder with the same run id may
use it only if that one is gone, because then it was moved. A copy of the staging folder itself belongs
to whoever holds it. A staging folder names its life as well:
where the run went on without it, from a store, the run folder may know another life under the same
number.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from lowdiff.errors import LowDiffError, NotARun, StorageError
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.document import read_json, write_json
from lowdiff.persistence.run.fences import life_of, read_run_id


@dataclass(frozen=True, slots=True)
class Owner:
    """Where a staging folder was made, for which run folder, and in which life.

    Attributes:
        run: The run folder, without symbolic links.
        staging: The staging folder, likewise.
        life: As in the fences of its incarnation.
    """

    run: str
    staging: str
    life: str

    @classmethod
    def read(cls, stage: StagingFolder) -> Owner | None:
        """Return what the folder says; None if its trainer died before, or where it is unreadable."""
        try:
            return cls(**read_json(stage.owner))
        except (FileNotFoundError, StorageError, TypeError):
            return None


def claim(stage: StagingFolder, folder: RunFolder, life: str) -> None:
    """Write into a new staging folder whose it is."""
    owner = Owner(os.path.realpath(folder.root), os.path.realpath(stage.root), life)
    write_json(stage.owner, asdict(owner))


def claim_moved(stage: StagingFolder, folder: RunFolder) -> None:
    """Say in a staging folder of this run where the run is now, if it was moved.

    A writer that still works on the old place gives up when it reads that.
    """
    owner = Owner.read(stage)
    if owner is not None and owner.run != os.path.realpath(folder.root):
        claim(stage, folder, owner.life)


def staging_of_run(staging_root: Path, folder: RunFolder, run_id: str) -> list[StagingFolder]:
    """Return the staging folders on this machine of this very run folder, oldest incarnation first.

    Those of a life other than the one that the run folder knows under their number are left out. A
    life of which the run folder knows nothing counts: its fences may be on their way.
    """
    return [
        stage
        for stage in StagingFolder.all_of_run(staging_root, run_id)
        if not _belongs_to_another(stage, folder, run_id)
    ]


def is_known(stage: StagingFolder, folder: RunFolder) -> bool:
    """Return whether the run folder knows the life of a staging folder, as far as that names one.

    It does not where the run went on from an older state: then what is staged is of no use to it. Where
    fences of the incarnation are there and none of them can be read, nobody can say so.
    """
    owner = Owner.read(stage)
    if owner is None:
        return True
    life = life_of(folder, stage.incarnation, stage.rank)
    return life == owner.life or (life is None and stage.incarnation in folder.incarnations())


def _belongs_to_another(stage: StagingFolder, folder: RunFolder, run_id: str) -> bool:
    owner = Owner.read(stage)
    if owner is None:
        return False
    if life_of(folder, stage.incarnation, stage.rank) not in (None, owner.life):
        return True
    if owner.staging != os.path.realpath(stage.root):
        return False
    try:
        return read_run_id(RunFolder(Path(owner.run))) == run_id and not os.path.samefile(
            owner.run, folder.root
        )
    except NotARun:  # it is gone, so the folder was moved
        return False
    except (LowDiffError, OSError):
        return True  # something is there, and it may be the run
