"""A run's identity, its fences and the lineage that follows, and a check for entries that are not ours."""

from __future__ import annotations

import math
import os
import re
import stat
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowdiff.errors import (
    ConfigError,
    DamagedFile,
    LowDiffError,
    NotARun,
    RunInUse,
    RunMismatch,
    StorageError,
)
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.paths import MOST_RANKS, RunFolder
from lowdiff.persistence.format.document import check_types, read_either, write_twice
from lowdiff.types import (
    DIGESTS,
    ITEM_BYTES,
    STRATEGIES,
    Decision,
    Environment,
    Fence,
    Layout,
    OptimizerSpec,
    Origin,
    ParameterSpec,
)

_CONTENT_HASH = re.compile("[0-9a-f]{64}")
_LIFE = re.compile("[0-9a-f]{32}")
#: ``2.13.0+cu130``, ``2.9.0a0+git1a2b3c``; who builds torch may write anything behind the first digit.
_VERSION = re.compile(r"v?\d[!-~]{0,99}")
_RUNS_NAMED = 5
#: Values of `torch.set_float32_matmul_precision`; "" if torch cannot tell the value.
_PRECISIONS = ("highest", "high", "medium", "")
#: What documents of before there were shards lack.
_OF_WHOLE_TENSORS: Mapping[str, Any] = {"tensor": "", "whole_shape": [], "ranks": []}


@dataclass(frozen=True, slots=True)
class Span:
    """The steps that one incarnation owns.

    Attributes:
        incarnation: The owner.
        world_size: Number of its ranks, which is the number of records of each of its steps.
        base: Step that it started from; its first own step is ``base + 1``.
        last: Its last valid step, inclusive; None while it is the newest.
    """

    incarnation: int
    world_size: int
    base: int
    last: int | None

    def owns(self, step: int) -> bool:
        """Return whether a differential of this step in this incarnation is valid."""
        return self.base < step and (self.last is None or step <= self.last)

    def holds(self, step: int) -> bool:
        """Return whether a snapshot of this step in this incarnation is valid."""
        return self.base <= step and (self.last is None or step <= self.last)


def lineage(fences: Mapping[int, Fence], last: int | None = None) -> tuple[Span, ...]:
    """Return the chain that leads to the newest incarnation, oldest first.

    Args:
        fences: Rank 0's fence of every incarnation whose fences are complete. An incarnation
            that died before all its ranks had written their fences never committed anything.
        last: Last valid step of the newest incarnation; None for all.
    """
    spans: list[Span] = []
    number = max(fences, default=None)
    while number is not None and number in fences:
        fence = fences[number]
        if last is None or last >= fence.base_step:
            spans.append(Span(number, fence.world_size, fence.base_step, last))
        last = fence.last_of_parent if last is None else min(last, fence.last_of_parent)
        number = fence.parent
    return tuple(reversed(spans))


def first_of_lineage(fences: Mapping[int, Fence]) -> Fence | None:
    """The fence with which the newest history began; None if there is none, or it is missing."""
    first = next((fences[span.incarnation] for span in lineage(fences)), None)
    return first if first is not None and first.parent is None else None


def new_run_id() -> str:
    """Return 32 hexadecimal digits that identify a run."""
    return uuid.uuid4().hex


def new_life() -> str:
    """Return 32 hexadecimal digits that identify an incarnation, also among equal numbers."""
    return uuid.uuid4().hex


def create_run(folder: RunFolder, run_id: str) -> None:
    """Write ``run.json`` unless it exists; idempotent."""
    make_directory(folder.root)
    if not folder.run_file.exists():
        write_twice(folder.run_file, {"run_id": run_id})


def known_run_id(folder: RunFolder) -> str | None:
    """Return the identity of the run that a trainer is about to continue, or None for a new run.

    Raises:
        DamagedFile: If files of a run are there but ``run.json`` is missing, because a new run in
            this folder would silently replace them.
    """
    if folder.run_file.is_file():
        return read_run_id(folder)
    for path in (*(p for *_, p in folder.fences()), *(p for *_, p in folder.snapshots())):
        what = f"it is missing, but {path} is there; bring it back, or choose another folder"
        raise DamagedFile(folder.run_file, what)
    return None


