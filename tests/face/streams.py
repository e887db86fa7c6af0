"""Streams of a device that does nothing before it must: what is not waited for comes last."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class Stream:
    """Work in order; nothing of it is done before something waits for it."""

    def __init__(self, _: object = None) -> None:
        self._work: list[Callable[[], None]] = []
        self._done = 0

    def do(self, work: Callable[[], None]) -> None:
        """Queue some work."""
        self._work.append(work)

    def wait_stream(self, other: Stream) -> None:
        """Go on only after what is queued there by now."""
        until = len(other._work)
        self.do(lambda: other._run(until))

    def synchronize(self) -> None:
        """Do all that is queued here, and what that waits for."""
        self._run(len(self._work))

    def _run(self, until: int) -> None:
        while self._done < until:
            self._done += 1
            self._work[self._done - 1]()


class Device:
    """Stands for ``torch`` in a module: has a current stream, and tensors that its work changes."""

    def __init__(self) -> None:
        self.current = Stream()
        self.Stream = Stream
        self.accelerator = SimpleNamespace(
            current_stream=lambda _: self.current, set_stream=self._set_stream
        )

    def _set_stream(self, stream: Stream) -> None:
        self.current = stream

    def get_device_module(self, _: object) -> Any:
        """The part that knows which device is selected: always the same."""
        return SimpleNamespace(current_device=lambda: 0, set_device=lambda _: None)

    def empty_like(self, _: object, **__: object) -> Tensor:
        """Memory that holds nothing yet."""
        return Tensor(self, 0)


class Tensor:
    """One number on a `Device`."""

    is_cpu = False

    def __init__(self, torch_: Device, value: int) -> None:
        self._torch, self.value = torch_, value
        self.device = torch.device("cuda")

    def detach(self) -> Tensor:
        """Itself."""
        return self

    def fill_(self, value: int) -> None:
        """Queue a change."""
        self._torch.current.do(lambda: setattr(self, "value", value))

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        """Queue a copy."""
        assert non_blocking
        self._torch.current.do(lambda: setattr(self, "value", source.value))

    def clone(self) -> Tensor:
        """Queue a copy into new memory."""
        made = Tensor(self._torch, 0)
        made.copy_(self, non_blocking=True)
        return made
