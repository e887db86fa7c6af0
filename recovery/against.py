"""Comparing a recovered step with a file that somebody else wrote."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from lowdiff.errors import ConfigError, DamagedFile
from lowdiff.layout import own_name
from lowdiff.persistence.catalog import scan
from lowdiff.persistence.object_store import is_url
from lowdiff.persistence.paths import RunFolder, staging_to_read
from lowdiff.persistence.values import same
from lowdiff.recovery.compare import distance
from lowdiff.recovery.engine import Progress, recover
from lowdiff.recovery.plan import usable_snapshots
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.sizing import check_memory

#: Keys under which files keep the model's weights.
_WEIGHTS = ("model", "state_dict", "model_state_dict")
#: Of a group: how its step is computed, not what.
_WAYS = ("foreach", "fused", "capturable", "differentiable")
#: What torch raises over bytes that it did not write; its unpickler goes wherever they lead it.
_UNREADABLE = (
    *(SafetensorError, pickle.UnpicklingError, struct.error, RuntimeError, EOFError),
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or number of an optimizer, that is not the same.

    Attributes:
        name: Its name.
        elements: Number of elements with other bits; 0 if the tensor is only on one side or has
            another shape or dtype.
        largest_ulps: Largest distance in units in the last place; None where that has no meaning.
        what: In words.
    """

    name: str
    elements: int
    largest_ulps: int | None
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step of a run against a file.

    Attributes:
        step: Which step of the run.
        compared: Number of tensors on both sides.
        differences: By name.
    """

    file: str
    step: int
    compared: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether every bit agrees, and there was something to compare."""
        return not self.differences and self.compared > 0

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return {"ok": self.ok, **asdict(self)}


