"""Hugging Face Trainer: one callback, and a run that was killed anywhere goes on exactly.

::

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[LowDiffCallback("runs/x")])
    trainer.train()

A step is committed when the next one begins, or the next epoch, or training ends: what the Trainer does between two
steps (evaluation, logging, saving, early stopping) belongs to the step before. The loader and its sampler stay as
they are; a resumed epoch passes over the indices of the batches that were consumed, and loads none of them.

Callbacks are handed no Trainer, and no event comes where a run must be resumed. So `LowDiffCallback` finds the Trainer
that calls its `on_init_end`, and gives the instance a class of the same name with `_Resuming` before its own class.
`_PARTS` and `_SUMS` list the private parts that this needs; another version of the Trainer that lacks one is refused.

Needs ``lowdiff[transformers]``.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

import lowdiff
from lowdiff.checkpointer import begin_body, ignore_checkpoint
from lowdiff.errors import ConfigError, RunMismatch, UsageError

try:
    import transformers
    from accelerate.data_loader import DataLoaderDispatcher
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ConfigError(
        "LowDiffCallback needs transformers and accelerate: pip install 'lowdiff[transformers]' "
        f"({error})"
    ) from error

__all__ = ["LowDiffCallback"]

#: The versions that the tests ran with; constraints.txt pins them.
_TESTED = "transformers 5.24.0 with accelerate 1.15.0"
#: Methods of the Trainer that `_Resuming` overrides, and the parameters that it reads or sets.
_PARTS = {
    "train": ("resume_from_checkpoint",),
    "_init_training_state": (),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        *("epoch", "train_dataloader", "steps_in_epoch"),
        *("resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"),
    ),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_load_rng_state": ("checkpoint",),
    "_evaluate": ("skip_scheduler",),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
}
#: What the training loop sets before ``on_train_begin``, and sums up from there on.
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
#: Fields of the TrainerState that training changes; the others come from the arguments, and the history is kept apart.
_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
#: Stands for a path in ``resume_from_checkpoint``, where the Trainer is to pass over batches.
_MARK = "lowdiff"
#: So many bytes of the log are kept as one tensor, which is logged once.
_CHUNK_BYTES = 16384

Generators = dict[str, Any]


class LowDiffCallback(TrainerCallback):
    """Commits every step of a Trainer, and resumes the Trainer exactly.

    ::

        Trainer(..., callbacks=[LowDiffCallback("runs/x", compressor=TopK(density=0.01))])

    Restored are weights, optimizer, scheduler, random generators, the place in the data, the ``TrainerState`` with its
    history, sums that the next log line needs, and callbacks that are an ``ExportableState``. A run that is finished
    ends at once when it is started again, with the same metrics; with larger ``max_steps`` or ``num_train_epochs`` it
    goes on.

    Attributes:
        checkpointer: The Checkpointer; attached while ``train()`` runs.
        evaluated: Names of the sets that the run was evaluated with; empty for the only one.
    """

    def __init__(self, run: str | Path, **settings: Any) -> None:
        """Set up the Checkpointer; nothing is read or written yet.

        Args:
            run: Folder of the run.
            settings: Of ``lowdiff.Checkpointer``.

        Raises:
            ConfigError: If a value cannot work.
        """
        self.checkpointer = lowdiff.Checkpointer(run, **settings)
        self._run, self._staging = Path(run), settings.get("staging")
        self._trainer: Any = None
        self._training: _Training | None = None
        self.evaluated: set[str] = set()

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Find the Trainer and put `_Resuming` before its class.

        Raises:
            ConfigError: If this version of the Trainer lacks a part that is needed.
            UsageError: If this callback belongs to a Trainer already.
        """
        trainer = _trainer_above(self)
        if self._trainer is not None and self._trainer is not trainer:
            raise UsageError("this LowDiffCallback belongs to another Trainer; make one for each")
        _refuse_other_trainers(Trainer)
        self._trainer = trainer
        trainer._lowdiff = self
        own = type(trainer)
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        trainer.__class__ = type(own.__name__, (_Resuming, own), names)
        # The first of all, so that a step is committed before other callbacks see the next epoch begin.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Put back the sums that the Trainer has just set to zero.

        Raises:
            UsageError: If the Trainer was made without this callback.
        """
        if self._training is None:
            raise UsageError(
                "LowDiffCallback was added after the Trainer was made; pass it to the Trainer: "
                "Trainer(..., callbacks=[LowDiffCallback(...)])"
            )
        self._training.begin()
        return control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the last step of the epoch before, with all that came after it."""
        assert self._training is not None
        self._training.next_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Note that a step was made; end training where a signal says so."""
        assert self._training is not None
        self._training.is_pending = True
        # Of several ranks, all see this at the same step.
        control.should_training_stop |= self.checkpointer.preempted
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit where a signal ended training within an epoch: no epoch ends there when it goes on."""
        assert self._training is not None
        if self.checkpointer.preempted and state.global_step < state.max_steps:
            self._training.stop_within_epoch()

    def export_model(
        self, step: int | None = None, folder: str | Path | None = None, *, model: Any = None
    ) -> Path:
        """Write a step's model as a folder for ``from_pretrained``; for one process.

        Args:
            step: Which; None for the newest.
            folder: Where to; by default ``lowdiff-STEP`` in the Trainer's ``output_dir``.
            model: A model of the same architecture, which is left as it is; by default the Trainer's.

        Returns:
            The folder.

        Raises:
            UsageError: If neither a model nor a Trainer is known, or no folder.
            StepNotFound: If the step cannot be recovered.
        """
        trainer = self._trainer
        if trainer is None and (model is None or folder is None):
            raise UsageError(
                "export_model needs the Trainer that this callback was passed to, or folder= and model="
            )
        state = lowdiff.recover(self._run, step, staging=self._staging)
        if folder is None:
            folder = Path(trainer.args.output_dir) / f"lowdiff-{state.step}"
        if model is None:
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        weights = {
            name.removeprefix("_orig_mod."): value
            for name, value in state.model_state_dict().items()
        }
        model.save_pretrained(folder, state_dict=weights)
        if trainer is not None and trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        return Path(folder)


