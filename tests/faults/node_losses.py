"""Nodes of a training with copies are lost, with all their processes, their memory and their disk."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowdiff.core.placement import place
from tests.faults import node_rank
from tests.faults.kills import LATE
from tests.faults.node_rank import ALONE, REFUSED
from tests.faults.nodes import Network, Node, Rank, why_no_nodes
from tests.faults.outcome import Outcome

#: What happens in a round, in turn. All but the last two lose no replicated step.
KINDS = (
    "lost",
    "recovering",
    "lost",
    "stopped",
    "returns",
    "lost",
    "silent",
    "flipped",
    "group",
)
_MAY_LOSE = ("flipped", "group")
#: A life is longer only where nothing stops it.
_MOST_STEPS_PER_ROUND = 60
_STEPS_BEFORE = 12
_RANDOM_SECONDS = 0.2
_STOPPED_SECONDS = 2.0
_ATTACH_SECONDS = 3.0
_RESUME_SECONDS = 60.0
#: How long a launcher lets ranks go on when one has ended.
_LAUNCHER_SECONDS = 20.0
_LOOK_SECONDS = 0.005
_STEP_SECONDS = 0.02
_CODE = re.compile(r"\bLD\d{3}\b")
#: What is said where training goes on with the error feedback of another step, or with none.
_INEXACT = "not bit-identical"

Line = dict[str, Any]


class Trouble(Exception):
    """A training did what no round can go on from; the message says what."""


@dataclass
class LossCampaign:
    """A run whose nodes are lost again and again.

    Attributes:
        folder: Shared by all nodes, but for their disks.
        strategy: One of `node_rank.STRATEGIES`.
        size: Number of nodes, each with one rank.
        copies: Nodes whose memory holds a step.
        rounds: Number of losses.
        shares_disk: Whether all nodes have one run folder.
        kinds: What happens, in turn.
        engine: Of all lives; see `tests.crash.launch.survivor_lives.ENGINES`.
        floor: The newest step that some rank has said to be replicated, or durable on a shared disk.
    """

    folder: Path
    strategy: str
    size: int
    copies: int
    rounds: int
    shares_disk: bool
    kinds: Sequence[str]
    outcome: Outcome
    chance: random.Random
    engine: str = "host"
    floor: int = -1
    #: Newest step that each rank has said to be durable: the run has what all have.
    _durables: list[int] = field(default_factory=list)
    _made: int = 0
    _life: int = 0
    _run: int = 0
    _read: list[int] = field(default_factory=list)
    _printed: list[int] = field(default_factory=list)
    _ranks: list[Rank] = field(default_factory=list)
    _states: list[dict[int, str]] = field(default_factory=list)
    _own: list[dict[int, str]] = field(default_factory=list)
    #: Error feedback of an earlier step was taken, and that was said: the next round begins another run.
    _is_inexact: bool = False
    _said: str = ""
    _learns: bool = True

    def carry_out(self) -> None:
        """Live once without interruption, then lose nodes in every life but the last."""
        self.folder.mkdir(parents=True)
        self._read, self._printed = [0] * self.size, [0] * self.size
        self._states = [{} for _ in range(self.size)]
        self._own = [{} for _ in range(self.size)]
        self._forget_floor()
        with Network(self.folder) as self._network:
            self._nodes = [self._network.start() for _ in range(self.size)]
            self._live_whole()
            for number in range(self.rounds):
                kind = self.kinds[number % len(self.kinds)]
                self.outcome.rounds += 1
                if self._is_inexact:
                    self._anew()
                try:
                    self._begin()
                    getattr(self, f"_{kind}")()
                except Trouble as trouble:
                    self.outcome.lose(f"round {number}, {kind}: {trouble}")
                    self._anew()
            try:
                self._begin()
                self._end_all(kill=False, node_lives=True, patience=_RESUME_SECONDS + self._until)
            except Trouble as trouble:
                self.outcome.lose(f"the last life: {trouble}")

    # What happens.

    def _lost(self) -> None:
        """Lose as many nodes as may be lost; half of the time no other rank lives on."""
        victims = self.chance.sample(range(self.size), self.copies - 1)
        self._at_some_instant()
        self._lose(victims)
        self._come_back("lost")

    def _silent(self) -> None:
        """Lose a node whose connections nobody closes."""
        victim = self.chance.randrange(self.size)
        self._at_some_instant()
        self._network.unplug(self._nodes[victim])
        time.sleep(self.chance.random() * _RANDOM_SECONDS)
        self._lose([victim], kill=False)
        self._come_back("silent")

    def _recovering(self) -> None:
        """Lose a node, and another one, or the one that takes its place, while all recover."""
        first = self.chance.randrange(self.size)
        self._at_some_instant()
        self._lose([first])
        second = self.chance.choice([n for n in range(self.size) if self._survives({first, n})])
        self._start()
        time.sleep(self.chance.random() * _ATTACH_SECONDS)
        self._lose([second])
        self._come_back("recovering")

    def _stopped(self) -> None:
        """Stop a node for some seconds; then it goes on, and another one is lost."""
        victim = self.chance.randrange(self.size)
        self._at_some_instant()
        self._nodes[victim].send_signal(signal.SIGSTOP)
        time.sleep(_STOPPED_SECONDS)
        self._nodes[victim].send_signal(signal.SIGCONT)
        self._wait_for_steps(2)
        self._lose([self.chance.randrange(self.size)])
        self._come_back("stopped")

    def _returns(self) -> None:
        """Let a node come back with the memory of an incarnation that others have gone on from."""
        victim = self.chance.randrange(self.size)
        self._at_some_instant()
        old = self._nodes[victim]
        old.stop_all()
        self._nodes[victim] = self._network.start()
        self._end_all(kill=self._may_kill())
        self._come_back("away")
        self._at_some_instant()
        self._nodes[victim].kill()
        self._nodes[victim] = old
        self._end_all(kill=self._may_kill())
        self._come_back("returns")

    def _flipped(self) -> None:
        """Lose a node, and change a byte of what others keep for it."""
        victim = self.chance.randrange(self.size)
        self._at_some_instant()
        self._end_all(kill=True)
        for node in self._nodes:
            node.stop_all()
        self._lose([victim])
        kept = [path for node in self._nodes for path in _kept_for(node, victim)]
        if kept:
            path = self.chance.choice(kept)
            data = bytearray(path.read_bytes())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            with path.open("r+b") as file:
                file.write(data)
        self._come_back("flipped")

    def _group(self) -> None:
        """Lose all nodes that hold a node's steps."""
        victims = place(self.size, self.copies).holders[self.chance.randrange(self.size)]
        self._at_some_instant()
        self._lose(victims)
        self._come_back("group")

    # How.

    def _live_whole(self) -> None:
        """Note every state of an uninterrupted training."""
        until = _MOST_STEPS_PER_ROUND * (self.rounds + 1)
        self._until = until
        self._start(run=self.folder / "whole", until=until)
        self._end_all(kill=False, node_lives=True, patience=_RESUME_SECONDS + until)
        self._output()
        self._learns = False
        if self.strategy == "topk":  # what was not sent is lost with a node: each life is its own
            self._states = [{0: states[0]} for states in self._states]
        for number, node in enumerate(self._nodes):
            node.kill()
            self._nodes[number] = self._network.start()
        self._forget_floor()
        self._made = 0

    def _start(self, run: Path | None = None, until: int | None = None) -> None:
        """Start all ranks."""
        self._life += 1
        name = f"run-{self._run}"
        run = run or (self.folder if self.shares_disk else self._network.disk) / name
        store = self.folder / f"store-{self._life}"
        self._ranks = [
            node.start(
                node_rank.main,
                *[rank, self.size, store, self.folder, until or self._until, self.strategy, run],
                *["--copies", self.copies, "--engine", self.engine],
                # As long as a residual takes on its way; else some steps have none.
                *["--step-seconds", _STEP_SECONDS if self.strategy == "replicated" else 0],
                output=self.folder / f"output.{rank}",
            )
            for rank, node in enumerate(self._nodes)
        ]

    def _begin(self) -> None:
        """Start all ranks if they do not run."""
        if not self._ranks:
            self._start()
            self._resume("begins")

    def _come_back(self, kind: str) -> None:
        """Start all ranks, with fresh nodes for those that are lost."""
        self._start()
        self._resume(kind)

    def _resume(self, kind: str) -> None:
        """Wait until all ranks have resumed, and look where."""
        deadline = time.monotonic() + _RESUME_SECONDS
        resumed: dict[int, Line] = {}
        while len(resumed) < self.size:
            for rank, lines in enumerate(self._news(resumed_only=True)):
                for line in lines:
                    resumed[rank] = line
            ended = [rank for rank, process in enumerate(self._ranks) if process.poll() is not None]
            if len(resumed) < self.size and (ended or time.monotonic() > deadline):
                self._refused(kind, sorted(resumed))
                return
            time.sleep(_LOOK_SECONDS)
        steps = {line["step"] for line in resumed.values()}
        said = self._output()
        if len(steps) > 1:
            raise Trouble(f"the ranks resumed at different steps: {sorted(steps)}")
        (step,) = steps
        if self.strategy == "replicated" and _INEXACT in said:
            self.outcome.found["error feedback of an earlier step, and said"] += 1
        least = self.floor
        if kind in _MAY_LOSE:
            least = self._durable if kind == "group" and self.shares_disk else -1
        if step < least:
            raise Trouble(
                f"step {self.floor} was replicated, {self._durable} durable, and {step} came back: "
                f"{said[-1500:]}"
            )
        if step < self.floor:
            if not _CODE.search(said) and kind == "flipped":
                raise Trouble(f"{step} came back in place of {self.floor}, and nothing was said")
            self.outcome.found[f"{kind}: next tier"] += 1
            self._forget_floor()
        elif kind not in ("begins", "away"):
            # A body that was made was perhaps not committed.
            is_whole = step >= self._made - 1
            words = "nothing lost" if is_whole else "all that was replicated came back"
            self.outcome.found[f"{kind}: {words}"] += 1
        self._made = step

    def _refused(self, kind: str, resumed: Sequence[int]) -> None:
        """Look why a life did not begin."""
        said = self._output()
        codes = self._end_all(kill=False)
        if kind in _MAY_LOSE and not resumed and REFUSED in codes:
            self.outcome.found[f"{kind}: named error"] += 1
            self._anew()
            self._begin()
            return
        raise Trouble(f"ranks ended with {codes}, {list(resumed)} had resumed: {said[-2500:]}")

    def _anew(self) -> None:
        """Begin another run."""
        if self._ranks:
            self._end_all(kill=True)
        for number, node in enumerate(self._nodes):
            node.kill()
            self._nodes[number] = self._network.start()
        self._news()
        self._output()
        self._run += 1
        self._ranks = []
        self._forget_floor()
        self._made = 0
        self._is_inexact = False
        if self.strategy == "topk":
            self._states = [{0: states[0]} for states in self._states]

    def _at_some_instant(self) -> None:
        self._wait_for_steps(self.chance.randrange(1, _STEPS_BEFORE))
        time.sleep(self.chance.random() * _RANDOM_SECONDS)

    def _wait_for_steps(self, count: int) -> None:
        """Wait until all ranks have made some steps."""
        self._check(self._news())
        target, deadline = self._made + count, time.monotonic() + _RESUME_SECONDS
        while self._made < target:
            codes = [process.poll() for process in self._ranks]
            if any(code is not None for code in codes) or time.monotonic() > deadline:
                raise Trouble(f"the training ended or stood: {codes}: {self._output()[-1500:]}")
            time.sleep(_LOOK_SECONDS)
            self._check(self._news())

    def _lose(self, victims: Sequence[int], *, kill: bool | None = None) -> None:
        """Kill nodes, and end the others as a launcher does, or at once; put fresh ones in their place."""
        for number in victims:
            self._nodes[number].kill()
        self._end_all(kill=self._may_kill() if kill is None else kill)
        for number in victims:
            self._nodes[number] = self._network.start()

    def _may_kill(self) -> bool:
        """Whether the ranks that live are killed too, by chance."""
        return self.chance.random() < 0.5

    def _end_all(
        self, *, kill: bool, node_lives: bool = False, patience: float = _LAUNCHER_SECONDS
    ) -> list[int | None]:
        """Let all ranks end, and return their codes; those that do not are killed, sometimes with their writers.

        Args:
            kill: Kill them at once.
            node_lives: Whether nothing was lost, so that all end well.
            patience: How long they may take.
        """
        takes_writers = self.chance.random() < 0.5
        for rank, process in enumerate(self._ranks):
            if kill and takes_writers and self._nodes[rank].is_alive:
                self._nodes[rank].stop_all()
            elif kill:
                process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + patience
        for process in self._ranks:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.outcome.found["a rank had to be ended"] += 1
        codes = [process.code for process in self._ranks]
        self._listen()  # of a life that nobody saw resume
        self._check(self._news())
        self._ranks = []
        if node_lives and any(codes):
            raise Trouble(f"ranks ended with {codes}: {self._output()[-1500:]}")
        if any(code not in (0, 1, ALONE, REFUSED, -signal.SIGKILL) for code in codes):
            raise Trouble(f"ranks ended with {codes}: {self._output()[-1500:]}")
        return codes

    def _survives(self, lost: set[int]) -> bool:
        """Whether every node's steps are in memory once some nodes are lost."""
        holders = place(self.size, self.copies).holders
        return all(set(own) - lost for own in holders)

    # What they say.

    def _news(self, *, resumed_only: bool = False) -> list[list[Line]]:
        """Read what ranks have reported since this was asked; up to the resumption if only that is of use."""
        return [list(self._new_lines(rank, resumed_only)) for rank in range(self.size)]

    def _new_lines(self, rank: int, resumed_only: bool) -> Iterator[Line]:
        path = self.folder / f"report.{rank}"
        if not path.exists():
            return
        with path.open() as file:
            file.seek(self._read[rank])
            lines = file.read().split("\n")[:-1]
        for text in lines:
            line = json.loads(text)
            if resumed_only and line["word"] != "resumed":
                return
            self._read[rank] += len(text) + 1
            yield line
            if resumed_only:
                self._check_line(rank, line)
                return

    def _check(self, news: Sequence[Sequence[Line]]) -> None:
        """Compare every state, and note how far all are."""
        for rank, lines in enumerate(news):
            for line in lines:
                self._check_line(rank, line)

    def _check_line(self, rank: int, line: Line) -> None:
        step, states = line["step"], self._states[rank]
        own = self._own[rank]
        if self.strategy == "topk" and line["word"] == "resumed":
            for known in (states, own):
                for later in [number for number in known if number > step]:
                    del known[later]
        if self._learns or self.strategy == "topk":
            states.setdefault(step, line["state"])
            if line["word"] == "made":
                own.setdefault(step, line["own"])
        if line["state"] != states.get(step) and not self._is_inexact:
            self.outcome.lose(f"rank {rank} {line['word']} step {step} with other bits")
        if line["word"] == "made" and line["own"] != own.get(step):
            self.outcome.lose(f"rank {rank} made step {step} with other generators or buffers")
        self._made = max(self._made, step)
        if self.shares_disk:
            self._durables[rank] = max(self._durables[rank], line["durable"])
        self.floor = max(self.floor, line["replicated"], self._durable)

    @property
    def _durable(self) -> int:
        return min(self._durables)

    def _forget_floor(self) -> None:
        self.floor, self._durables = -1, [-1] * self.size

    def _output(self) -> str:
        """All that ranks have printed since this was asked."""
        self._listen()
        said, self._said = self._said, ""
        return said

    def _listen(self) -> None:
        """Read what ranks have printed; a rank tells of generators before it reports steps that used them."""
        for rank in range(self.size):
            path = self.folder / f"output.{rank}"
            text = path.read_text() if path.exists() else ""
            self._said += text[self._printed[rank] :]
            self._printed[rank] = len(text)
        self._is_inexact |= self.strategy == "replicated" and _INEXACT in self._said


