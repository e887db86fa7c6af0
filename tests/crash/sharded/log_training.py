"""One rank of a training on 2 x 2 ranks, copies by shards, whose gradients may be compressed; it may kill itself.

Every step leaves a line: its number, the loss, and digests of what this rank trains and of its error feedback.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UnsupportedModel, UsageError
from lowdiff.model.sharding import local_of
from lowdiff.testing import wait_until
from tests.contract.compressors import FAMILY
from tests.crash.lives import owed_by
from tests.crash.sharded.training import is_replicated, join, whole

#: Rows of 37 and 3 are divided unevenly over 2 ranks.
_IN, _WIDTH, _OUT, _ROWS = 8, 37, 3, 4


class Net(nn.Module):
    """Three layers, one of which a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_IN, _WIDTH)
        self.middle = nn.Linear(_WIDTH, _WIDTH)
        self.last = nn.Linear(_WIDTH, _OUT)
        self.extra = nn.Parameter(torch.ones(5, _WIDTH))

    def forward(self, rows: torch.Tensor, *, uses_extra: bool = True) -> torch.Tensor:
        """Return values of shape [rows, 3]."""
        hidden = nn.functional.gelu(self.first(rows))
        if uses_extra:
            hidden = hidden * self.extra.mean(0)
        out: torch.Tensor = self.last(nn.functional.gelu(self.middle(hidden)))
        return out


def sharded(mesh: DeviceMesh, features: frozenset[str]) -> Net:
    """Make the model, sharded over a mesh; two dimensions make it native HSDP."""
    torch.manual_seed(0)
    model = Net()
    options: dict[str, Any] = {}
    if "half" in features:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "half reduced" in features:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    fully_shard(model.middle, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """Data of a step and rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(_ROWS, _IN, generator=generator)


def digest(tensors: list[torch.Tensor]) -> str:
    """Checksum of what this rank holds of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(local_of(tensor.detach()).contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def owed(checkpointer: lowdiff.Checkpointer) -> str:
    """Digest of this rank's error feedback."""
    residual = owed_by(checkpointer)
    # A resumed life also lists parameters that owe nothing.
    return digest([residual[name] for name in sorted(residual) if residual[name].any()])


class Loop:
    """A loop body with what its features add.

    ``accumulated`` sums micro-batches before they are exchanged, ``several passes`` exchanges each of them,
    ``scaled`` has a gradient scaler that once overflows, ``partly used`` leaves a parameter out at times.
    """

    def __init__(self, model: Net, rank: int, features: frozenset[str]) -> None:
        self.model = model
        self.rank = rank
        self.features = features
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled="scaled" in features)

    @property
    def stateful(self) -> dict[str, Any]:
        """What is attached besides the model and the optimizer."""
        found: dict[str, Any] = {"scheduler": self.scheduler}
        return found | ({"scaler": self.scaler} if "scaled" in self.features else {})

    def backward(self, step: int) -> float:
        """Run the step's backward passes; the last loss."""
        micros = 3 if self.features & {"accumulated", "several passes"} else 1
        for micro in range(micros):
            if "accumulated" in self.features:
                self.model.set_requires_gradient_sync(micro == micros - 1)  # type: ignore[operator]
            uses_extra = "partly used" not in self.features or step % 3 != 1
            rows = batch(step, micro, self.rank)
            loss: torch.Tensor = self.model(rows, uses_extra=uses_extra).float().square().mean()
            if "scaled" in self.features and step == 2:
                loss = loss * torch.inf
            self.scaler.scale(loss).backward()
        return loss.item()

    def step(self) -> None:
        """Clip, and step optimizer and scheduler."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()


def main(*words: str) -> None:
    """Train to the last step, or to the end of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("life", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("compressor")
    parser.add_argument("until", type=int)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--features", default="")
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--dying", default="last", choices=["last", "last before backward", "all"])
    parser.add_argument("--residual", default="exact")
    parser.add_argument("--nodes", default="", help="of each rank, if it has copies on two")
    args = parser.parse_args(words)
    features = frozenset(filter(None, args.features.split(",")))
    torch.set_num_threads(1)
    join(args.rank, args.world_size, args.folder / f"store-{args.life}")
    shape = args.copies, args.world_size // args.copies
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rep", "shard"))
    is_native = args.compressor == "native"
    loop = Loop(sharded(mesh if is_native else mesh["shard"], features), args.rank, features)
    place = args.folder
    if args.nodes:  # each with a disk of its own
        place /= f"node-{args.nodes[args.rank]}"
        place.mkdir(exist_ok=True)
    checkpointer = lowdiff.Checkpointer(
        place / "run",
        compressor=FAMILY.get(args.compressor),
        snapshot_every=100 if args.nodes else 4,
        batch_size=2,
        retention=None,
        residual=args.residual,
        copies=2 if args.nodes else 1,
        staging=place / "staging",
    )
    resumed = checkpointer.attach(
        loop.model, loop.optimizer, replicate=None if is_native else mesh["rep"], **loop.stateful
    )
    report = (args.folder / f"report.{args.rank}").open("a", buffering=1)
    report.write(json.dumps(["resumed", resumed]) + "\n")
    last = args.world_size - 1
    for step in range(resumed, args.until):
        dies = step == args.die_at and (args.rank == last or args.dying == "all")
        if dies and args.dying == "last before backward":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loop.backward(step)
        if dies:
            if args.nodes:
                wait_until(checkpointer, partial(is_replicated, step - 2))
            os.kill(os.getpid(), signal.SIGKILL)
        loop.step()
        checkpointer.commit()
        trained = [p for group in loop.optimizer.param_groups for p in group["params"]]
        kept = [v for p in trained for v in loop.optimizer.state.get(p, {}).values()]
        digests = digest([*trained, *kept]), owed(checkpointer)
        report.write(json.dumps([step, loss, *digests]) + "\n")
        state = whole(loop.model, loop.optimizer)
        if args.rank == 0:
            torch.save(state, args.folder / f"whole-{step + 1}.pt")
    checkpointer.close()
    dist.barrier()
    sys.stdout.flush()
    with suppress(RuntimeError):
        dist.destroy_process_group()
    os._exit(0)


def refusals(*words: str) -> None:
    """Attach in ways that are refused; what each error says stands in a file."""
    rank, world_size, folder = int(words[0]), int(words[1]), Path(words[2])
    torch.set_num_threads(1)
    join(rank, world_size, folder / "store")
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("rep", "shard"))
    nothing: frozenset[str] = frozenset()

    def partly() -> Net:
        model = Net()
        fully_shard(model.middle, mesh=mesh["shard"])
        return model

    def hooked() -> Net:
        model = sharded(mesh["shard"], nothing)
        model.middle.set_all_reduce_hook(print)  # type: ignore[operator]
        return model

    cases: dict[str, tuple[Callable[[], nn.Module], DeviceMesh | None]] = {
        "no replicate": (lambda: sharded(mesh["shard"], nothing), None),
        "two dimensions": (lambda: sharded(mesh["shard"], nothing), mesh),
        "the shards": (lambda: sharded(mesh["shard"], nothing), mesh["shard"]),
        "native": (lambda: sharded(mesh, nothing), mesh["rep"]),
        "not sharded": (lambda: DistributedDataParallel(Net()), mesh["rep"]),
        "partly sharded": (partly, mesh["rep"]),
        "another hook": (hooked, mesh["rep"]),
    }
    said: dict[str, str] = {}
    for number, (name, (build, replicate)) in enumerate(cases.items()):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer = lowdiff.Checkpointer(
            folder / f"run-{number}", compressor=TopK(0.1), staging=folder / "staging"
        )
        try:
            checkpointer.attach(model, optimizer, replicate=replicate)
        except (ConfigError, UnsupportedModel) as error:
            said[name] = str(error)
    (folder / f"said.{rank}").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)


