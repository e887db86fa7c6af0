"""Hugging Face Trainer: one callback commits every step, and resumes the Trainer.

python examples/hf_trainer.py runs/hf
torchrun --standalone --nproc-per-node=2 examples/hf_trainer.py runs/hf
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lowdiff.compressors import TopK
from lowdiff.integrations.transformers import LowDiffCallback


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the loss of every step of the run."""
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
    rows = (torch.arange(16) + torch.arange(200).unsqueeze(1)) % 64  # they count upwards
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=options,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[LowDiffCallback(args.run, compressor=TopK(density=0.05), staging=args.staging)],
    )
    trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


if __name__ == "__main__":
    main()
