"""Decide whether staging fits into its folder, before anything is written.

Memory on tmpfs counts twice: against the size of the file system, and against the memory limit of
the control group. The kernel answers a breach of that limit with SIGKILL for every process in the
group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowdiff.errors import ConfigError

#: Share of a control group's memory that is left for training itself.
_RESERVE = 0.05
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class DoesNotFit(ConfigError):
    """Staging memory does not hold what a strategy needs."""


@dataclass(frozen=True, slots=True)
class StagingNeed:
    """Staging memory that one rank needs, in bytes.

    Attributes:
        residual_bytes: Slots of the error-feedback residual.
        snapshot_bytes: Image of its share of a full snapshot, estimated before the first step.
        log_bytes: The log, with room for many steps of delay by storage.
        least_log_bytes: The log if memory is short; training then waits for storage earlier.
        replica_bytes: A replica's state, and a copy of it while the disk takes it (LowDiff+); what
            survivors save.
        copies_bytes: What is kept for ranks on other nodes, but their logs.
    """

    residual_bytes: int
    snapshot_bytes: int
    log_bytes: int
    least_log_bytes: int
    replica_bytes: int = 0
    copies_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """Return the least that works at all."""
        fixed = self.residual_bytes + self.snapshot_bytes + self.replica_bytes + self.copies_bytes
        return fixed + self.least_log_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """Free memory in the staging folder, in bytes.

    Attributes:
        root: The folder.
        file_system_bytes: Free bytes in its file system.
        memory_bytes: Free bytes under the control group's limit; None if there is no limit, or if
            the folder is not in memory.
    """

    root: Path
    file_system_bytes: int
    memory_bytes: int | None

    @property
    def free_bytes(self) -> int:
        """Return the smaller of both."""
        if self.memory_bytes is None:
            return self.file_system_bytes
        return min(self.file_system_bytes, self.memory_bytes)


def room_at(root: Path) -> Room:
    """Measure the file system and the control group."""
    existing = existing_part(root)
    found = os.statvfs(existing)
    limit = memory_headroom() if is_in_memory(existing) else None
    return Room(root, found.f_bavail * found.f_frsize, limit)


def existing_part(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(part for part in (path, *path.parents) if part.exists())


def log_cap(needs: Sequence[StagingNeed], mine: StagingNeed, room: Room) -> int:
    """Return the largest size of this rank's log if the ranks of ``needs`` share the room.

    If possible, they take no more than half of it, because the staging of a killed incarnation is released
    only once the next one has begun, which then finds as much.

    Raises:
        DoesNotFit: If not even the least fits; names the missing bytes and the ways out.
    """
    least = sum(need.least_bytes for need in needs)
    if least > room.free_bytes:
        raise DoesNotFit(
            f"staging needs {_mib(least)} at {room.root} for {len(needs)} rank(s) of this machine "
            f"({_mib(sum(n.residual_bytes for n in needs))} residuals, "
            f"{_mib(sum(n.snapshot_bytes for n in needs))} snapshot images, "
            f"{_mib(sum(n.replica_bytes for n in needs))} replicas, "
            f"{_mib(sum(n.copies_bytes for n in needs))} copies for other nodes, "
            f"{_mib(sum(n.least_log_bytes for n in needs))} logs), but {_mib(room.free_bytes)} are "
            f"free{_limited(room)} (staging of a killed incarnation is released once the next one has "
            "begun). Enlarge it (docker: --shm-size; Kubernetes: a volume emptyDir: {medium: "
            "Memory} mounted at /dev/shm), free it with `lowdiff gc --staging --all-runs --yes`, or "
            "pass Checkpointer(..., staging=FOLDER) with a folder on a disk of this machine: what "
            "is staged there survives SIGKILL as well"
        )
    # Half of what is free: the next incarnation finds as much.
    spare = (room.free_bytes // 2 if fits_twice(needs, room) else room.free_bytes) - least
    wanted = sum(need.log_bytes - need.least_log_bytes for need in needs)
    share = min(1.0, spare / wanted) if wanted else 1.0
    return mine.least_log_bytes + int(share * (mine.log_bytes - mine.least_log_bytes))


def fits_twice(needs: Sequence[StagingNeed], room: Room) -> bool:
    """Return whether the next incarnation finds room beside this one's staging, should it be killed."""
    return 2 * sum(need.least_bytes for need in needs) <= room.free_bytes


def is_in_memory(path: Path) -> bool:
    """Return whether a folder lies on a tmpfs."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in (_PROC / "self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def memory_headroom(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that the control groups of this process still allow; None without a limit."""
    return min(group_headrooms(proc, cgroups).values(), default=None)


def group_headrooms(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> dict[str, int]:
    """Return the bytes that each limited control group of this process still allows."""
    return dict(_headrooms(proc, cgroups))


def _headrooms(proc: Path, cgroups: Path) -> Iterator[tuple[str, int]]:
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            yield from _of_groups(cgroups, name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _of_groups(
                cgroups / "memory",
                name,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _of_groups(
    root: Path, name: str, limit_file: str, usage_file: str, reclaimable: str
) -> Iterator[tuple[str, int]]:
    """Yield headrooms of the group and its parents; a container may only show the hierarchy's root."""
    group = root / name.lstrip("/")
    for folder in (group, *group.parents):
        if (folder / limit_file).is_file() and (folder / usage_file).is_file():
            text = (folder / limit_file).read_text().strip()
            # Version 1 says "no limit" with a number near 2**63.
            if text != "max" and int(text) < 1 << 60:
                used = int((folder / usage_file).read_text())
                free = int(text) - used + _stat(folder / "memory.stat", reclaimable)
                yield str(folder), max(0, free - int(_RESERVE * int(text)))
        if folder == root:
            return


def _stat(path: Path, name: str) -> int:
    if not path.is_file():
        return 0
    values = dict(line.split() for line in path.read_text().splitlines())
    return int(values.get(name, 0))


def _limited(room: Room) -> str:
    if room.memory_bytes is None or room.file_system_bytes <= room.memory_bytes:
        return ""
    return " under the memory limit of the control group"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
