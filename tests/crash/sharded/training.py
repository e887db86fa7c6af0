"""One rank of a training whose parameters are sharded; it may kill itself.

Every step leaves a line: its number, the loss, and a digest of what this rank trains.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.model.sharding import is_sharded, local_of
from lowdiff.testing import wait_until

_IN, _OUT, _ROWS = 8, 3, 4
#: Layers of 13 are divided unevenly over 2 ranks, those of 3 leave a fourth rank without any.
_WIDTHS = {"even": 16, "uneven": 13}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def build(kind: str, world_size: int, features: frozenset[str]) -> nn.Module:
    """Make the model, sharded as its kind says."""
    torch.manual_seed(0)
    width = _WIDTHS["uneven" if kind == "uneven" else "even"]
    model = nn.Sequential(
        nn.Linear(_IN, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, _OUT)
    )
    if "overridden" in features:
        layers = nn.Linear(_IN, width, bias=False), nn.Linear(width, _OUT, bias=False)
        model = nn.Sequential(layers[0], nn.LayerNorm(width), layers[1])
    if kind == "sp":
        model = nn.Sequential(nn.LayerNorm(_IN), nn.Linear(_IN, width), nn.Linear(width, _OUT))
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        ends = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel()
        parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ends[0], "2": ends[1]})
        return model
    if "frozen" in features:
        model[2].weight.requires_grad_(False)
    if kind == "single":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    options: dict[str, Any] = {}
    if "half" in features:
        # Those of the norm stay as they are: from PyTorch 2.15 on.
        own = {"param_dtype_override_fn": lambda p: torch.float32 if p.ndim == 1 else None}
        overrides: dict[str, Any] = own if "overridden" in features else {}
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, **overrides)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("copy", "shard"))
    if kind in ("tp", "fsdp+tp", "ddp+tp"):
        both = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("shard", "tp"))
        last = ColwiseParallel(output_layouts=Replicate())
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": last}
        parallelize_module(model, both["tp"], plan)
        mesh = both["shard"]
    if "checkpointed" in features:
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.Linear))
    if kind == "ddp+tp":  # averaged by hand over the other dimension
        over = both["shard"].get_group()

        def average(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            dist.all_reduce(local_of(parameter.grad), dist.ReduceOp.AVG, over)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)
    elif kind != "tp":
        for part in model:
            if isinstance(part, nn.Linear) or hasattr(part, "_checkpoint_wrapped_module"):
                fully_shard(part, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    if "finalized" in features:
        model.set_manual_backward_finalization(True)  # type: ignore[operator]
    if "compiled" in features:
        model[2].compile(backend="eager")
    return model


def replica_of(kind: str, rank: int) -> int:
    """Number of the replica of the model that a rank trains, alone or together with others."""
    return {"tp": 0, "sp": 0, "fsdp+tp": rank // 2, "ddp+tp": rank // 2}.get(kind, rank)


def batch(kind: str, step: int, micro: int, rank: int) -> torch.Tensor:
    """Data of a step; ranks that train one replica of the model together have the same."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + replica_of(kind, rank))
    if kind == "sp":  # each rank has its part of the sequence
        return torch.randn(2, _ROWS, _IN, generator=generator)[:, 2 * rank : 2 * rank + 2]
    return torch.randn(_ROWS, _IN, generator=generator)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of what this rank trains: local parameters, and all that the optimizer keeps."""
    found = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {}).values()
            for tensor in (parameter, *(v for v in kept if isinstance(v, torch.Tensor))):
                found.update(local_of(tensor).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def drawn_next() -> float:
    """The number that torch's generator would give next."""
    state = torch.get_rng_state()
    number = torch.rand(()).item()
    torch.set_rng_state(state)
    return number


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank."""
    whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole.detach().clone()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state, on every rank."""
    parts = model.state_dict()
    state = [
        {k: gathered(v) if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        for group in optimizer.param_groups
        for own in (optimizer.state[p] for p in group["params"])
    ]
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    return {
        "model": {name.removeprefix(prefix): gathered(v) for name, v in parts.items()},
        "state": state,
    }


class Ema:
    """A moving average by hand, of what this rank trains."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.values = [local_of(p).detach().clone() for p in self._parameters]

    def update(self) -> None:
        """Take in the parameters."""
        for value, parameter in zip(self.values, self._parameters, strict=True):
            value.lerp_(local_of(parameter).detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        for value, known in zip(self.values, state["values"], strict=True):
            value.copy_(known)


def backward(
    model: nn.Module,
    scaler: GradScaler,
    kind: str,
    step: int,
    rank: int,
    features: frozenset[str],
) -> float:
    """Run the step's backward passes; the last loss."""
    micros = 3 if "accumulated" in features else 1
    for micro in range(micros):
        if micros > 1:
            model.set_requires_gradient_sync(micro == micros - 1)  # type: ignore[operator]
        inputs = batch(kind, step, micro, rank)
        if "drawn" in features:  # as dropout does
            inputs = inputs * (torch.rand(inputs.shape) > 0.3)
        loss: torch.Tensor = model(inputs).float().square().mean()
        scaler.scale(loss).backward()
    if "finalized" in features:
        model.finalize_backward()  # type: ignore[operator]
    return loss.item()


def join(rank: int, world_size: int, store: Path) -> None:
    """Meet the other ranks."""
    file = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=world_size)


