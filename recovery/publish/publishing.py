"""From the state of a run to versions of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from typing_extensions import Self

from lowdiff.core.events import Code, inform
from lowdiff.errors import ConfigError, StorageError
from lowdiff.persistence.versions.manifest import Manifest
from lowdiff.persistence.versions.target import Target, target_of
from lowdiff.persistence.versions.weights import Tensor
from lowdiff.persistence.versions.writer import VersionWriter
from lowdiff.recovery.follower import Follower
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import Publisher

#: Multiples of `Publisher.every` that a version may lag before some are passed over.
_MOST_BEHIND = 16

Naming = Callable[[str], str | None]


def published_names(keys: list[str], names: Naming) -> dict[str, str | None]:
    """Ask for the published name of each tensor.

    Raises:
        ConfigError: If an answer is no name, or two tensors have the same.
    """
    made = {key: names(key) for key in keys}
    seen: dict[str, str] = {}
    for key, name in made.items():
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"publish names({key!r}) is {name!r}; give a name, or None to leave it out"
            )
        if name in seen:
            raise ConfigError(
                f"publish names gives {name!r} to both {seen[name]!r} and {key!r}; names are one to one"
            )
        seen[name] = key
    return made


def weights_of(
    state: RecoveredState, dtype: torch.dtype | None, names: Naming | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Take a model's weights, and buffers of rank 0, out of a state.

    Args:
        state: Of whole tensors.
        dtype: For floating-point tensors; None leaves them as they are.
        names: Published names by those of ``model.state_dict()``.

    Returns:
        Copies of the tensors, and the names of tied ones -> the name that stands for them.

    Raises:
        ConfigError: If the names are not one to one.
    """
    held = state.model_state_dict()
    keys = [key for key in held if isinstance(held[key], torch.Tensor)]
    named = {key: key for key in keys} if names is None else published_names(keys, names)
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for key in keys:
        name, source = named[key], state.fence.names[key]
        if name is None:
            continue
        if source in first:
            aliases[name] = first[source]
            continue
        first[source] = name
        tensor = held[key]
        is_rounded = dtype is not None and tensor.is_floating_point()
        weights[name] = Tensor.of_torch(tensor.to(dtype) if is_rounded else tensor)
    return weights, aliases


class Publishing:
    """Publishes each step of a run that there is, one after the other. Use it as a context manager.

    While the target does not take versions, or the run is faster than they are made, steps are passed over: the next
    version is that of the newest one. Versions of steps that the run has lost are withdrawn.

    Args:
        run: The run folder, or the URL of its store. It may not exist yet.
        publisher: What the user chose. Its names are asked here.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Of replay.
        wait_seconds: How long to wait for another publisher to let go of a target.
        target: Takes the versions; None: the one that the user named.

    Attributes:
        error: Why nothing is published now; empty if all is well.
    """

    def __init__(
        self,
        run: str | Path,
        publisher: Publisher,
        *,
        staging: str | Path | None = None,
        options: ReplayOptions | None = None,
        wait_seconds: float = 0.0,
        target: Target | None = None,
    ) -> None:
        self.error = ""
        self._publisher = publisher
        self._dtype = None if publisher.dtype_name is None else getattr(torch, publisher.dtype_name)
        self._target = target_of(publisher.target) if target is None else target
        self._wait_seconds = wait_seconds
        self._follower = Follower(run, staging=staging, options=options, durable=publisher.durable)
        self._writer: VersionWriter | None = None
        #: Life and step of the last version, and the life for which lost versions were withdrawn.
        self._published = ("", -1)
        self._swept = ""
        #: Run of the writer, and the lives of that run whose versions it published, by incarnation.
        self._run_id = ""
        self._lives: dict[int, str] = {}
        self._is_late = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of run and target."""
        self._follower.close()
        if self._writer is not None:
            self._writer.close()

    @property
    def step(self) -> int:
        """The newest step that was followed; -1 before the first."""
        return self._follower.step

    def next(self) -> Manifest | None:
        """Publish the next version; None where there is nothing new, or the run or the target does not answer now.

        Raises:
            RunMismatch: If the target is another run's.
            RunInUse: If another process publishes there.
            ReplayMismatch: If the run's first steps do not replay.
        """
        try:
            made = self._next()
        except StorageError as error:
            if str(error) != self.error:
                Code.PUBLISH_FAILED.warn(f"no version is published now: {error}")
            self.error, self._is_late = str(error), True
            return None
        if self.error:
            inform("versions are published again", event="publisher_recovered")
        self.error = ""
        return made

    def _next(self) -> Manifest | None:
        follower, every = self._follower, self._publisher.every
        is_late = self._is_late or follower.newest - follower.step > _MOST_BEHIND * every
        follower.look(every, None if is_late else 1)
        made = (follower.life, follower.step)
        if not follower.has_state or made == self._published:
            return None
        state = follower.weights
        writer = self._opened(state.fence.run_id)
        if follower.life != self._swept:
            writer.withdraw(lambda version: self._is_lost(version.incarnation, version.step))
            self._swept = follower.life
        self._lives[follower.incarnation] = follower.life
        weights, aliases = weights_of(state, self._dtype, self._publisher.names)
        manifest = writer.publish(follower.step, follower.incarnation, weights, aliases)
        self._published, self._is_late = made, False
        return manifest

    def _is_lost(self, incarnation: int, step: int) -> bool:
        """Return whether a version is of a step that the run lost, or of a life whose number another life took."""
        now, then = self._follower.life_of(incarnation), self._lives.get(incarnation)
        is_replaced = then is not None and now is not None and now != then
        return is_replaced or self._follower.is_lost(incarnation, step)

    def _opened(self, run_id: str) -> VersionWriter:
        if self._writer is not None and run_id != self._run_id:
            # Another run is in the folder; a new writer refuses it where the target has versions of this one.
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = VersionWriter(
                self._target,
                run_id,
                anchor_every=self._publisher.anchor_every,
                keep_anchors=self._publisher.keep_anchors,
                wait_seconds=self._wait_seconds,
            )
            self._run_id, self._lives = run_id, {}
        return self._writer
