"""Owner of a staging folder: a copied run folder has the same run id, but staging of its own.

Every staging folder names the run folder that it was made for. Another folder with the same run id
may use it only if the named folder is gone, because then the run folder was moved. A copy of a
staging folder, which names another place, belongs to the run folder of its holder. A staging folder
also names its incarnation's identity (``life``): a run that went on elsewhere, from a store, may have
another incarnation of the same number.
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
    """The place, run folder and incarnation that a staging folder was made for.

    Attributes:
        run: The run folder, without symbolic links.
        staging: The staging folder, without symbolic links.
        life: Identity of the incarnation, as in its fences.
    """

    run: str
    staging: str
    life: str

    @classmethod
    def read(cls, stage: StagingFolder) -> Owner | None:
        """Read ``owner.json``; None if its trainer died before writing it, or if it is unreadable."""
        try:
            return cls(**read_json(stage.owner))
        except (FileNotFoundError, StorageError, TypeError):
            return None


def claim(stage: StagingFolder, folder: RunFolder, life: str) -> None:
    """Write the owner into a new staging folder."""
    owner = Owner(os.path.realpath(folder.root), os.path.realpath(stage.root), life)
    write_json(stage.owner, asdict(owner))


def claim_moved(stage: StagingFolder, folder: RunFolder) -> None:
    """Write the run's new place into a staging folder of this run, if the run was moved.

    A writer that still works on the old place gives up when it reads the new owner.
    """
    owner = Owner.read(stage)
    if owner is not None and owner.run != os.path.realpath(folder.root):
        claim(stage, folder, owner.life)


def staging_of_run(staging_root: Path, folder: RunFolder, run_id: str) -> list[StagingFolder]:
    """Return this machine's staging folders of this run folder, oldest incarnation first.

    A folder is left out if the run folder knows another identity for its incarnation number. A
    folder counts if the run folder knows none: the fences may be on their way.
    """
    return [
        stage
        for stage in StagingFolder.all_of_run(staging_root, run_id)
        if not _belongs_to_another(stage, folder, run_id)
    ]


def copies_of_run(staging_root: Path, folder: RunFolder, run_id: str) -> list[StagingFolder]:
    """Return what ranks of this machine keep of this run for ranks on other nodes; see `staging_of_run`."""
    return [
        copy
        for copy in StagingFolder.copies_of_run(staging_root, run_id)
        if not _belongs_to_another(copy, folder, run_id)
    ]


def is_known(stage: StagingFolder, folder: RunFolder) -> bool:
    """Return whether the run folder knows the incarnation that a staging folder names.

    False means that the run went on from an older state, and the staged steps are of no use to it.
    If the incarnation has fences and none can be read, the folder counts as known.
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
    except NotARun:  # the run folder is gone, so it was moved
        return False
    except (LowDiffError, OSError):
        return True  # a file is there that may be the run
