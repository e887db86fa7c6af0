"""Gradients that a body without an optimizer step leaves: does the next one use them?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle


class KeptGradients:
    """Looks at gradients that were left, once a body would add to them or step with them.

    A loop that clears them first, also in place and as late as between forward and backward pass,
    uses none of them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._waiting: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._report: Callable[[], None] = lambda: None

    def watch(self, kept: Iterable[int], report: Callable[[], None]) -> None:
        """Call ``report`` when one of the kept gradients is used; replaces what was watched before.

        Args:
            kept: Indices of parameters that hold a gradient now.
            report: Called at most once per parameter, by the thread that runs backward or the step.
        """
        self.forget()
        self._report = report
        for index in kept:
            # Autograd calls it before it adds to the parameter's gradient.
            handle = self._parameters[index].register_hook(lambda _, i=index: self._look(i))
            self._handles.append(handle)
            self._waiting.add(index)

    def before_step(self, owned: Iterable[int]) -> None:
        """Look at those that no backward pass has reached; their optimizer is about to step."""
        for index in owned:
            self._look(index)
        self.forget()

    def forget(self) -> None:
        """Watch nothing more, and take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()
        self._report = lambda: None

    def _look(self, index: int) -> None:
        """The first look counts: what comes later is of the body's own backward passes."""
        if index in self._waiting:
            self._waiting.discard(index)
            gradient = self._parameters[index].grad
            if gradient is not None and bool(gradient.any()):
                self._report()
