"""A user's script with a Trainer: a tiny GPT2 on synthetic text, which may kill itself anywhere.

Nothing in it knows of lowdiff but the one callback.
"""

# ruff: noqa: C408 - arguments are written as a call writes them

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from lowdiff.compressors import TopK
from lowdiff.integrations.transformers import LowDiffCallback
from tests.integrations.kills import Kill, leave

NUM_ROWS, LENGTH, WORDS = 52, 12, 32


@dataclass(frozen=True)
class Kind:
    """What a script trains, beside the model.

    Attributes:
        arguments: Of ``TrainingArguments``.
        settings: Of ``LowDiffCallback``.
        draws: Whether the collator masks tokens at random, as for masked language models.
        patience: Of early stopping; None without it.
        adapter: Whether only a low-rank adapter of peft is trained.
        more: Makes further callbacks, of the model.
    """

    arguments: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=lambda: {"compressor": TopK(density=0.1)})
    draws: bool = True
    patience: int | None = None
    adapter: bool = False
    more: Callable[[Any], list[Any]] = lambda model: []


class Ema(TrainerCallback):
    """An average of the weights, as the Trainer has none."""

    def __init__(self, model: Any) -> None:
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        """Update it."""
        self.average.update_parameters(model)

    def kept(self) -> Any:
        """What is compared."""
        return self.average.state_dict()


class ByNumber(TrainerCallback):
    """Thaws the first layer at the tenth step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Freeze or thaw it."""
        model.transformer.h[0].requires_grad_(state.global_step >= 9)


class LateEma(TrainerCallback):
    """An average that is made when training begins, and a state that is there from then on."""

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        """Make it."""
        self.average = AveragedModel(model)

    def state_dict(self) -> Any:
        """Return the average's."""
        return self.average.state_dict()


KINDS = {
    # 13 batches in an epoch: ends in the second.
    "steps": Kind(
        dict(
            max_steps=20, eval_strategy="steps", eval_steps=4, logging_steps=3, save_strategy="steps", save_steps=7,
            label_smoothing_factor=0.1, eval_on_start=True,
        )
    ),
    # 5 steps in an epoch, of which the last has one batch.
    "epochs": Kind(
        dict(
            num_train_epochs=3, gradient_accumulation_steps=3, eval_strategy="epoch", save_strategy="epoch",
            logging_steps=2, load_best_model_at_end=True, metric_for_best_model="loss", lr_scheduler_type="cosine",
        ),
        patience=5,
    ),
    "stops early": Kind(
        dict(
            num_train_epochs=20, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
            load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=0.3, save_total_limit=2,
            logging_steps=5,
        ),
        patience=2,
    ),
    "bf16 by length": Kind(
        dict(
            max_steps=18, bf16=True, train_sampling_strategy="group_by_length", logging_strategy="epoch",
            eval_strategy="epoch", save_strategy="best", metric_for_best_model="loss",
        )
    ),
    "workers": Kind(
        dict(
            max_steps=18, dataloader_num_workers=2, dataloader_persistent_workers=True, logging_steps=1,
            eval_strategy="steps", eval_steps=5,
        )
    ),
    "forked anew": Kind(dict(max_steps=18, dataloader_num_workers=1, logging_steps=1)),
    "replica": Kind(dict(max_steps=18, logging_steps=4), settings={}),
    "adapter": Kind(dict(max_steps=18, logging_steps=4, learning_rate=1e-2), adapter=True),
    "average": Kind(dict(max_steps=18, logging_steps=4), more=lambda model: [Ema(model)]),
    "thaws by number": Kind(dict(max_steps=18, logging_steps=4), more=lambda _: [ByNumber()]),
    "compiled": Kind(
        dict(max_steps=18, logging_steps=4, torch_compile=True, torch_compile_backend="eager")
    ),
    "late average": Kind(dict(max_steps=18), more=lambda _: [LateEma()]),
    "two": Kind(
        dict(
            max_steps=10, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, logging_steps=2,
            save_strategy="steps", save_steps=4,
        )
    ),
}  # fmt: skip


