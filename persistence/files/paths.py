"""Names of all files on disk and in staging.

::

    RUN/run.json, run.copy                               identity of the run
    RUN/incarnations/i000002/rank-0000.json, .copy       fences
    RUN/incarnations/i000002/begun                       on several nodes: all ranks outlived their attach
    RUN/snapshots/i000002-s0000000200/rank-0000.*        .safetensors, .json (manifest)
    RUN/segments/rank-0000/i000002-s0000000201.seg       differentials 201, 202, ...
    RUN/constants/0123...def.safetensors                 frozen parameters, by SHA-256
    RUN/locks/rank-0000.lock, lease, retention.lock
    RUN/pins/LABEL.json                                  steps that retention spares
    RUN/retention.json                                   policy, and what it has removed
    RUN/measurements/i000002-rank-0000.json              what one rank measured in an incarnation

    STAGING/RUN_ID/i000002-r0000/log-00000000.chunk      staging log
    STAGING/RUN_ID/i000002-r0000/residual                error-feedback slots
    STAGING/RUN_ID/i000002-r0000/snapshot                image of the snapshot being persisted
    STAGING/RUN_ID/i000002-r0000/status                  the writer's status page
    STAGING/RUN_ID/i000002-r0000/trainer                 the trainer's status page
    STAGING/RUN_ID/i000002-r0000/measured-by-trainer     pages of recent measurements
    STAGING/RUN_ID/i000002-r0000/measured-by-writer
    STAGING/RUN_ID/i000002-r0000/decisions               decisions of the tuner
    STAGING/RUN_ID/i000002-r0000/replica-00000001        state of the replica (LowDiff+)
    STAGING/RUN_ID/i000002-r0000/replica                 the replica's status page
    STAGING/RUN_ID/i000002-r0000/replica.lock, replica.log
    STAGING/RUN_ID/i000002-r0000/replica.boot            kernel under which the state was written
    STAGING/RUN_ID/i000002-r0000/replica.image           the replica's image being persisted
    STAGING/RUN_ID/i000002-r0000/items-0 to items-3      items of the beginning, of the last two steps, and ahead of one
    STAGING/RUN_ID/i000002-r0000/survivor                page of the thread that saves after a failure
    STAGING/RUN_ID/i000002-r0000/survivor.image          what was saved for the rank after a failure
    STAGING/RUN_ID/i000002-r0000/survivor.saved          page that says so, of whoever saved it
    STAGING/RUN_ID/i000002-r0000/survivor.lock           held while it is written
    STAGING/RUN_ID/i000002-r0000/guest-0004              what was saved for rank 4, which is on another node
    STAGING/RUN_ID/i000002-r0000/guest-0004.saved        page that says so
    STAGING/RUN_ID/i000002-r0004-k0000/...               what rank 0 keeps for rank 4, which is on another node
    STAGING/RUN_ID/i000002-r0004-k0000/copy-0, copy-0.items, copy-0.saved    its share of a snapshot; two take turns
    STAGING/RUN_ID/i000002-r0004-k0000/residual          its residuals, where they are replicated
    STAGING/RUN_ID/i000002-r0000/ring                    says that the log is what leads on from images kept here
    STAGING/RUN_ID/i000002-r0000/copy-0, copy-0.saved    with it, an image of the rank's share; two take turns
    STAGING/RUN_ID/i000002-r0000/owner.json              run folder that this folder belongs to
    STAGING/RUN_ID/i000002-r0000/trainer.lock, writer.lock, writer.log
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lowdiff.errors import ConfigError
from lowdiff.persistence.files.durable import remove_folder
from lowdiff.persistence.files.trust import readable_root, shared_staging_root, trusted_folders

RUN_FILE = "run.json"
_CONSTANTS_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
#: Labels that a user may give to a pin.
LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PIN_NAME = re.compile(rf"{LABEL.pattern}\.json")
JOURNAL_NAME = re.compile(rf"retention\.json|pins/{_PIN_NAME.pattern}")
CONSTANTS_NAME = re.compile(rf"constants/{_CONSTANTS_NAME.pattern}")

_IN_SNAPSHOT = r"snapshots/i(?P<incarnation>\d{6})-s(?P<step>\d{10})/rank-(?P<rank>\d{4})"
_FILE_NAMES = {
    "fence": re.compile(r"incarnations/i(?P<incarnation>\d{6})/rank-(?P<rank>\d{4})\.json"),
    "manifest": re.compile(rf"{_IN_SNAPSHOT}\.json"),
    "image": re.compile(rf"{_IN_SNAPSHOT}\.safetensors"),
    "segment": re.compile(
        r"segments/rank-(?P<rank>\d{4})/i(?P<incarnation>\d{6})-s(?P<step>\d{10})\.seg"
    ),
}
_STAGING_NAME = re.compile(r"i(\d{6})-r(\d{4})")
_COPY_NAME = re.compile(r"i(\d{6})-r(\d{4})-k(\d{4})")
_SNAPSHOT_NAME = re.compile(r"i(\d{6})-s(\d{10})")
_SEGMENT_NAME = re.compile(r"i(\d{6})-s(\d{10})\.seg")
_ANY_NAME = re.compile(r".+", re.DOTALL)
_MANIFEST_NAME = re.compile(r"rank-(\d{4})\.json")
#: Names of files and folders have four digits for a rank.
MOST_RANKS = 10_000
_RANK_NAME = re.compile(r"rank-(\d{4})(?:\.json)?")
_INCARNATION_NAME = re.compile(r"i(\d{6})")
_MEASUREMENTS_NAME = re.compile(r"i(\d{6})-rank-(\d{4})\.json")
_CHUNK_NAME = re.compile(r"log-(\d{8})\.chunk")
_REPLICA_STATE_NAME = re.compile(r"replica-(\d{8})")
_GUEST_SAVED_NAME = re.compile(r"guest-(\d{4})\.saved")
_RUN_ID = re.compile(r"[0-9a-f]{32}")
#: Images that stay in memory, which take turns.
NUM_KEPT = 2
#: Files of a rank's items.
NUM_ITEM_SLOTS = 4


def staging_to_read(staging: str | Path | None) -> Path:
    """Return the folder in which a command that changes nothing looks for staged steps.

    If other users could have written the folder, a warning names it, and an empty folder is
    returned in its place.

    Args:
        staging: The staging root that the user named; None for the default one.
    """
    return readable_root(
        shared_staging_root() if staging is None else user_path("staging", staging)
    )


def user_path(name: str, value: object) -> Path:
    """Return a path that the user gave.

    Raises:
        ConfigError: If the value is no path.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} is the path of a folder, got {value!r}")
    return Path(text)


