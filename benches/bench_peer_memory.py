"""What copies in other nodes' memory cost, beside sending the whole state as Gemini does.

    python -m benches.bench_peer_memory --out DIR [--smoke]

The nodes are namespaces of this machine, each with a network interface, memory and a disk of its own.

Counted is what the interfaces of four nodes send in some steps, with copies on two nodes and without,
with the log of steps (TopK 1 %) and with a replica; the difference is what copies send. The baseline sends each
rank's share of parameters and optimizer state to the other node at every step (Wang et al., SOSP 2023), by
the same sender over the same kind of group.

Timed are steps of two ranks on two nodes, with two copies beside one, in ABBA pairs, less what the
same method finds between two trainings with one copy.

Then one of four nodes is lost and a fresh one takes its place: how long the files of others take to come to
it in ``attach``, over a plain copy of the same bytes through a TCP connection of the loopback.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benches import ending
from benches import peer_memory_life as life
from benches.gpt import GPT
from benches.harness import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    RED,
    Result,
    arguments,
    dots,
    excess,
    machine,
    overhead,
    write,
)
from tests.faults.nodes import Network, Rank

TARGETS = {
    "bytes_sent_per_step_over_gemini": 0.01,
    "overhead_over_one_copy_upper95": 0.02,
    "retrieval_over_copy": 1.5,
}
NODES, COPIES = 4, 2
_STRATEGIES = tuple(life.STRATEGIES)
_ARMS = ("log", "replica", "gemini")
_PATIENCE_SECONDS = 600.0
_LOOK_SECONDS = 0.01
_PIECE_BYTES = 1 << 20
_COPIES_TIMED = 3
#: Steps with a log that are timed together.
_BLOCK = 3


class Nodes:
    """Nodes that run one training after the other.

    Args:
        folder: Shared by all of them.
        count: How many.
        smoke: Whether the model is tiny.
    """

    def __init__(self, network: Network, folder: Path, count: int, *, smoke: bool) -> None:
        self._network, self._folder, self._smoke = network, folder, smoke
        self._nodes = [network.start() for _ in range(count)]

    def start(self, main: Callable[..., None], *words: object) -> list[Rank]:
        """Start all ranks."""
        size = len(self._nodes)
        where = self._folder, self._network.disk, self._smoke
        return [
            node.start(main, *words, rank, size, *where, output=self._output(rank))
            for rank, node in enumerate(self._nodes)
        ]

    def finished(self, name: str, ranks: Sequence[Rank]) -> list[Any]:
        """Wait until all ranks have left their figures; return them."""
        paths = [self._folder / f"{name}.{rank}" for rank in range(len(ranks))]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not all(path.exists() for path in paths):
            assert all(rank.poll() in (None, 0) for rank in ranks), self._printed()
            assert time.monotonic() < deadline, self._printed()
            time.sleep(_LOOK_SECONDS)
        return [json.loads(path.read_text()) for path in paths]

    def run(self, name: str, main: Callable[..., None], *words: object) -> list[Any]:
        """Run a training to its end; the figures of all ranks."""
        ranks = self.start(main, *words)
        figures = self.finished(name, ranks)
        for rank in ranks:
            assert rank.wait() == 0, self._printed()
        return figures

    def lose(self, number: int) -> None:
        """Kill a node, and all ranks; a fresh node takes its place."""
        self._nodes[number].kill()
        for node in self._nodes:
            if node.is_alive:
                node.stop_all()
        self._nodes[number] = self._network.start()

    def _output(self, rank: int) -> Path:
        return self._folder / f"output.{rank}"

    def _printed(self) -> str:
        return "".join(p.read_text()[-3000:] for p in sorted(self._folder.glob("output.*")))


def count_traffic(nodes: Nodes, args: argparse.Namespace) -> dict[str, list[list[Any]]]:
    """What each arm's ranks say, in turn; by arm and number of copies."""
    arms = [(arm, copies) for arm in _STRATEGIES for copies in (1, COPIES)] + [("gemini", COPIES)]
    found: dict[str, list[list[Any]]] = {f"{arm}-{copies}": [] for arm, copies in arms}
    for arm, copies in arms:
        name = f"{arm}-{copies}"
        found[name].append(nodes.run(name, life.traffic, arm, copies, args.steps))
        print(f"{name:<10} {_per_step(found[name]):>14,.0f} bytes per step", flush=True)
    return found


