"""A seed makes a training loop as people write them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_Choice = TypeVar("_Choice")

#: Foreign writes that change gradients; all others change parameters.
GRADIENT_WRITES = frozenset({"noise", "centralised", "decay", "projection", "zeroed rows"})
#: Foreign writes that mix in weights kept beside the model.
SLOW_WRITES = frozenset({"lookahead", "swap"})


@dataclass(frozen=True)
class Write:
    """What the loop writes to parameters or gradients beside the optimizer.

    Attributes:
        kind: Which operation.
        extent: Which part of a tensor: ``"element"``, ``"row"``, ``"percent"`` or ``"all"``.
        target: ``"bias"``, ``"matrix"`` or ``"all"`` parameters.
        place: ``"top"``, ``"before step"``, ``"after step"`` or ``"after commit"``.
        first: Number of the first body that writes.
        every: Bodies from one write to the next; 0 writes once.
        through: How a gradient is written: ``"grad"`` in place, ``"grad.data"``, which passes version
            counters by, or as a ``"new grad"``.
    """

    kind: str
    extent: str
    target: str
    place: str
    first: int
    every: int
    through: str = ""

    def fires(self, step: int) -> bool:
        """Whether the body that leads from ``step`` to ``step + 1`` writes."""
        late = step - self.first
        return late == 0 or (late > 0 and self.every > 0 and late % self.every == 0)

    def __str__(self) -> str:
        how = "once in" if self.every == 0 else f"every {self.every} from"
        through = f" through .{self.through}" if self.through else ""
        place = f"{self.place}, {how} body {self.first}"
        return f"{self.kind}{through} of {self.extent} of {self.target}, {place}"


@dataclass(frozen=True)
class Loop:
    """One training loop, and where it is killed.

    Attributes:
        seed: What it was drawn from.
        model: ``"mlp"``, ``"conv"``, ``"transformer"``, ``"shared"`` (a buffer that shares a
            weight's memory) or ``"one N"`` (one tensor of N elements).
        optimizer: Which; ``"two"`` share the parameters out, ``"gan"`` take turns in a body.
        dtype: Of the parameters.
        ranks: Number of processes.
        is_ddp: Whether the model is wrapped.
        accumulation: Micro-batches of a body.
        clipping: ``""``, ``"norm"``, ``"value"`` or ``"checkpointer"``.
        scheduler: ``""``, ``"cosine"`` or ``"steps"``.
        ema: ``""``, ``"averaged"`` (``AveragedModel``) or ``"by hand"``.
        evaluation: Where averaged weights are swapped in and out: ``""``, ``"top"`` or
            ``"after commit"``.
        swaps_pointers: Whether that exchanges ``.data`` instead of copying.
        frozen: ``""``, ``"first"`` parameter, or a target network that is copied by ``"target
            copy_"`` or ``"target data"``.
        write: The foreign write, if there is one.
        compressor: Name and arguments; an empty name is LowDiff+.
        settings: Further settings of the Checkpointer.
        watch: Setting of the Checkpointer, where it has that.
        is_steps: Whether bodies are those of ``steps()``; else they call ``commit()``.
        steps: Number of bodies.
        kill_step: Number of the body in which the processes die.
        kill_place: ``"top"``, ``"backward"``, ``"stepped"`` or ``"committed"``.
        victim: Rank that dies first; -1 for all ranks at the same place.
    """

    seed: int
    model: str
    optimizer: str
    dtype: str
    ranks: int
    is_ddp: bool
    accumulation: int
    clipping: str
    scheduler: str
    ema: str
    evaluation: str
    swaps_pointers: bool
    frozen: str
    write: Write | None
    compressor: tuple[str, tuple[tuple[str, Any], ...]]
    settings: tuple[tuple[str, Any], ...]
    watch: str
    is_steps: bool
    steps: int
    kill_step: int
    kill_place: str
    victim: int

    @property
    def is_replica(self) -> bool:
        """Whether it trains without a compressor."""
        return not self.compressor[0]

    @property
    def is_exact(self) -> bool:
        """Whether a resumed run has the bits of the uninterrupted one."""
        return ("residual", "snapshot") not in self.settings

    def __str__(self) -> str:
        name, arguments = self.compressor
        words = ", ".join(f"{key}={value}" for key, value in (*arguments, *self.settings))
        parts = [
            f"{self.model} {self.dtype} {self.optimizer}",
            f"{self.ranks} ranks" if self.ranks > 1 else ("DDP" if self.is_ddp else ""),
            f"accumulation {self.accumulation}" if self.accumulation > 1 else "",
            f"clipping {self.clipping}" if self.clipping else "",
            self.scheduler,
            f"ema {self.ema}" if self.ema else "",
            f"evaluation {self.evaluation}{' by pointers' if self.swaps_pointers else ''}"
            if self.evaluation
            else "",
            f"frozen {self.frozen}" if self.frozen else "",
            f"WRITES {self.write}" if self.write else "",
            f"{name or 'LowDiff+'}({words}) watch={self.watch}",
            f"{'steps()' if self.is_steps else 'commit()'} to {self.steps}",
            f"killed in {self.kill_step} {self.kill_place}"
            + ("" if self.victim < 0 else f" by rank {self.victim}"),
        ]
        return f"seed {self.seed}: " + "; ".join(part for part in parts if part)


def generate(seed: int) -> Loop:
    """Draw a loop; common kinds are drawn often."""
    chance = random.Random(seed)

    def pick(weights: Mapping[_Choice, float]) -> _Choice:
        return chance.choices(list(weights), list(weights.values()))[0]

    ranks, is_ddp = pick({(1, False): 60, (1, True): 15, (2, True): 20, (3, True): 5})
    sizes = {"one 100": 5, "one 10000": 8, "one 1000000": 4}
    model = pick({"mlp": 40, "conv": 15, "transformer": 15, "shared": 14, **sizes})
    optimizers = {"sgd": 15, "adam": 20, "adamw foreach": 20, "adamw fused": 10}
    optimizer = pick({**optimizers, "rmsprop": 8, "adagrad": 7, "two": 10, "gan": 10})
    if optimizer == "gan" and not is_ddp:
        model = "mlp"
    elif optimizer in ("gan", "two") and (is_ddp or model.startswith("one")):
        optimizer = "adam"
    ema = "" if optimizer == "gan" else pick({"": 60, "averaged": 20, "by hand": 20})
    is_steps = chance.random() < 0.6
    places = {"": 50, "top": 25, "after commit": 0 if is_steps else 25}
    evaluation = pick(places) if ema else ""
    frozen = pick({"": 70, "first": 12, "target copy_": 9, "target data": 9})
    if optimizer == "gan" or (frozen == "first" and model.startswith("one")):
        frozen = ""
    steps = chance.randint(15, 25)
    write = _write(chance, steps, is_steps) if chance.random() < 0.5 else None
    # Most kills come after the first write, so that the run is resumed past it.
    earliest = write.first + 1 if write and chance.random() < 0.8 else 2
    density = ("density", pick({0.01: 1, 0.05: 2, 0.2: 2})), ("dense_below", pick({16: 2, 1024: 1}))
    compressor = pick(
        {
            ("TopK", density): 37,
            ("TopK", (*density, ("value_bits", pick({2: 1, 4: 1})))): 8,
            ("RandomK", density): 8,
            ("CyclicTopK", density): 8,
            ("PowerSGD", (("matrix_rank", 2), ("dense_below", 64))): 8,
            ("Quantize", (("bits", pick({8: 2, 4: 1})),)): 8,
            ("Cast", ()): 8,
            ("", ()): 15,
        }
    )
    settings: list[tuple[str, Any]] = [("snapshot_every", pick({3: 1, 5: 2, 8: 2, 100: 2}))]
    if compressor[0]:
        settings.append(("batch_size", pick({1: 1, 3: 2, 16: 2})))
        settings.append(("residual", pick({"exact": 8, "snapshot": 2})))
    elif ranks > 2:  # gloo adds three numbers in an order that differs from run to run
        settings.append(("reproducible", True))
    return Loop(
        seed=seed,
        model=model,
        optimizer=optimizer,
        dtype=pick({"float32": 80, "bfloat16": 10, "float64": 10}),
        ranks=ranks,
        is_ddp=is_ddp,
        accumulation=pick({1: 6, 2: 2, 4: 1}) if optimizer != "gan" else 1,
        clipping=pick({"": 5, "norm": 3, "value": 1, "checkpointer": 1}),
        scheduler=pick({"": 4, "cosine": 3, "steps": 3}),
        ema=ema,
        evaluation=evaluation,
        swaps_pointers=bool(evaluation) and chance.random() < 0.3,
        frozen=frozen,
        write=write,
        compressor=compressor,
        settings=tuple(settings),
        watch=pick({"live": 8, "recovery": 2}),
        is_steps=is_steps,
        steps=steps,
        kill_step=chance.randint(min(max(2, earliest), steps - 2), steps - 2),
        kill_place=pick({"top": 2, "backward": 1, "stepped": 1, "committed": 2}),
        victim=chance.randrange(-1, ranks) if ranks > 1 else -1,
    )


def _write(chance: random.Random, steps: int, is_steps: bool) -> Write:
    on_parameters = ["clamp", "normalised", "vector", "new tensor", "new order", "copy_"]
    kind = chance.choice([*on_parameters, *sorted(GRADIENT_WRITES), *sorted(SLOW_WRITES)])
    extents = ["all", "all", "percent", "row", "element"]
    places = ["top", "before step", "after step", *([] if is_steps else ["after commit"])]
    once = chance.randrange(2, steps - 2)
    first, every = chance.choice([(0, 1), (1, 1), (10, 1), (4, 5), (once, 0)])
    extent, target = chance.choice(extents), chance.choice(["bias", "matrix", "all"])
    if kind in SLOW_WRITES:
        extent = "all"
    place, through = chance.choice(places), ""
    if kind in GRADIENT_WRITES:
        place = "before step"
        through = chance.choice(["grad", "grad", "grad", "new grad", "grad.data"])
    return Write(kind, extent, target, place, first, every, through)
