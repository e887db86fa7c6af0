"""What a training loop carries from one step to the next, beside model, optimizers and objects."""

from __future__ import annotations

from typing import Any


class LoopState(dict[str, Any]):
    """A dict that is logged in every step that changes it, and restored by ``attach``.

    Values are tensors, numbers, strings, None, and lists, tuples and dicts of them. Each rank has its
    own. Tensors come back on the CPU.
    """

    def state_dict(self) -> dict[str, Any]:
        """What it holds."""
        return dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold this instead."""
        self.clear()
        self.update(state_dict)