def _per_step(runs: Sequence[Sequence[Any]]) -> float:
    """Bytes that all nodes send in a step."""
    sums = [sum(float(rank["bytes_per_step"]) for rank in ranks) for ranks in runs]
    return statistics.median(sums)


def lose_nodes(nodes: Nodes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Lose a node again and again; what the fresh one says of what it got, with a plain copy's time."""
    found = []
    before: list[Any] = []
    for number in range(args.losses + 1):
        ranks = nodes.start(life.attached, number, args.steps // 2)
        figures = nodes.finished(f"attached-{number}", ranks)
        lost = number % NODES
        if number:
            own = figures[(number - 1) % NODES]
            step = str(own["step"])
            assert len({rank["step"] for rank in figures}) == 1
            assert own["step"] >= min(rank["replicated_step"] for rank in before)
            for old, new in zip(before, figures, strict=True):
                assert old["made"][step] == new["checksum"], f"other bits at step {step}"
            sizes = [[s for r in rank["retrievals"] for s in r["sizes"]] for rank in figures]
            mine = sizes[(number - 1) % NODES]
            found.append(
                {
                    "seconds": sum(r["seconds"] for r in own["retrievals"]),
                    "bytes": sum(mine),
                    "bytes_of_all": sum(map(sum, sizes)),
                    "copy_seconds": [loopback_seconds(sizes) for _ in range(_COPIES_TIMED)],
                    "copy_seconds_of_one": [loopback_seconds([mine]) for _ in range(_COPIES_TIMED)],
                    "attach_seconds": own["attach_seconds"],
                }
            )
            print(f"lost node {lost}: {json.dumps(found[-1])}", flush=True)
        before = figures
        nodes.lose(lost)
    return found


def loopback_seconds(sizes: Sequence[Sequence[int]]) -> float:
    """Time plain copies of files through TCP connections of the loopback, from memory to files.

    Args:
        sizes: Of the files of each connection; all of them copy at the same time.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lowdiff-", dir="/dev/shm") as source,
        tempfile.TemporaryDirectory(prefix="lowdiff-") as target,
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(2 * len(sizes)) as pool,
    ):
        names = [[f"{line}-{i}" for i in range(len(own))] for line, own in enumerate(sizes)]
        for own_names, own in zip(names, sizes, strict=True):
            for name, size in zip(own_names, own, strict=True):
                (Path(source) / name).write_bytes(bytes(size))
        ends = []
        for _ in sizes:
            client = socket.create_connection(server.getsockname())
            ends.append((client, server.accept()[0]))

        def send(line: socket.socket, own: Sequence[str]) -> None:
            with line:
                for name in own:
                    with (Path(source) / name).open("rb") as file:
                        line.sendfile(file)

        def receive(line: socket.socket, own: Sequence[str], lengths: Sequence[int]) -> None:
            with line:
                for name, left in zip(own, lengths, strict=True):
                    with (Path(target) / name).open("wb") as file:
                        while left:
                            piece = line.recv(min(left, _PIECE_BYTES))
                            assert piece
                            left -= file.write(piece)

        began = time.perf_counter()
        under_way = [
            task
            for (client, accepted), own, lengths in zip(ends, names, sizes, strict=True)
            for task in (
                pool.submit(send, client, own),
                pool.submit(receive, accepted, own, lengths),
            )
        ]
        for task in under_way:
            task.result()
        return time.perf_counter() - began


def measure(args: argparse.Namespace, folder: Path) -> Result:
    """Count what is sent, then time steps, then lose nodes."""
    facts = machine()
    with Network(folder) as network:
        make = partial(Nodes, network, folder, smoke=args.smoke)
        sent = count_traffic(make(NODES), args)
        pair = make(2)
        compared = {
            "log": pair.run("compared-log", life.compared, "log", args.pairs, _BLOCK)[0],
            "replica": pair.run(
                "compared-replica", life.compared, "replica", max(2, args.pairs // 5), 2
            )[0],
        }
        losses = lose_nodes(make(NODES), args)
    extra = {
        arm: _per_step(sent[f"{arm}-{COPIES}"])
        - _per_step(sent[f"{'log' if arm == 'gemini' else arm}-1"])
        for arm in _ARMS
    }
    for arm in _STRATEGIES:  # copies change nothing that is trained
        sums = {
            rank["checksum"]
            for copies in (1, COPIES)
            for run in sent[f"{arm}-{copies}"]
            for rank in run
        }
        assert len(sums) == 1, f"{arm}: other bits with copies"
    messages = {
        arm: sum(rank["messages_bytes_per_step"] for rank in sent[f"{arm}-{COPIES}"][0])
        for arm in _STRATEGIES
    }
    cost = {
        arm: overhead(found["pairs"], found["null"], seed=args.seed)
        for arm, found in compared.items()
    }
    share_bytes = sum(rank["share_bytes"] for rank in sent[f"gemini-{COPIES}"][0])

    def over_copy(key: str) -> float:
        ratios = [loss["seconds"] / statistics.median(loss[key]) for loss in losses]
        return float(statistics.median(ratios))

    config = life.SMOKE_MODEL if args.smoke else life.MODEL
    return Result(
        name="peer_memory",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": sum(parameter.numel() for parameter in GPT(config).parameters()),
            "nodes": NODES,
            "copies": COPIES,
        },
        seed=args.seed,
        machine=facts,
        samples={"sent": sent, "compared": compared, "losses": losses},
        summary={
            "bytes_sent_per_step_over_gemini": max(extra[arm] for arm in _STRATEGIES)
            / extra["gemini"],
            **{f"bytes_sent_per_step_{arm}": value for arm, value in extra.items()},
            **{f"messages_bytes_per_step_{arm}": value for arm, value in messages.items()},
            "messages_over_gemini": max(messages.values()) / share_bytes,
            "state_bytes_per_step_gemini": share_bytes,
            "overhead_over_one_copy_upper95": cost["log"].upper95,
            "overhead_over_one_copy_median": cost["log"].median,
            "overhead_replica": cost["replica"].median,
            "overhead_replica_upper95": cost["replica"].upper95,
            "overheads": {arm: asdict(value) for arm, value in cost.items()},
            "retrieval_over_copy": over_copy("copy_seconds"),
            "retrieval_over_copy_of_one": over_copy("copy_seconds_of_one"),
            "retrieval_bytes": statistics.median(loss["bytes"] for loss in losses),
            "retrieval_seconds": statistics.median(loss["seconds"] for loss in losses),
            "bit_identical": True,  # asserted above
        },
    )


def draw_bytes(axes: Axes, result: Result) -> None:
    """Bytes per step of the three ways."""
    for height, (arm, colour) in enumerate(zip(reversed(_ARMS), (RED, GREEN, BLUE), strict=True)):
        value = max(1.0, result.summary[f"bytes_sent_per_step_{arm}"])
        axes.barh(height, value, height=0.55, color=colour)
        axes.text(value, height, f" {value:,.0f}", va="center", color=INK, fontsize=9)
    axes.set_xscale("log")
    axes.set_yticks(range(len(_ARMS)), list(reversed(_ARMS)))
    axes.set_xlabel("bytes per step, all nodes", color=INK)
    axes.margins(x=0.3)
    axes.set_title("Sent for a second copy", loc="left", color=INK, fontweight="bold")


def draw_overhead(axes: Axes, result: Result) -> None:
    """Every pair."""
    rows = [(arm, kind) for arm in _STRATEGIES for kind in ("pairs", "null")]
    for height, (arm, kind) in enumerate(reversed(rows)):
        pairs = [(a, b) for a, b in result.samples["compared"][arm][kind]]
        dots(
            axes,
            height,
            [100 * value for value in excess(pairs)],
            BLUE if kind == "pairs" else MUTED,
        )
    labels = {"pairs": "two copies", "null": "one, again"}
    axes.set_yticks(range(len(rows)), [f"{arm}, {labels[kind]}" for arm, kind in reversed(rows)])
    axes.set_xlabel("% of a step over one copy", color=INK)
    axes.set_title("Time of a second copy", loc="left", color=INK, fontweight="bold")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="steps whose bytes are counted")
    parser.add_argument("--pairs", type=int, default=50, help="pairs of blocks of steps with a log")
    parser.add_argument("--losses", type=int, default=3, help="nodes that are lost")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.pairs, args.losses = 4, 4, 1
    with tempfile.TemporaryDirectory(prefix="lowdiff-nodes-") as folder:
        result = measure(args, Path(folder))
    write(result, args.out, draw_bytes, draw_overhead)
    for key, target in TARGETS.items():
        verdict = "met" if result.summary[key] <= target else "MISSED"
        print(f"{key} {result.summary[key]:.4f}, target {target}: {verdict}")


if __name__ == "__main__":
    ending.run(main)
