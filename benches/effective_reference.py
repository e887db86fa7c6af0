"""A training without checkpoints that takes turns with another, so that both meet the same speed of the machine.

A machine's speed moves within minutes, by more than checkpoints cost. So a step without them is timed many times
within a life, while the life's processes are stopped; such a turn is not in the life's time.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from typing_extensions import Self

from benches.effective_life import Plan, Training, join, new_store, processes
from benches.survivors_life import WORLD_SIZE

#: Steps of a turn that do not count: caches hold another training's data, and gradients' memory is cold.
_WARM_UP = 2
#: Steps before the first turn.
_FIRST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """Time in which a life stood still.

    Attributes:
        began: Seconds since 1970.
        ended: The same.
        step_seconds: What a step without checkpoints took.
    """

    began: float
    ended: float
    step_seconds: float

    def stood(self, when: float) -> float:
        """How much of this turn was before a moment."""
        return min(max(0.0, when - self.began), self.ended - self.began)


class Reference:
    """Ranks that make steps when they are told; a context manager that leaves no process behind."""

    def __init__(self, plan: Plan) -> None:
        context, self._store = processes(), new_store()
        self._pipes: list[Connection] = []
        self._ranks: list[BaseProcess] = []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            told = plan, rank, self._store.port, theirs
            process = context.Process(target=_serve, args=told, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._pipes.append(ours)
            self._ranks.append(process)
        self.step_seconds(_FIRST_STEPS)  # they are ready, and their memory is there

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
            process.join()

    def step_seconds(self, steps: int) -> float:
        """Mean time of that many steps; a few are made before them."""
        for pipe in self._pipes:
            pipe.send(steps)
        return statistics.mean(float(pipe.recv()) for pipe in self._pipes)


def _serve(plan: Plan, rank: int, port: int, orders: Connection) -> None:
    torch.set_num_threads(1)
    join(port, "reference", rank)
    training = Training(plan, rank)
    number = 0
    try:
        while True:
            steps = orders.recv()
            for made in range(_WARM_UP + steps):
                if made == _WARM_UP:
                    begun = time.monotonic()
                training.step(number)
                number += 1
            orders.send((time.monotonic() - begun) / steps)
    except EOFError:
        os._exit(0)  # nobody asks any more, and Gloo's threads may never end
