"""Two lives of one run may begin under one number, from one step: they are told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile, RunMismatch
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import read_json, write_json
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.run.fences import life_of, new_life, read_fence, write_fence
from lowdiff.persistence.run.owner import claim, is_known, staging_of_run
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.fetch import fetch_history
from tests.unit.persistence.made_runs import began, fence
from tests.unit.persistence.writers import RUN_ID, append, log_of, settings_in, stored, writing

A, B = "a" * 32, "b" * 32


def living(root: Path, life: str, steps: range) -> WriterSettings:
    """Life 1, from step 10 of life 0, with steps in staging."""
    settings = settings_in(root, incarnation=1, base_step=10)
    began(settings.folder)
    write_fence(settings.folder, fence(1, base=10, life=life))
    claim(settings.staging, settings.folder, life)
    log = log_of(settings)
    for step in steps:
        append(log, step)
    return settings


def uploaded(root: Path, life: str, steps: range) -> ObjectStore:
    """A store that holds a life whose node is gone."""
    settings = living(root, life, steps)
    with writing(settings):
        pass
    url = f"file://{shutil.copytree(settings.run, root / 'store')}"
    shutil.rmtree(settings.run)
    shutil.rmtree(settings.staging_root)
    return ObjectStore(url)


def moved_away(settings: WriterSettings) -> Path:
    """The run folder, elsewhere, as a refusal advises."""
    return settings.folder.root.rename(settings.folder.root.with_name("elsewhere"))


def test_a_life_is_named_by_its_fences(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert life_of(folder, 3, 0) is None
    life = new_life()
    assert life != new_life()
    write_fence(folder, fence(3, rank=1, world_size=2, life=life))
    assert read_fence(folder.fence(3, 1)).life == life
    assert life_of(folder, 3, 0) == life_of(folder, 3, 1) == life
    folder.fence(3, 0).write_bytes(b"{}")
    assert life_of(folder, 3, 0) == life


@pytest.mark.parametrize("life", ["A" * 32, "a" * 31, 7, None])
def test_a_life_that_is_none_is_damage(tmp_path: Path, life: object) -> None:
    folder = RunFolder(tmp_path)
    write_fence(folder, fence(0))
    document = read_json(folder.fence(0, 0))
    write_json(folder.fence(0, 0), {**document, "life": life})
    with pytest.raises(DamagedFile, match="not a fence"):
        read_fence(folder.fence(0, 0))


@pytest.mark.slow
def test_a_fetch_does_not_mix_two_lives(tmp_path: Path) -> None:
    store = uploaded(tmp_path / "b", B, range(11, 21))
    here = living(tmp_path / "a", A, range(11, 16))
    with writing(here):
        pass
    with pytest.raises(RunMismatch, match=r"different histories: their .*rank-0000\.json differs"):
        fetch_history(store, here.folder, None)
    assert stored(here.folder, 1) == list(range(11, 16))


def test_memory_of_another_life_counts_for_nothing_and_stays(tmp_path: Path) -> None:
    store = uploaded(tmp_path / "b", B, range(11, 21))
    here = living(tmp_path / "a", A, range(11, 26))
    elsewhere = moved_away(here)
    roots = [Path(here.staging_root)]
    fetch_history(store, here.folder, None)
    assert scan(here.folder, roots).of(1, 0).ranges == [(11, 20)]
    assert staging_of_run(roots[0], here.folder, RUN_ID) == []
    assert stored(here.folder, 1) == list(range(11, 21))
    # Where it belongs it counts again.
    shutil.rmtree(here.run)
    elsewhere.rename(here.run)
    assert scan(here.folder, roots).of(1, 0).ranges == [(11, 25)]


def test_memory_of_a_life_that_the_run_knows_nothing_of_is_told_from_its_own(
    tmp_path: Path,
) -> None:
    here = living(tmp_path, A, range(11, 16))
    moved_away(here)
    began(here.folder)
    here.folder.run_file.write_bytes((tmp_path / "elsewhere" / "run.json").read_bytes())
    assert not is_known(here.staging, here.folder)
    # Fences may still be on their way when memory is looked for.
    assert staging_of_run(tmp_path / "staging", here.folder, RUN_ID) == [here.staging]


def test_a_life_whose_fence_cannot_be_read_is_not_called_unknown(tmp_path: Path) -> None:
    here = living(tmp_path, A, range(11, 16))
    here.folder.fence(1, 0).write_bytes(b"{}")
    assert is_known(here.staging, here.folder)
