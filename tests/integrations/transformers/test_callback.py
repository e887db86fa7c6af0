"""The callback without kills: what it refuses, what it exports, and the snippet of the documentation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, RunMismatch, UsageError
from lowdiff.integrations.trainer_state import LogHistory
from lowdiff.integrations.transformers import LowDiffCallback
from tests.docs.blocks import ROOT, blocks_of
from tests.integrations.transformers.training import WORDS, tiny_model

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


def rows(count: int = 12) -> list[dict[str, torch.Tensor]]:
    tokens = (torch.arange(8) + torch.arange(count).unsqueeze(1)) % WORDS
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {
        "output_dir": str(folder / "output"),
        "use_cpu": True,
        "max_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**(given | more))


def callback_in(folder: Path) -> LowDiffCallback:
    return LowDiffCallback(folder / "run", compressor=TopK(density=0.1), staging=folder / "staging")


def trained(folder: Path, callback: LowDiffCallback, **more: Any) -> Trainer:
    given: dict[str, Any] = {
        "model": tiny_model(),
        "args": arguments(folder),
        "train_dataset": rows(),
        "callbacks": [callback],
    }
    trainer = Trainer(**(given | more))
    trainer.train()
    return trainer


def test_a_step_is_exported_as_a_folder_that_from_pretrained_takes(tmp_path: Path) -> None:
    callback = callback_in(tmp_path)
    trainer = trained(tmp_path, callback)
    assert trainer.state.global_step == 4
    folder = callback.export_model(4)
    assert folder == tmp_path / "output" / "lowdiff-4"
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    before = GPT2LMHeadModel.from_pretrained(callback.export_model(2, tmp_path / "second"))
    second = lowdiff.recover(tmp_path / "run", 2, staging=tmp_path / "staging").model_state_dict()
    assert torch.equal(before.state_dict()["lm_head.weight"], second["lm_head.weight"])
    assert not torch.equal(before.lm_head.weight, loaded.lm_head.weight)


def test_a_step_is_exported_without_a_trainer(tmp_path: Path) -> None:
    trained(tmp_path, callback_in(tmp_path))
    callback = callback_in(tmp_path)
    with pytest.raises(UsageError, match="or folder= and model="):
        callback.export_model()
    folder = callback.export_model(folder=tmp_path / "third", model=tiny_model())
    assert (folder / "config.json").exists()


def test_the_trainer_keeps_its_class_and_the_overrides_of_the_user(tmp_path: Path) -> None:
    class OwnTrainer(Trainer):
        asked = 0

        def get_batch_samples(self, *args: Any, **options: Any) -> Any:
            self.asked += 1
            return super().get_batch_samples(*args, **options)

    trainer = OwnTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=rows(),
        callbacks=[callback_in(tmp_path)],
    )
    trainer.train()
    assert isinstance(trainer, OwnTrainer)
    assert type(trainer).__name__ == "OwnTrainer"
    assert trainer.asked == 4


def test_a_trainer_that_lacks_a_part_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(
        ConfigError, match=r"tested with transformers 5.24.0.* lacks _run_epoch\(epoch, "
    ):
        Trainer(model=tiny_model(), args=arguments(tmp_path), callbacks=[callback_in(tmp_path)])


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.delitem(sys.modules, "lowdiff.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'lowdiff\[transformers\]'"):
        importlib.import_module("lowdiff.integrations.transformers")


def test_a_callback_that_is_added_later_is_an_error(tmp_path: Path) -> None:
    trainer = Trainer(model=tiny_model(), args=arguments(tmp_path), train_dataset=rows())
    trainer.add_callback(callback_in(tmp_path))
    with pytest.raises(UsageError, match="pass it to the Trainer"):
        trainer.train()


def test_one_callback_serves_one_trainer(tmp_path: Path) -> None:
    callback = callback_in(tmp_path)
    trained(tmp_path, callback)
    with pytest.raises(UsageError, match="make one for each"):
        Trainer(model=tiny_model(), args=arguments(tmp_path), callbacks=[callback])


def test_a_setting_that_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strategy is one of"):
        LowDiffCallback(tmp_path / "run", strategy="often")


class Stream(IterableDataset[Any]):
    """Rows without a place."""

    def __iter__(self) -> Any:
        return iter(rows())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"train_dataset": Stream()}, "an IterableDataset does not reveal its place"),
        ({"args": {"dataloader_in_order": False}}, "dataloader_in_order=False"),
        ({"args": {"accelerator_config": {"dispatch_batches": True}}}, "dispatch_batches=True"),
    ],
)
def test_a_loader_that_cannot_be_resumed_is_refused(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    if "args" in more:
        more = {**more, "args": arguments(tmp_path, **more["args"])}
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path, callback_in(tmp_path), **more)


def test_a_run_of_another_loop_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with lowdiff.Checkpointer(
        tmp_path / "run", compressor=TopK(density=0.1), staging=tmp_path / "staging"
    ) as checkpointer:
        checkpointer.attach(model, optimizer)
        for _ in checkpointer.steps(until=2):
            model(**{name: value[None] for name, value in rows(1)[0].items()}).loss.backward()
            optimizer.step()
    with pytest.raises(RunMismatch):
        trained(tmp_path, callback_in(tmp_path))


def test_an_error_in_a_step_leaves_the_run_to_the_next_training(tmp_path: Path) -> None:
    class Failing(Trainer):
        def training_step(self, *args: Any, **options: Any) -> Any:
            if self.state.global_step == 2:
                raise RuntimeError("broken")
            return super().training_step(*args, **options)

    failing = Failing(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset=rows(),
        callbacks=[callback_in(tmp_path)],
    )
    with pytest.raises(RuntimeError, match="broken"):
        failing.train()
    trainer = trained(tmp_path, callback_in(tmp_path))
    assert trainer.state.global_step == 4
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 4


def test_a_long_history_comes_back_whole() -> None:
    class Owner:
        class state:
            log_history: list[dict[str, Any]] = []  # noqa: RUF012

    entries = [{"loss": i / 7, "step": i, "none": float("nan")} for i in range(2000)]
    history = LogHistory(Owner)
    for until in (0, 3, 900, 2000):
        Owner.state.log_history = entries[:until]
        state = history.state_dict()
    assert len(state["full"]) > 5
    assert all(chunk.nbytes >= 4096 for chunk in state["full"])
    again = LogHistory(Owner)
    again.load_state_dict(state)
    again.restore()
    assert json.dumps(Owner.state.log_history) == json.dumps(entries)


@pytest.mark.launch
def test_the_snippet_of_the_documentation_runs(tmp_path: Path) -> None:
    block = next(b for b in blocks_of("docs/integrations.md") if b.language == "python")
    given = (
        "from transformers import Trainer, TrainingArguments\n"
        "from tests.integrations.transformers.test_callback import *\n"
        f"from pathlib import Path\nmodel, dataset, args = tiny_model(), rows(), arguments(Path({str(tmp_path)!r}))\n"
    )
    check = "assert trainer.state.global_step == 4\n"
    command = [sys.executable, "-c", given + block.text + check]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "runs" / "x" / "run.json").exists()


def test_all_that_the_trainers_own_checkpoint_holds_is_known(tmp_path: Path) -> None:
    """A version that keeps something else there is noticed, so that a step is made to hold it too."""
    callback = callback_in(tmp_path)
    args = arguments(tmp_path, save_strategy="steps", save_steps=4)
    trainer = trained(tmp_path, callback, args=args)
    folder = tmp_path / "output" / "checkpoint-4"
    held_as = {
        "model.safetensors": "weights",
        "optimizer.pt": "optimizers",
        "scheduler.pt": "scheduler",
        "rng_state.pth": "generators",
        "trainer_state.json": "the state of the Trainer",
        **dict.fromkeys(
            ("config.json", "generation_config.json", "training_args.bin"), "the script's"
        ),
    }
    assert {path.name for path in folder.iterdir()} == held_as.keys()
    held = json.loads((folder / "trainer_state.json").read_text())
    assert set(held) == set(vars(trainer.state)), "what is saved is what the state has"