class _Resuming:
    """Overrides of the Trainer's parts between which a run is resumed and committed.

    Mixed in before the Trainer's own class by `LowDiffCallback.on_init_end`, so that overrides of the user's
    Trainer are called by ``super()`` as ever.
    """

    _lowdiff: LowDiffCallback

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train or resume; the run decides where to begin."""
        callback = self._lowdiff
        trainer: Any = self
        _refuse_arguments(trainer, args, options)
        callback._training = _Training(
            trainer, callback.checkpointer, callback._run, resume_from_checkpoint
        )
        try:
            return self._above.train(None, *args, **options)
        finally:
            # After an error nothing is committed; else it is closed already.
            callback.checkpointer.close()
            callback._training = None

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[Any, int]:
        self._above._init_training_state(*args, **options)
        return _FirstEpoch(self._running), 0

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        prepared = self._above._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        self._running.attach(*prepared)
        return cast(tuple[Any, Any], prepared)

    def _run_epoch(self, **given: Any) -> None:
        running = self._running
        consumed = running.begin_epoch(given["epoch"], given["steps_in_epoch"])
        given |= {
            "resume_from_checkpoint": _MARK if consumed else None,
            "epochs_trained": given["epoch"],
            "steps_trained_in_current_epoch": consumed,
        }
        self._above._run_epoch(**given)
        running.end_epoch()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        self._running.commit()
        batches = _Fetched(epoch_iterator, self._running)
        return self._above.get_batch_samples(batches, num_batches, device)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint == _MARK:
            self._running.restore_generators()
        else:
            self._above._load_rng_state(checkpoint)

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        # With `eval_on_start`, the only evaluation that no scheduler hears of: it was made when the run began.
        if options.get("skip_scheduler") and self._running.is_resumed:
            return {}
        return self._above._evaluate(*args, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = self._above.get_eval_dataloader(eval_dataset)
        name = eval_dataset if isinstance(eval_dataset, str) else ""
        _watch_evaluation(self, loader, name, self._lowdiff.evaluated)
        return loader

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        seconds = self._running.end()
        return self._above._finalize_training(trial, num_train_samples, start_time - seconds)

    @property
    def _above(self) -> Any:
        return super()

    @property
    def _running(self) -> _Training:
        training = self._lowdiff._training
        assert training is not None
        return training


class _Training:
    """One call of ``train()``: where it stands in the data, and what is to be restored when.

    Large because it holds what lies between the events of one training.

    Attributes:
        epoch: The epoch that the next batch belongs to.
        consumed: Batches of the epoch that this rank trained with, or is training with.
        is_pending: Whether a step was made that is not committed.
        is_resumed: Whether the run has steps of an earlier process.
    """

    def __init__(
        self, trainer: Any, checkpointer: lowdiff.Checkpointer, run: Path, given: Any
    ) -> None:
        self.epoch = self.consumed = 0
        self.is_pending = self.is_resumed = False
        self._trainer, self._checkpointer = trainer, checkpointer
        self._checkpoint, self._run, self._is_new = given, run, not run.exists()
        self._loader: Any = None
        self._progress = _Progress(trainer, self)
        self._order = _Order(self)
        self._steps_in_epoch = 0
        self._is_epoch_over = False
        self._earlier_seconds = 0.0
        self._begun = time.monotonic()
        #: The generators after attach; lowdiff warns of numbers that were drawn from there on.
        self._at_attach: Generators = {}
        self._is_restored = True

    # What the Trainer's events call, in this order.

    def attach(self, model: Any, loader: Any) -> None:
        """Attach what the Trainer has prepared; restore its state.

        Raises:
            ConfigError: If something cannot be resumed.
            RunMismatch: If another kind of loop made the run, or the place in the data has no meaning any more.
        """
        trainer, checkpointer = self._trainer, self._checkpointer
        if self._checkpoint not in (None, False) and self._is_new:
            raise ConfigError(
                f"resume_from_checkpoint={self._checkpoint!r}: the run {self._run} goes on from its own steps, and has "
                "none yet. To begin from that checkpoint, load its weights into the model "
                "(from_pretrained) and leave resume_from_checkpoint out"
            )
        self._loader = loader
        self._order.take(loader)
        objects: dict[str, Any] = {"scheduler": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        history = _History(trainer)
        step = checkpointer.attach(
            trainer.model_wrapped,
            trainer.optimizer,
            **objects,
            trainer=self._progress,
            trainer_history=history,
            trainer_epoch=self._order.at_epoch,
            trainer_batch=self._order.ahead,
        )
        if self._checkpoint not in (None, False):
            ignore_checkpoint(
                checkpointer,
                f"resume_from_checkpoint={self._checkpoint!r}",
                "load its weights into the model by from_pretrained and name another folder",
            )
        if step == 0:
            self._progress.found = history.found = None
            return
        found = self._progress.found
        if found is None or history.found is None or found["state"]["global_step"] != step:
            raise RunMismatch(
                f"step {step} of the run has no state of a Trainer: another loop made it. Name another folder"
            )
        self.is_resumed = True
        self._at_attach = _read_generators()
        self._is_restored = False
        self._progress.restore()
        history.restore()
        self.epoch, self.consumed = found["epoch"], found["consumed"]
        self._earlier_seconds = found["seconds"]
        trainer._lowdiff.evaluated |= set(found["evaluated"])
        self._order.restore(self.consumed)

    @property
    def first_epoch(self) -> int:
        """The epoch to begin with; behind all epochs where training is finished."""
        state = self._trainer.state
        found = self._progress.found if self.is_resumed else None
        is_stopped = found is not None and found["stopped_of"] == state.max_steps
        is_finished = is_stopped or (self.is_resumed and state.global_step >= state.max_steps)
        return sys.maxsize if is_finished else self.epoch

    def begin(self) -> None:
        """Restore the Trainer's sums."""
        self._begun = time.monotonic()
        self._progress.begin()

    def next_epoch(self) -> None:
        """Commit the step before an epoch; at this edge a run may be resumed."""
        if self.is_resumed and not self._is_restored:
            if self.consumed == 0:
                self.restore_generators()
            return
        if self._is_epoch_over:
            self.epoch, self.consumed = self.epoch + 1, 0
            self._is_epoch_over = False
        self._order.begin_epoch(None)
        self.commit()

    def begin_epoch(self, epoch: int, steps_in_epoch: int) -> int:
        """Prepare for the loader's next iterator.

        Returns:
            The number of batches to pass over.
        """
        self._steps_in_epoch = steps_in_epoch
        assert epoch == self.epoch, "the Trainer begins with another epoch than the run"
        if self._is_restored:
            self._order.begin_epoch(_read_generators())
            if epoch:
                self._order.begin_workers()
            return 0
        self._order.repeat_epoch()
        return self.consumed

    def stop_within_epoch(self) -> None:
        """Commit the last step without what the Trainer does at an epoch's end, unless it is the epoch's last."""
        if self.consumed < self._steps_in_epoch:
            self.commit()

    def end_epoch(self) -> None:
        """Note whether the epoch is over, or training ends within it."""
        is_stopping = self._trainer.control.should_training_stop
        self._is_epoch_over = self.consumed >= self._steps_in_epoch or not is_stopping

    def commit(self) -> None:
        """Commit the step that was made, if one was."""
        if self.is_pending:
            self.is_pending = False
            self._checkpointer.commit()

    def restore_generators(self) -> None:
        """Set the generators to those of the last commit, once."""
        if not self._is_restored:
            self._is_restored = True
            # What the loader's iterator draws again is no reason for lowdiff's warning.
            _set_generators(self._at_attach)
            begin_body(self._checkpointer)

    def end(self) -> float:
        """Commit the last step and close the run: the best model's weights may be loaded now.

        Returns:
            Seconds that earlier processes trained.
        """
        self.restore_generators()  # of a finished run, in which no epoch began
        if self._is_epoch_over:
            self.epoch, self.consumed = self.epoch + 1, 0
            self._order.begin_epoch(None)
        self.commit()
        self._checkpointer.close()
        return self._earlier_seconds

    # What the parts ask.

    @property
    def is_restored(self) -> bool:
        """Whether the generators are those that the run needs now."""
        return self._is_restored

    @property
    def num_workers(self) -> int:
        """Processes that load batches; without them this process does, between the steps."""
        return int(self._loader.num_workers)

    def seed(self, epoch: int, number: int) -> int:
        """A seed for loading a batch of this rank."""
        return _seed_of(self._trainer.args, epoch, number)

    @property
    def seconds(self) -> float:
        """Seconds that the run was trained."""
        return self._earlier_seconds + time.monotonic() - self._begun

    @property
    def layout(self) -> dict[str, int]:
        """Say what a number of batches means."""
        args = self._trainer.args
        return {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "processes": args.world_size,
            "batches in an epoch": len(self._loader),
        }

    @property
    def is_stopped(self) -> bool:
        """Whether a callback ended training, and no signal did."""
        control = self._trainer.control
        return bool(control.should_training_stop) and not self._checkpointer.preempted

    def fetched(self) -> None:
        """Count a batch that was handed out."""
        self.consumed += 1
        self._order.note_fetched(self.consumed)