def file_bytes(path: Path) -> int:
    """Return a file's length; 0 if the file is gone, as a live run's files may be at any moment."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@dataclass(frozen=True, slots=True)
class RunFile:
    """Facts in the name of a run's file, relative to the run.

    Attributes:
        kind: ``"fence"``, ``"manifest"``, ``"image"`` or ``"segment"``.
        step: Step of the snapshot, or of the segment's first record; 0 for a fence.
    """

    name: str
    kind: str
    incarnation: int
    rank: int
    step: int

    @classmethod
    def parse(cls, name: str) -> RunFile | None:
        """Parse a name; None for a name of no kind."""
        for kind, pattern in _FILE_NAMES.items():
            match = pattern.fullmatch(name)
            if match:
                numbers = {key: int(value) for key, value in match.groupdict().items()}
                return cls(
                    name, kind, numbers["incarnation"], numbers["rank"], numbers.get("step", 0)
                )
        return None


class _File:
    """Descriptor of a file with a fixed name; returns the file's path in a folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder | StagingFolder, owner: object = None) -> Path:
        return _within(folder.root, self._name)


@lru_cache(maxsize=1024)
def _within(root: Path, name: str) -> Path:
    """Return a path in a folder, made once: each step asks for some."""
    return root / name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    #: Identity of the run.
    run_file = _File(RUN_FILE)
    #: Lease that rank 0's trainer renews, for trainers on machines that its lock does not reach.
    lease = _File("locks/lease")
    #: Lock held while old files are removed, and shared by processes that must not lose a file.
    retention_lock = _File("locks/retention.lock")
    #: The run's policy, and the steps that retention has removed.
    retention_file = _File("retention.json")

    def name(self, path: Path) -> str:
        """Return a path's name inside the run, which is also its name in a store."""
        return path.relative_to(self.root).as_posix()

    def fence(self, incarnation: int, rank: int) -> Path:
        """Return the path of one rank's fence."""
        return self.root / "incarnations" / f"i{incarnation:06d}" / f"rank-{rank:04d}.json"

    def begun(self, incarnation: int) -> Path:
        """Return the path of the file that says that an incarnation has begun on all its ranks."""
        return self.root / "incarnations" / f"i{incarnation:06d}" / "begun"

    def fences(self) -> Iterator[tuple[int, int, Path]]:
        """Yield ``(incarnation, rank, path)`` of every fence."""
        for folder, (incarnation,) in _matching(self.root / "incarnations", _INCARNATION_NAME):
            for path, (rank,) in _matching(folder, _RANK_NAME):
                yield incarnation, rank, path

    def incarnations(self) -> set[int]:
        """Return the numbers of all incarnations with a fence, including those that died in attach."""
        return {incarnation for incarnation, _, _ in self.fences()}

    def snapshot(self, incarnation: int, step: int) -> Path:
        """Return the folder of one snapshot."""
        return self.root / "snapshots" / f"i{incarnation:06d}-s{step:010d}"

    def snapshots(self) -> Iterator[tuple[int, int, Path]]:
        """Yield ``(incarnation, step, folder)`` of every snapshot folder, complete or not."""
        for path, (incarnation, step) in _matching(self.root / "snapshots", _SNAPSHOT_NAME):
            yield incarnation, step, path

    @staticmethod
    def manifests(snapshot: Path) -> list[Path]:
        """Return a snapshot's manifests, one per rank; none if the folder is being removed."""
        return [path for path, _ in _matching(snapshot, _MANIFEST_NAME)]

    def segments_of(self, rank: int) -> Path:
        """Return the folder of one rank's segments."""
        return self.root / "segments" / f"rank-{rank:04d}"

    def segments(
        self, is_wanted: Callable[[int], bool] = lambda rank: True
    ) -> Iterator[tuple[int, int, int, Path]]:
        """Yield ``(incarnation, rank, first step, path)`` of the wanted ranks' segments, sorted."""
        for folder, (rank,) in _matching(self.root / "segments", _RANK_NAME):
            if is_wanted(rank):
                for path, (incarnation, first) in _matching(folder, _SEGMENT_NAME):
                    yield incarnation, rank, first, path

    def segment(self, incarnation: int, rank: int, first: int) -> Path:
        """Return the path of the segment whose first record has step ``first``."""
        return self.segments_of(rank) / f"i{incarnation:06d}-s{first:010d}.seg"

    def constants(self, content_hash: str) -> Path:
        """Return the path of frozen parameters that snapshots share."""
        return self.root / "constants" / f"{content_hash}.safetensors"

    def all_constants(self) -> Iterator[tuple[str, Path]]:
        """Yield ``(content hash, path)`` of every file of frozen parameters."""
        for path, _ in _matching(self.root / "constants", _CONSTANTS_NAME):
            yield path.stem, path

    def lock(self, rank: int) -> Path:
        """Return the path of the lock held by this rank's trainer."""
        return self.root / "locks" / f"rank-{rank:04d}.lock"

    def pin(self, label: str) -> Path:
        """Return the path of a pin."""
        return self.root / "pins" / f"{label}.json"

    def pins(self) -> Iterator[tuple[str, Path]]:
        """Yield ``(label, path)`` of every pin."""
        for path, _ in _matching(self.root / "pins", _PIN_NAME):
            yield path.stem, path

    def measurements(self, incarnation: int, rank: int) -> Path:
        """Return the path of one rank's measurements in one incarnation."""
        return self.root / "measurements" / f"i{incarnation:06d}-rank-{rank:04d}.json"

    def all_measurements(self) -> Iterator[Path]:
        """Yield every document of measurements, oldest incarnation first."""
        for path, _ in _matching(self.root / "measurements", _MEASUREMENTS_NAME):
            yield path


