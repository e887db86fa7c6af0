"""An experiment: a mask that all ranks share without sending it, chosen from the optimizer's own state.

    python -m benches.shared_mask --out DIR [--smoke] [--seeds 1]

A sparse compressor spends most of its bytes on positions. All ranks hold the same optimizer state, so all of them can
choose the next step's positions from it, and neither send nor store any (after SCAPE, arXiv 2607.01678: a mask chosen
one step ahead from the optimizer's moments). What is not chosen waits in each rank's residual, as with top-k. Scores,
by Adam's moments m and v:

- ``first``: the magnitude of m, the entries that move now;
- ``second``: sqrt(v), those that moved lately;
- ``waiting``: sqrt(v) times the root of the steps for which an entry has waited, about the size of its residual.

Trained is the text of `bench_convergence`, with its rates and steps. Values travel in two bits; stored bytes are
those of the codes of both ranks; 18 % of the entries take about as many as `TopK(0.03, value_bits=2)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zstandard
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from benches import ending
from benches.bench_convergence import share_of_rate, text
from benches.harness import arguments
from benches.hooked import in_ranks
from lowdiff.compressors.binned import binned, packed, restored

_BITS = 2
#: Smaller parameters are averaged whole, as by the sparse compressors.
_DENSE_BELOW = 1024

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SCORES: dict[str, Score] = {
    "first": lambda m, v, age: m.abs(),
    "second": lambda m, v, age: v.sqrt(),
    "waiting": lambda m, v, age: v.sqrt() * age.sqrt(),
}


class SharedMask:
    """The hook, and what it keeps of every parameter: residual, positions, steps since they were sent."""

    def __init__(self, optimizer: torch.optim.Optimizer, density: float, score: str) -> None:
        self._optimizer, self._density, self._score = optimizer, density, SCORES[score]
        self._residual: dict[torch.Tensor, torch.Tensor] = {}
        self._age: dict[torch.Tensor, torch.Tensor] = {}
        self.stored_bytes = 0

    def hook(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average what the mask shows of a bucket, and the small parameters."""
        world_size = dist.get_world_size()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            flat = gradient.view(-1)
            if parameter.numel() < _DENSE_BELOW:
                dist.all_reduce(flat.div_(world_size))
                continue
            total = flat + self._residual.get(parameter, torch.zeros_like(flat))
            chosen = self._positions(parameter)
            codes, means = binned(total[chosen], _BITS)
            sent = restored(codes, means.to(flat.dtype))
            self.stored_bytes += len(zstandard.compress(packed(codes, _BITS).numpy().tobytes()))
            self._residual[parameter] = total.index_add(0, chosen, sent, alpha=-1)
            dist.all_reduce(sent.div_(world_size))
            flat.zero_().index_copy_(0, chosen, sent)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def _positions(self, parameter: torch.Tensor) -> torch.Tensor:
        age = self._age.setdefault(parameter, torch.zeros(parameter.numel())).add_(1)
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        count = math.ceil(self._density * parameter.numel())
        if not state:  # nothing is known before the first step
            return torch.arange(count)
        score = self._score(state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), age)
        chosen = torch.topk(score, count, sorted=False).indices
        age[chosen] = 0
        return chosen


def train(
    rank: int, seed: int, steps: int, rate: float, density: float, score: str
) -> dict[str, float]:
    """One training; held-out loss, and stored bytes per element and step of both ranks."""
    task = text()
    torch.manual_seed(seed)
    model = task.model()
    ddp = DistributedDataParallel(model)
    optimizer = task.optimizer(ddp.parameters(), task.rate * rate)
    mask = SharedMask(optimizer, density, score)
    # DDP reads annotations, which are strings here.
    ddp.register_comm_hook(None, lambda state, bucket: mask.hook(state, bucket))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: share_of_rate(n, steps))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        task.loss(ddp, seed, step, rank).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), task.max_norm)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        loss = float(task.held_out(model))
    stored = torch.tensor([float(mask.stored_bytes)])
    dist.all_reduce(stored)
    elements = sum(p.numel() for p in model.parameters())
    return {"loss": loss, "stored": float(stored) / steps / elements}


def job(rank: int, world_size: int, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All trainings on one of the ranks."""
    found = []
    for cell in cells:
        found.append(cell | train(rank, **cell))
        if rank == 0:
            print(json.dumps(found[-1]), flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the experiment; prints a line for each training."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--densities", default="0.18")
    parser.add_argument("--rates", default="1,2,4")
    parser.add_argument("--scores", default=",".join(SCORES))
    args = parser.parse_args(argv)
    cells = [
        {"seed": args.seed + n, "steps": 3 if args.smoke else args.steps, "rate": float(rate),
         "density": float(density), "score": score}
        for score in args.scores.split(",")
        for density in args.densities.split(",")
        for rate in args.rates.split(",")
        for n in range(args.seeds)
    ]  # fmt: skip
    found, _ = in_ranks(2, job, cells)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in found)
    (args.out / "shared_mask.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    ending.run(main)
