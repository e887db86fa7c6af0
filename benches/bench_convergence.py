"""Does training under compression end where dense training ends?

    python -m benches.bench_convergence --out DIR [--smoke] [--seeds 5]

Two trainings on real data that ships with a package, each on two ranks, with every compressor and with
DDP's plain all-reduce, for the same number of steps from the same weights with the same batches:

- ``digits``: scikit-learn's 1,797 images of handwritten digits, a small convolutional network, SGD with
  momentum; 20 % are held out.
- ``text``: the source code of Python's standard library, byte by byte (`benches/corpus.py`), a small GPT,
  AdamW with clipping; files are held out.

Measured is the loss on what is held out after the last step. A compressor is within target if its mean
over the seeds is at most two standard deviations of dense training's seeds above dense training's mean.
Both ranks must end with the same bits. Until all have ended, those that have are in ``convergence.jsonl``:
a call with the same ``--out`` goes on behind them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benches.corpus import batch_for_step, held_out_batch, load_corpus
from benches.gpt import GPT, GPTConfig
from benches.harness import BLUE, GREEN, INK, MUTED, Result, arguments, machine, write
from benches.hooked import Hooked, in_ranks
from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.core.layout import byte_view
from lowdiff.protocols import Compressor

#: None is dense training.
ARMS: dict[str, Compressor | None] = {
    "dense": None,
    "topk 1 %": TopK(0.01),
    "topk 1 % bfloat16": TopK(0.01, value_dtype=torch.bfloat16),
    "topk 1 % warm-up": TopK(0.01, warmup=100),
    "topk 3 % 2 bits": TopK(0.03, value_bits=2),
    "cyclic topk 1 %": CyclicTopK(0.01),
    "randomk 1 %": RandomK(0.01),
    "powersgd 4": PowerSGD(4),
    "8 bits": Quantize(8),
    "4 bits": Quantize(4),
    "cast bfloat16": Cast(torch.bfloat16),
}
#: Those that should be as good as dense training.
TARGETED = ("topk 1 %", "cyclic topk 1 %", "powersgd 4", "8 bits", "cast bfloat16")
_DEVIATIONS = 2.0
_WORLD_SIZE = 2


@dataclass(frozen=True)
class Task:
    """One training, the same under every compressor.

    Attributes:
        model: Makes it, from torch's generator.
        optimizer: Of its parameters.
        loss: Loss of the model on the batch of a seed, step and rank.
        held_out: Loss on what is held out.
        max_norm: Clips gradients; 0 for not.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[nn.Module, int, int, int], torch.Tensor]
    held_out: Callable[[nn.Module], torch.Tensor]
    max_norm: float = 0.0


def digits() -> Task:
    """Handwritten digits."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(data.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    train, held_out = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> torch.Tensor:
        drawn = np.random.default_rng((seed, step)).choice(len(train), (_WORLD_SIZE, 16), False)
        chosen = train[torch.from_numpy(drawn[rank])]
        return nn.functional.cross_entropy(model(images[chosen]), targets[chosen])

    def test(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images[held_out]), targets[held_out])

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    return Task(model, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), loss, test)


def text() -> Task:
    """Source code."""
    corpus = load_corpus()
    config = GPTConfig(context=64, layers=2, heads=4, width=96, dropout=0.0)
    inputs, targets = held_out_batch(corpus.held_out, batch_size=64, context=config.context)

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> torch.Tensor:
        batch = batch_for_step(
            corpus.train, step=step, rank=rank, world_size=_WORLD_SIZE, seed=seed,
            batch_size=8, context=config.context,
        )  # fmt: skip
        found: torch.Tensor = model(*batch)
        return found

    def test(model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = model(inputs, targets)
        return found

    return Task(
        lambda: GPT(config), lambda p: torch.optim.AdamW(p, lr=3e-3), loss, test, max_norm=1.0
    )


TASKS = {"digits": digits, "text": text}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training of the comparison.

    Attributes:
        task: Key of ``TASKS``.
        arm: Key of ``ARMS``.
        steps: Optimizer steps.
    """

    task: str
    arm: str
    seed: int
    steps: int


def train(cell: Cell, task: Task, rank: int) -> tuple[float, str]:
    """One training: held-out loss, and a digest of the parameters."""
    torch.manual_seed(cell.seed)
    model = task.model()
    compressor = ARMS[cell.arm]
    hooked = None if compressor is None else Hooked(model, compressor)
    ddp = DistributedDataParallel(model) if hooked is None else hooked.ddp
    optimizer = task.optimizer(ddp.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cell.steps)
    for step in range(1, cell.steps + 1):
        optimizer.zero_grad()
        task.loss(ddp, cell.seed, step, rank).backward()
        if task.max_norm:
            nn.utils.clip_grad_norm_(ddp.parameters(), task.max_norm)
        optimizer.step()
        schedule.step()
        if hooked is not None:
            hooked.end_step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(byte_view(parameter.detach()))
    model.eval()
    with torch.no_grad():
        return float(task.held_out(model)), digest.hexdigest()


