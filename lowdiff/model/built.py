"""What a script builds: settings of its optimizers and attached objects, read without asking any object for its state.

A resumed run takes back what its history holds. Where the script was edited in between, another rate or another
length of the schedule, what it builds is dropped. So a fence records what was built, and the next start compares:
two starts of one script build the same, however far the run had come.

A setting is what a constructor takes: counters and times that an object begins with are none. What an object does not
store in its own state does not go to disk for this, either.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from crc32c import crc32c
from torch.optim.lr_scheduler import LRScheduler

from lowdiff.model.binding import hyper_parameters
from lowdiff.model.items import Stateful

#: Longer lists and dicts are data.
_MOST_PARTS = 64
_MOST_CHARACTERS = 80
#: Where schedulers keep those that they consist of.
_PARTS = "_schedulers"
#: What schedulers count.
_COUNTERS = frozenset({"last_epoch"})
#: What was attached in this process before: by now it holds what training made of it. By identity.
_used: dict[int, weakref.ref[Any]] = {}


def read_built(
    optimizers: Sequence[torch.optim.Optimizer], stateful: Mapping[str, Stateful]
) -> dict[str, str]:
    """Name of each setting -> its value as text; none of what was attached in this process before."""
    found: dict[str, str] = {}
    for index, optimizer in enumerate(optimizers):
        whose = type(optimizer).__name__ + (f" {index}" if len(optimizers) > 1 else "")
        for number, group in enumerate(() if _is_used(optimizer) else hyper_parameters(optimizer)):
            found |= {f"{key} of group {number} of {whose}": t for key, t in _settings(group)}
    for name, thing in stateful.items():
        if not _is_used(thing):
            found |= {f"{name}.{key}": text for key, text in _attributes(thing)}
    return found


def stored(built: Mapping[str, str], stateful: Mapping[str, Stateful]) -> dict[str, str]:
    """Leave out the settings of objects that are not in their states, a token say; asks for these.

    Args:
        built: Of `read_built`.
        stateful: The objects, which have been given their states by now.
    """
    kept = dict(built)
    for name, thing in stateful.items():
        own = {key for key in built if key.startswith(f"{name}.")}
        if not own or isinstance(thing, LRScheduler):
            continue
        state = thing.state_dict()
        keys = {str(key).lstrip("_") for key in state} if isinstance(state, Mapping) else set()
        for key in own:
            if key.removeprefix(f"{name}.").lstrip("_") not in keys:
                del kept[key]
    return kept


def mark_used(things: Iterable[object]) -> None:
    """Note that objects are attached: what they hold at a later attach, their script did not build."""
    for thing in things:
        try:
            _used[id(thing)] = weakref.ref(thing)
        except TypeError:  # then it has no attributes, either
            continue


def _is_used(thing: object) -> bool:
    known = _used.get(id(thing))
    return known is not None and known() is thing


def dropped(
    then: Mapping[str, str], now: Mapping[str, str], after: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Say which settings of this script differ from what the run was built with, and were overwritten.

    Args:
        then: What the run was built with.
        now: What this script built.
        after: The same settings once the run's state was restored.

    Returns:
        A sentence for each; and what the run is built with from now on, which is `now` but for those.
    """
    said, built = [], {**then, **now}
    for name, text in now.items():
        if then.get(name, text) != text and after.get(name) != text:
            said.append(
                f"{name}: built as {text}, before as {then[name]}; {after.get(name)} is back"
            )
            built[name] = then[name]
    return said, built


def _attributes(thing: object) -> Iterator[tuple[str, str]]:
    """The attributes of an object that go by the name of an argument of its constructor."""
    try:
        own = dict(vars(thing))
        arguments = {
            name
            for kind in type(thing).__mro__
            if "__init__" in vars(kind)
            for name in inspect.signature(vars(kind)["__init__"]).parameters
        }
    except (
        TypeError,
        ValueError,
    ):  # an object without attributes, a constructor without a signature
        return
    if isinstance(thing, LRScheduler):
        for number, part in enumerate(own.get(_PARTS, ())):
            for key, text in _attributes(part):
                yield f"{_PARTS}[{number}].{key}", text
        arguments -= _COUNTERS
    yield from _settings({k: v for k, v in own.items() if str(k).lstrip("_") in arguments})


def _settings(values: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        try:
            text = _text(value)
        except Exception:  # noqa: BLE001  a value of whatever kind: it is no setting then
            text = None
        if text is not None and len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]}... (CRC-32C {crc32c(text.encode()):08x})"
        if text is not None:
            yield str(key), text


def _text(value: object, *, is_part: bool = False) -> str | None:
    """A number, a text, or a short list or dict of them, alike for every version of its library; None for all else."""
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if is_part:
        return None
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    if not isinstance(value, list | tuple | dict) or len(value) > _MOST_PARTS:
        return None
    pairs = value.items() if isinstance(value, dict) else ((None, part) for part in value)
    texts = [(key, _text(part, is_part=True)) for key, part in pairs]
    if any(text is None for _, text in texts):
        return None
    return ", ".join(text if key is None else f"{key}: {text}" for key, text in texts if text)
