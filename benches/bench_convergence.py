"""Does training under compression end where dense training ends, each at the learning rate that suits it?

    python -m benches.bench_convergence --out DIR [--smoke] [--seeds 5] [--steps 1200]

Two trainings on real data that ships with a package, each on two ranks, with every compressor and with
DDP's plain all-reduce, for the same number of steps from the same weights with the same batches:

- ``digits``: scikit-learn's 1,797 images of handwritten digits, a small convolutional network, SGD with
  momentum; 20 % are held out.
- ``text``: the source code of Python's standard library, byte by byte (`benches/corpus.py`), a small GPT,
  AdamW with clipping; files are held out.

An entry that waits for its turn arrives late and large, so a compressor's best rate is not dense training's. Each
is therefore tuned on the first seed: rates a factor of 2 apart, with more at the ends until the best lies between
others; each rises over the first 20th of the steps and then falls by a cosine. Those that have a warm-up of the
density are tuned without and with one of a quarter of the steps. With what was best, the other seeds follow.

Measured are the loss on what is held out after the last step, and the stored bytes per element of all ranks,
coded as the log codes them. A compressor is within target if its mean over the seeds is at most two standard
deviations of dense training's seeds above dense training's mean. Both ranks must end with the same bits. What has
ended is in ``convergence.jsonl``, at last in ``convergence.json``: a call with the same ``--out`` goes on behind it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benches import ending
from benches.corpus import batch_for_step, held_out_batch, load_corpus
from benches.gpt import GPT, GPTConfig
from benches.harness import BLUE, GREEN, INK, MUTED, Result, arguments, machine, write
from benches.hooked import Hooked, in_ranks
from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, TopK
from lowdiff.core.memory import byte_view
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import encode_sections
from lowdiff.protocols import Compressor

#: None is dense training.
ARMS: dict[str, Compressor | None] = {
    "dense": None,
    "topk 1 %": TopK(0.01),
    "topk 1 % 2 bits": TopK(0.01, value_bits=2),
    "topk 3 % 2 bits": TopK(0.03, value_bits=2),
    "topk 10 % 2 bits": TopK(0.1, value_bits=2),
    "cyclic topk 3 % 2 bits": CyclicTopK(0.03, value_bits=2),
    "powersgd 2": PowerSGD(2),
    "powersgd 4": PowerSGD(4),
    "powersgd 8": PowerSGD(8),
    "8 bits": Quantize(8),
    "4 bits": Quantize(4),
    "cast bfloat16": Cast(torch.bfloat16),
}
#: What the documentation recommends: each should be as good as dense training.
RECOMMENDED = ("powersgd 4", "8 bits", "cast bfloat16")
_DEVIATIONS = 2.0
_WORLD_SIZE = 2
#: Rates that are tried first, in units of a task's own, and how far they are extended at either end.
_RATES = (0.5, 1.0, 2.0)
_LOWEST, _HIGHEST = 1 / 16, 16.0
_RISES = 0.05
_WARMUP = 0.25
#: Payloads that are coded to count their bytes lie so many to a training, after every warm-up.
_COUNTED = 8


@dataclass(frozen=True)
class Task:
    """One training, the same under every compressor.

    Attributes:
        model: Makes it, from torch's generator.
        optimizer: Of its parameters, with a learning rate.
        rate: Its own learning rate.
        loss: Loss of the model on the batch of a seed, step and rank.
        held_out: Loss on what is held out.
        max_norm: Clips gradients; 0 for not.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    rate: float
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

    return Task(model, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 0.025, loss, test)


def text() -> Task:
    """Source code."""
    corpus = load_corpus()
    config = GPTConfig(context=64, layers=2, heads=4, width=64, dropout=0.0)
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
        lambda: GPT(config),
        lambda p, lr: torch.optim.AdamW(p, lr=lr),
        6e-3,
        loss,
        test,
        max_norm=1.0,
    )


