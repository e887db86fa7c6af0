"""A small training in this process, for tests of the face."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.protocols import Compressor, Reducer

PATIENCE_SECONDS = 20.0


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what another process does; fails if it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_until_lost(checkpointer: lowdiff.Checkpointer) -> None:
    """Wait until a trainer's lease has found that another took the run over, which takes it seconds."""
    lock = testing.parts_of(checkpointer).lock
    wait_until(lambda: lock.is_lost(look=True))


def close_after_error(checkpointer: lowdiff.Checkpointer) -> None:
    """Close it as an exception of the training does."""
    with suppress(ZeroDivisionError), checkpointer:
        raise ZeroDivisionError


def fail_once(
    patch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException, *, call: int = 1
) -> list[object]:
    """Have one call of a method raise, counted from 1; returns the list of calls, which grows."""
    method, calls = getattr(owner, name), list[object]()

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == call:
            raise error
        return method(*given)

    patch.setattr(owner, name, failing)
    return calls


@contextmanager
def bound_reducers(kind: type[Compressor]) -> Iterator[list[Any]]:
    """What compressors of a kind bind meanwhile, oldest first."""
    reducers: list[Any] = []
    bind = kind.bind

    def bound(self: Compressor, *arguments: Any) -> Reducer:
        reducer = bind(self, *arguments)
        reducers.append(reducer)
        return reducer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "bind", bound)
        yield reducers


def small_model() -> nn.Module:
    """A model with a little of everything."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 3))


@dataclass
class Loop:
    """A model, its optimizer and where its run lives."""

    folder: Path
    model: nn.Module = field(default_factory=small_model)
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = self.make(self.model.parameters())
        self.checkpointer = lowdiff.Checkpointer(
            self.folder / "run",
            **{
                "staging": self.folder / "staging",
                "compressor": TopK(0.1),
                "snapshot_every": 5,
                "retention": None,
                **self.settings,
            },
        )

    def attach(self, **options: Any) -> int:
        """Attach model and optimizer."""
        return self.checkpointer.attach(self.model, self.optimizer, **options)

    def step(self, number: int) -> torch.Tensor:
        """Forward, backward, optimizer step."""
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        loss: torch.Tensor = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def scaled_step(
        self, number: int, scaler: torch.amp.GradScaler, *, overflows: bool = False
    ) -> None:
        """`step` under a gradient scaler, with gradients that it skips if they overflow."""
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        loss = self.model(inputs).square().mean() * (float("inf") if overflows else 1.0)
        self.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()

    def run(self, until: int, **options: Any) -> int:
        """Attach, train, close; returns where it resumed."""
        resumed = self.attach(**options)
        for number in self.checkpointer.steps(until):
            self.step(number)
        self.checkpointer.close()
        return resumed

    def settle(self) -> None:
        """Have every step staged that has ended, as it is soon where nothing comes from an accelerator."""
        testing.wait_until(self.checkpointer, lambda stats: not stats["pending_steps"])

    def die(self) -> None:
        """End as SIGKILL would."""
        testing.kill(self.checkpointer)

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the model's state."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@contextmanager
def as_late() -> Iterator[None]:
    """Inside, what a scaler says is read as from an accelerator."""
    unread = SimpleNamespace(may_look=lambda _: False)
    with ExitStack() as patched:
        patched.enter_context(testing.whole_buckets())
        for module in ("gradients", "verdict"):
            patched.enter_context(mock.patch(f"lowdiff.step.{module}.devices", unread))
        yield
