"""The hooks in the user's optimizers: where a step is heard of, before and after it happens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from lowdiff.errors import UsageError

#: What compiles the functions that are called next, if a compiled one called the present one. PyTorch
#: 2.6 does not tell.
_compiling_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


class Steps(Protocol):
    """A recorder of the steps of optimizers."""

    def before_optimizer(self, index: int, arguments: Sequence[Any]) -> None:
        """Read what an optimizer is about to consume."""
        ...

    def after_optimizer(self, index: int) -> None:
        """Look at what it has just updated."""
        ...


class OptimizerHooks:
    """Hooks of one session in its optimizers.

    Attributes:
        pre_hook_ids: Optimizer -> id of our pre-hook, behind which no other may come.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], steps: Steps) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.pre_hook_ids: list[int] = []
        for index, optimizer in enumerate(optimizers):
            before = optimizer.register_step_pre_hook(partial(_before, steps, index))
            self.pre_hook_ids.append(before.id)
            after = optimizer.register_step_post_hook(partial(_after, steps, index))
            # First of all: what the user's hooks write, replay lacks, so it must not count as the
            # optimizer's own work.
            hooks = optimizer._optimizer_step_post_hooks
            assert isinstance(hooks, OrderedDict)
            hooks.move_to_end(after.id, last=False)
            self._handles += [before, after]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _before(
    steps: Steps,
    index: int,
    _: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    # torch.compile goes on without compiling what raises while it is traced, but it still
    # compiles what that calls: the update itself, and any function that is called here.
    if torch.compiler.is_compiling() or _compiling_callback() not in (None, False):
        raise UsageError(
            "optimizer.step() runs inside torch.compile, whose arithmetic replay does not "
            "repeat; compile the model alone, or mark the function that calls "
            "optimizer.step() with torch.compiler.disable"
        )
    steps.before_optimizer(index, [*args, *kwargs.values()])


def _after(steps: Steps, index: int, *_: object) -> None:
    steps.after_optimizer(index)
