"""The callback without kills: what it refuses, and the snippet of the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ParallelStrategy
from torch.utils.data import DataLoader

import lowdiff
from lowdiff.errors import ConfigError, UsageError
from lowdiff.integrations.lightning import LowDiffCallback
from tests.docs.blocks import ROOT, blocks_of

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


def callback_in(folder: Path) -> LowDiffCallback:
    return LowDiffCallback(folder / "run", staging=folder / "staging")


def trainer_of(*callbacks: Any, **arguments: Any) -> lightning.Trainer:
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(callbacks=list(callbacks), **(given | arguments))


def test_lightnings_own_model_trains_to_the_same_bits_with_and_without(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [callback_in(tmp_path)]):
        lightning.seed_everything(1, verbose=False)
        model = BoringModel()
        trainer_of(*callbacks).fit(model)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 3
    assert torch.equal(state.model_state_dict()["layer.weight"], weights[0]["layer.weight"])


def test_one_trainer_may_fit_again(tmp_path: Path) -> None:
    callback = callback_in(tmp_path)
    trainer = trainer_of(callback)
    trainer.fit(BoringModel())
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(BoringModel())
    assert trainer.global_step == 5
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 5


def test_after_an_error_the_run_is_closed_and_goes_on(tmp_path: Path) -> None:
    class Fails(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        trainer_of(callback_in(tmp_path)).fit(Fails())
    trainer = trainer_of(callback_in(tmp_path))
    trainer.fit(BoringModel())
    assert trainer.global_step == 3


class Several(BoringModel):
    """Several loaders."""

    def train_dataloader(self) -> Any:
        return {name: DataLoader(RandomDataset(32, 8)) for name in ("a", "b")}


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    callback = callback_in(tmp_path)
    with pytest.raises(ConfigError, match="resumes one DataLoader, and this training has 2"):
        trainer_of(callback).fit(Several())
    with pytest.raises(ConfigError, match="reload_dataloaders_every_n_epochs makes new loaders"):
        trainer_of(callback, reload_dataloaders_every_n_epochs=1).fit(BoringModel())
    with pytest.raises(UsageError, match="several LowDiffCallbacks"):
        trainer_of(callback, Second(tmp_path / "other")).fit(BoringModel())


class Second(LowDiffCallback):
    """Another class, which Lightning does not take for the same callback."""


def test_another_strategy_is_refused_by_name(tmp_path: Path) -> None:
    class OwnStrategy(ParallelStrategy):
        """Nothing."""

    callback = callback_in(tmp_path)
    trainer = trainer_of(callback)
    trainer.strategy.__class__ = type("OwnStrategy", (OwnStrategy,), {"__abstractmethods__": ()})
    with pytest.raises(ConfigError, match="'auto' or 'ddp', not with OwnStrategy"):
        callback.on_fit_start(trainer, BoringModel())


def test_a_version_that_lacks_a_part_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(_TrainingEpochLoop, "advance")
    with pytest.raises(
        ConfigError, match=r"tested with lightning 2.6.6.* lacks _TrainingEpochLoop"
    ):
        callback_in(tmp_path)


def test_the_snippet_of_the_documentation_trains_and_goes_on(tmp_path: Path) -> None:
    (block,) = (
        block
        for block in blocks_of("docs/integrations.md")
        if block.text.startswith("from lowdiff.integrations.lightning")
    )
    given = (
        "import lightning\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset\n"
        "from torch.utils.data import DataLoader\n"
        "model, loader = BoringModel(), DataLoader(RandomDataset(32, 64))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(given + block.text + "print(trainer.global_step)\n")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1] == "192"


class Everything(BoringModel):
    """A module with hyper-parameters, a data module's worth of state and a hook."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = 1


class Rows(lightning.LightningDataModule):
    """Data with a state."""

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 16))

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}


def test_all_that_lightnings_own_checkpoint_holds_is_known(tmp_path: Path) -> None:
    """A version that keeps something else there is noticed, so that a step is made to hold it too."""
    trainer = trainer_of(callback_in(tmp_path), limit_val_batches=0)
    trainer.fit(Everything(), datamodule=Rows())
    held_as = {
        "state_dict": "weights",
        "optimizer_states": "optimizers",
        "lr_schedulers": "scheduler0",
        **dict.fromkeys(("epoch", "global_step", "loops", "callbacks", "Rows"), "lightning"),
        "more": "checkpoint0 of Everything",
        **dict.fromkeys(("hparams_name", "hyper_parameters"), "the script's"),
        "pytorch-lightning_version": "the environment's",
    }
    assert trainer._checkpoint_connector.dump_checkpoint(False).keys() == held_as.keys()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    kept = {
        name for name in held_as.values() if name.startswith(("scheduler", "lightning", "check"))
    }
    assert kept <= set(state.stateful)
