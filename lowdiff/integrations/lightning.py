"""Lightning: one callback, and a run that was killed anywhere goes on exactly.

::

    trainer = lightning.Trainer(max_epochs=3, callbacks=[LowDiffCallback("runs/x")])
    trainer.fit(model, train_dataloaders=loader)

A step is committed when the next batch is about to be fetched, when the next epoch begins, or when training has ended:
validation, logging and checkpoint callbacks belong to the step before. Lightning's own progress, callbacks, schedulers
and sums of logged values are a state of each step. The loader stays as it is; a resumed epoch passes over the indices
of the batches that were consumed, and loads none of them.

No event comes right before a batch is fetched, and Lightning runs backward inside ``optimizer.step(closure)``, where
nobody can read gradients before they are used. So three methods of the loops, and one of the precision plugin, are
wrapped on the instances while ``fit`` runs. `_PARTS` lists them; a version that lacks one is refused.

Needs ``lowdiff[lightning]``.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import lowdiff
from lowdiff.checkpointer import begin_body, ignore_checkpoint
from lowdiff.errors import ConfigError, RunMismatch, UsageError
from lowdiff.integrations.callbacks import averages_of

try:
    import lightning
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.plugins.precision.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from torchmetrics import Metric
except ImportError as error:
    raise ConfigError(
        f"LowDiffCallback needs lightning: pip install 'lowdiff[lightning]' ({error})"
    ) from error

__all__ = ["LowDiffCallback"]

#: The version that the tests ran with; constraints.txt pins it.
_TESTED = "lightning 2.6.6"
#: Methods that are wrapped or called, and their parameters.
_PARTS: dict[type, dict[str, tuple[str, ...]]] = {
    _FitLoop: {"setup_data": (), "on_advance_start": (), "on_run_end": ()},
    _TrainingEpochLoop: {"advance": ("data_fetcher",)},
    Precision: {
        "optimizer_step": ("optimizer", "model", "closure"),
        "_wrap_closure": ("model", "optimizer", "closure"),
    },
}
_RESTARTED = "You're resuming from a checkpoint that ended before the epoch ended"


class LowDiffCallback(lightning.Callback):
    """Commits every step of ``Trainer.fit``, and resumes it exactly.

    ::

        Trainer(..., callbacks=[LowDiffCallback("runs/x", compressor=TopK(density=0.01))])

    Restored are weights, optimizers, schedulers, random generators, the place in the data, the loops' progress,
    callbacks and a data module with a state, logged values and their sums. A run that is finished ends at once when it
    is started again; with a larger ``max_epochs`` or ``max_steps`` it goes on.

    Attributes:
        checkpointer: The Checkpointer; attached while ``fit`` runs.
    """

    def __init__(self, run: str | Path, **settings: Any) -> None:
        """Set up the Checkpointer; nothing is read or written yet.

        Args:
            run: Folder of the run.
            settings: Of ``lowdiff.Checkpointer``.

        Raises:
            ConfigError: If a value cannot work, or this version of Lightning lacks a part that is needed.
        """
        self.checkpointer = lowdiff.Checkpointer(run, **settings)
        self._training: _Training | None = None
        _refuse_other_versions()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach model, optimizers and loader, and restore them: all are set up, and no loop has begun.

        Raises:
            ConfigError: If something cannot be resumed.
            RunMismatch: If another kind of loop made the run.
        """
        self._training = _Training(trainer, self.checkpointer)
        self._training.attach()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Stop where a signal says so; all ranks hear of it at the same step."""
        if self.checkpointer.preempted:
            trainer.should_stop = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run without the step under way."""
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the run; one that had no step to make leaves the generators as it found them at its end."""
        training = self._training
        if training is not None:
            training.finish()
        self._end()
        if training is not None:
            training.hand_out()

    def _end(self) -> None:
        if self._training is not None:
            self._training.unwrap()
            self._training = None
            self.checkpointer.close()


class _Training:
    """One call of ``fit``: what is wrapped, and where a step is committed. Large because all that is wrapped shares it."""

    def __init__(self, trainer: Any, checkpointer: lowdiff.Checkpointer) -> None:
        self._trainer, self._checkpointer = trainer, checkpointer
        self._loop = trainer.fit_loop
        self._wrapped: list[tuple[Any, str]] = []
        self._committed = 0
        self._is_first = self._is_unbegun = True
        self._is_resumed = False
        self._schedulers: list[Any] = []
        #: Callbacks that put an average into the model when training ends.
        self._averaging: list[Any] = []

    def attach(self) -> None:
        """See `LowDiffCallback.on_fit_start`."""
        trainer, loop = self._trainer, self._loop
        _refuse(trainer)
        with _undrawn(trainer):
            loop.setup_data()
        loader = _loader_of(loop)
        progress = _Progress(trainer, self._checkpointer)
        self._schedulers = _schedulers_of(trainer)
        objects: dict[str, Any] = {
            f"scheduler{i}": scheduler for i, scheduler in enumerate(self._schedulers)
        }
        objects |= averages_of(trainer.callbacks)
        self._averaging = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        saved = [_Saved(trainer, owner) for owner in _with_hooks(trainer)]
        objects |= {f"checkpoint{i} of {part.name}": part for i, part in enumerate(saved)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            objects["scaler"] = scaler
        if loader is not None:
            objects["loader"] = (
                _Positioned(loader, loop) if hasattr(loader, "load_state_dict") else loader
            )
        step = self._checkpointer.attach(
            trainer.model, trainer.optimizers, **objects, lightning=progress
        )
        self._refuse_checkpoint(step)
        is_within_epoch = False
        if step:
            if progress.found is None:
                raise RunMismatch(
                    f"step {step} of the run has no state of Lightning: another loop made it. Name another folder"
                )
            is_within_epoch = progress.restore()
            for part in saved:
                part.restore()
            if type(objects.get("loader")) is not _Positioned and loader is not None:
                self._checkpointer.batch_of(loader)  # Lightning counts on where the epoch was
        progress.found = None  # of a run that made no step, too
        for part in saved:
            part.loaded = None
        self._committed = trainer.global_step
        if loader is not None and is_within_epoch:
            iter(loop._data_fetcher)  # the one of setup_data knows nothing of the run
        if loader is not None and not step:
            self._wrap(loop, "setup_data", None, self._begin_first_epoch)
        if isinstance(objects.get("loader"), _Positioned):
            objects["loader"].loaded = None
        self._wrap(loop, "on_advance_start", self._before_epoch)
        self._wrap(loop.epoch_loop, "advance", self._before_batch)
        self._is_resumed = step > 0
        if self._averaging:
            self._wrap(loop, "on_run_end", self._before_the_average)
        else:
            self._wrap(loop, "on_run_end", None, self._after_training)
        self._replace(trainer.precision_plugin, "optimizer_step", self._step)

    def _refuse_checkpoint(self, step: int) -> None:
        """See that no checkpoint of Lightning's is loaded over the run's own step.

        Raises:
            ConfigError: If the run has none yet.
        """
        trainer = self._trainer
        if trainer.ckpt_path is None:
            return
        if not step:
            raise ConfigError(
                f"ckpt_path={str(trainer.ckpt_path)!r}: the run goes on from its own steps, and has none yet. To begin "
                "from that checkpoint, load its weights into the model (load_from_checkpoint) and leave ckpt_path out"
            )
        trainer._checkpoint_connector._loaded_checkpoint = {}
        ignore_checkpoint(
            self._checkpointer,
            f"ckpt_path={str(trainer.ckpt_path)!r}",
            "load its weights by load_from_checkpoint and name another folder",
        )

    # What is wrapped.

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[[], None] | None,
        after: Callable[[], None] | None = None,
    ) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            if before is not None:
                before()
            result = original(*args, **options)
            if after is not None:
                after()
            return result

        self._replace(owner, name, wrapped)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._wrapped.append((owner, name))

    def unwrap(self) -> None:
        """Give the loops their own methods back."""
        while self._wrapped:
            owner, name = self._wrapped.pop()
            delattr(owner, name)

    def _begin_first_epoch(self) -> None:
        """Make the first iteration over the loader where the loop makes it without lowdiff."""
        if self._is_unbegun:
            self._is_unbegun = False
            iter(self._loop._data_fetcher)

    def _before_epoch(self) -> None:
        """Commit the last step of the epoch before, with all that came after it."""
        if self._is_first:
            if not self._loop.restarted_mid_epoch:
                begin_body(self._checkpointer)
            return
        self._end_epoch()
        self._commit()

    def _end_epoch(self) -> None:
        """Leave the epoch's iteration over the loader, which may not have come to its end."""
        iterator = self._loop._combined_loader._iterator
        if iterator is not None:
            iterator.reset()

    def _before_batch(self) -> None:
        """Commit the step that was made; from the first batch on, nothing is a restart any more."""
        if self._is_first:
            self._is_first = False
            for loop in _loops(self._loop):
                loop._restarting = False
            begin_body(self._checkpointer)
        self._commit()
        if self._checkpointer.preempted:
            self._trainer.should_stop = True
            raise StopIteration

    def _after_training(self) -> None:
        epochs = self._loop.epoch_progress.current
        if epochs.ready == epochs.processed:
            self._end_epoch()
        self._commit()

    def _before_the_average(self) -> None:
        """End the run with the weights that trained: with more epochs it goes on from these."""
        self._after_training()
        self._checkpointer.close()

    def hand_out(self) -> None:
        """Put the averages into the model of a run that was finished already, as its training did at its end."""
        if self._is_first and self._is_resumed:
            for callback in self._averaging:
                WeightAveraging.on_train_end(
                    callback, self._trainer, self._trainer.lightning_module
                )

    def finish(self) -> None:
        """Restore the generators of a run that is finished already."""
        if self._is_first:
            begin_body(self._checkpointer)

    def _commit(self) -> None:
        """Commit, if an optimizer stepped since the last commit."""
        step = self._trainer.global_step
        if _schedulers_of(self._trainer) != self._schedulers:
            raise UsageError(
                f"a callback put another scheduler into the Trainer by step {step}; only those that "
                "configure_optimizers made are part of the run. Let one scheduler do both (SequentialLR, say)"
            )
        if step != self._committed:
            self._committed = step
            self._checkpointer.commit()

    def _step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Make an optimizer's step with gradients that are there before it begins; see `Precision.optimizer_step`."""
        plugin = self._trainer.precision_plugin
        if getattr(plugin, "scaler", None) is not None:  # it does so as well
            original = type(plugin).optimizer_step
            return original(plugin, optimizer, model=model, closure=closure, **options)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates gradients in its step, which cannot be recorded")
        result = plugin._wrap_closure(model, optimizer, closure)
        optimizer.step(**options)
        return result


