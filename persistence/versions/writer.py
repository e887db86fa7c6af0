"""Publishing versions into a target."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

from lowdiff.errors import ConfigError, DamagedFile, RunInUse, RunMismatch
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.format.document import json_bytes, parse_json
from lowdiff.persistence.format.image import ImageEntry
from lowdiff.persistence.versions.changes import encode
from lowdiff.persistence.versions.manifest import (
    PUBLISHER,
    Listing,
    Manifest,
    manifest_name,
    part_name,
    withdrawn_name,
)
from lowdiff.persistence.versions.parts import Piece, divided, pieces_of
from lowdiff.persistence.versions.target import FolderTarget, Target
from lowdiff.persistence.versions.weights import Tensor

_LOCK = "publisher.lock"

Weights = Mapping[str, Tensor]


def claim(target: Target, run_id: str) -> None:
    """See that a target is for the weights of a run, from now on or already.

    Raises:
        RunMismatch: If it is another run's.
        StorageError: If it cannot be used now.
    """
    if target.create(PUBLISHER, [json_bytes({"run_id": run_id})]):
        return
    other = parse_json(bytes(target.read(PUBLISHER)), f"{target.name}/{PUBLISHER}").get("run_id")
    if other != run_id:
        raise RunMismatch(
            f"{target.name} holds the weights of run {other!r:.80}, and this is run {run_id}; name another target"
        )


class VersionWriter:
    """Publishes the weights of one run. Use it as a context manager, or `close` it.

    It begins with an anchor, whatever lies in the target: an earlier publisher's last version may be anything.

    Args:
        target: Where to.
        run_id: The run, the only one of the target.
        anchor_every: Versions from one anchor to the next.
        keep_anchors: Anchors that stay, with the versions after them.
        wait_seconds: How long to wait for another publisher to let go of a folder.

    Raises:
        RunMismatch: If the target is another run's.
        RunInUse: If another process publishes there.
        StorageError: If the target cannot be used.
    """

    def __init__(
        self,
        target: Target,
        run_id: str,
        *,
        anchor_every: int = 100,
        keep_anchors: int = 2,
        wait_seconds: float = 0.0,
    ) -> None:
        self._target, self._run_id = target, run_id
        self._anchor_every, self._keep_anchors = anchor_every, keep_anchors
        self._name = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._last: Manifest | None = None
        self._number = 0
        self._weights: Weights = {}
        self._aliases: Mapping[str, str] = {}
        self._since_anchor = 0
        self._lock: FileLock | None = None
        if isinstance(target, FolderTarget):
            make_directory(target.folder)
            self._lock = FileLock(target.folder / _LOCK)
            if not self._lock.acquire(self._name, timeout_seconds=wait_seconds):
                holder = self._lock.holder()
                self._lock = None
                raise RunInUse(Path(target.name), holder, wait_seconds)
        try:
            claim(target, run_id)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the target."""
        if self._lock is not None:
            self._lock.release()

    def publish(
        self,
        step: int,
        incarnation: int,
        weights: Weights,
        aliases: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Publish the weights of a step as the next version; it is there when this returns.

        Args:
            step: The step.
            incarnation: Which made it.
            weights: Tensors by name; kept until the next version.
            aliases: Name of a tensor -> name of the one in ``weights`` that it is tied to.

        Raises:
            RunInUse: If another publisher wrote to the target.
            StorageError: If it cannot be written now. Nothing was published; try again with what is new by then.
        """
        aliases = aliases or {}
        unknown = [name for name, tied in aliases.items() if tied not in weights or name in weights]
        if unknown:
            raise ConfigError(f"{unknown[0]} is tied to no tensor that is published")
        listing = Listing.of(self._target.sizes())
        last = self._last
        if last is not None and listing.manifests and listing.manifests[-1] > last.version:
            raise self._other(listing.manifests[-1])
        if last is not None and last.version not in listing.manifests:
            claim(self._target, self._run_id)  # somebody removed what was there
            last = None
        base = last.version if last is not None and self._goes_on(weights, aliases) else None
        number = max(listing.newest, self._number) + 1
        tensors = self._anchor(weights) if base is None else self._changes(weights)
        digests = {entry.name: weights[entry.name].digest for entry, _ in tensors}
        sizes = []
        told = {"step": str(step), "version": str(number)}
        for i, part in enumerate(divided(tensors)):
            pieces = pieces_of(part, told)
            self._create(part_name(number, i), pieces, number)
            sizes.append(sum(map(len, pieces)))
        manifest = Manifest(
            version=number,
            base=base,
            run_id=self._run_id,
            incarnation=incarnation,
            step=step,
            publisher=self._name,
            parts=tuple(sizes),
            digests=digests,
            aliases=aliases if base is None else {},
        )
        self._create(manifest_name(number), [manifest.to_bytes()], number)
        self._last, self._weights, self._aliases = manifest, dict(weights), dict(aliases)
        self._number = number
        self._since_anchor = 1 if base is None else self._since_anchor + 1
        if base is None:
            self._clean(listing)
        return manifest

    def withdraw(self, is_lost: Callable[[Manifest], bool]) -> int:
        """Withdraw the versions of steps that the run went back behind; the next version is an anchor.

        Oldest first: who holds a newer one stays with it until that is withdrawn as well, and goes on with the anchor.

        Returns:
            How many.

        Raises:
            StorageError: If it cannot be done now.
        """
        listing = Listing.of(self._target.sizes())
        count = 0
        for version in listing.manifests:
            if version in listing.withdrawn:
                continue
            try:
                manifest = self._read(version)
            except DamagedFile:
                continue  # nobody takes it
            if is_lost(manifest):
                self._target.create(withdrawn_name(version), [b"the run went back\n"])
                count += 1
        if count:
            self._last = None
        return count

    def newest(self) -> Manifest | None:
        """Return the newest version that is not withdrawn; None if there is none that can be read."""
        listing = Listing.of(self._target.sizes())
        for version in reversed(listing.manifests):
            if version not in listing.withdrawn:
                try:
                    return self._read(version)
                except DamagedFile:
                    continue
        return None

    def _read(self, version: int) -> Manifest:
        name = manifest_name(version)
        return Manifest.of_bytes(self._target.read(name), version, f"{self._target.name}/{name}")

    def _create(self, name: str, pieces: Sequence[bytes | memoryview], version: int) -> None:
        """Write a file of a version.

        Raises:
            RunInUse: If somebody else wrote one of that name.
        """
        if self._target.create(name, pieces):
            return
        # A store may have written it although its answer was lost, and the client have asked again.
        if self._target.read(name) != b"".join(pieces):
            raise self._other(version)

    def _goes_on(self, weights: Weights, aliases: Mapping[str, str]) -> bool:
        """Whether the next version may be told by what changed."""
        if self._since_anchor >= self._anchor_every or aliases != self._aliases:
            return False
        before = {name: (own.dtype, own.shape) for name, own in self._weights.items()}
        return before == {name: (own.dtype, own.shape) for name, own in weights.items()}

    def _anchor(self, weights: Weights) -> list[Piece]:
        return [(ImageEntry(name, own.dtype, own.shape), own.data) for name, own in weights.items()]

    def _changes(self, weights: Weights) -> list[Piece]:
        changes = {
            name: encode(self._weights[name].bits, own.bits) for name, own in weights.items()
        }
        return [
            (ImageEntry(name, "U8", (len(change),)), memoryview(change))
            for name, change in changes.items()
            if change
        ]

    def _other(self, version: int) -> RunInUse:
        """Return the error of a target that somebody else writes to."""
        try:
            who = self._read(version).publisher
        except DamagedFile:
            who = f"another process, which began version {version}"
        return RunInUse(Path(self._target.name), who, 0.0)

    def _clean(self, listing: Listing) -> None:
        """Remove versions before the anchors that stay, manifests first, and what dead publishers left.

        Args:
            listing: Of the target before the anchor that was just published.
        """
        oldest = self._oldest_kept(listing)
        gone = [version for version in listing.manifests if version < oldest]
        self._target.remove(map(manifest_name, gone))
        whole = set(listing.manifests) - set(gone)
        names = (
            name for version, own in listing.names.items() if version not in whole for name in own
        )
        self._target.remove(names)

    def _oldest_kept(self, listing: Listing) -> int:
        """Return the oldest anchor that stays; 0 if all do."""
        left = self._keep_anchors - 1  # the new one is not listed
        for version in reversed(listing.manifests):
            if left == 0:
                return version + 1
            if version not in listing.withdrawn:
                try:
                    left -= self._read(version).base is None
                except DamagedFile:
                    continue
                if left == 0:
                    return version
        return 0