TASKS = {"digits": digits, "text": text}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training of the comparison.

    Attributes:
        task: Key of ``TASKS``.
        arm: Key of ``ARMS``.
        steps: Optimizer steps.
        rate: Highest learning rate, in units of the task's own.
        warmup: Steps over which the compressor's density falls.
    """

    task: str
    arm: str
    seed: int
    steps: int
    rate: float
    warmup: int

    @property
    def compressor(self) -> Compressor | None:
        """The arm's compressor, with this training's warm-up if it has any."""
        chosen = ARMS[self.arm]
        return replace(chosen, warmup=self.warmup) if isinstance(chosen, TopK) else chosen


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a training.

    Attributes:
        loss: On what is held out; infinite where it is no number.
        stored: Bytes per element and step, of all ranks.
        digest: Of the parameters.
    """

    loss: float
    stored: float
    digest: str


def share_of_rate(number: int, steps: int) -> float:
    """Share of the highest learning rate at step ``number``, from 0: it rises, and falls by a cosine."""
    rising = max(1, int(_RISES * steps))
    return min((number + 1) / rising, 0.5 + 0.5 * math.cos(math.pi * number / steps))


def train(cell: Cell, task: Task, rank: int) -> Ended:
    """One training."""
    torch.manual_seed(cell.seed)
    model = task.model()
    compressor = cell.compressor
    hooked = None if compressor is None else Hooked(model, compressor)
    ddp = DistributedDataParallel(model) if hooked is None else hooked.ddp
    optimizer = task.optimizer(ddp.parameters(), task.rate * cell.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: share_of_rate(n, cell.steps))
    first = int(_WARMUP * cell.steps)
    counted = set(np.linspace(first + 1, cell.steps, _COUNTED).astype(int).tolist())
    codec, stored = Codec(), []
    for step in range(1, cell.steps + 1):
        optimizer.zero_grad()
        task.loss(ddp, cell.seed, step, rank).backward()
        if task.max_norm:
            nn.utils.clip_grad_norm_(ddp.parameters(), task.max_norm)
        if hooked is not None and step in counted:
            stored.append(len(encode_sections(hooked.payload().sections, codec)))
        optimizer.step()
        schedule.step()
        if hooked is not None:
            hooked.end_step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(byte_view(parameter.detach()))
    model.eval()
    with torch.no_grad():
        loss = float(task.held_out(model))
    of_ranks = torch.tensor([float(statistics.mean(stored or [0]))])
    dist.all_reduce(of_ranks)
    elements = sum(p.numel() for p in model.parameters())
    loss = loss if math.isfinite(loss) else math.inf
    return Ended(loss, float(of_ranks) / elements, digest.hexdigest())


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
                lines.write(json.dumps({"cell": asdict(cell), "ended": asdict(found[0])}) + "\n")


def read(ended: Path) -> dict[Cell, Ended]:
    """Trainings that have ended, in this call or in one before."""
    rows, result = [], ended.with_suffix(".json")
    if result.exists():  # a call for more seeds goes on behind it
        rows += json.loads(result.read_text(encoding="utf-8"))["samples"].get("trainings", [])
    if ended.exists():
        rows += map(json.loads, ended.read_text(encoding="utf-8").splitlines())
    return {Cell(**row["cell"]): Ended(**row["ended"]) for row in rows}


def best_of_rates(known: Mapping[Cell, Ended], first: Cell) -> Cell | list[Cell]:
    """The best rate of an arm on the first seed, or what must end before it is known.

    Args:
        known: What has ended.
        first: The arm's training with the first seed; its rate does not count.
    """
    tried = list(_RATES)
    while True:
        cells = [replace(first, rate=rate) for rate in tried]
        if missing := [cell for cell in cells if cell not in known]:
            return missing
        best = min(cells, key=lambda cell: known[cell].loss)
        if best.rate == min(tried) > _LOWEST:
            tried.append(best.rate / 2)
        elif best.rate == max(tried) < _HIGHEST:
            tried.append(best.rate * 2)
        else:
            return best


