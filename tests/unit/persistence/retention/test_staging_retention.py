"""What dead runs left on tmpfs goes only when nothing is lost with it and nobody uses it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.framing import FileHeader, FileKind, RecordKind, read_records
from lowdiff.persistence.retention.staging import StagingVerdict, clear_staging
from lowdiff.persistence.run.fences import create_run, write_fence
from lowdiff.persistence.run.journal import write_collected
from lowdiff.persistence.run.owner import claim, staging_of_run
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.writer.handle import WriterProcess
from tests.unit.persistence.made_runs import LIFE, fence
from tests.unit.persistence.network_disk import keep_open
from tests.unit.persistence.writers import PATIENCE_SECONDS
from tests.unit.recovery.training import flip

RUN_ID = "00112233445566778899aabbccddeeff"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "run")
    create_run(folder, RUN_ID)
    return folder


def staged(run: RunFolder, steps: int, rank: int = 0) -> StagingFolder:
    """A staging folder of a trainer that died after so many steps; nothing of it is durable."""
    root = run.root.parent.parent / "staging"
    stage = StagingFolder.of(root, RUN_ID, 0, rank)
    stage.root.mkdir(parents=True)
    write_fence(run, fence(0, rank))
    claim(stage, run, LIFE)
    append(stage, steps)
    return stage


def append(stage: StagingFolder, steps: int) -> None:
    """Stage steps from the first on."""
    log = StagingLog(stage, run_id=RUN_ID, world_size=1, chunk_bytes=4096, cap_bytes=1 << 20)
    log.append(RecordKind.BASE, 0, b"", (), durable_step=-1)
    for step in range(1, steps + 1):
        log.append(RecordKind.DIFFERENTIAL, step, b"", (), durable_step=-1)


def made_durable(run: RunFolder, stage: StagingFolder) -> None:
    """Let a writer do its work."""
    settings = WriterSettings(
        run=str(run.root),
        staging_root=str(stage.root.parent.parent),
        run_id=RUN_ID,
        incarnation=0,
        rank=stage.rank,
        world_size=1,
        base_step=0,
        trainer_pid=0,
        batch_size=4,
        flush_seconds=1.0,
        retention=None,
    )
    WriterProcess(settings).finish(PATIENCE_SECONDS)


def cleared(stage: StagingFolder, *, force: bool = False, dry_run: bool = False) -> StagingVerdict:
    (verdict,) = clear_staging(stage.root.parent.parent, force=force, dry_run=dry_run)
    assert verdict.path == stage.root
    return verdict


def test_steps_that_are_nowhere_else_stay(run: RunFolder) -> None:
    stage = staged(run, 3)
    verdict = cleared(stage)
    assert (verdict.goes, verdict.run) == (False, str(run.root))
    assert verdict.reason == "steps 1 to 3 are here only; the next attach goes on from them"
    assert stage.chunk(0).exists()
    assert cleared(stage, force=True).goes
    assert not stage.root.parent.exists()


@pytest.mark.slow
def test_steps_that_are_all_durable_go(run: RunFolder) -> None:
    stage = staged(run, 3)
    made_durable(run, stage)
    assert cleared(stage, dry_run=True).reason == f"its steps are all in {run.root}"
    assert stage.chunk(0).exists()
    assert cleared(stage).goes
    assert not stage.root.exists()


def test_a_folder_goes_also_where_what_is_open_cannot_be_deleted(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(run, 3)
    made_durable(run, stage)
    with monkeypatch.context() as patch:
        keep_open(patch, ["writer.lock"])
        assert cleared(stage).goes
    (left,) = stage.root.iterdir()
    left.unlink()
    assert cleared(stage).goes
    assert not stage.root.exists()


def test_one_step_that_is_not_durable_keeps_the_folder(run: RunFolder) -> None:
    stage = staged(run, 2)
    made_durable(run, stage)
    append(stage, 3)
    assert cleared(stage).reason == "steps 3 to 3 are here only; the next attach goes on from them"


def test_steps_that_are_durable_no_more_keep_the_folder(run: RunFolder) -> None:
    stage = staged(run, 9)
    made_durable(run, stage)
    path = run.segment(0, 0, 1)
    whole = path.read_bytes()
    records = list(read_records(memoryview(whole), FileHeader.unpack(whole, path)))
    # The last steps are good; of those before one bit flips.
    later = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 7).pack() + whole[records[6].offset :]
    run.segment(0, 0, 7).write_bytes(later)
    flip(path, records[3].offset + 8)
    assert cleared(stage).reason == "steps 4 to 6 are here only; the next attach goes on from them"
    assert stage.root.exists()
    write_collected(run, RUN_ID, [(0, 1, 6)])
    assert cleared(stage).goes


def test_a_folder_that_cannot_be_read_stays(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(run, 3)

    def broken(path: Path) -> memoryview:
        raise DamagedFile(path, "it cannot be read ([Errno 5] Input/output error)")

    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.persistence.staging.log.read_view", broken)
        verdict = cleared(stage)
    assert not verdict.goes
    assert verdict.reason.startswith("it may hold steps, but ")


@pytest.mark.parametrize("known", ["b" * 32, None])
def test_a_life_that_the_run_has_gone_on_without_stays(run: RunFolder, known: str | None) -> None:
    stage = staged(run, 3)
    made_durable(run, stage)
    run.fence(0, 0).unlink()
    if known is not None:
        write_fence(run, fence(0, life=known))
    reason = cleared(stage).reason
    assert reason.startswith("steps 1 to 3 may be here only: ")
    assert "has gone on without incarnation 0" in reason
    shutil.rmtree(run.root / "incarnations", ignore_errors=True)
    write_fence(run, fence(0))
    assert cleared(stage).goes


def test_a_folder_without_a_step_goes(run: RunFolder) -> None:
    assert cleared(staged(run, 0)).reason == "it holds no step"


@pytest.mark.parametrize("name", ["trainer_lock", "writer_lock"])
def test_what_is_in_use_stays_even_by_force(run: RunFolder, name: str) -> None:
    stage = staged(run, 0)
    lock = FileLock(getattr(stage, name))
    assert lock.acquire("process 7 on some host")
    verdict = cleared(stage, force=True)
    assert (verdict.goes, verdict.is_in_use) == (False, True)
    assert verdict.reason == "in use by process 7 on some host"
    lock.release()
    assert cleared(stage).goes


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_belongs_to_a_run_that_was_moved_or_deleted_stays(
    run: RunFolder, tmp_path: Path, is_replaced: bool
) -> None:
    stage = staged(run, 3)
    moved = RunFolder(run.root.rename(tmp_path / "moved"))
    why = "was it moved or deleted, or is it not mounted?"
    if is_replaced:
        create_run(run, "ff" * 16)
        why = "is another run now"
    verdict = cleared(stage)
    assert not verdict.goes
    assert verdict.reason.startswith(f"steps 1 to 3 may be here only: {run.root} ")
    assert verdict.reason.endswith(why)
    assert staging_of_run(tmp_path / "staging", moved, RUN_ID) == [stage]
    assert cleared(stage, force=True).goes
    assert not stage.root.exists()


def test_nothing_is_lost_with_a_folder_of_a_deleted_run_without_a_step(run: RunFolder) -> None:
    stage = staged(run, 0)
    shutil.rmtree(run.root)
    assert cleared(stage).goes


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_a_folder_that_names_no_run_stays(run: RunFolder, content: bytes | None) -> None:
    stage = staged(run, 3)
    stage.owner.unlink() if content is None else stage.owner.write_bytes(content)
    assert cleared(stage).reason == "step 3 may be here only: no run is named"
    assert staging_of_run(stage.root.parent.parent, run, RUN_ID) == [stage]


def test_every_rank_is_judged_by_itself(run: RunFolder, tmp_path: Path) -> None:
    staged(run, 0), staged(run, 2, rank=1)
    (tmp_path / "staging" / "something else").mkdir()
    found: Iterator[StagingVerdict] = clear_staging(tmp_path / "staging")
    assert [verdict.goes for verdict in found] == [True, False]
    assert list(clear_staging(tmp_path / "nowhere")) == []


def test_what_a_live_trainer_renames_and_what_is_adopted_meanwhile_is_no_trouble(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(run, 3)
    lock = FileLock(stage.trainer_lock)
    assert lock.acquire("a trainer")
    entries = Path.iterdir
    with monkeypatch.context() as reusing:
        gone = stage.chunk(7)
        reusing.setattr(Path, "iterdir", lambda path: [*entries(path), gone])
        assert cleared(stage).is_in_use
    lock.release()
    acquire = FileLock.acquire

    def too_late(lock: FileLock, description: str, *, is_guest: bool) -> bool:
        stage.remove()
        return acquire(lock, description, is_guest=is_guest)

    monkeypatch.setattr(FileLock, "acquire", too_late)
    assert list(clear_staging(stage.root.parent.parent)) == []