def read_run_id(
    folder: RunFolder, damage: list[DamagedFile] | None = None, *, with_copy: bool = False
) -> str:
    """Return the run's identity; for ``damage`` and ``with_copy`` see `read_either`.

    Raises:
        NotARun: If the folder holds no run.
    """
    if not folder.root.is_dir():
        raise NotARun(folder.root, "it is a file" if folder.root.exists() else "no such folder")
    refuse_strange_entries(folder)
    if not folder.run_file.is_file():
        runs = sorted(path.parent.name for path in folder.root.glob("*/run.json"))
        named = [*runs[:_RUNS_NAMED], *(["..."] if len(runs) > _RUNS_NAMED else [])]
        inside = f"; runs in it: {', '.join(named)}" if runs else ""
        raise NotARun(folder.root, f"it has no run.json{inside}")
    run_id = str(read_either(folder.run_file, damage, with_copy=with_copy).get("run_id", ""))
    if len(run_id) != 32 or not set(run_id) <= set("0123456789abcdef"):
        raise DamagedFile(folder.run_file, f"run_id {run_id[:40]!r} is not 32 hexadecimal digits")
    return run_id


def require_run(folder: RunFolder, run_id: str) -> None:
    """Check that a folder holds this run, before each write and removal in the background.

    Raises:
        StorageError: If it holds no run; the disk may only be unmounted.
        RunMismatch: If it holds another run, whose files have the same names.
    """
    try:
        found = str(read_either(folder.run_file).get("run_id"))
    except FileNotFoundError:
        raise StorageError(
            f"{folder.run_file} is gone; bring the run folder back, or mount it"
        ) from None
    if found != run_id:
        raise RunMismatch(
            f"{folder.root} holds another run now: its run.json names {found:.32}, and this one is "
            f"{run_id}; bring this run's folder back, or stop its trainer"
        )


def refuse_strange_entries(folder: RunFolder) -> None:
    """Refuse links, pipes and devices among the run's files; lowdiff makes none.

    A link would lead a reader, or worse a writer, out of the folder, and opening a pipe waits for
    ever. Every opening of a run from elsewhere therefore checks this first, before it takes a lock.

    Raises:
        DamagedFile: Naming the first such entry.
    """
    pending = [
        folder.root / name
        for name in (
            *("run.json", "run.copy", "incarnations", "snapshots", "segments", "constants"),
            *("locks", "pins", "retention.json", "measurements"),
        )
    ]
    while pending:
        path = pending.pop()
        try:
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                # The listing tells the type of most entries; the check above covers the rest.
                with os.scandir(path) as entries:
                    others = [e.path for e in entries if not e.is_file(follow_symlinks=False)]
                pending += map(Path, others)
        except FileNotFoundError:
            continue  # a live run's retention has removed the folder
        except NotADirectoryError as error:
            raise NotARun(folder.root, "a part of its path is a file") from error
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            what = "it is a link, a pipe or a device, and lowdiff makes none; remove it"
            raise DamagedFile(path, what)


def write_fence(folder: RunFolder, fence: Fence) -> None:
    """Write one rank's fence durably.

    Raises:
        ConfigError: If there are more ranks than file names have room for.
        RunInUse: If a fence exists: another trainer began this incarnation at the same time.
    """
    if fence.world_size > MOST_RANKS:
        raise ConfigError(f"a run has at most {MOST_RANKS:,} ranks, and {fence.world_size:,} train")
    path = folder.fence(fence.incarnation, fence.rank)
    make_directory(path.parent)
    try:
        content = asdict(fence)
        for name in ("lost_tail", "origin"):
            if content[name] is None:
                del content[name]
        for name, default in (("draws", ()), ("digests", "crc32c")):
            if content[name] == default:
                del content[name]  # so that earlier versions read it
        if fence.lost_tail is not None:
            content["lost_tail"] = fence.lost_tail.document()
        write_twice(path, content, exclusive=True)
    except FileExistsError as error:
        raise RunInUse(folder.root, "a trainer that attached at the same time", 0.0) from error


def write_missing_fences(folder: RunFolder, fences: Iterable[Fence]) -> None:
    """Write the fences of other ranks that this folder lacks: their disk may be lost with their node."""
    for fence in fences:
        if not folder.fence(fence.incarnation, fence.rank).exists():
            write_fence(folder, fence)