class _FirstEpoch:
    """The first epoch's number, for ``range``: asked for it after everything was attached.

    The Trainer sets its epoch before model and optimizer are prepared, and ``attach`` needs both.
    """

    def __init__(self, training: _Training) -> None:
        self._training = training

    def __index__(self) -> int:
        return self._training.first_epoch


class _Progress:
    """The small part of a Trainer's state, which every step changes: a stateful object.

    Attributes:
        found: What the run knew; None if nothing.
    """

    def __init__(self, trainer: Any, training: _Training) -> None:
        self.found: dict[str, Any] | None = None
        self._trainer, self._training = trainer, training
        #: Whether what was found is not restored, so that it is still the state.
        self._is_waiting = True

    def state_dict(self) -> dict[str, Any]:
        """Return state, sums and place; the sums do not exist before the first ``train()``."""
        if self._is_waiting and self.found is not None:
            return self.found
        trainer, training = self._trainer, self._training
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": {name: _plain(getattr(trainer.state, name)) for name in _STATE},
            "callbacks": _states_of(self._callbacks()),
            "loss": None if loss is None else loss.detach().cpu(),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "first_step": int(getattr(trainer, "_initial_global_step", 0)),
            "flos": float(trainer.current_flos),
            "stopped_of": trainer.state.max_steps if training.is_stopped else None,
            "seconds": training.seconds,
            "epoch": training.epoch,
            "consumed": training.consumed,
            "layout": training.layout,
            "evaluated": sorted(trainer._lowdiff.evaluated),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until it can be restored."""
        self.found = state_dict

    def restore(self) -> None:
        """Restore the TrainerState and callbacks.

        Raises:
            RunMismatch: If the run is within an epoch whose batches were others.
        """
        found, trainer = self.found, self._trainer
        assert found is not None
        now = self._training.layout
        changed = [
            f"{name} {now[name]} instead of {was}"
            for name, was in found["layout"].items()
            if now[name] != was
        ]
        if found["consumed"] and changed:
            raise RunMismatch(
                f"the run is within epoch {found['epoch']}, after {found['consumed']} batches, and has "
                f"{', '.join(changed)} now, so what they were is unknown; keep the earlier arguments until that "
                "epoch is over"
            )
        for name, value in found["state"].items():
            setattr(trainer.state, name, value)
        _restore_states(self._callbacks(), found["callbacks"])

    def begin(self) -> None:
        """Restore what the Trainer sets to zero when training begins, unless the run begins."""
        found, trainer = self.found, self._trainer
        self._is_waiting = False
        if found is None or not self._training.is_resumed:
            return
        if found["loss"] is not None:
            trainer._tr_loss = found["loss"].to(trainer._tr_loss)
        trainer._total_loss_scalar = found["total_loss"]
        trainer._globalstep_last_logged = found["last_logged"]
        trainer._initial_global_step = found["first_step"]
        trainer.current_flos = found["flos"]

    def _callbacks(self) -> list[Any]:
        return [
            c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)
        ]


class _History:
    """The log history, a line of JSON per entry: a stateful object.

    It grows as long as training does, and a step must not log all of it: what is full is a tensor, which is logged
    once.

    Attributes:
        found: What the run knew and is not restored yet; None if nothing.
    """

    def __init__(self, trainer: Any) -> None:
        self.found: dict[str, Any] | None = None
        self._trainer = trainer
        self._clear()

    def _clear(self) -> None:
        self._full: list[torch.Tensor] = []
        self._rest = b""
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all entries."""
        if self.found is not None:
            return self.found
        entries = self._trainer.state.log_history
        if len(entries) < self._count:  # somebody began another list
            self._clear()
        for entry in entries[self._count :]:
            self._rest += json.dumps(entry, default=_plain).encode() + b"\n"
        self._count = len(entries)
        while len(self._rest) >= _CHUNK_BYTES:
            chunk, self._rest = self._rest[:_CHUNK_BYTES], self._rest[_CHUNK_BYTES:]
            self._full.append(torch.frombuffer(bytearray(chunk), dtype=torch.uint8))
        return {"full": list(self._full), "rest": self._rest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until it can be restored."""
        self.found = state_dict

    def restore(self) -> None:
        """Restore the history."""
        assert self.found is not None
        text = (
            b"".join(chunk.numpy().tobytes() for chunk in self.found["full"]) + self.found["rest"]
        )
        self._trainer.state.log_history = [json.loads(line) for line in text.splitlines()]
        self.found = None
        self._clear()


class _Kept:
    """A value that is a stateful object.

    Attributes:
        value: It.
    """

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a value."""
        self.value = state_dict["value"]


class _Order:
    """The order of an epoch, and the numbers that loading its batches draws.

    The Trainer's loader fetches a batch while the one before is trained with, and without worker processes this draws
    from the generators of the training: a collator that masks tokens, say. So the generators are kept as they were
    when the epoch's order was drawn, and before the batch that is fetched but not consumed. Worker processes are given
    a seed for each batch.

    Attributes:
        at_epoch: Generators of process and samplers when the epoch began; a stateful object.
        ahead: Generators before the fetched batch, None where loading it drew nothing; a stateful object.
    """

    def __init__(self, training: _Training) -> None:
        self.at_epoch, self.ahead = _Kept(), _Kept()
        self._training = training
        self._loader: Any = None
        self._samplers: list[Any] = []
        self._requested = 0
        self._before: Generators | None = None
        #: The loader's own generator while another takes its place.
        self._hidden: list[torch.Generator | None] = []
        #: Of the epoch that is resumed: how many batches to pass over, and the generators before the next.
        self._passed, self._first, self._is_fetched = 0, None, False

    def take(self, loader: Any) -> None:
        """Watch a loader's order.

        Raises:
            ConfigError: If its place cannot be found again.
        """
        _refuse_loader(loader)
        base = getattr(loader, "base_dataloader", loader)
        # DataLoader sets a sampler but once; the watched one hands out the same batches.
        name = "sampler" if isinstance(base.sampler, BatchSampler) else "batch_sampler"
        watched = _WatchedBatches(getattr(base, name), self._seed, self)
        object.__setattr__(base, name, watched)
        self._loader, self._samplers = base, list(_chain(base))

    def _seed(self, number: int) -> int | None:
        training = self._training
        return training.seed(training.epoch, number) if training.num_workers else None

    def restore(self, consumed: int) -> None:
        """Take what ``attach`` has restored; the seeds count from now on."""
        if self.at_epoch.value is not None:
            _set_samplers(self._samplers, self.at_epoch.value["samplers"])
        kept = self.ahead.value
        self._passed, self._is_fetched, self._first = (
            consumed,
            kept["is_fetched"],
            kept["generators"],
        )

    def begin_epoch(self, generators: Generators | None) -> None:
        """Note how an epoch begins."""
        self.at_epoch.value = {"generators": generators, "samplers": _read_samplers(self._samplers)}
        self.ahead.value = {"is_fetched": False, "generators": None}
        self._requested = 0

    def begin_workers(self) -> None:
        """Start persistent workers in a later epoch than the first without drawing their seed.

        They have lived since the first epoch in a run that nobody kills, which drew it there.
        """
        loader = self._loader
        if loader.persistent_workers and loader._iterator is None:
            self._hidden, loader.generator = [loader.generator], torch.Generator()

    def repeat_epoch(self) -> None:
        """Let the loader draw the order of the epoch that is resumed."""
        kept = self.at_epoch.value
        _set_samplers(self._samplers, kept["samplers"])
        _set_generators(kept["generators"])
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._training.epoch)
        self._requested = 0

    def note_request(self, number: int) -> None:
        """Prepare for the loading of a batch; called before each, in this process.

        Args:
            number: Of the batch in its epoch; the number of batches where there is no other.
        """
        training = self._training
        self._requested = number + 1
        if training.num_workers:
            return
        if not training.is_restored:
            if number == self._passed and self._is_fetched:
                if self._first is not None:
                    _set_generators(self._first)
            elif number >= self._passed:
                training.restore_generators()
        if number >= self._passed or training.is_restored:
            self._before = _read_generators()

    def note_end(self, count: int) -> None:
        """There is no other batch to load."""
        if not self._training.num_workers and count > self._passed:
            self._training.restore_generators()

    def note_fetched(self, consumed: int) -> None:
        """Keep the generators before the batch that was fetched ahead of the one just handed out."""
        while self._hidden:
            self._loader.generator = self._hidden.pop()
        is_fetched = self._requested > consumed
        generators = None
        if is_fetched and not self._training.num_workers:
            generators = None if _equal(self._before, _read_generators()) else self._before
        self.ahead.value = {"is_fetched": is_fetched, "generators": generators}


