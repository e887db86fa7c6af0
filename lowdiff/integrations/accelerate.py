"""Accelerate: a loop that was killed anywhere goes on exactly, with its own loader.

::

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with LowDiffRun(accelerator, "runs/x", model, optimizer, loader, scheduler) as run:
        for epoch in run.epochs(3):  # in place of range(3)
            for batch in loader:
                with accelerator.accumulate(model):
                    ...

A step is committed when the next batch is asked for, when the next epoch begins, or when the ``with`` ends: what the
loop does after a step (evaluation, logging, saving) belongs to it. A resumed epoch passes over the indices of the
batches that were consumed, and loads none of them; ``skip_first_batches`` is not needed.

Needs ``lowdiff[accelerate]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

import lowdiff
from lowdiff.checkpointer import begin_body, name_uncalled_hooks
from lowdiff.errors import ConfigError, RunMismatch, UsageError

try:
    from accelerate import skip_first_batches
    from accelerate.data_loader import DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

    from lowdiff.integrations.batch_order import (
        BatchOrder,
        Generators,
        read_generators,
        refuse_loader,
        set_generators,
    )
except ImportError as error:
    raise ConfigError(
        f"LowDiffRun needs accelerate: pip install 'lowdiff[accelerate]' ({error})"
    ) from error

__all__ = ["LowDiffRun"]

#: How processes train together, where every one of them holds the whole model.
_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class LowDiffRun:
    """A run of a loop with Accelerate: begun, or gone on with. Use it as a context manager.

    Restored are weights, optimizers, schedulers, gradient scaler, random generators, the place in the data, and what
    ``accelerator.register_for_checkpointing`` was given before. What a loop carries along, a best metric say, belongs
    into ``run.checkpointer.state``. Large because it is the loop's position, from all sides.

    Attributes:
        checkpointer: The Checkpointer.
        epoch: The epoch that the next batch belongs to.
        consumed: Batches of the epoch that this process trained with, or is training with.
        step: Steps that the run had when it was resumed.
    """

    def __init__(
        self,
        accelerator: Any,
        run: str | Path,
        model: torch.nn.Module,
        optimizer: Any,
        loader: Any,
        scheduler: Any = None,
        **settings: Any,
    ) -> None:
        """Attach what Accelerate has prepared; the run's newest step is restored.

        Args:
            accelerator: Which prepared the others.
            run: Folder of the run.
            model: As ``prepare`` returned it.
            optimizer: Likewise; or a list of them.
            loader: Likewise; the loader of the training.
            scheduler: Likewise; or a list of them, or None.
            settings: Of ``lowdiff.Checkpointer``.

        Raises:
            ConfigError: If something cannot be resumed.
            RunMismatch: If another kind of loop made the run, or the place in the data has no meaning any more.
        """
        self._optimizers, schedulers = _listed(optimizer), _listed(scheduler)
        _refuse(accelerator, self._optimizers, loader)
        self.checkpointer = lowdiff.Checkpointer(run, **settings)
        self.epoch = self.consumed = 0
        self._accelerator, self._loader = accelerator, loader
        self._seed = torch.initial_seed()
        self._found: dict[str, Any] | None = None
        self._num_steps = self._num_committed = 0
        self._is_ending = self._is_awaited = False
        self._is_restored = True
        self._at_attach: Generators = {}
        self._order = BatchOrder(self)
        self._order.take(loader)
        objects = {f"registered{i}": made for i, made in enumerate(accelerator._custom_objects)}
        if accelerator._save_model_state_pre_hook:
            name_uncalled_hooks()
        objects |= {f"scheduler{i}": made for i, made in enumerate(schedulers)}
        if accelerator.scaler is not None:
            objects["scaler"] = accelerator.scaler
        try:
            self.step = self.checkpointer.attach(
                model,
                [made.optimizer for made in self._optimizers],
                **objects,
                accelerate=_Position(self),
                batch_order=self._order.at_epoch,
                batch_ahead=self._order.ahead,
            )
            self._begin()
        except BaseException:
            self._order.leave()
            self.checkpointer.close()
            raise
        for made in self._optimizers:
            made.optimizer.register_step_post_hook(self._note_step)
        self._own = own = type(loader)
        loader._lowdiff = self
        _set_class(loader, type(own.__name__, (_Counted, own), {"__module__": own.__module__}))

    def _begin(self) -> None:
        """Take the place that was restored, unless the run begins."""
        found, self._found = self._found, None
        if self.step == 0:
            return
        if found is None:
            raise RunMismatch(
                f"step {self.step} of the run has no place of Accelerate's loader: another loop made it. Name "
                "another folder"
            )
        changed = [
            f"{name} {now} instead of {found['layout'][name]}"
            for name, now in self._layout.items()
            if now != found["layout"][name]
        ]
        if found["consumed"] and changed:
            raise RunMismatch(
                f"the run is within epoch {found['epoch']}, after {found['consumed']} batches, and has "
                f"{', '.join(changed)} now, so what they were is unknown; keep the earlier ones until that epoch is over"
            )
        self.epoch, self.consumed, self._seed = found["epoch"], found["consumed"], found["seed"]
        self._is_restored = False
        self._at_attach = read_generators()
        self._order.restore(self.consumed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.restore_generators()  # of a finished run, in which no epoch began
            self._commit()
        _set_class(self._loader, self._own)
        del self._loader._lowdiff
        self._order.leave()
        self.checkpointer.close()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of ``count``; the first may be left in part.

        A signal (see ``Checkpointer.preempted``) ends it after the step under way.
        """
        while self.epoch < count and not self._is_ending:
            if not self.consumed:
                self.restore_generators()
            self._is_awaited = True
            yield self.epoch
            if not self._is_ending:
                self.epoch, self.consumed = self.epoch + 1, 0
                self._order.begin_epoch(None)
                self._commit()
                self._is_ending = self.checkpointer.preempted

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of the epoch that are left; called by ``iter(loader)``.

        Raises:
            UsageError: If this epoch's were yielded.
        """
        if not self._is_awaited:
            raise UsageError(
                "the training loader is read once in each epoch of `for epoch in run.epochs(n)`, and its place is the "
                "run's; for another look at the data, prepare another loader"
            )
        self._is_awaited = False
        loader.iteration = self.epoch  # from which Accelerate sets the samplers' epoch
        source = loader
        if self._is_restored:
            self._order.begin_epoch(read_generators())
        else:
            self._order.repeat_epoch()
            source = skip_first_batches(loader, self.consumed)
        if self.epoch:
            self._order.begin_workers(source)
        made = DataLoaderShard.__iter__(source)
        while True:
            # What comes after an epoch's last step, an evaluation say, belongs to it.
            if not self.consumed or not source.end_of_dataloader:
                self._commit()
                self._is_ending = self.checkpointer.preempted
            batch = _END if self._is_ending else next(made, _END)
            if batch is _END:
                break
            self.restore_generators()  # where worker processes load; else it is done
            self.consumed += 1
            self._order.note_fetched(self.consumed)
            yield batch
        self.restore_generators()
        loader.iteration = self.epoch + 1

    def _note_step(self, *_: Any) -> None:
        self._num_steps += 1

    def _commit(self) -> None:
        """Commit, if an optimizer stepped since the last commit, or a gradient scaler skipped its step."""
        if not self._accelerator.sync_gradients:
            return
        is_skipped = any(made.step_was_skipped for made in self._optimizers)
        if self._num_steps > self._num_committed or is_skipped:
            self._num_committed = self._num_steps
            self.checkpointer.commit()

    # What the order of batches asks; see `Place`.

    @property
    def is_restored(self) -> bool:
        """Whether the generators are those that the run needs now."""
        return self._is_restored

    @property
    def num_workers(self) -> int:
        """Processes that load batches."""
        return int(self._loader.num_workers)

    def seed(self, epoch: int, number: int) -> int:
        """Return a seed for loading a batch of this rank."""
        words = [self._seed % 2**63, self._accelerator.process_index, epoch, number]
        made = np.random.SeedSequence(words).generate_state(1, np.uint64)
        return int(made[0]) % 2**63

    def restore_generators(self) -> None:
        """Set the generators to those of the last commit, once."""
        if not self._is_restored:
            self._is_restored = True
            # What the loader's iterator draws again is no reason for lowdiff's warning.
            set_generators(self._at_attach)
            begin_body(self.checkpointer)

    @property
    def _layout(self) -> dict[str, int]:
        """Say what a number of batches means."""
        return {
            "batches in an epoch": len(self._loader),
            "processes": self._accelerator.num_processes,
            "gradient_accumulation_steps": self._accelerator.gradient_accumulation_steps,
        }

    def place(self) -> dict[str, Any]:
        """Return the place in the data, which every step keeps."""
        if self._found is not None:
            return self._found
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self._seed,
            "layout": self._layout,
        }

    def take_place(self, found: dict[str, Any]) -> None:
        """Keep a place until everything is restored."""
        self._found = found


_END = object()


class _Counted:
    """A loader of Accelerate whose iteration is a run's."""

    _lowdiff: LowDiffRun

    def __iter__(self) -> Iterator[Any]:
        return self._lowdiff.batches(self)