def read_fence(
    path: Path, damage: list[DamagedFile] | None = None, *, with_copy: bool = False
) -> Fence:
    """Read a fence, or its copy if it is damaged; see `read_either`.

    Args:
        path: Of the fence.
        damage: Gets the error of a fence whose copy served.
        with_copy: Whether to look at the copy in any case.

    Raises:
        DamagedFile: If the fence is damaged, and its copy does not serve.
        RunMismatch: If a later version of lowdiff wrote it, of a strategy or with checksums that this one does not
            know.
    """
    document = read_either(path, damage, with_copy=with_copy)
    for key, known in (("strategy", STRATEGIES), ("digests", DIGESTS)):
        named = document.get(key, known[0])
        if named not in known:
            raise RunMismatch(
                f"{path} names {key} {named!r:.40}, which this version of lowdiff does not know; the run was made "
                f"with lowdiff {document.get('version')!s:.40}: recover it, or go on with it, with that version or a newer one"
            )
    try:
        return _fence(document)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DamagedFile(path, f"not a fence ({error!r})") from error


def newest_staging(folder: RunFolder) -> set[str]:
    """Return the staging roots of the newest incarnation's ranks, from all readable fences."""
    newest = max(folder.incarnations(), default=-1)
    roots = set()
    for number, _, path in folder.fences():
        if number == newest:
            with suppress(LowDiffError):
                roots.add(read_fence(path).staging)
    return roots - {""}


def life_of(folder: RunFolder, incarnation: int, rank: int) -> str | None:
    """Return the identity of an incarnation that a run folder knows under a number.

    Args:
        folder: The run folder.
        incarnation: The number.
        rank: Rank whose fence is read first; other ranks' fences say the same.

    Returns:
        None if no fence of the incarnation is there and readable.
    """
    own = folder.fence(incarnation, rank)
    for path in (own, *sorted(own.parent.glob("rank-*.json"))):
        try:
            return str(read_either(path)["life"])
        except (FileNotFoundError, KeyError, LowDiffError):
            continue
    return None


def _fence(document: dict[str, Any]) -> Fence:
    layout = _layout(document.pop("layout"))
    frozen_shards = _layout(document.pop("frozen_shards", {"parameters": []}))
    optimizers = tuple(
        OptimizerSpec(o["class_name"], tuple(tuple(names) for names in o["groups"]))
        for o in document.pop("optimizers")
    )
    facts = document.pop("environment")
    check_types(Environment, facts)
    environment = Environment(**facts)
    averages = {name: tuple(names) for name, names in document.pop("averages", {}).items()}
    draws = tuple(document.pop("draws", ()))
    told, origin = document.pop("lost_tail", None), document.pop("origin", None)
    if origin is not None:
        check_types(Origin, origin)
        origin = Origin(**origin)
    if "strategy" not in document:  # of a version that told it by the compressor's name
        of_compressor = {"dense": "replica", "averaged": "survivors"}
        document["strategy"] = of_compressor.get(document["compressor"]["name"], "log")
    document.setdefault("version", "")
    document.setdefault("digests", "crc32c")
    check_types(Fence, document)
    fence = Fence(
        layout=layout,
        frozen_shards=frozen_shards,
        optimizers=optimizers,
        environment=environment,
        averages=averages,
        lost_tail=None if told is None else _decision(told),
        origin=origin,
        draws=draws,
        **document,
    )
    _check(fence)
    return fence


def _decision(document: dict[str, Any]) -> Decision:
    check_types(Decision, document)
    return Decision(
        losses={
            str(name): math.inf if loss is None else float(loss)
            for name, loss in document.pop("losses").items()
        },
        refused={str(name): str(why) for name, why in document.pop("refused").items()},
        **document,
    )


def _layout(document: dict[str, Any]) -> Layout:
    return Layout(tuple(map(_parameter, document["parameters"])))


def _parameter(document: dict[str, Any]) -> ParameterSpec:
    document = {**_OF_WHOLE_TENSORS, **document}
    check_types(ParameterSpec, document)
    return ParameterSpec(
        name=document["name"],
        shape=tuple(document["shape"]),
        strides=tuple(document["strides"]),
        dtype=document["dtype"],
        offset=document["offset"],
        global_offset=tuple(document["global_offset"]),
        tensor=document["tensor"],
        whole_shape=tuple(document["whole_shape"]),
        ranks=tuple(document["ranks"]),
    )