class _WatchedBatches(BatchSampler):
    """A loader's batch sampler that tells when the next batch is asked for, and seeds worker processes."""

    def __init__(
        self, sampler: Any, seed: Callable[[int], int | None], order: _Order | None = None
    ) -> None:
        """Watch a sampler.

        Args:
            sampler: Whose batches are handed out.
            seed: What a worker process loads a batch with, by its number in the epoch; None where this process
                loads it, with its own generators.
            order: Told of every batch.
        """
        self.watched = sampler
        self._seed, self._order = seed, order

    def __getattr__(self, name: str) -> Any:
        if name == "watched":  # while it is copied
            raise AttributeError(name)
        return getattr(self.watched, name)

    def __len__(self) -> int:
        return len(self.watched)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for count, indices in enumerate(self.watched, 1):
            if self._order is not None:
                self._order.note_request(count - 1)
            seed = self._seed(count - 1)
            yield indices if seed is None else _SeededBatch(indices, seed)
        if self._order is not None:
            self._order.note_end(count)


class _SeededBatch:
    """Indices of a batch on their way to a worker process, which seeds its generators when it receives them.

    The batch is then loaded the same way whichever worker does it, and whatever it loaded before.
    """

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> tuple[Any, tuple[Any, int]]:
        return _received, (self._indices, self._seed)