def _kept_for(node: Node, rank: int) -> list[Path]:
    """Images and chunks that a node keeps of a rank on another one."""
    folders = (node.root / "dev/shm").rglob(f"i*-r{rank:04d}-k*")
    files = [path for folder in folders for path in folder.iterdir()]
    found = [p for p in files if p.suffix == ".chunk" or re.fullmatch(r"copy-\d", p.name)]
    return [path for path in found if path.stat().st_size]


def node_losses(
    folder: Path,
    rounds: int,
    *,
    strategy: str,
    size: int,
    copies: int = 2,
    shares_disk: bool = False,
    kinds: Sequence[str] = KINDS,
    engine: str = "host",
    seed: int = 0,
) -> Outcome:
    """Lose nodes of a run ``rounds`` times."""
    disk = ", one disk for all" if shares_disk else ""
    late = LATE * (engine == "late")
    outcome = Outcome(f"{strategy}: nodes of {size} are lost, {copies} copies{disk}{late}", seed)
    outcome.not_run = why_no_nodes()
    if outcome.not_run:
        return outcome
    target = folder / f"{strategy}-{size}-{copies}-{int(shares_disk)}-{engine}"
    chance = random.Random(f"{seed} {target.name}")
    campaign = LossCampaign(
        target, strategy, size, copies, rounds, shares_disk, kinds, outcome, chance, engine
    )
    with outcome.timed():
        campaign.carry_out()
    return outcome