def endings(*words: str) -> None:
    """Train beside a Checkpointer that has let go, and without any; what comes of it stands in a file."""
    rank, world_size, folder = int(words[0]), int(words[1]), Path(words[2])
    torch.set_num_threads(1)
    join(rank, world_size, folder / "store")
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("rep", "shard"))
    loop = Loop(sharded(mesh["shard"], frozenset()), rank, frozenset())

    def attached(run: str) -> lowdiff.Checkpointer:
        made = lowdiff.Checkpointer(
            folder / run, compressor=TopK(0.1), staging=folder / "staging", residual="snapshot"
        )
        made.attach(loop.model, loop.optimizer, replicate=mesh["rep"])
        return made

    def failure(step: int) -> list[str]:
        try:
            loop.backward(step)
        except (UnsupportedModel, UsageError) as error:
            return [type(error).__name__, str(error)]
        return []

    first = attached("first")
    loop.backward(0)
    loop.step()
    first.commit()
    first.detach()
    loop.backward(1)
    loop.step()
    found: dict[str, Any] = {"detached": digest(list(loop.model.parameters()))}
    attached("second").close()
    found["closed"] = failure(2)
    # A fresh model: FSDP does not go on after a backward pass that failed.
    loop = Loop(sharded(mesh["shard"], frozenset()), rank, frozenset({"partly used"}))
    attached("third")
    if hasattr(
        loop.model, "set_reduce_scatter_unused_params"
    ):  # before PyTorch 2.11 it is as if unset
        loop.model.set_reduce_scatter_unused_params(False)  # type: ignore[operator]
    found["partly used"] = failure(1)
    (folder / f"found.{rank}").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)