def _watch_evaluation(trainer: Any, loader: Any, name: str, evaluated: set[str]) -> None:
    """Make what worker processes load for an evaluation depend on the step alone.

    Args:
        trainer: Its Trainer.
        loader: The evaluation's; a persistent one is handed out again and again.
        name: Of its data set.
        evaluated: Sets that the run was evaluated with before; the name is added.
    """
    base = getattr(loader, "base_dataloader", loader)
    sampler = getattr(base, "batch_sampler", None)
    if getattr(base, "num_workers", 0) and not isinstance(base.dataset, IterableDataset):
        if sampler is not None and not isinstance(sampler, _WatchedBatches):

            def seed(number: int) -> int:
                return _seed_of(trainer.args, trainer.state.global_step, number, 1)

            object.__setattr__(base, "batch_sampler", _WatchedBatches(sampler, seed))
        if name in evaluated and base.persistent_workers and base._iterator is None:
            # In a run that nobody kills, the workers live since the first evaluation, which drew their seed.
            base.generator = torch.Generator()
    evaluated.add(name)


def _seed_of(args: Any, *parts: int) -> int:
    """Return one seed for this rank and some numbers."""
    words = np.random.SeedSequence([args.seed % 2**63, args.process_index, *parts])
    return int(words.generate_state(1, np.uint64)[0]) % 2**63