def _set_class(loader: Any, kind: type) -> None:
    """Set the class of an object; Accelerate's loaders show that of the loader below in its place."""
    vars(object)["__class__"].__set__(loader, kind)


class _Position:
    """The place of a run, as a stateful object."""

    def __init__(self, run: LowDiffRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return self._run.place()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it."""
        self._run.take_place(state_dict)


def _listed(made: Any) -> Sequence[Any]:
    """Return several objects, or one, or none, as a list."""
    if made is None:
        return []
    return made if isinstance(made, list | tuple) else [made]


def _refuse(accelerator: Any, optimizers: Sequence[Any], loader: Any) -> None:
    """Check that a loop can be resumed exactly.

    Raises:
        ConfigError: Saying what to change.
        UsageError: If something was not prepared, or another run has the loader.
    """
    kind = accelerator.distributed_type
    if kind not in _KNOWN:
        raise ConfigError(
            f"LowDiffRun works with one process or DDP, not with {kind.value}; sharded models train with "
            "lowdiff.Checkpointer in a loop of their own (docs/sharded.md)"
        )
    refuse_loader(loader)
    wrong = [made for made in optimizers if not isinstance(made, AcceleratedOptimizer)]
    if not isinstance(loader, DataLoaderShard):
        wrong.append(loader)
    if wrong or not optimizers:
        raise UsageError(
            "LowDiffRun takes what accelerator.prepare returned, and got "
            f"{', '.join(type(made).__name__ for made in wrong) or 'no optimizer'}; prepare model, optimizer, loader "
            "and scheduler first"
        )
    if isinstance(loader, _Counted):
        raise UsageError("this loader belongs to another LowDiffRun; leave that one's `with` first")