def compare_with(
    run: str | Path,
    file: str | Path,
    *,
    step: int | None = None,
    staging: str | Path | None = None,
    options: ReplayOptions | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Recover a step and compare it with a ``.pt`` or ``.safetensors`` file, bit for bit.

    Args:
        run: The run folder, or the URL of its store.
        file: Weights by name, or a dict that holds them under ``model``, ``state_dict`` or
            ``model_state_dict``, and maybe the optimizer's ``state_dict``, or a list of several
            optimizers', under ``optimizer``.
            Wrapper prefixes of names (``module.``) do not count.
        step: Which step; None for the one that the file names, else the newest.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.
        progress: Told about each window of steps.

    Raises:
        ConfigError: If the file is of another kind.
        DamagedFile: If it cannot be read.
        NotEnoughMemory: If the state and the file do not fit into memory together.
    """
    path = Path(file)
    _check_name(path)
    if not is_url(run):  # of a store the snapshot is not here yet
        root = staging_to_read(staging)
        check_memory(_largest_snapshot(RunFolder(Path(run)), root) + path.stat().st_size)
    weights, optimizers, named_step = _read(path)
    state = recover(
        run, named_step if step is None else step, staging=staging, options=options,
        progress=progress,
    )  # fmt: skip
    mine = dict(state.model_state_dict())
    if path.suffix == ".safetensors":  # which holds nothing else
        mine = {name: value for name, value in mine.items() if isinstance(value, torch.Tensor)}
    theirs = _unwrapped(weights, mine)
    for index, optimizer in enumerate(optimizers):
        which = "optimizer" if len(optimizers) == 1 else f"optimizer {index}"
        theirs |= _entries(which, optimizer)
        if index < len(state.optimizers):
            ours = state.optimizer_state_dict(index)
            mine |= _entries(which, ours)
            hyper, others = _hyper_parameters(which, ours), _hyper_parameters(which, optimizer)
            # Other versions of PyTorch have more of them, or fewer.
            common = hyper.keys() & others.keys()
            mine |= {name: hyper[name] for name in common}
            theirs |= {name: others[name] for name in common}
    return Comparison(
        file=str(path),
        step=state.step,
        compared=sum(isinstance(mine[name], torch.Tensor) for name in mine.keys() & theirs.keys()),
        differences=tuple(_differences(mine, theirs)),
    )


def _unwrapped(weights: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """A file's weights without what wrappers put before all names, as far as the run has it not."""
    found = [{own_name(name): value for name, value in weights.items()}]
    while found[-1] and all(name.startswith("module.") for name in found[-1]):
        found.append({name.removeprefix("module."): v for name, v in found[-1].items()})
    return max(found, key=lambda named: len(named.keys() & mine.keys()))


def _check_name(path: Path) -> None:
    if path.suffix not in (".pt", ".pth", ".safetensors"):
        raise ConfigError(
            f"{path} ends in none of .pt, .pth and .safetensors; convert it to one of these"
        )
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give one that torch.save or safetensors wrote")


def _largest_snapshot(folder: RunFolder, staging: Path) -> int:
    """What a state of the run takes in memory, by its snapshots."""
    there = usable_snapshots(scan(folder, [staging]))
    return max((s.bytes for s in there), default=0)


def _read(path: Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], int | None]:
    """Weights, the state of each optimizer that the file has, and the step if it is told."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                told = (opened.metadata() or {}).get("lowdiff_step")
            return load_file(path), [], None if told is None else int(told)
        content = torch.load(path, weights_only=True, map_location="cpu")
    except _UNREADABLE as error:
        raise DamagedFile(path, f"it cannot be read ({error!r:.300})") from error
    if not isinstance(content, dict):
        raise _refusal(path, f"a {type(content).__name__}")
    inner = next((content[key] for key in _WEIGHTS if isinstance(content.get(key), dict)), None)
    optimizer = content.get("optimizer") if inner is not None else None
    listed = optimizer if isinstance(optimizer, list) else [optimizer]
    optimizers: list[Mapping[str, Any]] = [found for found in listed if isinstance(found, dict)]
    weights: Mapping[str, Any] = content if inner is None else inner
    strange = next((name for name in weights if not isinstance(name, str)), None)
    if strange is not None:
        raise _refusal(path, f"a dict with {strange!r:.60} for a tensor's name")
    for found in optimizers:
        _check_optimizer(path, found)
    told = content.get("step")
    return weights, optimizers, told if isinstance(told, int) else None


def _check_optimizer(path: Path, optimizer: Mapping[str, Any]) -> None:
    """See that it has the form of an optimizer's ``state_dict``."""
    state, groups = optimizer.get("state", {}), optimizer.get("param_groups", ())
    fits = (
        isinstance(state, dict)
        and isinstance(groups, Sequence)
        and all(isinstance(entry, dict) for entry in (*state.values(), *groups))
    )
    if not fits:
        raise _refusal(path, "something else than an optimizer's state_dict() under 'optimizer'")


def _refusal(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} holds {what}, not a dict of tensors; save model.state_dict(), or a dict with it "
        "under 'model'"
    )


def _entries(which: str, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{which} state {number} {key}": value
        for number, entry in optimizer.get("state", {}).items()
        for key, value in entry.items()
    }


def _hyper_parameters(which: str, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{which} group {number} {key}": value
        for number, group in enumerate(optimizer.get("param_groups", ()))
        for key, value in group.items()
        if key != "params" and key not in _WAYS
    }


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs:
            side = "the file" if name in theirs else "the run"
            yield Difference(name, 0, None, f"only in {side}")
            continue
        left, right = mine[name], theirs[name]
        if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
            if not same(left, right):
                yield Difference(name, 0, None, f"{left!r:.60} against {right!r:.60}")
        elif _form(left) != _form(right):
            what = f"{_form(left)} against {_form(right)}"
            yield Difference(name, 0, None, what)
        else:
            count, ulps = distance(left, right)
            if count:
                far = "" if ulps is None else f", at most {ulps} units in the last place apart"
                yield Difference(name, count, ulps, f"{count} of {left.numel()} elements{far}")


def _form(tensor: torch.Tensor) -> str:
    """Whatever of a tensor must be the same before its elements can be compared."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    nothing = " without content" if tensor.is_meta else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{layout}{nothing}"