def _received(indices: Any, seed: int) -> Any:
    """Seed the generators of a worker process; return the indices that it will load next."""
    if get_worker_info() is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
    return indices


class _Fetched:
    """An epoch's iterator that counts the batches handed out."""

    def __init__(self, batches: Any, training: _Training) -> None:
        self._batches, self._training = batches, training

    def __iter__(self) -> _Fetched:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._training.fetched()
        return batch


def _chain(loader: Any) -> Iterator[Any]:
    """Yield a loader and the samplers that it reads, each once."""
    waiting, seen = [loader], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, _WatchedBatches):
            yield part
        for name in ("batch_sampler", "sampler", "watched"):
            waiting.append(getattr(part, name, None))


def _read_samplers(samplers: Sequence[Any]) -> list[dict[str, Any]]:
    """Seeds and generators of samplers."""
    found = []
    for sampler in samplers:
        generator = getattr(sampler, "generator", None)
        seed = getattr(sampler, "initial_seed", None)
        found.append(
            {
                "generator": generator.get_state()
                if isinstance(generator, torch.Generator)
                else None,
                "seed": seed if isinstance(seed, int) else None,
            }
        )
    return found


def _set_samplers(samplers: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Restore seeds and generators of samplers.

    Raises:
        RunMismatch: If they are other samplers.
    """
    if len(samplers) != len(states):
        raise RunMismatch(
            f"the training loader has {len(samplers)} samplers and had {len(states)}, so its order is another; keep "
            "the earlier loader until the epoch is over"
        )
    for sampler, state in zip(samplers, states, strict=True):
        if state["seed"] is not None:
            sampler.initial_seed = state["seed"]
        if state["generator"] is not None:
            if sampler.generator is None:
                sampler.generator = torch.Generator()
            sampler.generator.set_state(state["generator"])


def _read_generators() -> Generators:
    """The global random generators of this process."""
    found = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_generators(states: Generators) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _equal(before: Any, now: Any) -> bool:
    """Whether two states of generators are the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_equal(before[key], now[key]) for key in before)
    if isinstance(before, torch.Tensor):
        return torch.equal(before, now)
    if isinstance(before, np.ndarray):
        return np.array_equal(before, now)
    return bool(before == now)


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's; all else as it is."""
    return value.item() if isinstance(value, np.generic | torch.Tensor) else value


