"""What callbacks of a framework keep: averages of the weights, which are attached and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch.optim.swa_utils import AveragedModel


def averages_of(callbacks: Iterable[object]) -> dict[str, AveragedModel]:
    """Name to attach it by -> each average that callbacks keep as an attribute, or in a list or dict of theirs.

    Names go by the callback's class and the number of its average, so that other callbacks may come and go.
    """
    counts: Counter[str] = Counter()
    found: dict[str, AveragedModel] = {}
    for callback in callbacks:
        for average in _averages(callback):
            if not any(average is known for known in found.values()):
                kind = type(callback).__name__
                found[f"{kind}_average{counts[kind]}"] = average
                counts[kind] += 1
    return found


def _averages(callback: object) -> Iterator[AveragedModel]:
    for value in getattr(callback, "__dict__", {}).values():
        several = value.values() if isinstance(value, dict) else value
        if isinstance(value, AveragedModel):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from (one for one in several if isinstance(one, AveragedModel))