def is_replicated(step: int, stats: dict[str, Any]) -> bool:
    """Whether what other nodes hold of a step was told, which the step after it does."""
    return step < 0 or bool(stats["replicated_step"] >= step)


def main(*words: str) -> None:
    """Train to the last step, or to the end of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("life", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("until", type=int)
    parser.add_argument("--features", default="")
    parser.add_argument("--strategy", default="replica")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--snapshot-every", type=int, default=4)
    parser.add_argument("--nodes", default="", help="of each rank, if it has copies on two")
    parser.add_argument("--restore", default="all")
    args = parser.parse_args(words)
    features = frozenset(filter(None, args.features.split(",")))
    torch.set_num_threads(1)
    join(args.rank, args.world_size, args.folder / f"store-{args.life}")
    model = build(args.kind, args.world_size, features)
    if "drawn" in features:
        torch.manual_seed(100 + replica_of(args.kind, args.rank))
    optimizer = OPTIMIZERS[args.optimizer]([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = GradScaler("cpu", enabled="scaled" in features, growth_interval=3)
    objects: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler}
    if "ema" in features:
        objects["ema"] = Ema(model)
    place = args.folder
    if args.nodes:  # each with a disk of its own
        place /= f"node-{args.nodes[args.rank]}"
        place.mkdir(exist_ok=True)
    checkpointer = lowdiff.Checkpointer(
        place / "run",
        strategy=args.strategy,
        snapshot_every=args.snapshot_every,
        staging=place / "staging",
        copies=2 if args.nodes else 1,
    )
    report = (args.folder / f"report.{args.rank}").open("a", buffering=1)
    resumed = checkpointer.attach(model, optimizer, restore=args.restore, **objects)
    report.write(json.dumps(["resumed", resumed]) + "\n")
    for step in checkpointer.steps(args.until):
        optimizer.zero_grad()
        drawn = drawn_next()
        loss = backward(model, scaler, args.kind, step, args.rank, features)
        if step == 2 and "scaled" in features:  # a step that is skipped
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, torch.inf)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step == args.die_at and args.rank == args.world_size - 1:
            wait_until(checkpointer, partial(is_replicated, step - 2 if args.nodes else -1))
            os.kill(os.getpid(), signal.SIGKILL)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if "ema" in features:
            objects["ema"].update()
        if "parted" in features and step == 2 and args.rank == args.world_size - 1:
            with torch.no_grad():
                local_of(next(model.parameters())).add_(1)
        if "evaluated" in features:
            with torch.no_grad():
                model(batch(args.kind, step, 7, args.rank))
        report.write(json.dumps([step, loss, digest(model, optimizer), drawn, drawn_next()]) + "\n")
    state = whole(model, optimizer)
    if args.rank == 0:
        torch.save(state, args.folder / "whole.pt")
    checkpointer.close()
    dist.barrier()
    sys.stdout.flush()
    with suppress(RuntimeError):
        dist.destroy_process_group()
    os._exit(0)