def _states_of(callbacks: Iterable[Any]) -> str:
    """The states of callbacks in their order, as the Trainer writes them: in JSON.

    Raises:
        ConfigError: If a state has no form in JSON.
    """
    states = []
    for callback in callbacks:
        try:
            states.append([type(callback).__name__, json.dumps(callback.state(), default=_plain)])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(callback).__name__}.state() has no form in JSON ({error}); return plain values"
            ) from error
    return json.dumps(states)


def _restore_states(callbacks: Iterable[Any], text: str) -> None:
    """Give callbacks their states, by class and order; the arguments of their constructors stay the script's."""
    waiting: dict[str, list[dict[str, Any]]] = {}
    for name, state in json.loads(text):
        waiting.setdefault(name, []).append(json.loads(state))
    for callback in callbacks:
        states = waiting.get(type(callback).__name__)
        if not states:
            continue
        state = states.pop(0)
        if type(callback).from_state.__func__ is ExportableState.from_state.__func__:
            for name, value in state.get("attributes", {}).items():
                setattr(callback, name, value)
        else:  # it alone knows how to read its state
            vars(callback).update(vars(type(callback).from_state(state)))


def _trainer_above(callback: LowDiffCallback) -> Any:
    """The Trainer whose constructor calls ``on_init_end``; callbacks are not told.

    Raises:
        ConfigError: If none does.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ConfigError(
        f"LowDiffCallback found no Trainer that calls on_init_end; tested is {_TESTED}, and this is "
        f"transformers {transformers.__version__}"
    )


def _refuse_other_trainers(trainer: type) -> None:
    """Check that a class of Trainer has the parts that are overridden.

    Raises:
        ConfigError: Naming what is missing.
    """
    missing = []
    for name, parameters in _PARTS.items():
        part = getattr(trainer, name, None)
        known = () if part is None else inspect.signature(part).parameters
        if part is None or any(parameter not in known for parameter in parameters):
            missing.append(f"{name}({', '.join(parameters)})")
    loop = getattr(trainer, "_inner_training_loop", None)
    names = () if loop is None else inspect.unwrap(loop).__code__.co_names
    missing += [name for name in _SUMS if name not in names]
    if missing:
        raise ConfigError(
            f"LowDiffCallback was tested with {_TESTED}; the Trainer of transformers {transformers.__version__} lacks "
            f"{', '.join(missing)}. Install the tested version: pip install 'lowdiff[transformers]'"
        )


def _refuse_arguments(trainer: Any, positional: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Check that a training can be resumed exactly.

    Raises:
        ConfigError: Saying what to change.
    """
    args = trainer.args
    reasons = {
        "auto_find_batch_size=True begins anew with other batches": args.auto_find_batch_size,
        "ignore_data_skip=True begins an epoch anew after a restart": args.ignore_data_skip,
        "a search for hyper-parameters makes several runs in one": options.get("trial")
        or any(positional[:1]),
        "DeepSpeed keeps the state of model and optimizer to itself": trainer.is_deepspeed_enabled,
        "FSDP under the Trainer is not supported": trainer.is_fsdp_enabled,
        "one process with several GPUs trains in DataParallel; start one process each, by torchrun": args.n_gpu
        > 1,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"{reason}, and LowDiffCallback could not resume it exactly; leave that out"
            )


def _refuse_loader(loader: Any) -> None:
    """Check that a loader's place can be found again without loading what was consumed.

    Raises:
        ConfigError: Saying what to change.
    """
    reason = ""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        reason = "an IterableDataset does not reveal its place; give the Trainer a dataset with __getitem__ and __len__"
    elif isinstance(loader, DataLoaderDispatcher):
        reason = "dispatch_batches=True has one process load all batches; leave it out"
    elif not isinstance(getattr(loader, "base_dataloader", loader), DataLoader):
        reason = f"a {type(loader).__name__} is no DataLoader; let get_train_dataloader return one"
    elif getattr(loader, "use_stateful_dataloader", False):
        reason = "use_stateful_dataloader=True keeps a place of its own; leave it out"
    elif not getattr(loader, "in_order", True):
        reason = "dataloader_in_order=False hands batches out as they come; leave it out"
    elif loader.batch_sampler is None:
        reason = "a DataLoader with batch_size=None has no batches to count; give it a batch_size"
    if reason:
        raise ConfigError(f"LowDiffCallback cannot resume this loader: {reason}")
