"""Copies from an accelerator into host memory that are under way, and what waits for them.

Training does not wait for them: they run on a stream of their own, into pinned memory, and are read
when the next step is committed. Only what overwrites their source waits, and that on the device. On
the CPU nothing is copied, and what would wait happens at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


def fetch_now(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, shared if it is there already; an accelerator's is waited for."""
    return tensor.detach().cpu()


class HostCopies:
    """The copies of one training thread; not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """Copy from ``device``, on which the training runs."""
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        #: The stream on which an optimizer stepped last.
        self._stepping: torch.Stream | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        #: Sources of copies under way: the allocator must not hand their memory out again.
        self._sources: list[torch.Tensor] = []

    @property
    def lag(self) -> bool:
        """Whether what is read after a step is at hand only when the next one is committed."""
        return self._stream is not None

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor that nothing overwrites before `hold`.

        Returns:
            Same shape and dtype, on the CPU: itself on a CPU, else pinned memory whose content
            counts only in what was given to `then` afterwards.
        """
        source = tensor.detach()
        if self._stream is None:
            return source
        if source.is_cpu:
            return source.clone()
        if source.device != self._device:  # a frozen part, say; no stream of ours knows of it
            return source.cpu()
        self.follow()
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        training = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(training)
        # Setting a stream selects its device as well; the caller may have selected another.
        devices = torch.get_device_module(self._device)
        selected = devices.current_device()
        torch.accelerator.set_stream(self._stream)
        try:
            host.copy_(source, non_blocking=True)
        finally:
            torch.accelerator.set_stream(training)
            devices.set_device(selected)
        self._sources.append(source)
        return host

    def fetch_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """`fetch` of a tensor that the next forward pass may overwrite."""
        if self._stream is None:
            return self.fetch(tensor)
        self.follow()
        copy = tensor.detach().clone()
        current = torch.accelerator.current_stream(self._device)
        if self._stepping is not None and self._stepping != current:
            self._stepping.wait_stream(current)
        return self.fetch(copy)

    def follow(self) -> None:
        """Let what is queued from here on come after what the last optimizer did.

        A loop body may run on a stream of the user's, and its commit on another.
        """
        if self._stepping is not None:
            current = torch.accelerator.current_stream(self._device)
            if current != self._stepping:
                current.wait_stream(self._stepping)

    def then(self, action: Callable[[], None]) -> None:
        """Run an action once all that was fetched is there, after those given before."""
        if self._stream is None:
            action()
        else:
            self._waiting.append(action)

    def hold(self) -> None:
        """Let the device do nothing more for training until it has read what is being copied.

        Called where an optimizer is about to step.
        """
        if self._stream is not None:
            self._stepping = torch.accelerator.current_stream(self._device)
            if self._sources:
                self._stepping.wait_stream(self._stream)

    def wait(self) -> None:
        """Wait for the copies, on the host."""
        if self._stream is not None and self._sources:
            self._stream.synchronize()
            self._sources.clear()

    def finish(self) -> None:
        """Wait for the copies, on the host, and run what waits for them.

        An action that raises stays, to be run again by the next call.
        """
        self.wait()
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()
