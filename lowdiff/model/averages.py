"""Averages of the parameters (EMA, SWA) in the live run: which are replayed, and what they did.

An ``AveragedModel`` that follows attached parameters with one of torch's own functions costs a few
bytes a step instead of a copy of the model. What else it holds (buffers, copies of
frozen parameters, custom functions) is logged when it changes, like any stateful object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from lowdiff.core.events import Code
from lowdiff.core.layout import dtype_name, own_name
from lowdiff.errors import ConfigError
from lowdiff.model.binding import Attached, wrappers
from lowdiff.recovery.replay.averages import rule_of
from lowdiff.recovery.state import AVERAGE_ITEM
from lowdiff.types import AverageStep, ItemRef, Layout


class LiveAverage:
    """One ``AveragedModel`` that follows parameters of the layout."""

    def __init__(self, name: str, model: AveragedModel, parameters: Mapping[int, torch.Tensor]):
        """Watch ``model``, known as ``name``, whose ``parameters`` follow the layout's by index."""
        self.name = name
        self.parameters = parameters
        self._model = model
        self._sources = {id(tensor): i for i, tensor in parameters.items()}
        self.begin()

    def begin(self) -> None:
        """Take its present content for committed."""
        self._seen = self._fingerprint()

    def outline(self, layout: Layout) -> dict[str, Any]:
        """Its state dict, with references in place of the tensors that are replayed."""
        prefix = f"{AVERAGE_ITEM}{self.name}/"
        return {
            key: ItemRef(prefix + layout.parameters[self._sources[id(value)]].name)
            if id(value) in self._sources
            else (value.detach() if isinstance(value, torch.Tensor) else value)
            for key, value in self._model.state_dict(keep_vars=True).items()
        }

    @property
    def is_as_committed(self) -> bool:
        """Whether nothing was written since the last `commit`."""
        return self._fingerprint() == self._seen

    def commit(self) -> AverageStep | None:
        """Return its step since the last call; None if that cannot be replayed."""
        (count, versions), (now, written) = self._seen, self._fingerprint()
        self._seen = (now, written)
        updated = now == count + 1
        rule = rule_of(self._model) if updated else ("", None)
        # One update writes every tensor exactly once.
        expected = [version + updated for version in versions]
        if rule is None or now not in (count, count + 1) or written != expected:
            return None
        return AverageStep(updated, *rule, count)

    def _fingerprint(self) -> tuple[int, list[int]]:
        written = [tensor._version for tensor in self.parameters.values()]
        return int(self._model.n_averaged), written


class Averages:
    """All averages of one run."""

    def __init__(self, live: Mapping[str, LiveAverage], attached: Attached) -> None:
        """Watch what ``live`` averages do from now on."""
        self._live = live
        self._attached = attached
        for average in live.values():
            average.begin()

    def before_step(self, optimizer: int) -> bool:
        """Whether an average took in parameters that this optimizer is only now to update."""
        owner = self._attached.owner
        return any(
            not average.is_as_committed and any(owner[i] == optimizer for i in average.parameters)
            for average in self._live.values()
        )

    def commit(self) -> tuple[dict[str, AverageStep], bool]:
        """Return the step of every average since the last call, and whether all can be replayed."""
        found = {name: average.commit() for name, average in self._live.items()}
        steps = {name: step for name, step in found.items() if step is not None}
        return steps, len(steps) == len(found)

    @property
    def is_as_committed(self) -> bool:
        """Whether no average was written since the last commit."""
        return all(average.is_as_committed for average in self._live.values())

    def named_tensors(self) -> dict[str, dict[int, torch.Tensor]]:
        """Name of each average -> layout index -> tensor."""
        return {name: dict(average.parameters) for name, average in self._live.items()}


def followed_names(live: Mapping[str, LiveAverage], layout: Layout) -> dict[str, tuple[str, ...]]:
    """Name of each average -> names of the parameters it follows, as a fence states it."""
    return {
        name: tuple(layout.parameters[i].name for i in sorted(average.parameters))
        for name, average in live.items()
    }


def find_averages(stateful: Mapping[str, object], attached: Attached) -> dict[str, LiveAverage]:
    """The stateful objects whose tensors need not be logged.

    Raises:
        ConfigError: If one is made of inference tensors.
    """
    found = {}
    for name, thing in stateful.items():
        if not isinstance(thing, AveragedModel):
            continue
        if any(tensor.is_inference() for tensor in thing.parameters()):
            raise ConfigError(
                f"{name} was made under torch.inference_mode(), so PyTorch would restore nothing into "
                "it; make it outside, or under torch.no_grad(); it may be updated in either"
            )
        parameters = _followed(thing, attached)
        is_plain = type(thing).update_parameters is AveragedModel.update_parameters
        if parameters and is_plain and rule_of(thing) is not None:
            found[name] = LiveAverage(name, thing, parameters)
        else:
            Code.AVERAGE_NOT_REPLAYED.warn(
                f"{name} averages with a function or a method of its own, or over other parameters than the "
                "attached ones, or over one of several parts that are alike; it is not replayed "
                "but logged whole at every update; use one of torch.optim.swa_utils' functions, "
                "and average the attached model",
            )
    return found


def _followed(average: AveragedModel, attached: Attached) -> dict[int, torch.Tensor]:
    """Layout index -> its average, if all that the average could follow is in the layout.

    The averaged model may be a part of the attached one, such as a GAN's generator. Where several
    parts have its names and shapes, nothing tells which one it follows.
    """
    mine: dict[str, torch.Tensor] = {
        own_name(n): p for n, p in wrappers(average.module)[-1].named_parameters()
    }
    layout = attached.layout
    index_of = {spec.name: i for i, spec in enumerate(layout.parameters)}
    frozen = {own_name(n) for n, p in attached.module.named_parameters()} - set(index_of)
    fitting = []
    for prefix, part in attached.module.named_modules():
        full_names = {
            own_name(n): own_name(f"{prefix}.{n}".lstrip(".")) for n, _ in part.named_parameters()
        }
        if full_names.keys() != mine.keys():
            continue
        followed = {
            full_names[name]: tensor
            for name, tensor in mine.items()
            if full_names[name] not in frozen
        }
        found = {index_of[name]: tensor for name, tensor in followed.items() if name in index_of}
        if len(found) == len(followed) and all(_fits(t, layout, i) for i, t in found.items()):
            fitting.append(found)
    return fitting[0] if len(fitting) == 1 else {}


def _fits(tensor: torch.Tensor, layout: Layout, index: int) -> bool:
    spec = layout.parameters[index]
    return (tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype)) == (
        spec.shape,
        spec.strides,
        spec.dtype,
    )
