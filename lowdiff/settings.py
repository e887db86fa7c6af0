"""A user's choices for a run, checked where they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import RunFolder, user_path
from lowdiff.persistence.files.trust import shared_staging_root
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.protocols import Compressor
from lowdiff.tuner.policy import Tuning
from lowdiff.types import Publisher, Retention, whole_number

if TYPE_CHECKING:
    import torch

#: Where the tuner begins: on its grid.
_FIRST_INTERVAL, _FIRST_BATCH = 91, 16
_CHOICES: dict[str, tuple[int | str, ...]] = {
    "backpressure": ("block", "degrade"),
    "residual": ("exact", "snapshot", "replicated"),
    "on_error": ("warn", "raise"),
    "watch": ("live", "recovery"),
    "optimizer_steps": (1, "any"),
    "on_hang": ("save", "exit"),
    "lost_steps": ("redo", "predict"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """A run's settings.

    Attributes:
        run: Run folder.
        compressor: How gradients are compressed.
        snapshot_every: Steps between full snapshots (``f``).
        batch_size: Differentials per durable write (``b``).
        strategy: What protects its steps, by name; see `lowdiff.protect`.
        is_usual: Whether nobody chose it, so that another one may be taken for what is attached.
        staging: Folder for the staging logs of all runs; None for the default one in memory (tmpfs).
        retention: Which steps stay; None keeps everything.
        store: URL of the run in an object store; None for none.
        backpressure: Whether training waits for storage, or gives up durable steps, once ``2 b``
            steps are at risk or staging is full.
        residual: Whether error feedback outlives a crash of processes as of its very step, for which
            it lies in staging, or as of the last full snapshot; or also the loss of a node, for which copies of
            it lie on other nodes.
        on_error: Whether the writer's trouble is a warning or an error at the next commit.
        watch: Whether writes to parameters by something else than the optimizer are looked for at
            every step, or found by recovery.
        optimizer_steps: How many optimizer steps one loop body may make: 1, or ``"any"``.
        tunes_interval: Whether ``snapshot_every`` is only where the tuner begins.
        tunes_batch: Whether ``batch_size`` is.
        tuning: What the tuner goes by.
        imports: Modules that a replica imports, so that it knows registered optimizers.
        hang_seconds: After how long without a step ranks that wait for each other hang; None: after 20
            times the median step, and at least a minute.
        on_hang: What a hang does once the state is saved: ``"save"`` waits on, ``"exit"`` ends the process.
        copies: On how many nodes what a rank stages lies in memory, its own included.
        node: Names the node of this rank; None: its machine and staging folder tell.
        publish: How weights are published; None for not at all.
        lost_steps: Whether steps that are lost with a node or with power are made again, or predicted.
        validate: Held-out loss of the model, by which predictions are judged.
        flush_seconds: A batch is written after so long even if it is not full.
        lock_seconds: How long ``attach`` waits for another trainer to let go of the run.
    """

    run: Path
    compressor: Compressor
    snapshot_every: int
    batch_size: int
    strategy: str = "log"
    is_usual: bool = False
    staging: Path | None = None
    retention: Retention | None = field(default_factory=Retention)
    store: str | None = None
    backpressure: str = "block"
    residual: str = "exact"
    on_error: str = "warn"
    watch: str = "live"
    optimizer_steps: int | str = 1
    tunes_interval: bool = False
    tunes_batch: bool = False
    tuning: Tuning = field(default_factory=Tuning)
    imports: tuple[str, ...] = ()
    hang_seconds: float | None = None
    on_hang: str = "save"
    copies: int = 1
    node: str | None = None
    publish: Publisher | None = None
    lost_steps: str = "redo"
    validate: Callable[[torch.nn.Module], float] | None = None
    flush_seconds: float = 5.0
    lock_seconds: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.compressor, type) or not hasattr(self.compressor, "bind"):
            raise ConfigError(
                f"compressor is an object, e.g. TopK(density=0.01), got {self.compressor!r}"
            )
        if not isinstance(self.retention, Retention | None):
            raise ConfigError(
                "retention is a number of snapshots, a lowdiff.Retention, or None to keep every "
                f"step, got {self.retention!r}"
            )
        if not isinstance(self.tuning, Tuning):
            raise ConfigError(f"tuning is a lowdiff.Tuning or None, got {self.tuning!r}")
        for name in ("snapshot_every", "batch_size"):
            if whole_number(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} counts steps, at least 1, got {getattr(self, name)}")
        if whole_number("copies", self.copies) < 1:
            raise ConfigError(f"copies counts nodes, this rank's own included, got {self.copies}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                raise ConfigError(f"{name} is one of {choices}, got {getattr(self, name)!r}")
        _refuse_prediction(self)
        if self.publish is not None:
            _refuse_publisher(self.publish, self)
        if not isinstance(self.store, str | None):
            raise ConfigError(f"store is the URL of an object store or None, got {self.store!r}")
        if self.store is not None:
            ObjectStore(self.store, make=True)  # refuses what cannot work

    def takes_snapshot_at(self, step: int) -> bool:
        """Whether a full snapshot is due at a step: regularly, and where it is kept for ever."""
        return step % self.snapshot_every == 0 or self.keeps(step)

    def keeps(self, step: int) -> bool:
        """Whether a step is kept for ever."""
        return self.retention is not None and (
            self.retention.last_kept_step(step, step) is not None
        )

    @property
    def is_tuned(self) -> bool:
        """Whether anything is left to the tuner."""
        return self.tunes_interval or self.tunes_batch

    @property
    def has_several_steps(self) -> bool:
        """Whether a loop body may make several optimizer steps, which are committed together."""
        return self.optimizer_steps == "any"

    @property
    def replicates_residual(self) -> bool:
        """Whether error feedback is sent to other nodes."""
        return self.residual == "replicated"

    @property
    def staging_root(self) -> Path:
        """Folder that staging is looked for in."""
        return shared_staging_root() if self.staging is None else self.staging

    @property
    def folder(self) -> RunFolder:
        """Names inside the run folder."""
        return RunFolder(self.run)


def _refuse_prediction(settings: Settings) -> None:
    """Check that lost steps can be predicted as the user wants.

    Raises:
        ConfigError: Saying what to change.
    """
    if settings.lost_steps == "redo":
        if settings.validate is not None:
            raise ConfigError(
                'validate judges predictions: give lost_steps="predict", or leave it out'
            )
        return
    if not callable(settings.validate):
        raise ConfigError(
            'lost_steps="predict" needs validate=, a function that takes the model and returns its loss on what '
            f"is held out, got {settings.validate!r}"
        )
    if settings.has_several_steps or settings.publish is not None:
        other = "publish" if settings.publish is not None else 'optimizer_steps="any"'
        raise ConfigError(f'lost_steps="predict" does not go with {other}; leave one of them out')


def _refuse_publisher(publisher: Publisher, settings: Settings) -> None:
    """Check that a run can be published as its user wants.

    Raises:
        ConfigError: Saying what to change.
    """
    if not isinstance(publisher, Publisher):
        raise ConfigError(f"publish is a lowdiff.Publisher or None, got {publisher!r}")
    if is_url(publisher.target):
        ObjectStore(str(publisher.target), make=True)  # refuses what cannot work
        return
    target, run = user_path("publish target", publisher.target).absolute(), settings.run
    if target == run or run in target.parents or target in run.parents:
        raise ConfigError(
            f"the run folder {run} and the target {target} lie in one another; name another target"
        )


def module_names(imports: object) -> tuple[str, ...]:
    """Return ``imports`` of a Checkpointer as names.

    Raises:
        ConfigError: If it is no list of names of modules.
    """
    names = tuple(imports) if isinstance(imports, Iterable) else ()
    are_names = (isinstance(n, str) and all(p.isidentifier() for p in n.split(".")) for n in names)
    if isinstance(imports, str) or not isinstance(imports, Iterable) or not all(are_names):
        raise ConfigError(
            f'imports is a list of names of modules, e.g. imports=["my_optimizers"], got {imports!r}'
        )
    return names


def cadence(
    snapshot_every: int | str, batch_size: int | str, tuning: Tuning | None
) -> dict[str, Any]:
    """Settings from numbers of steps, or from ``"auto"`` in their place.

    Raises:
        ConfigError: If one is neither.
    """
    for name, value in (("snapshot_every", snapshot_every), ("batch_size", batch_size)):
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ConfigError(f'{name} is a number of steps or "auto", got {value!r}')
    return {
        "snapshot_every": _FIRST_INTERVAL if snapshot_every == "auto" else snapshot_every,
        "batch_size": _FIRST_BATCH if batch_size == "auto" else batch_size,
        "tunes_interval": snapshot_every == "auto",
        "tunes_batch": batch_size == "auto",
        "tuning": tuning or Tuning(),
    }
