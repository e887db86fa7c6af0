"""What the next life finds in the memory of one that died, and what it waits for and refuses first."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from lowdiff import testing
from lowdiff.core.memory import byte_view
from lowdiff.errors import ReplayMismatch, RunInUse, StorageError
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.retention.staging import clear_staging
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.run.fences import read_fence
from lowdiff.persistence.staging.status import ReplicaStatus, read_status
from lowdiff.protect.replica.queue import ReplicaImages
from lowdiff.recovery import recover, search
from lowdiff.recovery.replay.replayer import replay, step_through
from lowdiff.recovery.replica import file as replica_file
from lowdiff.recovery.replica.file import ReplicaFile
from lowdiff.recovery.replica.share import Shard, contents_of
from lowdiff.recovery.sources import shares
from lowdiff.recovery.sources.chooser import plan_in_memory
from lowdiff.recovery.state import RecoveredState
from tests.crash.pool import Pool
from tests.faults.victim import ONE_WORKER, digest_of
from tests.processes import is_alive
from tests.unit.commit.test_replica_queue import LargerTraining, Life
from tests.unit.commit.test_replica_ranks import RankLife
from tests.unit.loops import wait_until

STEPS = 7


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A life of `STEPS` steps, of which the disk holds none but the first state."""
    life = Life(tmp_path_factory.mktemp("original"), snapshot_every=1000)
    with pytest.MonkeyPatch.context() as patch:
        # As where the replica is slow to begin: the trainer's image is still there.
        patch.setattr(ReplicaImages, "free", lambda *_: None)
        life.run(STEPS)
    life.wait(lambda stats: stats["replica_step"] == STEPS)
    life.wait(lambda stats: stats["durable_step"] == 0)
    life.kill()
    return life


@pytest.fixture
def killed(original: Life, tmp_path: Path) -> Life:
    """What it left, to be changed."""
    for name in ("run", "staging"):
        shutil.copytree(original.folder / name, tmp_path / name)
    life = copy(original)
    life.folder = tmp_path
    return life


@pytest.fixture
def dead(killed: Life) -> Life:
    """The same, with no step in its queue any more, so that nothing leads on from the disk."""
    empty_queue(killed)
    return killed


def empty_queue(life: Life) -> None:
    for _, chunk in stage_of(life.folder).chunks():
        chunk.unlink()


def planned(life: Life) -> int | None:
    """The step that the memory leads to; None if it does not."""
    catalog = scan(RunFolder(life.folder / "run"), [life.folder / "staging"])
    plan = plan_in_memory(catalog, None)
    return None if plan is None else plan.step


def stage_of(folder: Path) -> StagingFolder:
    (stage,) = StagingFolder.all(folder / "staging")
    return stage


