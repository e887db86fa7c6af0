"""Learning-rate schedulers of attached optimizers that are not attached themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lowdiff.core.events import Code

#: PyTorch's schedulers mark the ``step`` of the optimizer that they are made for.
_MARK = "_wrapped_by_lr_sched"
#: How deep an attached object may hold its schedulers: a trainer, a dict of its lists of them.
_DEEPEST = 4
#: Longer lists and dicts are data: looking through them takes long, and finds no scheduler.
_MOST_PARTS = 1000


def warn_of_schedulers_left_out(
    optimizers: Sequence[torch.optim.Optimizer], objects: Iterable[object], rank: int
) -> None:
    """Warn of an optimizer with a scheduler if no attached object holds a scheduler of it.

    Args:
        optimizers: The attached optimizers.
        objects: What else is attached.
        rank: This rank.
    """
    marked = [optimizer for optimizer in optimizers if hasattr(optimizer.step, _MARK)]
    if not marked:
        return
    held = [scheduler.optimizer for scheduler in _schedulers_in(objects)]
    missing = [optimizer for optimizer in marked if not any(optimizer is its for its in held)]
    for optimizer in missing:
        # The mark outlives its scheduler, and an optimizer does not know its schedulers.
        living = [kind.__name__ for kind in _kinds_of_living(optimizer)]
        if living:
            Code.SCHEDULER_NOT_ATTACHED.warn(
                f"{' and '.join(living)} of the attached {type(optimizer).__name__} is not attached, "
                "so once it steps, a resumed run has the rates of a new run; attach it by name: "
                "attach(model, optimizer, scheduler=scheduler)",
                rank=rank,
            )


def _schedulers_in(objects: Iterable[object]) -> Iterator[LRScheduler]:
    """Find schedulers in objects, in their attributes, and in lists and dicts of those."""
    seen: set[int] = set()
    level: list[object] = list(objects)
    for _ in range(_DEEPEST):
        below: list[object] = []
        for thing in level:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if issubclass(type(thing), LRScheduler) and hasattr(thing, "optimizer"):
                yield thing  # type: ignore[misc]
            else:
                below += _parts(thing)
        level = below


def _parts(thing: Any) -> Iterable[object]:
    if isinstance(thing, list | tuple | dict):
        if len(thing) > _MOST_PARTS:
            return ()
        return thing.values() if isinstance(thing, dict) else thing
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    found = [getattr(thing, name, None) for name in slots if isinstance(name, str)]
    return [*getattr(thing, "__dict__", {}).values(), *found]


def _kinds_of_living(optimizer: torch.optim.Optimizer) -> list[type[LRScheduler]]:
    """Return the classes of an optimizer's schedulers that somebody holds; takes a tenth of a second."""
    gc.collect()  # else one in a cycle that nobody holds would be named
    schedulers: list[Any] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)
    ]
    kinds = [type(s) for s in schedulers if getattr(s, "optimizer", None) is optimizer]
    return sorted(set(kinds), key=lambda kind: kind.__name__)
