"""Is a predicted state worth the steps that were lost?

    python -m benches.bench_lost_tail --out DIR [--smoke] [--seeds 5] [--steps 1200]

The two trainings of `bench_convergence` (text, digits) fail at 25, 50 and 75 % of their steps, just before a snapshot
would have been durable, with snapshots every 25, 100 and 400 steps. So as many steps are lost as lie between two
snapshots. Then training goes on, in one of these ways:

- ``redo``: from the last snapshot, with the batches of the lost steps once more: bit for bit the lost steps;
- ``stale``: from the last snapshot's parameters, with the batches behind the failure;
- the predictors of `lowdiff.recovery.prediction`: from their parameters, with the batches behind the failure; moments
  are the last snapshot's.

Counted are the steps until the held-out loss is for the first time no higher than the uninterrupted training's at the
failure, over the lost steps; at most twice as many are made. The loss is noisy, so redoing may get there early as
well. ``gate`` takes what `choose` takes by the held-out loss right after the failure, and redoes where that takes
nothing. Histories are the last 12 snapshots. What has ended is
in ``lost_tail.jsonl``: a call with the same ``--out`` goes on behind it.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn

from benches import ending
from benches.bench_convergence import TASKS, Task, share_of_rate
from benches.harness import BLUE, GREEN, INK, MUTED, PALE, RED, Result, arguments, machine, write
from lowdiff.recovery.prediction import History, Predictor, Stale, choose
from lowdiff.recovery.prediction.gate import PREDICTORS

_SHARES = (0.25, 0.5, 0.75)
_INTERVALS = (25, 100, 400)
_STATES = 12
_LOOKS = 5
_MOST = 2
#: In units of each task's own: the text's best in bench_convergence; on digits 1, 2 and 4 are equally good.
_RATES = {"text": 1.0, "digits": 1.0}
WAYS: tuple[Predictor, ...] = (Stale(), *PREDICTORS)


class Training:
    """One process that trains a task with a schedule of a given length."""

    def __init__(self, name: str, task: Task, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.task, self.seed = task, seed
        self.model = task.model()
        self.optimizer = task.optimizer(self.model.parameters(), task.rate * _RATES[name])
        self._base, self._steps = self.optimizer.param_groups[0]["lr"], steps

    def step(self, number: int) -> None:
        """Make step ``number``, from 0; its batch and rate depend on nothing else."""
        self.optimizer.param_groups[0]["lr"] = self._base * share_of_rate(number, self._steps)
        self.optimizer.zero_grad()
        self.task.loss(self.model, self.seed, number + 1, 0).backward()
        if self.task.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        self.optimizer.step()

    def loss(self) -> float:
        """On what is held out."""
        with torch.no_grad():
            return float(self.task.held_out(self.model))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Flat copies by name."""
        return {n: p.detach().flatten().clone() for n, p in self.model.named_parameters()}

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take parameters as `parameters` gives them."""
        with torch.no_grad():
            for name, own in self.model.named_parameters():
                own.copy_(parameters[name].view_as(own))


Snapshot = tuple[dict[str, torch.Tensor], dict[str, Any]]


def whole(
    training: Training, steps: int, every: int
) -> tuple[dict[int, Snapshot], dict[int, float]]:
    """Train to the end; snapshots and held-out losses by step."""
    snapshots, losses = {}, {}
    for number in range(steps + 1):
        if number % every == 0:
            snapshots[number] = (
                training.parameters(),
                copy.deepcopy(training.optimizer.state_dict()),
            )
            losses[number] = training.loss()
        if number < steps:
            training.step(number)
    return snapshots, losses


def regained(training: Training, first: int, lost: int, target: float, looks: int) -> int:
    """Steps from number ``first`` on until the loss is no higher than the target; ``_MOST`` times the lost ones at most."""
    for made in range(_MOST * lost + 1):
        if made % looks == 0 and training.loss() <= target:
            return made
        training.step(first + made)
    return _MOST * lost


def one_failure(
    name: str, training: Training, snapshots: Mapping[int, Snapshot], failed: int, interval: int,
    target: float,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the cost of every way after a failure; None where there is no snapshot but the first."""
    base = failed - interval
    steps = [s for s in range(base, -1, -interval) if s in snapshots][:_STATES][::-1]
    if len(steps) < 2:
        return None
    names = list(snapshots[base][0])
    history = History(
        tuple(steps), {n: torch.stack([snapshots[s][0][n] for s in steps]) for n in names}
    )
    looks = max(1, min(_LOOKS, interval // 5))

    candidates: list[Mapping[str, torch.Tensor]] = []

    def validate(parameters: Mapping[str, torch.Tensor]) -> float:
        candidates.append(parameters)
        training.load(parameters)
        return training.loss()

    decision, _ = choose(history, failed, validate)
    parameters, optimizer = snapshots[base]
    training.load(parameters)
    training.optimizer.load_state_dict(copy.deepcopy(optimizer))
    redone = regained(training, base, interval, target, looks)
    for number in range(base + redone, failed):
        training.step(number)
    assert training.loss() == target, f"{name}: the steps made again differ"
    costs = {"redo": redone / interval}
    for name_of_way, candidate in zip(decision.losses, candidates, strict=True):
        training.load(candidate)
        optimizer = copy.deepcopy(snapshots[base][1])
        for entries in optimizer["state"].values():
            if "step" in entries:
                entries["step"] = entries["step"] + interval
        training.optimizer.load_state_dict(optimizer)
        costs[name_of_way] = regained(training, failed, interval, target, looks) / interval
    costs["gate"] = costs[decision.chosen or "redo"]
    return {
        "task": name, "seed": training.seed, "failed": failed, "interval": interval,
        "losses": dict(decision.losses), "target": target, "chosen": decision.chosen,
        "refused": dict(decision.refused), "costs": costs,
    }  # fmt: skip


def measured(ended: Path, seeds: Sequence[int], steps: int, intervals: Sequence[int]) -> None:
    """Add a line for every failure that has none yet."""
    known = {(r["task"], r["seed"]) for r in rows(ended) if r.get("ended")}
    for name, make in TASKS.items():
        for seed in seeds:
            if (name, seed) in known:
                continue
            training = Training(name, make(), seed, steps)
            snapshots, losses = whole(training, steps, math.gcd(*intervals))
            lines = []
            for share in _SHARES:
                for interval in intervals:
                    failed = int(share * steps) // intervals[0] * intervals[0]
                    found = one_failure(name, training, snapshots, failed, interval, losses[failed])
                    if found is not None:
                        lines.append(found | {"share": share})
            lines.append({"task": name, "seed": seed, "ended": True})
            with ended.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))