def parse_staging_name(name: str) -> tuple[int, int, int | None]:
    """Return incarnation, rank and keeper of a staging folder's name."""
    match = _COPY_NAME.fullmatch(name) or _STAGING_NAME.fullmatch(name)
    assert match is not None
    incarnation, rank, *keeper = map(int, match.groups())
    return incarnation, rank, keeper[0] if keeper else None


@dataclass(frozen=True, slots=True)
class StagingFolder:
    """Paths inside one rank's staging folder of one incarnation.

    Attributes:
        root: The folder.
        incarnation: Number of the incarnation.
        rank: The rank whose data it holds.
        keeper: The rank on another node that keeps this copy; None where the rank made it itself.
    """

    root: Path
    incarnation: int
    rank: int
    keeper: int | None = None

    #: Residual slots.
    residual = _File("residual")
    #: Image of the snapshot that the writer is persisting.
    snapshot = _File("snapshot")
    #: The writer's status page.
    status = _File("status")
    #: The trainer's status page.
    trainer_status = _File("trainer")
    #: The trainer's page of measurements.
    measured_by_trainer = _File("measured-by-trainer")
    #: The writer's page of measurements.
    measured_by_writer = _File("measured-by-writer")
    #: Decisions of the tuner in this incarnation.
    decisions = _File("decisions")
    #: Name of the run folder that this staging folder belongs to.
    owner = _File("owner.json")
    #: Lock held by the trainer.
    trainer_lock = _File("trainer.lock")
    #: Lock held by the writer.
    writer_lock = _File("writer.lock")
    #: The replica's status page; exists from the first moment of an incarnation with a replica.
    replica_status = _File("replica")
    #: Lock held by the replica process.
    replica_lock = _File("replica.lock")
    #: Kernel under which the replica's files were written.
    replica_boot = _File("replica.boot")
    #: Output of the replica process.
    replica_log = _File("replica.log")
    #: Image of the replica's state that the writer is persisting.
    replica_image = _File("replica.image")
    #: Status page of the process that publishes weights; rank 0 has it.
    publisher_status = _File("publisher")
    #: Output of that process.
    publisher_log = _File("publisher.log")
    #: Published names, where the user gave them.
    publisher_names = _File("publisher.names")
    #: Page of the rank's survivor: what it knows of a failure.
    survivor_status = _File("survivor")
    #: Page that says what was saved for the rank, by whichever survivor did.
    survivor_saved = _File("survivor.saved")
    #: Image of the rank's share that a survivor saved after a failure.
    survivor_image = _File("survivor.image")
    #: Lock held by the survivor that writes it.
    survivor_lock = _File("survivor.lock")
    #: Exists where the log leads on from images that are kept beside it, and becomes durable by them alone.
    ring = _File("ring")
    #: Output of the writer process.
    writer_log = _File("writer.log")

    @classmethod
    def of(cls, staging_root: Path, run_id: str, incarnation: int, rank: int) -> StagingFolder:
        """Return the folder of a rank in an incarnation; nothing is created."""
        name = f"i{incarnation:06d}-r{rank:04d}"
        return cls(staging_root / run_id / name, incarnation, rank)

    @classmethod
    def copy_of(
        cls, staging_root: Path, run_id: str, incarnation: int, rank: int, keeper: int
    ) -> StagingFolder:
        """Return the folder in which one rank keeps what another one staged; nothing is created."""
        name = f"i{incarnation:06d}-r{rank:04d}-k{keeper:04d}"
        return cls(staging_root / run_id / name, incarnation, rank, keeper)

    @classmethod
    def copies_of_run(cls, staging_root: Path, run_id: str) -> list[StagingFolder]:
        """Return the folders of a run in which ranks keep what those on other nodes staged; see `all_of_run`."""
        named = (
            (path, _COPY_NAME.fullmatch(path.name))
            for path in trusted_folders(staging_root, run_id)
        )
        return [cls(path, *map(int, match.groups())) for path, match in named if match]

    @classmethod
    def all_of_run(cls, staging_root: Path, run_id: str) -> list[StagingFolder]:
        """Return all staging folders of a run id, oldest incarnation first, including its copies'.

        Folders that other users could have made or written are left out, and a warning names them.
        """
        named = (
            (path, _STAGING_NAME.fullmatch(path.name))
            for path in trusted_folders(staging_root, run_id)
        )
        return [cls(path, int(match[1]), int(match[2])) for path, match in named if match]

    @classmethod
    def with_copies_of_run(cls, staging_root: Path, run_id: str) -> list[StagingFolder]:
        """Return the folders of a run: those of its ranks, then the copies of others'."""
        own = cls.all_of_run(staging_root, run_id)
        return [*own, *cls.copies_of_run(staging_root, run_id)]

    @classmethod
    def all(cls, staging_root: Path) -> Iterator[StagingFolder]:
        """Yield all staging folders of all runs on this machine; none if the root is not trusted."""
        for path, _ in _matching(readable_root(staging_root), _RUN_ID):
            yield from cls.with_copies_of_run(staging_root, path.name)

    @property
    def run_id(self) -> str:
        """Return the id of the run that the folder belongs to."""
        return self.root.parent.name

    def chunk(self, sequence: int) -> Path:
        """Return the path of one chunk of the log."""
        return self.root / f"log-{sequence:08d}.chunk"

    def chunks(self) -> list[tuple[int, Path]]:
        """Return ``(sequence, path)`` of every chunk, oldest first."""
        return [(sequence, path) for path, (sequence,) in _matching(self.root, _CHUNK_NAME)]

    def remove(self) -> None:
        """Delete the folder with its content, and its parent if this was the run's last folder."""
        remove_folder(self.root)
        self.sweep()

    def sweep(self) -> None:
        """Delete the folder if it is empty, once no process has its files open any more."""
        with contextlib.suppress(OSError):  # the folder is gone, or in use
            self.root.rmdir()
        with contextlib.suppress(OSError):  # other ranks' folders are still there
            self.root.parent.rmdir()

    def items(self, slot: int) -> Path:
        """Return the path of one of the files of a rank's items."""
        return _within(self.root, f"items-{slot}")

    def kept(self, slot: int) -> Path:
        """Return the path of an image of a share that stays in memory, for recovery to begin from; two take turns."""
        return self.root / f"copy-{slot}"

    def image(self, slot: int) -> Path:
        """Return the path of the trainer's image in a slot; see `ImageMark`."""
        return self.snapshot if slot < 0 else self.kept(slot)

    def kept_items(self, slot: int) -> Path:
        """Return the path of the items that belong to the image, which in a copy are not in it."""
        return self.root / f"copy-{slot}.items"

    def kept_saved(self, slot: int) -> Path:
        """Return the path of the page that says that the image, and its items, are whole."""
        return self.root / f"copy-{slot}.saved"

    def kept_pages(self) -> list[tuple[int, Path]]:
        """Return slot and page of every image that stays in memory."""
        pages = ((slot, self.kept_saved(slot)) for slot in range(NUM_KEPT))
        return [(slot, page) for slot, page in pages if page.exists()]

    def copied_files(self) -> list[Path]:
        """Return the files of a copy that recovery reads."""
        slots = [slot for slot, _ in self.kept_pages()]
        images = (f(slot) for slot in slots for f in (self.kept, self.kept_items, self.kept_saved))
        others = (self.residual, *map(self.items, range(NUM_ITEM_SLOTS)))
        return [*(path for _, path in self.chunks()), *images, *(f for f in others if f.exists())]

    def guest(self, rank: int) -> Path:
        """Return the path of the image of the share of a rank on another node."""
        return self.root / f"guest-{rank:04d}"

    def guest_saved(self, rank: int) -> Path:
        """Return the path of the page that says what was saved for a rank on another node."""
        return self.root / f"guest-{rank:04d}.saved"

    def guest_files(self) -> list[Path]:
        """Return the pages and images of what was saved here for ranks on other nodes; pages first."""
        guests = self.saved_guests()
        return [*map(self.guest_saved, guests), *map(self.guest, guests)]

    def saved_guests(self) -> list[int]:
        """Return the ranks on other nodes for which something was saved here."""
        return [rank for _, (rank,) in _matching(self.root, _GUEST_SAVED_NAME)]

    @property
    def state_locks(self) -> tuple[Path, Path]:
        """Locks of the processes that write a state into the folder, beside its trainer."""
        return self.replica_lock, self.survivor_lock

    def replica_state(self, generation: int) -> Path:
        """Return the path of one file of the replica's state."""
        return self.root / f"replica-{generation:08d}"

    def replica_states(self) -> list[tuple[int, Path]]:
        """Return ``(generation, path)`` of every file of the replica's state, oldest first."""
        found = _matching(self.root, _REPLICA_STATE_NAME)
        return [(generation, path) for path, (generation,) in found]

    def replica_files(self) -> list[Path]:
        """Return the files that recovery reads of a state in memory.

        Images for ranks on other nodes are left out: they are large, and seldom needed.
        """
        names = [self.replica_status, self.survivor_status]
        names += [self.items(slot) for slot in range(NUM_ITEM_SLOTS)]
        if self.survivor_saved.exists():
            names += [self.survivor_saved, self.survivor_image]
        if self.ring.exists() and self.keeper is None:
            slots = [slot for slot, _ in self.kept_pages()]
            names += [self.ring, *(f(slot) for slot in slots for f in (self.kept, self.kept_saved))]
        if self.replica_status.exists() or not self.chunks():  # a log leads further than its image
            names += [self.trainer_status, self.snapshot]
        states = (path for _, path in self.replica_states())
        return [*(path for path in names if path.exists()), *states]


def entries_of(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted; none if the folder is missing or disappears meanwhile."""
    return [path for path, _ in _matching(folder, _ANY_NAME)]


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield entries whose whole name matches, sorted, with the numbers in it; follow no links."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            yield folder / name, tuple(map(int, match.groups()))
