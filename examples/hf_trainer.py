"""Hugging Face Trainer: a callback that attaches when training begins and commits every step.

python examples/hf_trainer.py runs/hf
torchrun --standalone --nproc-per-node=2 examples/hf_trainer.py runs/hf
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import lowdiff
from lowdiff.compressors import TopK


def inputs_of(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch for the model: the tokens are their own labels."""
    tokens = torch.stack([row[0] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


class CommitEachStep(TrainerCallback):
    """Commits every step of a Trainer, and resumes the Trainer."""

    def __init__(self, trainer: Trainer, checkpointer: lowdiff.Checkpointer) -> None:
        self.trainer = trainer
        self.checkpointer = checkpointer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Attach; model and optimizer are wrapped by now."""
        trainer = self.trainer
        state.global_step = self.checkpointer.attach(
            trainer.model_wrapped, trainer.optimizer, scheduler=trainer.lr_scheduler
        )
        trainer._globalstep_last_logged = state.global_step  # what it averages losses from
        control.should_training_stop = state.global_step >= state.max_steps
        print(f"starting at step {state.global_step}", flush=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Commit; optimizer and scheduler have stepped."""
        self.checkpointer.commit()
        control.should_training_stop |= self.checkpointer.preempted


class ResumingTrainer(Trainer):
    """A Trainer that reads from a loader with its own position."""

    def __init__(self, *, loader: Any, **options: Any) -> None:
        super().__init__(**options)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        """Return this object itself: the Trainer needs a length and batches."""
        return self

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the Trainer stops: of a resumed epoch, the loader may have fewer left."""
        while not self.control.should_training_stop:
            yield from self.loader


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the loss of every step that this process made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)
    options = TrainingArguments(
        output_dir=f"{args.run}-trainer", max_steps=args.steps, use_cpu=True, seed=0,
        lr_scheduler_type="constant_with_warmup", warmup_steps=10, learning_rate=1e-3,
        save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    rows = (torch.arange(16) + torch.arange(200).unsqueeze(1)) % 64  # they count upwards
    with lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.05), staging=args.staging
    ) as checkpointer:
        loader = checkpointer.dataloader(TensorDataset(rows), batch_size=8, collate_fn=inputs_of)
        trainer = ResumingTrainer(model=model, args=options, loader=loader)
        trainer.add_callback(CommitEachStep(trainer, checkpointer))
        trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


if __name__ == "__main__":
    main()