class Text(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens of different lengths, which count upwards; counts what is loaded."""

    def __init__(self, count: int, start: int) -> None:
        self.rows = [(torch.arange(LENGTH - i % 3) + start + i * i) % WORDS for i in range(count)]
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded.append(index)
        return {"input_ids": self.rows[index]}


class Killer(TrainerCallback):
    """Sends this process a signal when something happens for the n-th time."""

    def __init__(self, kill: str) -> None:
        self.happens = Kill(kill).happens

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: self.happens(name)
        return super().__getattribute__(name)


class Counter(TrainerCallback, ExportableState):
    """A callback of the user's with a state, and random numbers of its own."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.steps, self.drawn = start, 0, 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count."""
        self.steps += 1

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Draw, as what generates samples of text does."""
        self.drawn = self.drawn / 2 + random.random()

    def state(self) -> dict[str, Any]:
        """See ExportableState."""
        return {
            "args": {"start": self.start},
            "attributes": {"steps": self.steps, "drawn": self.drawn},
        }


def collator(
    kind: Kind, happens: Callable[[str], None]
) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    """What makes a batch of rows."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        happens("collate")
        tokens = torch.zeros(len(rows), LENGTH, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for i, row in enumerate(rows):
            words = row["input_ids"]
            tokens[i, : len(words)] = labels[i, : len(words)] = words
        if kind.draws:
            tokens[torch.rand(tokens.shape) < 0.1] = random.randrange(WORDS)
            tokens[:, int(np.random.randint(LENGTH))] = 0
        return {"input_ids": tokens, "labels": labels}

    return collate


def tiny_model() -> Any:
    """A GPT2 of a few thousand parameters, with dropout."""
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def warm_up() -> None:
    """Save a model once."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)


def main(name: str, folder: str, more: str = "{}", kill: str = "") -> None:
    """Train or resume, and write what is compared to ``FOLDER/result-RANK.pt``.

    Args:
        name: Of the kind.
        folder: Of run, staging and output.
        more: Further arguments of ``TrainingArguments`` as JSON; ``resume`` is that of ``train``, and ``lowdiff`` says
            whether the run is kept ``"as is"``, without a compressor, or ``"not"`` at all.
        kill: Where the last rank dies: ``PLACE:COUNT``, or ``PLACE:COUNT:SIGNAL`` for another signal than ``SIGKILL``.
    """
    kind, given = KINDS[name], json.loads(more)
    killer = Killer(kill)
    resume, kept = given.pop("resume", None), given.pop("lowdiff", "")
    save = torch.save

    def save_or_die(*args: Any, **options: Any) -> None:
        killer.happens("torch.save")
        save(*args, **options)

    torch.save = save_or_die
    options: dict[str, Any] = dict(
        output_dir=f"{folder}/output", per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=True, seed=3,
        save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, warmup_steps=4,
    )  # fmt: skip
    args = TrainingArguments(**(options | kind.arguments | given))
    torch.manual_seed(0)
    model = tiny_model()
    if kind.adapter:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    rows = Text(NUM_ROWS, 0)
    counter = Counter()
    settings = {} if kept == "as is" else kind.settings
    callback = LowDiffCallback(f"{folder}/run", staging=f"{folder}/staging", **settings)
    further = kind.more(model)
    callbacks: list[Any] = [counter, killer, *([] if kept == "not" else [callback]), *further]
    if kind.patience is not None:
        callbacks.append(EarlyStoppingCallback(kind.patience))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=Text(9, 5),
        data_collator=collator(kind, killer.happens),
        callbacks=callbacks,
    )
    output = trainer.train(resume_from_checkpoint=resume)
    torch.save = save
    result = {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.optimizer.state_dict(),
        "rates": trainer.lr_scheduler.state_dict()["_last_lr"],
        "history": [timeless(entry) for entry in trainer.state.log_history],
        "state": {
            key: getattr(trainer.state, key)
            for key in (
                "epoch",
                "global_step",
                "total_flos",
                "best_metric",
                "best_global_step",
                "best_model_checkpoint",
            )
        },
        "metrics": timeless(output.metrics),
        "loss": output.training_loss,
        "callbacks": [
            counter.state(),
            *(
                c.early_stopping_patience_counter
                for c in callbacks
                if isinstance(c, EarlyStoppingCallback)
            ),
        ],
        "kept": [made.kept() for made in further if hasattr(made, "kept")],
        "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "evaluation": timeless(trainer.evaluate()),
        "loaded": rows.loaded,
    }
    leave(result, folder)


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    """Metrics without those that tell how long something took."""
    return {
        key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))
    }
