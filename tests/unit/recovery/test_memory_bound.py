"""All states are counted before anything is replayed: of comparisons two, of neighbours theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import NotEnoughMemory
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.compare import differences, largest_ulps
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replay import sizing
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.sizing import local_ranks, needed_bytes
from tests.crash.pool import Pool
from tests.crash.trainings import classifier, wrapped
from tests.unit.recovery.training import Trained, train

_ELEMENTS = 1 << 24  # 64 MiB


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Snapshots at 0, 5 and 7."""
    return train(tmp_path_factory.mktemp("bound"), 7)


def bytes_of(trained: Trained) -> int:
    """Of the largest snapshot."""
    return max(path.stat().st_size for path in trained.run.rglob("*.safetensors"))


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(sizing, "free_memory", lambda: {"machine": num_bytes})


def test_verify_counts_what_it_compares_with(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bytes_of(trained)
    free(monkeypatch, needed_bytes(one + one // 2))
    assert lowdiff.recover(trained.run, staging=trained.staging).step == 7
    begun: list[Any] = []
    with pytest.raises(NotEnoughMemory) as refused:
        verify(trained.run, trained.staging, progress=lambda *seen: begun.append(seen))
    assert not begun
    assert needed_bytes(one + one // 2) < refused.value.needed_bytes <= needed_bytes(2 * one)
    free(monkeypatch, needed_bytes(2 * one))
    assert verify(trained.run, trained.staging).ok


def recovered_by(
    rank: int,
    _: int,
    trained: Trained,
    free: tuple[list[int], ...],
    machines: str,
    groups: str = "",
) -> int | tuple[int, int, str]:
    """One rank of those that recover together, and how it is refused; runs in a pool's process.

    Args:
        trained: What they recover.
        free: Per rank, what it finds free each time it looks; the last for ever.
        machines: A letter for each rank.
        groups: Likewise, of its control group, whose limit it finds; none, and it is the machine's.
    """
    looks = list(free[rank])
    group = groups[rank : rank + 1]
    with pytest.MonkeyPatch.context() as patch:

        def look() -> dict[str, int]:
            free = looks.pop(0) if len(looks) > 1 else looks[0]
            # Of the rank's own group; the machine has enough for all.
            return {"machine": 1 << 50, f"group {group}": free} if group else {"machine": free}

        patch.setattr(sizing, "free_memory", look)
        patch.setattr(sizing, "this_machine", lambda: machines[rank])
        here = local_ranks(Ranks(dist.group.WORLD).gather)
        options = ReplayOptions(num_workers=1, here=here)
        try:
            return lowdiff.recover(trained.run, 7, staging=trained.staging, options=options).step
        except NotEnoughMemory as error:
            return error.needed_bytes, error.num_processes, str(error)


@pytest.mark.slow
def test_processes_of_one_machine_need_the_memory_of_all_of_them(
    trained: Trained, pool: Pool
) -> None:
    one = needed_bytes(bytes_of(trained))
    short = ([2 * one - 1], [2 * one - 1])
    for needed, num_processes, text in pool.run(recovered_by, 2, trained, short, "AA"):
        assert (needed, num_processes) == (2 * one, 2)
        assert "in each of the 2 processes that recover on this machine at once" in text
    assert pool.run(recovered_by, 2, trained, ([one], [one]), "AB") == [7, 7]
    assert pool.run(recovered_by, 2, trained, ([one], [one]), "AA", "GH") == [7, 7]
    found = pool.run(recovered_by, 2, trained, short, "AA", "GG")
    assert [num_processes for _, num_processes, _ in found] == [2, 2]


def test_what_the_neighbours_have_taken_already_is_not_missed_twice(
    trained: Trained, pool: Pool
) -> None:
    one = needed_bytes(bytes_of(trained))
    # Both looked before anything was loaded; the later one looks again when the other has its state.
    assert pool.run(recovered_by, 2, trained, ([2 * one], [2 * one, one]), "AA") == [7, 7]
    # The first looked while the other still held what it had of an attempt before.
    assert pool.run(recovered_by, 2, trained, ([one], [2 * one]), "AA") == [7, 7]


def attached_by(rank: int, world_size: int, folder: str, free_bytes: int | None) -> int | str:
    """A pool's job: where a life begins, or how it is refused."""
    model = wrapped(classifier())
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(0.1), staging=f"{folder}/staging"
    )
    with pytest.MonkeyPatch.context() as patch:
        if free_bytes is not None:
            free(patch, free_bytes)
        try:
            resumed = checkpointer.attach(model, torch.optim.SGD(model.parameters(), 0.1))
        except NotEnoughMemory as error:
            return str(error)
    checkpointer.close()
    return resumed


@pytest.mark.slow
def test_attach_counts_the_ranks_of_the_machine(pool: Pool, tmp_path: Path) -> None:
    pool.run(attached_by, 2, str(tmp_path), None)
    one = needed_bytes(scan(RunFolder(tmp_path / "run")).snapshots[-1].bytes)
    for refused in pool.run(attached_by, 2, str(tmp_path), 2 * one - 1):
        assert "in each of the 2 processes that recover on this machine at once" in refused
    assert pool.run(attached_by, 2, str(tmp_path), 2 * one) == [0, 0]


@contextmanager
def at_most(mib: int) -> Iterator[None]:
    """Fail if the body makes this process grow by more than so many MiB."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) >> 10

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew
    before = status("VmRSS")
    yield
    assert status("VmHWM") - before <= mib


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensor: None, []),
        (lambda tensor: tensor[5:].add_(1), ["parameter 0 (16777211 elements; the first, 5: 0.0"]),
    ],
    ids=["same", "different"],
)
def test_comparing_takes_next_to_nothing(
    trained: Trained, change: Callable[[torch.Tensor], Any], named: list[str]
) -> None:
    left, right = (lowdiff.recover(trained.run, 0, staging=trained.staging) for _ in range(2))
    left.parameters["0"], right.parameters["0"] = torch.zeros(_ELEMENTS), torch.zeros(_ELEMENTS)
    change(right.parameters["0"])
    with at_most(mib=48):
        found = list(differences(left, right))
    assert [text[: len(start)] for text, start in zip(found, named, strict=True)] == named


def test_distances_of_far_numbers_do_not_overflow() -> None:
    largest = torch.finfo(torch.float64).max
    left, right = (torch.full((2,), x, dtype=torch.float64) for x in (-largest, largest))
    assert largest_ulps(left, right) == 2 * (0x7FF << 52) - 2
    assert largest_ulps(left[:0], right[:0]) == 0
    bits = torch.arange(4, dtype=torch.uint8)
    assert largest_ulps(bits.view(torch.float16), bits.flip(0).view(torch.float16)) == 0x301
    of_a_byte = (side.view(torch.float8_e4m3fn) for side in (bits, bits.flip(0)))
    assert largest_ulps(*of_a_byte) is None