def _check(fence: Fence) -> None:
    """Refuse values that lowdiff never writes, before anything relies on them."""
    environment = fence.environment
    _check_layout(fence.layout, fence.world_size)
    _check_layout(fence.frozen_shards, fence.world_size)
    if fence.parent is not None and fence.parent >= fence.incarnation:
        raise ValueError(f"incarnation {fence.incarnation} continues {fence.parent}")
    tail = fence.predicted
    if tail is not None and not (
        fence.parent is not None and tail.base_step < tail.step == fence.base_step
    ):
        raise ValueError(f"step {fence.base_step} is predicted as {tail!r:.200}")
    if fence.constants and not _CONTENT_HASH.fullmatch(fence.constants):
        raise ValueError(f"constants {fence.constants[:80]!r}")
    if fence.draws and not (
        len(fence.draws) == fence.world_size
        and all(_is_size(number) and number < fence.world_size for number in fence.draws)
    ):
        raise ValueError(f"{fence.world_size} ranks draw as {fence.draws!r:.80}")
    if "\0" in fence.staging:
        raise ValueError(f"staging {fence.staging[:80]!r}")
    if not _LIFE.fullmatch(fence.life):
        raise ValueError(f"life {fence.life[:40]!r}")
    if not _VERSION.fullmatch(environment.torch_version):
        raise ValueError(f"torch_version {environment.torch_version[:40]!r} is no version")
    if (
        environment.default_dtype not in ITEM_BYTES
        or environment.matmul_precision not in _PRECISIONS
    ):
        raise ValueError(f"torch has no mode {environment!r:.200}")
    if not fence.rank < fence.world_size <= MOST_RANKS:
        raise ValueError(f"rank {fence.rank} of {fence.world_size}")
    texts = [*fence.names.items(), *fence.stateful.items(), (fence.compressor["name"], "")]
    texts += fence.built.items()
    texts += [(o.class_name, name) for o in fence.optimizers for g in o.groups for name in g]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise TypeError("a name is not text")
    if not fence.layout.parameters or not fence.optimizers:
        raise ValueError("there is nothing to train")
    known = {spec.tensor for spec in fence.layout.parameters}
    if [name for name in fence.names.values() if name not in known and "/" not in name]:
        raise ValueError("the model's names lead to parameters that the layout lacks")


def _check_layout(layout: Layout, world_size: int) -> None:
    end = 0
    for spec in layout.parameters:
        if spec.offset != end or spec.dtype not in ITEM_BYTES:
            raise ValueError(f"parameter {spec.name!r} lies at {spec.offset} as {spec.dtype}")
        if len(spec.shape) != len(spec.strides) or not all(
            map(_is_size, spec.shape + spec.strides)
        ):
            raise ValueError(f"parameter {spec.name!r} has shape {spec.shape}")
        _check_part(spec, world_size)
        end = spec.stop
    stored: Counter[str] = Counter()
    for spec in layout.parameters:
        stored[spec.tensor] += spec.numel
    for spec in layout.parameters:
        if stored[spec.tensor] != math.prod(spec.whole_shape):
            raise ValueError(f"the parts of {spec.tensor!r} are not all of {spec.whole_shape}")


def _check_part(spec: ParameterSpec, world_size: int) -> None:
    """Refuse a shard that is not a range of its tensor, or of ranks that there are not."""
    if not (len(spec.shape) == len(spec.global_offset) == len(spec.whole_shape)):
        raise ValueError(f"parameter {spec.name!r} is of another rank than {spec.tensor!r}")
    ends = zip(spec.global_offset, spec.shape, spec.whole_shape, strict=True)
    if not all(
        _is_size(start) and _is_size(whole) and start + size <= whole for start, size, whole in ends
    ):
        raise ValueError(f"parameter {spec.name!r} reaches beyond {spec.tensor!r}")
    if not all(type(rank) is int and 0 <= rank < world_size for rank in spec.ranks):
        raise ValueError(f"parameter {spec.name!r} is of ranks {spec.ranks}")


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63