@contextmanager
def beside(run: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run something in a thread, which ends when its event is set."""
    end = threading.Event()
    thread = threading.Thread(target=run, args=(end,))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["trainer_lock", "replica_lock"])
def test_whoever_only_looks_at_the_memory_is_waited_for(dead: Life, name: str) -> None:
    lock = FileLock(getattr(stage_of(dead.folder), name))
    assert lock.acquire("process 1, clearing staging memory", is_guest=True)

    def look(end: threading.Event) -> None:
        end.wait(1.0)
        lock.release()

    with beside(look):
        dead.assert_recovered()


@pytest.mark.slow
def test_looks_of_gc_hide_no_step(dead: Life) -> None:
    def look(end: threading.Event) -> None:
        while not end.is_set():
            list(clear_staging(dead.folder / "staging", dry_run=True))

    with beside(look):
        for _ in range(40):
            assert planned(dead) == STEPS


@pytest.mark.parametrize("name", ["trainer_lock", "replica_lock"])
def test_whoever_keeps_the_memory_of_a_dead_trainer_is_named(
    dead: Life, name: str, limits: Callable[..., None]
) -> None:
    limits(memory_patience_seconds=0.2)
    lock = FileLock(getattr(stage_of(dead.folder), name))
    assert lock.acquire("somebody else", is_guest=True)
    with pytest.raises(RunInUse, match="in use by somebody else"):
        dead.assert_recovered()
    lock.release()
    dead.assert_recovered()


def test_the_memory_of_a_live_trainer_is_left_alone_at_once(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(memory_patience_seconds=0.0)  # it would be an error
    life = Life(tmp_path, snapshot_every=4)
    life.run(6)
    life.wait(lambda stats: stats["replica_step"] == 6)
    assert planned(life) is None
    life.assert_recovered()  # from the disk, and what it lists of the queue
    life.kill()
    assert planned(life) == 6


def no_memory(*_: object, **__: object) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def no_room(*_: object, **__: object) -> Any:
    raise StorageError("staging needs 1.0 MiB, and that file system is full")


def no_map(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("thing", "name", "failure", "error"),
    [
        (Shard, "__init__", no_memory, RuntimeError),
        (Shard, "__init__", no_room, StorageError),
        (mmap, "mmap", no_map, OSError),
    ],
    ids=["memory", "room", "map"],
)
def test_want_of_memory_is_no_reason_to_go_back(
    dead: Life, thing: Any, name: str, failure: Any, error: type[Exception]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if thing is mmap:  # of the replica's file only
            patch.setattr(replica_file, "mmap", type("Full", (), {**vars(mmap), name: failure}))
        else:
            patch.setattr(thing, name, failure)
        with pytest.raises(error):
            recover(dead.folder / "run", staging=dead.folder / "staging", options=ONE_WORKER)
    dead.assert_recovered()


def test_content_that_fits_nothing_is_a_reason_to_go_back(
    dead: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def misfit(*_: object, **__: object) -> Any:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    monkeypatch.setattr(shares, "merge", misfit)
    dead.assert_recovered(0)
    assert "going back to what is on disk" in caplog.text


def flip_parameter(file: ReplicaFile) -> None:
    name = next(name for name in file.tensors() if name.startswith("model/"))
    byte_view(file.tensors()[name])[3] ^= 0x40


def flip_step_of_unit(file: ReplicaFile) -> None:
    file.unit_steps[0] ^= 1


@pytest.mark.parametrize("flip", [flip_parameter, flip_step_of_unit])
def test_a_flipped_bit_in_the_replicas_memory_is_a_reason_to_go_back(
    killed: Life, flip: Callable[[ReplicaFile], None], caplog: pytest.LogCaptureFixture
) -> None:
    stage = stage_of(killed.folder)
    generation = read_status(stage.replica_status, ReplicaStatus).generation
    flip(ReplicaFile.open(stage.replica_state(generation), private=False))
    killed.assert_recovered()  # the first state and the queue lead as far
    assert "LD605" in caplog.text
    assert "going back to what is on disk" in caplog.text
    caplog.clear()
    empty_queue(killed)
    killed.assert_recovered(0)
    assert "LD605" in caplog.text


def test_a_flipped_bit_in_what_the_replica_keeps_of_a_step_is_told(
    killed: Life, caplog: pytest.LogCaptureFixture
) -> None:
    stage = stage_of(killed.folder)
    path = stage.replica_state(read_status(stage.replica_status, ReplicaStatus).generation)
    last = ReplicaFile.open(path, private=True).last_step()
    assert last is not None
    content = bytearray(path.read_bytes())
    content[content.index(last[1])] ^= 1
    path.write_bytes(content)
    killed.assert_recovered()  # by the step's record
    assert f"step {STEPS} fails its checksum" in caplog.text
    caplog.clear()
    empty_queue(killed)
    killed.assert_recovered(0)
    assert f"step {STEPS} fails its checksum" in caplog.text


# Blocks that do not reproduce the live run's bits, as with an unusual kernel


@pytest.fixture
def in_flight(tmp_path: Path) -> Life:
    """A life whose replica holds step 3, and whose queue leads to `STEPS`."""
    life = Life(tmp_path, snapshot_every=1000)
    life.run(3)
    life.wait(lambda stats: stats["replica_step"] == 3)
    life.signal("replica", signal.SIGSTOP)
    life.run(STEPS)
    life.kill()
    return life


def replaying_in_blocks_fails(attempts: list[bool]) -> Callable[..., RecoveredState]:
    def replayed(*arguments: Any) -> RecoveredState:
        options = arguments[-1]
        attempts.append(options.whole)
        if not options.whole:
            raise ReplayMismatch("the parameters differ")
        return replay(*arguments)

    return replayed


def make_whole(stage: StagingFolder) -> None:
    """As a replica leaves its file once it has seen that blocks do not reproduce the bits."""
    fence = read_fence(
        RunFolder(stage.root.parents[2] / "run").fence(stage.incarnation, stage.rank)
    )
    path = stage.replica_state(read_status(stage.replica_status, ReplicaStatus).generation)
    state = Shard(ReplicaFile.open(path, private=True), fence, journaled=False).state
    ReplicaFile.create(path.with_suffix(".new"), contents_of(state, whole=True))
    path.with_suffix(".new").rename(path)


def test_steps_in_flight_are_replayed_in_whole_tensors_where_blocks_do_not_reproduce_them(
    in_flight: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[bool] = []
    monkeypatch.setattr(search, "replay", replaying_in_blocks_fails(attempts))
    in_flight.assert_recovered()
    assert attempts == [False, True]
    assert "replaying whole tensors instead of blocks" in caplog.text


def test_steps_in_flight_are_replayed_as_the_replica_had_to(
    in_flight: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_whole(stage_of(in_flight.folder))
    attempts: list[bool] = []
    monkeypatch.setattr(search, "replay", replaying_in_blocks_fails(attempts))
    in_flight.assert_recovered()
    assert attempts == [True]
    assert not caplog.records


def trained(rank: int, _: int, folder: Path) -> str:
    """One rank's life up to `STEPS`, all of which its replica holds; runs in a pool's process."""
    life = RankLife(rank, folder, snapshot_every=1000)
    while life.step < STEPS:
        life.train()
    # The last step is known to be committed only with the next.
    life.wait(lambda: life.checkpointer.stats()["replica_step"] == STEPS - 1)
    digest = life.training.digest()
    testing.kill(life.checkpointer)
    return digest


@pytest.mark.slow
def test_a_share_that_begins_with_the_trainers_image_is_stepped_as_the_others_are(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, _ = pool.run(trained, 2, tmp_path)
    first, second = StagingFolder.all(tmp_path / "staging")
    first.replica_state(read_status(first.replica_status, ReplicaStatus).generation).unlink()
    # A trainer gives its image's memory back once the writer has made the image durable.
    (image,) = (tmp_path / "run").rglob("rank-0000.safetensors")
    shutil.copy(image, first.snapshot)
    make_whole(second)
    stepped: list[tuple[int, bool]] = []

    def noted(share: RecoveredState, steps: Any, fence: Any, options: Any) -> Any:
        stepped.append((len(steps), options.whole))
        return step_through(share, steps, fence, options)

    monkeypatch.setattr(shares, "step_through", noted)
    state = recover(tmp_path / "run", staging=tmp_path / "staging", options=ONE_WORKER)
    assert (state.step, digest_of(state)) == (STEPS, digest)
    (first_steps, is_whole), others = stepped
    assert first_steps > 0
    assert (is_whole, others) == (True, (0, True))


def tear(stage: StagingFolder) -> None:
    """Leave one page of the replica's state as it was at an earlier step, as a loss of power does."""
    generation = read_status(stage.replica_status, ReplicaStatus).generation
    file = ReplicaFile.open(stage.replica_state(generation), private=False)
    for tensor in file.tensors().values():
        tensor.zero_()


def test_a_state_on_a_disk_is_not_believed_after_a_loss_of_power(
    killed: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_file, "is_in_memory", lambda _: False)
    assert planned(killed) == STEPS  # its own kernel still runs
    tear(stage_of(killed.folder))
    monkeypatch.setattr(replica_file, "this_machine", lambda: "the next boot")
    # The trainer's first image and the queue have checksums.
    killed.assert_recovered()
    assert "before this machine was started" in caplog.text
    empty_queue(killed)
    assert planned(killed) == 0
    stage_of(killed.folder).snapshot.unlink()
    assert planned(killed) is None
    killed.assert_recovered(0)


def test_a_state_in_memory_needs_no_note(dead: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_file, "is_in_memory", lambda _: True)
    monkeypatch.setattr(replica_file, "this_machine", lambda: "whatever it is")
    dead.assert_recovered()


def test_a_replica_without_its_trainer_ends_with_the_step_in_hand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    life = Life(tmp_path, LargerTraining, snapshot_every=1000)
    life.run(2)
    life.wait(lambda stats: stats["replica_step"] == 2)
    stage, stats = life.stage, life.checkpointer.stats()
    life.signal("replica", signal.SIGSTOP)
    life.run(8)
    testing.kill(life.checkpointer, processes=False)
    os.kill(stats["replica_pid"], signal.SIGCONT)
    wait_until(lambda: not (is_alive(stats["replica_pid"]) or is_alive(stats["writer_pid"])))
    assert read_status(stage.replica_status, ReplicaStatus).step <= 3
    life.assert_recovered()
    after = Life(tmp_path, LargerTraining, snapshot_every=1000)
    assert after.resumed == 8
    assert after.training.digest() == life.training.digest()
    after.kill()
