"""Real text that every machine has: the interpreter's own standard-library sources.

Tokens are bytes. Whole files are held out, so that the held-out loss is measured on text the
model has not seen. A batch is a pure function of seed, step and rank: the data position *is*
the step, and a resumed run needs nothing else to go on with the right batch.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lowdiff.errors import ConfigError

#: Number of different tokens: one per byte value.
VOCABULARY = 256

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
_HELD_OUT_OF_256 = 26  # about one file in ten


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The text as byte tokens, uint8, one dimension each.

    Attributes:
        train: The training files, one after the other.
        held_out: The files kept for evaluation.
    """

    train: torch.Tensor
    held_out: torch.Tensor


def standard_library() -> Path:
    """Folder of the interpreter's standard-library sources."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name, with forward slashes, is kept for evaluation."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_OF_256


def source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Relative name and path of every ``.py`` file under ``root``, in the same order anywhere.

    Installed packages and test folders are left out.
    """
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path


def load_corpus(root: Path | None = None, *, max_bytes: int = 4_000_000) -> Corpus:
    """Read the sources and split them by file.

    Args:
        root: Folder to read; the standard library by default.
        max_bytes: Stop before the file that would exceed this total.

    Raises:
        ConfigError: The folder holds too little source text to train on.
    """
    root = standard_library() if root is None else root
    train, held_out, total = bytearray(), bytearray(), 0
    for name, path in source_files(root):
        text = path.read_bytes()
        total += len(text)
        if total > max_bytes:
            break
        part = held_out if is_held_out(name) else train
        part += text
    if min(len(train), len(held_out)) < 10_000:
        raise ConfigError(
            f"{root} holds {len(train):,} bytes of training and {len(held_out):,} bytes of "
            "held-out source text, too little to train on; use a Python whose standard library "
            "is installed as .py files"
        )
    return Corpus(
        torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)
    )


def batch_for_step(
    tokens: torch.Tensor,
    *,
    step: int,
    rank: int,
    world_size: int,
    seed: int,
    batch_size: int,
    context: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one rank for one step.

    The ranks share one draw of ``world_size * batch_size`` windows and take disjoint rows of
    it. The draw has its own generator: the global ones are not touched.

    Returns:
        Inputs and next-token targets, each of shape ``[batch_size, context]``, int64, on the CPU.
    """
    # Not torch's CPU generator: it takes 32 bits of seed, too few for a seed and a step.
    generator = np.random.default_rng((seed, step))
    last_start = len(tokens) - context - 1
    starts = generator.integers(last_start, size=(world_size, batch_size), endpoint=True)
    return _windows(tokens, torch.from_numpy(starts[rank]), context)


def held_out_batch(
    tokens: torch.Tensor, *, batch_size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evenly spaced windows, always the same, shaped as in ``batch_for_step``."""
    starts = torch.linspace(0, len(tokens) - context - 1, batch_size).long()
    return _windows(tokens, starts, context)


def _windows(
    tokens: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    windows = tokens.unfold(0, context + 1, 1)[starts].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