def tuned(known: Mapping[Cell, Ended], first: Cell) -> Cell | list[Cell]:
    """The best setting of an arm on the first seed, or what must end before it is known.

    Args:
        known: What has ended.
        first: The arm's training with the first seed; its rate and warm-up do not count.
    """
    warmups = (0, int(_WARMUP * first.steps)) if isinstance(first.compressor, TopK) else (0,)
    found = [best_of_rates(known, replace(first, warmup=steps)) for steps in warmups]
    if missing := [cell for one in found if isinstance(one, list) for cell in one]:
        return missing
    return min((one for one in found if isinstance(one, Cell)), key=lambda cell: known[cell].loss)


def chosen(
    known: Mapping[Cell, Ended], arms: Mapping[tuple[str, str], Cell], args: argparse.Namespace
) -> tuple[dict[tuple[str, str], Cell], list[Cell]]:
    """The best setting of every arm that has one, and the trainings that are to be done next."""
    settings, missing = {}, []
    for key, first in arms.items():
        best = first if args.smoke else tuned(known, first)
        if isinstance(best, Cell):
            settings[key] = best
            own = [replace(best, seed=args.seed + n) for n in range(args.seeds)]
            missing += [cell for cell in own if cell not in known]
        else:
            missing += best
    return settings, sorted(missing, key=lambda cell: cell.seed)


def key_of(arm: str) -> str:
    """An arm's name in the figures."""
    return arm.replace(" %", "").replace(" ", "_")


def compared(
    known: Mapping[Cell, Ended], settings: Mapping[tuple[str, str], Cell], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """Figures of every task and arm, and the losses of all seeds by task and arm."""
    found: dict[str, Any] = {}
    losses: dict[str, dict[str, list[float]]] = {task: {} for task in TASKS}
    for (task, arm), best in settings.items():
        ends = [known[replace(best, seed=args.seed + n)] for n in range(args.seeds)]
        losses[task][arm] = own = [end.loss for end in ends]
        name = f"{task}/{key_of(arm)}"
        found[f"{name}_loss"] = statistics.mean(own)
        found[f"{name}_rate"] = best.rate
        found[f"{name}_warmup"] = best.warmup
        found[f"{name}_stored"] = statistics.mean(end.stored for end in ends)
    for task, arms in losses.items():
        mean, dense = found[f"{task}/dense_loss"], arms["dense"]
        spread = statistics.stdev(dense) if len(dense) > 1 else 0.0
        found[f"{task}/dense_deviation"] = spread
        for arm in arms:
            excess = found[f"{task}/{key_of(arm)}_loss"] - mean
            found[f"{task}/{key_of(arm)}_deviations"] = (
                excess / spread if spread else float(excess > 0)
            )
    found["worst_deviation_at_tuned_rate"] = max(
        found[f"{task}/{key_of(arm)}_deviations"] for task in TASKS for arm in RECOMMENDED
    )
    found["targets_missed"] = [
        f"{task}: {arm}" for task in TASKS for arm in RECOMMENDED
        if found[f"{task}/{key_of(arm)}_deviations"] > _DEVIATIONS
    ]  # fmt: skip
    found["best_rate_at_an_edge"] = [
        f"{task}: {arm}" for (task, arm), best in settings.items()
        if best.rate in (_LOWEST, _HIGHEST)
    ]  # fmt: skip
    return found, losses


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
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args(argv)
    if args.smoke:
        args.seeds, args.steps = 1, 3
    before = machine()
    args.out.mkdir(parents=True, exist_ok=True)
    ended = args.out / "convergence.jsonl"
    arms = {
        (task, arm): Cell(task, arm, args.seed, args.steps, 1.0, 0)
        for task in TASKS
        for arm in ARMS
    }
    while (found := chosen(known := read(ended), arms, args))[1]:
        in_ranks(_WORLD_SIZE, job, found[1], ended)
    figures, losses = compared(known, found[0], args)
    settings = {
        "seeds": args.seeds,
        "steps": args.steps,
        "rates": list(_RATES),
        "smoke": args.smoke,
    }
    samples = {
        "losses": losses,
        "trainings": [{"cell": asdict(c), "ended": asdict(e)} for c, e in known.items()],
    }
    summary = {"bit_identical": True, **figures}
    write(Result("convergence", settings, args.seed, before, samples, summary), args.out, draw)
    ended.unlink(missing_ok=True)


if __name__ == "__main__":
    ending.run(main)
