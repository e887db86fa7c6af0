"""A run's identity and its fences, as JSON on disk."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowdiff.errors import DamagedFile, NotARun
from lowdiff.persistence.durable import make_directory, read_json, write_json
from lowdiff.persistence.paths import RunFolder
from lowdiff.types import Environment, Fence, Layout, OptimizerSpec, ParameterSpec


def new_run_id() -> str:
    """32 hexadecimal digits that tell this run from every other."""
    return uuid.uuid4().hex


def create_run(folder: RunFolder, run_id: str) -> None:
    """Write ``run.json`` unless it exists; idempotent."""
    make_directory(folder.root)
    if not folder.run_file.exists():
        write_json(folder.run_file, {"run_id": run_id})


def read_run_id(folder: RunFolder) -> str:
    """The run's identity.

    Raises:
        NotARun: If the folder holds no run.
    """
    if not folder.root.is_dir():
        raise NotARun(folder.root, "no such folder")
    if not folder.run_file.is_file():
        raise NotARun(folder.root, "it has no run.json")
    run_id = str(read_json(folder.run_file).get("run_id", ""))
    if len(run_id) != 32 or not set(run_id) <= set("0123456789abcdef"):
        raise DamagedFile(folder.run_file, f"run_id {run_id[:40]!r} is not 32 hexadecimal digits")
    return run_id


def write_fence(folder: RunFolder, fence: Fence) -> None:
    """Write one rank's fence durably."""
    path = folder.fence(fence.incarnation, fence.rank)
    make_directory(path.parent)
    write_json(path, asdict(fence))


def read_fence(path: Path) -> Fence:
    """Read a fence.

    Raises:
        DamagedFile: If it is not whole.
    """
    document = read_json(path)
    try:
        return _fence(document)
    except (TypeError, KeyError, ValueError) as error:
        raise DamagedFile(path, f"not a fence ({error!r})") from error


def _fence(document: dict[str, Any]) -> Fence:
    layout = Layout(
        tuple(
            ParameterSpec(
                name=p["name"],
                shape=tuple(p["shape"]),
                strides=tuple(p["strides"]),
                dtype=p["dtype"],
                offset=p["offset"],
            )
            for p in document.pop("layout")["parameters"]
        )
    )
    optimizers = tuple(
        OptimizerSpec(o["class_name"], tuple(tuple(names) for names in o["groups"]))
        for o in document.pop("optimizers")
    )
    environment = Environment(**document.pop("environment"))
    averages = {name: tuple(names) for name, names in document.pop("averages", {}).items()}
    return Fence(
        layout=layout,
        optimizers=optimizers,
        environment=environment,
        averages=averages,
        **document,
    )
