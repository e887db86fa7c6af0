"""One rank of the trainings of ``bench_peer_memory``, on a node of its own.

`traffic`, `compared` and `attached` are what it may be told to do. Each leaves its figures as JSON in
a file of the rank.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crc32c import crc32c
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.harness import Pair, abba
from lowdiff.compressors import TopK
from lowdiff.compressors.collectives import own_group
from lowdiff.core.memory import byte_view
from lowdiff.core.placement import peers_of
from lowdiff.model.ranks import Ranks
from lowdiff.protect.copies.line import Receiver, Sender

#: 10.7 million parameters.
MODEL = GPTConfig(layers=6, heads=6, width=384)
SMOKE_MODEL = GPTConfig(layers=1, heads=2, width=32, context=16)
#: What a Checkpointer is told, by strategy.
STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {"compressor": TopK(0.01)},
    "replica": {"strategy": "replica", "reproducible": True},
}
_ROWS = 4
_WARM_UP_STEPS = 3
_SETTLE_SECONDS = 0.5
_LOOK_SECONDS = 0.001
#: No snapshot but the one that an incarnation begins with.
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank of a training is.

    Attributes:
        rank: Its number.
        world_size: Of all ranks.
        folder: Shared by all nodes.
        disk: The node's own.
        smoke: Whether the model is tiny.
    """

    rank: int
    world_size: int
    folder: Path
    disk: Path
    smoke: bool

    @classmethod
    def joined(
        cls, name: str, rank: str, world_size: str, folder: str, disk: str, smoke: str
    ) -> Place:
        """Join the process group of a training."""
        place = cls(int(rank), int(world_size), Path(folder), Path(disk), smoke == "True")
        torch.set_num_threads(1)
        store = dist.FileStore(str(place.folder / f"{name}.store"), place.world_size)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
        return place

    def write(self, name: str, figures: Any) -> None:
        """Leave this rank's figures."""
        part = self.folder / f"{name}.{self.rank}.part"
        part.write_text(json.dumps(figures))
        part.replace(self.folder / f"{name}.{self.rank}")


