"""What the chooser plans is a state of the run, whatever is missing, old or damaged."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowdiff
from lowdiff.compressors import Cast
from lowdiff.errors import LowDiffError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import encode
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.reshard import whole
from lowdiff.recovery.search import Search, load_and_replay
from lowdiff.recovery.sources import chooser
from lowdiff.testing import kill, parts_of
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

SETTINGS: dict[str, dict[str, Any]] = {
    "log": {"compressor": Cast(), "batch_size": 64, "copies": 2},
    "gradients": {"strategy": "gradients", "copies": 2},
    "replica": {"strategy": "replica", "copies": 2},
    "survivors": {"strategy": "survivors"},
}
#: Steps of the first life, of which a copy is made after some, and of the second one.
FIRST, EARLY, SECOND = 7, 4, 10
#: Of three ranks with a copy each, in two incarnations.
_MOST_FOLDERS = 12


def lived(rank: int, world_size: int, folder: str, kind: str, until: int) -> int:
    """A life on a node of each rank's own, which ends as by SIGKILL of all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model: nn.Module = wrapped(net) if world_size > 1 else net
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    settings = SETTINGS[kind] | ({"copies": 1} if world_size == 1 else {})
    staging = f"{folder}/staging/{rank}"
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=staging, snapshot_every=3, **settings
    )
    began = checkpointer.attach(model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number, rank, 6, 12)).square().mean().backward()
        optimizer.step()

    def noted(number: int) -> None:
        if rank == 0:
            Path(folder, f"state-{number + 1}").write_text(digest_of(net.state_dict()))

    for number in range(began, until):
        step(number)
        checkpointer.commit()
        noted(number)
        if number == EARLY:
            kept(folder, "early", rank, world_size)
    if kind == "survivors" and world_size > 1:  # the others do not come to their commit
        step(until)
        if rank == 0:
            checkpointer.commit()
            noted(until)
            parts_of(checkpointer).protection.save("the others are lost")
    kept(folder, f"late-{until}", rank, world_size)
    kill(checkpointer)
    return began


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    return hashlib.sha256(encode(dict(state))).hexdigest()


def kept(folder: str, name: str, rank: int, world_size: int) -> None:
    """Copy all staging as it is now."""
    if world_size > 1:
        dist.barrier()
    if rank == 0:
        for path in sorted(Path(folder, "staging").rglob("*")):
            place = Path(folder, name) / path.relative_to(Path(folder, "staging"))
            with suppress(FileNotFoundError):  # a writer still works
                if path.is_file():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)
    if world_size > 1:
        dist.barrier()


KINDS = [("gradients", 2), ("replica", 2), ("log", 3), ("survivors", 2)]
MORE_KINDS = [
    ("gradients", 3),
    ("gradients", 1),
    ("replica", 1),
    ("log", 2),
    ("replica", 3),
    ("survivors", 3),
]


@pytest.fixture(
    scope="module",
    params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)],
    ids=lambda kind: f"{kind[0]} of {kind[1]}",
)
def life(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two lives of a run; beside the run folder lie copies of staging at three moments."""
    kind, world_size = request.param
    folder = tmp_path_factory.mktemp("lives")
    pool.run(lived, world_size, str(folder), kind, FIRST)
    pool.run(lived, world_size, str(folder), kind, SECOND)
    return folder


#: What becomes of a rank's or a copy's folder: gone, or as it was at a moment.
moments = st.sampled_from(["", "early", f"late-{FIRST}", f"late-{SECOND}", f"late-{SECOND}"])
#: Which file is damaged, how, and where.
damages = st.tuples(st.floats(0, 1), st.sampled_from(["remove", "flip", "cut"]), st.floats(0, 1))


def put(life: Path, folder: Path, chosen: Sequence[str]) -> None:
    """Lay out staging folders as they were at the chosen moments."""
    shutil.copytree(life / "run", folder / "run")
    names = sorted({p.relative_to(m) for m in all_moments(life) for p in m.glob("*/*/*")})
    for name, moment in zip(names, [*chosen, *[""] * len(names)], strict=False):
        source = life / moment / name
        if moment and source.is_dir():
            shutil.copytree(source, folder / "staging" / name)


def all_moments(life: Path) -> list[Path]:
    return [path for path in life.iterdir() if path.name.startswith(("early", "late"))]


def damage(folder: Path, place: float, how: str, where: float) -> None:
    """Remove a file, cut it, or change a bit of it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "locks" not in p.parts)
    if not files:  # a writer removed them while the moment was copied
        return
    path = files[min(int(place * len(files)), len(files) - 1)]
    if how == "remove" or path.stat().st_size == 0:
        path.unlink()
        return
    at = min(int(where * path.stat().st_size), path.stat().st_size - 1)
    with path.open("r+b") as file:
        if how == "cut":
            file.truncate(at)
            return
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def scanned(folder: Path) -> Catalog:
    return scan(RunFolder(folder / "run"), sorted((folder / "staging").glob("*")))


@given(
    chosen=st.lists(moments, min_size=_MOST_FOLDERS, max_size=_MOST_FOLDERS),
    of_staging=st.lists(damages, max_size=2),
    of_run=st.lists(damages, max_size=1),
    step=st.none() | st.integers(0, SECOND + 1),
)
def recovers(
    life: Path, chosen: list[str], of_staging: list[Any], of_run: list[Any], step: int | None
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put(life, folder, chosen)
        for part, some in (("staging", of_staging), ("run", of_run)):
            for one in some if (folder / part).exists() else ():
                damage(folder / part, *one)
        try:
            search = Search(scanned(folder), step, goes_back=step is None, act=load_and_replay)
            state = whole(search.run(ReplayOptions(), progress=None))
        except LowDiffError:
            return  # which says what is missing
        assert step in (None, state.step)
        if state.step:
            expected = (life / f"state-{state.step}").read_text()
            assert digest_of(state.model_state_dict()) == expected


def test_what_is_planned_is_a_state_of_the_run(life: Path) -> None:
    recovers(life)


def test_a_lost_rank_is_planned_for(life: Path, tmp_path: Path) -> None:
    """From memory, where nothing is damaged and the node of the last of several ranks is lost."""
    put(life, tmp_path, [f"late-{SECOND}"] * _MOST_FOLDERS)
    ranks = len(list((life / "staging").iterdir()))
    if ranks > 1:
        shutil.rmtree(tmp_path / "staging" / str(ranks - 1))
    plan = chooser.plan_in_memory(scanned(tmp_path), None)
    assert plan is not None
    assert plan.step >= SECOND - 2
