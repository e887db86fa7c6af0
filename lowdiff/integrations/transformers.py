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
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

import lowdiff
from lowdiff.checkpointer import begin_body, ignore_checkpoint
from lowdiff.errors import ConfigError, RunMismatch, UsageError
from lowdiff.integrations.callbacks import averages_of

try:
    import transformers
    from transformers import Trainer, TrainerCallback

    from lowdiff.integrations.batch_order import (
        BatchOrder,
        Generators,
        WatchedBatches,
        read_generators,
        set_generators,
    )
    from lowdiff.integrations.trainer_state import LogHistory, TrainerProgress
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
#: Stands for a path in ``resume_from_checkpoint``, where the Trainer is to pass over batches.
_MARK = "lowdiff"


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
        self._training.note_step()
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
        self._progress = TrainerProgress(trainer, self)
        self._order = BatchOrder(self)
        self._steps_in_epoch = 0
        self._is_epoch_over = False
        #: Averages that are attached, until the first step.
        self._averages: dict[str, AveragedModel] | None = None
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
        callbacks = trainer.callback_handler.callbacks
        self._averages = averages_of(callbacks)
        objects |= self._averages
        history = LogHistory(trainer)
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
        self._at_attach = read_generators()
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
            self._order.begin_epoch(read_generators())
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

    def note_step(self) -> None:
        """Note that a step was made.

        Raises:
            ConfigError: In the first step, if a callback has made an average that no step holds.
        """
        self.is_pending = True
        known, self._averages = self._averages, None
        if known is None:
            return
        found = averages_of(self._trainer.callback_handler.callbacks)
        late = [n for n, a in found.items() if not any(a is other for other in known.values())]
        if late:
            raise ConfigError(
                f"{late[0].partition('_average')[0]} made its AveragedModel after train() had prepared the model, so that no "
                "step holds it, and a resumed run would begin it anew; make it in the callback's constructor, of "
                "the model that the Trainer gets"
            )

    def restore_generators(self) -> None:
        """Set the generators to those of the last commit, once."""
        if not self._is_restored:
            self._is_restored = True
            # What the loader's iterator draws again is no reason for lowdiff's warning.
            set_generators(self._at_attach)
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
        if sampler is not None and not isinstance(sampler, WatchedBatches):

            def seed(number: int) -> int:
                return _seed_of(trainer.args, trainer.state.global_step, number, 1)

            object.__setattr__(base, "batch_sampler", WatchedBatches(sampler, seed))
        if name in evaluated and base.persistent_workers and base._iterator is None:
            # In a run that nobody kills, the workers live since the first evaluation, which drew their seed.
            base.generator = torch.Generator()
    evaluated.add(name)


def _seed_of(args: Any, *parts: int) -> int:
    """Return one seed for this rank and some numbers."""
    words = np.random.SeedSequence([args.seed % 2**63, args.process_index, *parts])
    return int(words.generate_state(1, np.uint64)[0]) % 2**63


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
