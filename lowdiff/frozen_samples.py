"""A few elements of every frozen parameter, which tell of writes that no version counter shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowdiff.layout import INT_OF_BYTES, flat, is_dense

#: Elements of each, at least, if it has so many: reading them in every step must cost little.
_NUM_ELEMENTS = 8
_INTEGERS = {1: torch.int8, **INT_OF_BYTES}


class FrozenSamples:
    """What a few elements of each frozen parameter were when it was last read whole.

    A target network or a momentum encoder that is written through ``.data`` changes everywhere, so
    these tell. A write to a part may pass between them.
    """

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self._seen: dict[str, torch.Tensor] = {}
        #: By device, names and what was seen of all of them: joining that costs as much as looking.
        self._joined: dict[torch.device, tuple[list[str], torch.Tensor]] = {}

    def note(self, name: str, parameter: torch.Tensor) -> None:
        """A parameter is being read whole."""
        self._live[name] = _sampled(parameter)
        self._seen[name] = self._live[name].clone()
        self._joined.clear()

    def have_moved(self, names: Iterable[str]) -> bool:
        """Whether any of these is not as it was noted; their memory must be where it was."""
        by_device: dict[torch.device, list[str]] = {}
        for name in names:
            by_device.setdefault(self._live[name].device, []).append(name)
        return any(
            not torch.equal(
                torch.cat([self._live[name] for name in own]), self._seen_of(own, device)
            )
            for device, own in by_device.items()
        )

    def _seen_of(self, names: list[str], device: torch.device) -> torch.Tensor:
        if device not in self._joined or self._joined[device][0] != names:
            self._joined[device] = names, torch.cat([self._seen[name] for name in names])
        return self._joined[device][1]


def _sampled(parameter: torch.Tensor) -> torch.Tensor:
    """Some of its elements, as integers of their bits; shares its memory."""
    # Where there are holes in its memory, only rows of it are known to be within.
    line = (
        flat(parameter) if is_dense(parameter) else parameter.detach()[(0,) * (parameter.dim() - 1)]
    )
    # An odd step, because rows are often a power of two long: else all would be of one column.
    picked = line[:: line.numel() // _NUM_ELEMENTS | 1]
    return picked.view(_INTEGERS[parameter.element_size()])