def rows(ended: Path) -> list[dict[str, Any]]:
    """Lines of the file."""
    if not ended.exists():
        return []
    return [json.loads(line) for line in ended.read_text(encoding="utf-8").splitlines()]


def figures_of(failures: Sequence[Mapping[str, Any]], intervals: Sequence[int]) -> dict[str, Any]:
    """Mean costs over the lost steps, by task, interval and way; and how often the gate took something."""
    found: dict[str, Any] = {}
    for task in TASKS:
        for interval in intervals:
            own = [f for f in failures if (f["task"], f["interval"]) == (task, interval)]
            for way in ("redo", "gate", *(one.name for one in WAYS)):
                costs = [f["costs"][way] for f in own if way in f["costs"]]
                if costs:
                    found[f"{task}/{interval}/{way.replace(' ', '_')}_over_lost"] = statistics.mean(
                        costs
                    )
            if own:
                taken = [f for f in own if f["chosen"]]
                found[f"{task}/{interval}/gate_takes"] = len(taken) / len(own)
    pairs = [(f["costs"]["gate"], f["costs"]["redo"]) for f in failures]
    found["gate_over_redo"] = sum(gate for gate, _ in pairs) / sum(redo for _, redo in pairs)
    found["gate_worse_than_redo"] = sum(gate > redo for gate, redo in pairs) / len(pairs)
    return found


def draw(axes: Axes, result: Result) -> None:
    """Costs over the lost steps, every failure a dot."""
    colors = dict(zip((one.name for one in WAYS), (MUTED, PALE, BLUE, GREEN, RED), strict=True))
    places: list[float] = []
    labels: list[str] = []
    for task in TASKS:
        for interval in result.settings["intervals"]:
            own = [
                f for f in result.samples["failures"]
                if (f["task"], f["interval"]) == (task, interval)
            ]  # fmt: skip
            if not own:
                continue
            place = float(len(places))
            places.append(place)
            labels.append(f"{task}, every {interval}")
            for number, way in enumerate(["redo", *colors]):
                costs = [f["costs"][way] for f in own if way in f["costs"]]
                at = place + 0.14 * (number - 2.5)
                color = INK if way == "redo" else colors[way]
                axes.plot([at] * len(costs), costs, "o", ms=3, alpha=0.6, color=color,
                          label=way if len(places) == 1 else None)  # fmt: skip
                if costs:
                    axes.plot(
                        [at - 0.06, at + 0.06], [statistics.mean(costs)] * 2, "-", lw=2, color=color
                    )
    axes.axhline(1, color=INK, lw=0.8)
    axes.set_xticks(places, labels, fontsize=8, rotation=20, ha="right")
    axes.set_ylabel("steps until the loss is regained, over the lost ones")
    axes.legend(frameon=False, fontsize=7, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args(argv)
    intervals: Sequence[int] = _INTERVALS
    if args.smoke:
        args.seeds, args.steps, intervals = 1, 24, (2, 4)
    torch.set_num_threads(1)
    before = machine()
    args.out.mkdir(parents=True, exist_ok=True)
    ended = args.out / "lost_tail.jsonl"
    measured(ended, range(args.seed, args.seed + args.seeds), args.steps, intervals)
    failures = [row for row in rows(ended) if not row.get("ended")]
    settings = {
        "seeds": args.seeds, "steps": args.steps, "smoke": args.smoke, "intervals": list(intervals),
    }  # fmt: skip
    summary = {
        "bit_identical": True,  # asserted of the steps made again, at every failure
        **figures_of(failures, intervals),
    }
    write(
        Result("lost_tail", settings, args.seed, before, {"failures": failures}, summary),
        args.out,
        draw,
    )
    ended.unlink()


if __name__ == "__main__":
    ending.run(main)