class _Saved:
    """What the hooks of a callback, or of the module, put into Lightning's own checkpoint: a stateful object.

    The hook gets a checkpoint with the progress and the module's state; what it adds is kept. What it changes of these
    is not: lowdiff restores them itself.

    Args:
        trainer: The trainer.
        owner: A callback, or the module.

    Attributes:
        name: Of its owner's class.
        loaded: What the run knew and is not restored yet; None if nothing.
    """

    def __init__(self, trainer: Any, owner: Any) -> None:
        self.name = type(owner).__name__
        self.loaded: dict[str, Any] | None = None
        self._trainer, self._owner = trainer, owner

    def state_dict(self) -> dict[str, Any]:
        """Return what the owner adds.

        Raises:
            ConfigError: If it cannot.
        """
        if self.loaded is not None:
            return self.loaded
        before = self._checkpoint()
        checkpoint = dict(before)
        self._call("on_save_checkpoint", checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until it can be restored."""
        self.loaded = state_dict

    def restore(self) -> None:
        """Hand its part of the checkpoint to the owner."""
        if self.loaded is not None:
            self._call("on_load_checkpoint", {**self._checkpoint(), **copy.deepcopy(self.loaded)})

    def _checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": trainer.lightning_module.state_dict(),
        }

    def _call(self, hook: str, checkpoint: dict[str, Any]) -> None:
        module = self._trainer.lightning_module
        before = () if self._owner is module else (self._trainer, module)
        try:
            getattr(self._owner, hook)(*before, checkpoint)
        except Exception as error:
            raise ConfigError(
                f"{self.name}.{hook}() raised {type(error).__name__}: {error}. LowDiffCallback calls it with the keys "
                f"{', '.join(self._checkpoint())} and keeps what it adds, at every step; keep that state in "
                "state_dict() of a callback instead"
            ) from error


def _with_hooks(trainer: Any) -> list[Any]:
    """Return callbacks, and the module, that write into a checkpoint or read from it."""
    return [
        owner
        for owner in (*trainer.callbacks, trainer.lightning_module)
        if any(
            is_overridden(hook, owner, kind)
            # What these hold is an average, which is attached.
            and getattr(type(owner), hook) is not getattr(WeightAveraging, hook)
            for kind in (lightning.Callback, lightning.LightningModule)
            if isinstance(owner, kind)
            for hook in ("on_save_checkpoint", "on_load_checkpoint")
        )
    ]


def _schedulers_of(trainer: Any) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


@contextmanager
def _undrawn(trainer: Any) -> Iterator[None]:
    """Leave random generators as they are, although a loader's first iteration is made and thrown away."""
    strategy, states = trainer.strategy, list[tuple[torch.Generator, torch.Tensor]]()
    original = strategy.process_dataloader

    def note(loader: Any) -> Any:
        """Keep the states of a loader's own generators; Lightning iterates over it only after that."""
        made = original(loader)
        sampler = getattr(made, "sampler", None)
        batches = getattr(made, "batch_sampler", None)
        for owner in (made, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                states.append((generator, generator.get_state()))
        return made

    strategy.process_dataloader = note
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        del strategy.process_dataloader
    for generator, state in states:
        generator.set_state(state)


class _Progress:
    """The state of Lightning's loops, callbacks and logged values: a stateful object.

    Attributes:
        found: What the run knew and is not restored yet; None if nothing.
    """

    def __init__(self, trainer: Any, checkpointer: lowdiff.Checkpointer) -> None:
        self.found: dict[str, Any] | None = None
        self._trainer, self._checkpointer = trainer, checkpointer
        results = trainer.fit_loop.epoch_loop._results
        results.__class__ = _Results
        results.waiting = {}
        self._results: _Results = results

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        if self.found is not None:
            return self.found
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # the loader's place, which it knows itself
        known = trainer._logger_connector
        return {
            "loops": loops,
            "callbacks": {
                callback.state_key: state
                for callback in trainer.callbacks
                if (state := callback.state_dict())
            },
            "datamodule": None if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "metrics": {
                kind: _on_cpu(getattr(known, f"_{kind}_metrics"))
                for kind in ("callback", "logged", "progress_bar")
            },
            "sums": self._results.sums(),
            "module_metrics": {
                name: _metric_state(metric) for name, metric in _metrics(trainer.lightning_module)
            },
            "should_stop": bool(trainer.should_stop) and not self._checkpointer.preempted,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until it can be restored."""
        self.found = state_dict

    def restore(self) -> bool:
        """Restore everything; whether the run is within an epoch."""
        found, trainer = self.found, self._trainer
        assert found is not None
        trainer.should_stop = found["should_stop"]
        for callback in trainer.callbacks:
            if callback.state_key in found["callbacks"]:
                callback.load_state_dict(copy.deepcopy(found["callbacks"][callback.state_key]))
        if trainer.datamodule is not None and found["datamodule"]:
            trainer.datamodule.load_state_dict(found["datamodule"])
        device = trainer.strategy.root_device
        for kind, values in found["metrics"].items():
            kept = getattr(trainer._logger_connector, f"_{kind}_metrics")
            kept.update({name: _to(value, device) for name, value in values.items()})
        for name, metric in _metrics(trainer.lightning_module):
            for key, value in found["module_metrics"].get(name, {}).items():
                setattr(metric, key, _to(value, device))
        return self._restore_loops(found)

    def _restore_loops(self, found: Mapping[str, Any]) -> bool:
        loop = self._trainer.fit_loop
        loop.load_state_dict(found["loops"])
        epochs = loop.epoch_progress.current
        is_within_epoch = bool(epochs.ready != epochs.processed)
        # A state lies between two batches, or two epochs; Lightning's checkpoints lie elsewhere, and it guesses where.
        for part in _loops(loop):
            part._restarting = is_within_epoch
        loop.epoch_loop.val_loop._restarting = (
            True  # else it would be tried out, which forgets metrics
        )
        loop._resuming_from_checkpoint = is_within_epoch
        if is_within_epoch:
            self._results.waiting = {key: dict(sums) for key, sums in found["sums"].items()}
            # The loader is resumed by lowdiff, which Lightning cannot know.
            warnings.filterwarnings("ignore", message=_RESTARTED)
        return is_within_epoch


class _Positioned:
    """A loader that knows its position, torchdata's say: between two epochs it has none but its generators'.

    Attributes:
        loaded: What it was given last, until an iteration begins with it.
    """

    def __init__(self, loader: Any, loop: Any) -> None:
        self._loader, self._loop = loader, loop
        self.loaded: dict[str, Any] | None = None

    def _generators(self) -> list[torch.Generator]:
        owners = (self._loader, getattr(self._loader, "sampler", None))
        found = (getattr(owner, "generator", None) for owner in owners)
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, and its generators'."""
        if self.loaded is not None:
            return self.loaded
        epochs = self._loop.epoch_progress.current
        is_between = epochs.ready == epochs.processed
        return {
            "loader": None if is_between else self._loader.state_dict(),
            "generators": [generator.get_state() for generator in self._generators()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set them."""
        self.loaded = state_dict
        for generator, state in zip(self._generators(), state_dict["generators"], strict=False):
            generator.set_state(state)
        if state_dict["loader"] is not None:
            self._loader.load_state_dict(state_dict["loader"])


class _Results(_ResultCollection):
    """Sums of values that a training logs in an epoch, some of which a run had before it was resumed.

    Attributes:
        waiting: Sums of values that were not logged since.
    """

    waiting: dict[str, dict[str, Any]]

    def __setitem__(self, key: str, metric: Any) -> None:
        for name, value in self.waiting.pop(key, {}).items():
            setattr(metric, name, value)
        super().__setitem__(key, metric)

    def sums(self) -> dict[str, dict[str, Any]]:
        """Return the sums by key."""
        found = {
            key: {
                name: _on_cpu(getattr(metric, name))
                for name in ("value", "cumulated_batch_size", "_update_count")
                if hasattr(metric, name)
            }
            for key, metric in self.items()
            if metric.is_tensor and not metric.has_reset
        }
        return {**self.waiting, **found}


def _loops(loop: Any) -> Iterator[Any]:
    """Yield a loop and those within it."""
    epochs = loop.epoch_loop
    yield loop
    yield from (epochs, epochs.val_loop, epochs.automatic_optimization, epochs.manual_optimization)


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    """Yield the torchmetrics of a module, by name."""
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            yield name, part


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Return what a metric has summed up, which is no part of its state dict."""
    names = [*metric._defaults, "_update_count"]
    return {name: _on_cpu(getattr(metric, name)) for name in names}


def _on_cpu(value: Any) -> Any:
    """Copy tensors in dicts and lists to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _on_cpu(part) for key, part in value.items()}
    return [_on_cpu(part) for part in value] if isinstance(value, list) else value


def _to(value: Any, device: torch.device) -> Any:
    """Move a tensor, or those of a list, to a device."""
    if isinstance(value, list):
        return [_to(part, device) for part in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _loader_of(loop: Any) -> Any:
    """Return the loader of a training; None if it has nothing to load.

    Raises:
        ConfigError: If there are several.
    """
    if loop._combined_loader is None:
        return None
    loaders = loop._combined_loader.flattened
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
        raise ConfigError(
            f"LowDiffCallback resumes one DataLoader, and this training has {len(loaders)}: "
            f"{', '.join(type(loader).__name__ for loader in loaders)}; draw from one dataset that returns a part of "
            "each, or let the loop be yours and use lowdiff.Checkpointer"
        )
    return loaders[0]


def _refuse(trainer: Any) -> None:
    """Check that a training can be resumed exactly.

    Raises:
        ConfigError: Saying what to change.
        UsageError: If the callback is there twice.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise ConfigError(
            f"LowDiffCallback works with strategy='auto' or 'ddp', not with {type(strategy).__name__}; sharded models "
            "train with lowdiff.Checkpointer in a loop of their own (docs/sharded.md)"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "reload_dataloaders_every_n_epochs makes new loaders while training runs, whose place LowDiffCallback "
            "would not know; leave it out, and let the dataset change with the sampler's epoch"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "StochasticWeightAveraging swaps the scheduler, the weights and the number of epochs while training "
                "runs; average with WeightAveraging, and give SWALR in configure_optimizers"
            )
        if isinstance(callback, WeightAveraging) and any(
            getattr(type(callback), hook) is not getattr(WeightAveraging, hook)
            for hook in ("on_save_checkpoint", "on_load_checkpoint")
        ):
            raise ConfigError(
                f"{type(callback).__name__} has other hooks for checkpoints than WeightAveraging, which put the average "
                "into the weights of a checkpoint; keep more state in its state_dict()"
            )
        if isinstance(callback, BaseFinetuning):
            raise ConfigError(
                f"{type(callback).__name__} thaws layers and adds groups to the optimizer while training runs, and a "
                "run records the parameters that train when fit begins. Give all of them to configure_optimizers, and "
                "freeze by the step's number, in on_train_batch_start: "
                "self.backbone.requires_grad_(self.global_step >= 1000). Or make each stage a fit of its own, in a run "
                "folder of its own, that begins with the weights of the one before (lowdiff.recover)"
            )
    if sum(isinstance(callback, LowDiffCallback) for callback in trainer.callbacks) > 1:
        raise UsageError("this Trainer has several LowDiffCallbacks; a run has one")


def _refuse_other_versions() -> None:
    """Check that this version has the parts that are wrapped.

    Raises:
        ConfigError: Naming what is missing.
    """
    missing = []
    for owner, parts in _PARTS.items():
        for name, parameters in parts.items():
            part = getattr(owner, name, None)
            known = () if part is None else inspect.signature(part).parameters
            if part is None or any(parameter not in known for parameter in parameters):
                missing.append(f"{owner.__name__}.{name}({', '.join(parameters)})")
    if missing:
        raise ConfigError(
            f"LowDiffCallback was tested with {_TESTED}; lightning {lightning.__version__} lacks {', '.join(missing)}. "
            "Install the tested version: pip install 'lowdiff[lightning]'"
        )
