"""Staging is measured against the file system and the control group before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowdiff.errors import ConfigError
from lowdiff.persistence.staging.budget import (
    Room,
    StagingNeed,
    fits_twice,
    is_in_memory,
    log_cap,
    memory_headroom,
    room_at,
)

MIB = 1 << 20
NEED = StagingNeed(30 * MIB, 50 * MIB, 100 * MIB, 20 * MIB)


def room(free_mib: float, limit_mib: float | None = None) -> Room:
    limit = None if limit_mib is None else int(limit_mib * MIB)
    return Room(Path("/memory"), int(free_mib * MIB), limit)


def test_with_room_enough_the_log_may_become_as_long_as_wanted() -> None:
    assert log_cap([NEED], NEED, room(180)) == NEED.log_bytes
    assert log_cap([NEED, NEED], NEED, room(10_000)) == NEED.log_bytes


def test_short_memory_is_shared_between_the_ranks_of_a_machine() -> None:
    assert log_cap([NEED, NEED], NEED, room(280)) == 60 * MIB
    small = StagingNeed(0, 0, 40 * MIB, 20 * MIB)
    needs = [NEED, small]
    caps = [log_cap(needs, need, room(120 + 50)) for need in needs]
    assert caps == [20 * MIB + 40 * MIB, 20 * MIB + 10 * MIB]
    assert sum(caps) + NEED.residual_bytes + NEED.snapshot_bytes <= 170 * MIB
    assert log_cap([NEED], NEED, room(100)) == NEED.least_log_bytes


def test_a_log_leaves_half_of_what_is_free_to_the_life_after_a_crash_if_that_is_enough() -> None:
    assert log_cap([NEED], NEED, room(230)) == 35 * MIB
    assert NEED.residual_bytes + NEED.snapshot_bytes + 35 * MIB == 115 * MIB
    assert log_cap([NEED], NEED, room(360)) == NEED.log_bytes
    assert fits_twice([NEED], room(200))
    assert not fits_twice([NEED], room(199))


def test_what_cannot_fit_is_refused_with_numbers_and_advice() -> None:
    with pytest.raises(ConfigError) as error:
        log_cap([NEED, NEED], NEED, room(199.9))
    for part in ("200.0 MiB at /memory for 2 rank(s)", "199.9 MiB are free", "gc --staging"):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="free under the memory limit of the control group"):
        log_cap([NEED], NEED, room(1000, 99))


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def process_in(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    return root / "proc"


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "0::/outer/inner")
    groups = tmp_path / "cgroup"
    group(groups, memory__max="max", memory__current=10_000)
    stat = "anon 5\ninactive_file 300"
    group(groups / "outer", memory__max=2000, memory__current=1500, memory__stat=stat)
    group(groups / "outer/inner", memory__max="max", memory__current=10)
    # 500 free and 300 that the kernel would give back, less 5 % for training itself.
    assert memory_headroom(proc, groups) == 500 + 300 - 100
    (groups / "outer/inner/memory.max").write_text("60\n")
    assert memory_headroom(proc, groups) == 60 - 10 - 3
    (groups / "outer/inner/memory.max").write_text("5\n")
    assert memory_headroom(proc, groups) == 0


def test_in_a_container_the_root_of_the_hierarchy_is_the_group(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "0::/kubepods/not-visible-here")
    group(tmp_path / "cgroup", memory__max=1000, memory__current=400)
    assert memory_headroom(proc, tmp_path / "cgroup") == 550


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    proc = process_in(tmp_path, "5:cpu:/", "4:memory:/job", "0::/")
    groups = tmp_path / "cgroup"
    limits = {"memory__limit_in_bytes": 9223372036854771712, "memory__usage_in_bytes": 7}
    group(groups / "memory", **limits)
    assert memory_headroom(proc, groups) is None
    stat = "total_inactive_file 100"
    limits = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 700}
    group(groups / "memory/job", **limits, memory__stat=stat)
    assert memory_headroom(proc, groups) == 350


def test_this_machine(tmp_path: Path) -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert not is_in_memory(Path("/proc"))
    found = room_at(tmp_path / "not/yet/there")
    assert found.free_bytes > 0
