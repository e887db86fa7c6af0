"""Exchange between ranks at attach and at close, over a process group of lowdiff's own.

Background collectives on the training group would deadlock with DDP's, so every exchange here uses
a Gloo group made for it. Nothing is pickled: values travel in the run's own encoding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import keep_for_ever, leave, own_group, timeout_of
from lowdiff.core.layout import dtype_name
from lowdiff.core.memory import byte_view
from lowdiff.core.waiting import wait_for_ranks
from lowdiff.errors import ConfigError, LowDiffError, StorageError
from lowdiff.persistence.files.durable import make_directory, replaced
from lowdiff.persistence.format.values import decode, encode
from lowdiff.protocols import Compressor
from lowdiff.types import Layout

#: Of a tensor that are sent at once; and how many such pieces, most of them small tensors.
_PIECE_BYTES, _PIECES_UNDER_WAY = 64 << 20, 16
#: The same for files, whose pieces are written while the next are under way.
_FILE_PIECE_BYTES, _FILE_PIECES_UNDER_WAY = 4 << 20, 4


class Ranks:
    """The ranks of one run. A single process is a group of one without a process group."""

    def __init__(self, training_group: dist.ProcessGroup | None) -> None:
        self.training_group = training_group
        #: The Gloo group of lowdiff's own, on which every rank starts the same collectives in turn.
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        #: How long ranks wait for one another in a step.
        self.patience: timedelta | None = None
        if training_group is not None:
            self.group = own_group(training_group)
            self.patience = timeout_of(training_group)
            self.rank, self.world_size = dist.get_rank(training_group), training_group.size()

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in rank order."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device="cpu"), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=self.group)
        return [
            decode(byte_view(part[: int(size)])) for part, size in zip(parts, sizes, strict=True)
        ]

    def meet(self, timeout_seconds: float) -> str:
        """Wait for everybody at the end of a run; why that was in vain, or nothing.

        Messages from rank to rank, because in a barrier only rank 0 goes by a time limit.
        """
        if self.group is None:
            return ""
        if not dist.is_initialized():
            return "the process group was destroyed before close()"
        deadline = time.monotonic() + timeout_seconds
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        members = dist.get_process_group_ranks(self.group)
        others = members[1:] if self.rank == 0 else members[:1]

        def exchange(start: Callable[..., dist.Work | None]) -> None:
            for other in others:
                work = start(word, other, self.group)
                assert work is not None
                left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
                wait_for_ranks(work.wait, left)

        try:
            for start in (dist.irecv, dist.isend) if self.rank == 0 else (dist.isend, dist.irecv):
                exchange(start)
        except RuntimeError:
            return f"another rank did not reach close() within {timeout_seconds:.0f} s"
        return ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on every rank; if it fails on any, fail on all.

        So that no rank waits for one that gave up, the body itself must not wait for others. It
        also ends as a barrier does: where it is left, every rank has been through it.

        Raises:
            LowDiffError: On the ranks whose own body succeeded, naming one that failed; the
                others raise what their body raised.
        """
        try:
            yield
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, text in enumerate(self.gather(None)):
            if text is not None:
                raise LowDiffError(
                    f"rank {rank} failed: {text}. Mend that, and start all ranks again"
                )

    def share_files(self, mine: Mapping[str, Path], imported: Path, *, durable: bool) -> None:
        """Bring files that only other ranks can see into a folder of this rank's own.

        Equal names are the same file, of which the longest version counts: a copy of what a killed
        writer had only begun is shorter than what was written in its place since.

        Args:
            mine: Name -> path of the files that this rank sees.
            imported: Where missing ones are written, under their names.
            durable: Whether they are to outlive a power failure.
        """
        with self.together():
            sizes = {name: _size(path) for name, path in mine.items()}
        tables: list[dict[str, int]] = self.gather(sizes)
        #: Told at the end: until then other ranks count on the pieces.
        trouble: list[Exception] = []
        for name in sorted(set().union(*tables)):
            found = [table.get(name, -1) for table in tables]
            longest = max(found)
            if all(size == longest for size in found):
                continue
            owner = found.index(longest)
            pieces = self._pieces(mine.get(name), longest, owner, trouble)
            target = imported / name
            try:
                # On a shared folder it may have appeared, or grown, since this rank looked.
                if found[self.rank] < longest and _size(target) < longest:
                    make_directory(target.parent)
                    with replaced(target, durable=durable) as file:
                        for piece in pieces:
                            file.write(byte_view(piece))
            except (OSError, LowDiffError) as error:
                trouble.append(error)
            for _ in pieces:  # what is not wanted here, or could not be written
                continue
        with self.together():
            if trouble:
                raise trouble[0]

    def _pieces(
        self, path: Path | None, size: int, owner: int, trouble: list[Exception]
    ) -> Iterator[torch.Tensor]:
        """Send a file from its owner; its pieces come on every rank, and all of them whatever happens."""

        def made() -> Iterator[tuple[torch.Tensor, int]]:
            for start in range(0, size, _FILE_PIECE_BYTES):
                length = min(_FILE_PIECE_BYTES, size - start)
                piece = torch.empty(length, dtype=torch.uint8, device="cpu")
                if self.rank == owner and path is not None:
                    try:
                        _read(path, start, piece)
                    except (OSError, StorageError) as error:
                        trouble.append(error)
                yield piece, owner

        return self._arriving(made(), _FILE_PIECES_UNDER_WAY)

    def spread(
        self,
        mine: Mapping[str, torch.Tensor],
        is_wanted: Callable[[str], bool] = lambda _: True,
    ) -> dict[str, torch.Tensor]:
        """Bring tensors that only other ranks have, each from the first rank that has it.

        Args:
            mine: Name -> tensor on the host. Equal names hold equal bits and shapes.
            is_wanted: Whether this rank keeps the tensor of a name.

        Returns:
            Those that this rank lacks.
        """
        forms = {name: [dtype_name(t.dtype), list(t.shape)] for name, t in mine.items()}
        tables: list[dict[str, list[Any]]] = self.gather(forms)
        found: dict[str, torch.Tensor] = {}

        def made() -> Iterator[tuple[torch.Tensor, int]]:
            for name in sorted(set().union(*tables)):
                holders = [rank for rank, table in enumerate(tables) if name in table]
                if len(holders) == self.world_size:
                    continue
                dtype, shape = tables[holders[0]][name]
                if self.rank == holders[0]:
                    values = mine[name].contiguous()
                else:
                    values = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                if name not in mine and is_wanted(name):
                    found[name] = values
                data = values.view(-1).view(torch.uint8)
                for piece in data.split(_PIECE_BYTES) if len(data) else ():
                    yield piece, holders[0]

        for _ in self._arriving(made(), _PIECES_UNDER_WAY):
            continue
        return found

    def _arriving(
        self, pieces: Iterable[tuple[torch.Tensor, int]], most_under_way: int
    ) -> Iterator[torch.Tensor]:
        """Send pieces, each from its owner, some at a time; yields each on every rank once it is there."""
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()

        def arrived() -> torch.Tensor:
            work, piece = under_way.popleft()
            wait_for_ranks(work.wait)
            return piece

        for piece, owner in pieces:
            under_way.append((self._send(piece, owner), piece))
            if len(under_way) == most_under_way:
                yield arrived()
        while under_way:
            yield arrived()

    def _send(self, buffer: torch.Tensor, owner: int) -> dist.Work:
        """Begin to fill a buffer on every rank with the owner's."""
        assert self.group is not None
        source = dist.get_global_rank(self.group, owner)
        work: dist.Work | None = dist.broadcast(buffer, source, group=self.group, async_op=True)
        assert work is not None
        return work

    def abandon(self) -> None:
        """Prepare to leave the group while a rank does not answer what is under way in it."""
        if self.group is not None:
            keep_for_ever(self.group)

    def close(self) -> None:
        """Leave the group."""
        leave(self.group)
        self.group = None


def _read(path: Path, start: int, piece: torch.Tensor) -> None:
    """Fill a tensor with the bytes of a file from an offset.

    Raises:
        StorageError: If the file is shorter.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        if file.readinto(byte_view(piece)) != len(piece):
            raise StorageError(f"{path} became shorter while it was sent to other ranks")


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def refuse_disagreement(
    ranks: Ranks, compressor: Compressor, layout: Layout, modes: Mapping[str, object]
) -> None:
    """Compare what must be equal on all ranks before anything is exchanged, in one collective.

    Raises:
        ConfigError: On all ranks, naming the first that differs from rank 0.
    """
    own = [
        f"compresses with {compressor.name}({dict(compressor.settings())})",
        "has " + ", ".join(f"{key}={value!r}" for key, value in modes.items()),
        *(f"trains {s.name} {s.dtype}{list(s.shape)}" for s in layout.parameters),
    ]
    first, *others = ranks.gather(own)
    for rank, theirs in enumerate(others, start=1):
        for here, there in zip_longest(first, theirs, fillvalue="trains no further parameter"):
            if here != there:
                raise ConfigError(
                    f"rank {rank} {there} where rank 0 {here}; give every rank the same compressor, "
                    "modes and model, with the same parameters frozen"
                )