class Training:
    """A model with its Checkpointer, which makes steps.

    Args:
        place: Of this rank.
        run: Name of the run's folder.
        strategy: One of `STRATEGIES`.
        copies: See ``Checkpointer``.
        dropout: Of the model; with it every rank's generator changes in every step.
    """

    def __init__(
        self, place: Place, run: str, strategy: str, copies: int, dropout: float = 0.1
    ) -> None:
        self._config = replace(SMOKE_MODEL if place.smoke else MODEL, dropout=dropout)
        torch.manual_seed(0)
        self.model = DistributedDataParallel(GPT(self._config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(100 + place.rank)
        self.checkpointer = lowdiff.Checkpointer(
            place.disk / run, copies=copies, snapshot_every=_NEVER, **STRATEGIES[strategy]
        )
        self._rank = place.rank
        self.step_number = self.checkpointer.attach(self.model, self.optimizer)

    def step(self) -> None:
        """Make one step."""
        chance = torch.Generator().manual_seed(1000 * self.step_number + self._rank)
        size = (_ROWS, self._config.context + 1)
        tokens = torch.randint(self._config.vocabulary, size, generator=chance)
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()
        self.checkpointer.commit()
        self.step_number += 1

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, and what the optimizer keeps of their size."""
        states = self.optimizer.state.values()
        kept = [value for state in states for value in state.values() if value.numel() > 1]
        return [*(parameter.detach() for parameter in self.model.parameters()), *kept]

    def checksum(self) -> int:
        """Of `tensors`."""
        checksum = 0
        for tensor in self.tensors():
            checksum = crc32c(byte_view(tensor), checksum)
        return checksum


class WholeState:
    """Sends a rank's share of the whole state to its keepers, as Gemini does: with lowdiff's sender.

    Args:
        place: Of this rank.
        copies: Nodes that hold each share.
    """

    def __init__(self, place: Place, copies: int) -> None:
        world = dist.group.WORLD
        assert world is not None
        group = own_group(world)
        peers = peers_of(place.rank, range(place.world_size), copies)
        self._place, self._sent = place, 0
        self._num_keepers = len(peers.keepers)
        self._sender = Sender(group, peers.keepers)
        for ward in peers.wards:
            receiver = Receiver(group, ward)
            threading.Thread(target=self._keep, args=(receiver,), daemon=True).start()

    def send(self, training: Training) -> int:
        """Send this rank's share of the state, and wait until it is sent; its length."""
        share = b"".join(
            byte_view(tensor.flatten().chunk(self._place.world_size)[self._place.rank]).tobytes()
            for tensor in training.tensors()
            if tensor.numel() >= self._place.world_size
        )
        self._sent += len(share) * self._num_keepers
        self._sender.send(share)
        while self._sender.bytes_sent < self._sent:
            assert not self._sender.error, self._sender.error
            time.sleep(_LOOK_SECONDS)
        return len(share)

    def close(self) -> None:
        """Tell the keepers that nothing follows."""
        self._sender.close()

    def _keep(self, receiver: Receiver) -> None:
        while (head := receiver.head()) is not None:
            receiver.note(head)


def traffic(arm: str, copies: str, steps: str, *words: str) -> None:
    """Count what a node sends in some steps.

    Args:
        arm: A strategy, or ``gemini``: the log of steps, and the whole state beside it.
        copies: Nodes that hold each step.
        steps: How many count.
        words: See `Place.joined`.
    """
    name = f"{arm}-{copies}"
    place = Place.joined(name, *words)
    is_gemini = arm == "gemini"
    training = Training(
        place, name, "log" if is_gemini else arm, copies=1 if is_gemini else int(copies)
    )
    whole = WholeState(place, int(copies)) if is_gemini else None
    share_bytes = 0
    with training.checkpointer:
        for number in range(_WARM_UP_STEPS + int(steps)):
            if number == _WARM_UP_STEPS:
                before, own_before = settled(), _own_bytes(training)
                began = time.perf_counter()
            training.step()
            if whole is not None:
                share_bytes = whole.send(training)
        seconds = time.perf_counter() - began
        sent, own = settled() - before, _own_bytes(training) - own_before
        stats = training.checkpointer.stats()
        if whole is not None:
            whole.close()
        figures = {
            "bytes_per_step": sent / int(steps),
            "messages_bytes_per_step": own / int(steps),
            "share_bytes": share_bytes,
            "step_seconds": seconds / int(steps),
            "replicated_step": stats.get("replicated_step", -1),
            "checksum": training.checksum(),
        }
        place.write(name, figures)


def _own_bytes(training: Training) -> int:
    return int(training.checkpointer.stats().get("copies_bytes_sent", 0))


def settled() -> int:
    """Bytes that the node's interface has sent, once nothing is under way any more."""
    dist.barrier()
    time.sleep(_SETTLE_SECONDS)
    lines = Path("/proc/net/dev").read_text().splitlines()
    sent = next(int(line.split()[9]) for line in lines if os.environ["GLOO_SOCKET_IFNAME"] in line)
    dist.barrier()
    return sent


def compared(strategy: str, pairs: str, block: str, *words: str) -> None:
    """Time steps with two copies beside steps with one, and those beside others with one.

    Args:
        strategy: One of `STRATEGIES`.
        pairs: How many of either.
        block: Steps that are timed together.
        words: See `Place.joined`.
    """
    name = f"compared-{strategy}"
    place = Place.joined(name, *words)
    trainings = [
        Training(place, f"{name}-{arm}", strategy, copies, dropout=0.0)
        for arm, copies in (("one", 1), ("other", 1), ("two", 2))
    ]
    one, other, two = trainings
    #: Of the state at the last step that all of them make.
    checksums: list[int] = []
    last = _WARM_UP_STEPS + int(block) * int(pairs)

    def seconds(training: Training) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(int(block)):
            training.step()
        taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if training.step_number == last:
            checksums.append(training.checksum())
        return float(taken)

    for training in trainings:
        for _ in range(_WARM_UP_STEPS):
            training.step()
    found: dict[str, list[Pair]] = {"pairs": [], "null": []}
    while len(found["pairs"]) < int(pairs):
        found["pairs"] += abba(lambda: seconds(two), lambda: seconds(one))
        found["null"] += abba(lambda: seconds(other), lambda: seconds(one))
    assert len(checksums) == len(trainings)
    assert len(set(checksums)) == 1, checksums
    place.write(name, found)
    for training in trainings:
        training.checkpointer.close()


def attached(number: str, steps: str, *words: str) -> None:
    """Attach to a run, and say how long the files of others took; then train until all are killed.

    Args:
        number: How often nodes were lost before.
        steps: To train.
        words: See `Place.joined`.
    """
    name = f"attached-{number}"
    place = Place.joined(name, *words)
    share, retrievals = Ranks.share_files, []

    def timed(ranks: Ranks, mine: Mapping[str, Path], imported: Path, *, durable: bool) -> None:
        ranks.meet(60.0)
        began = time.perf_counter()
        share(ranks, mine, imported, durable=durable)
        seconds = time.perf_counter() - began
        if not durable:  # what was staged, and is needed only now
            files = [path for path in imported.rglob("*") if path.is_file()]
            sizes = [path.stat().st_size for path in files]
            retrievals.append({"seconds": seconds, "sizes": sizes})

    Ranks.share_files = timed  # type: ignore[assignment, method-assign]
    began = time.perf_counter()
    training = Training(place, "retrieved", "log", copies=2)
    attach_seconds = time.perf_counter() - began
    made: dict[int, int] = {}
    figures = {
        "step": training.step_number,
        "checksum": training.checksum(),
        "attach_seconds": attach_seconds,
        "retrievals": retrievals,
        "made": made,
    }
    for _ in range(int(steps)):
        training.step()
        made[training.step_number] = training.checksum()
    while training.checkpointer.stats()["replicated_step"] < training.step_number - 2:
        time.sleep(_LOOK_SECONDS)
        training.step()
        made[training.step_number] = training.checksum()
    figures["replicated_step"] = training.checkpointer.stats()["replicated_step"]
    place.write(name, figures)
    os.kill(os.getpid(), signal.SIGSTOP)  # until it is killed
