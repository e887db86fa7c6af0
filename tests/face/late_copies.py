"""An accelerator at its worst, without one: every copy is made at the last moment it may be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowdiff.host_copy import HostCopies


class LateCopies(HostCopies):
    """Host memory holds rubbish until `hold` or `wait`, which copy what the source holds by then."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def lag(self) -> bool:
        return True

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(tensor.detach())
        host.view(torch.uint8 if host.dim() else host.dtype).fill_(77)
        self._pairs.append((host, tensor.detach()))
        return host

    def fetch_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.fetch(tensor.detach().clone())

    def then(self, action: Callable[[], None]) -> None:
        self._waiting.append(action)

    def hold(self) -> None:
        for host, source in self._pairs:
            host.copy_(source)
        self._pairs.clear()

    def wait(self) -> None:
        self.hold()