def job(rank: int, world_size: int, cells: Sequence[Cell], ended: Path) -> None:
    """Trainings on one of the ranks; rank 0 adds a line to the file for each."""
    assert world_size == _WORLD_SIZE
    tasks = {name: make() for name, make in TASKS.items()}
    for cell in cells:
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, train(cell, tasks[cell.task], rank))
        assert len(set(found)) == 1, f"the ranks ended with different weights: {cell}, {found}"
        if rank == 0:
            with ended.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(cell) | {"loss": found[0][0]}) + "\n")


def read(ended: Path) -> Iterator[tuple[Cell, float]]:
    """Trainings that have ended, and their losses."""
    if ended.exists():
        for line in ended.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            loss = row.pop("loss")
            yield Cell(**row), loss


def compared(losses: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Figures of every task and arm, and which targets are met."""
    found: dict[str, Any] = {}
    for task, arms in losses.items():
        mean = statistics.mean(arms["dense"])
        spread = statistics.stdev(arms["dense"]) if len(arms["dense"]) > 1 else 0.0
        found[f"{task}/dense_loss"] = mean
        found[f"{task}/dense_deviation"] = spread
        for arm, own in arms.items():
            if arm != "dense":
                key = arm.replace(" %", "").replace(" ", "_")
                found[f"{task}/{key}_loss"] = statistics.mean(own)
                excess = statistics.mean(own) - mean
                found[f"{task}/{key}_deviations"] = excess / spread if spread else float(excess > 0)
        met = [a for a in TARGETED if statistics.mean(arms[a]) <= mean + _DEVIATIONS * spread]
        found[f"{task}/targets_met"] = met
        found[f"{task}/targets_missed"] = [a for a in TARGETED if a not in met]
    return found


def draw(axes: Axes, result: Result) -> None:
    """Every seed's excess over dense training, in standard deviations of its seeds."""
    colors = {"digits": BLUE, "text": GREEN}
    losses = result.samples["losses"]
    for number, (task, arms) in enumerate(losses.items()):
        mean = statistics.mean(arms["dense"])
        for place, (arm, own) in enumerate(arms.items()):
            excess = [loss / mean - 1 for loss in own]
            at = [place + 0.2 * (number - 0.5)] * len(own)
            label = f"{task}: {mean:.3f} when dense" if arm == "dense" else None
            axes.plot(at, [100 * e for e in excess], "o", ms=4, alpha=0.7, color=colors[task],
                      label=label)  # fmt: skip
            axes.plot(at[0], 100 * statistics.mean(excess), "_", ms=14, color=INK)
        spread = 100 * _DEVIATIONS * result.summary[f"{task}/dense_deviation"] / mean
        axes.axhline(spread, color=colors[task], lw=0.8, ls=":")
    axes.axhline(0, color=MUTED, lw=0.8)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_xticks(range(len(ARMS)), list(ARMS), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("held-out loss over dense, %")
    axes.set_title("dots: seeds; bars: means; dotted: 2 deviations of dense", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--digits-steps", type=int, default=600)
    parser.add_argument("--text-steps", type=int, default=600)
    args = parser.parse_args(argv)
    args.steps = {"digits": args.digits_steps, "text": args.text_steps}
    if args.smoke:
        args.seeds, args.steps = 1, {"digits": 3, "text": 2}
    before = machine()
    seeds = range(args.seed, args.seed + args.seeds)
    cells = [
        Cell(task, arm, seed, args.steps[task]) for seed in seeds for task in TASKS for arm in ARMS
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    ended = args.out / "convergence.jsonl"
    known = dict(read(ended))
    in_ranks(_WORLD_SIZE, job, [cell for cell in cells if cell not in known], ended)
    known = dict(read(ended))
    losses = {
        task: {
            arm: [known[Cell(task, arm, seed, args.steps[task])] for seed in seeds] for arm in ARMS
        }
        for task in TASKS
    }
    summary = {"bit_identical": True, **compared(losses)}
    settings = {"seeds": args.seeds, "steps": args.steps, "smoke": args.smoke}
    result = Result("convergence", settings, args.seed, before, {"losses": losses}, summary)
    write(result, args.out, draw)
    ended.unlink()


if __name__ == "__main__":
    main()
