"""Runs of one PyTorch, recovered by another: ``python -m tests.versions.written write|read FOLDER``.

``write`` trains every training of `tests.crash` for a few steps and keeps what its live objects held;
``read`` recovers those steps and compares. Both print one line of JSON. The environment's Python runs
them; `tests.versions` makes the environments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import LowDiffError, ReplayMismatch
from lowdiff.persistence.format.values import encode
from tests.background import fork_processes
from tests.crash.all_trainings import TRAININGS
from tests.crash.lives import digests
from tests.crash.trainings import Training

#: Digest of what has other bits each time.
VARIES = "varies"
#: The last has a snapshot; the others are replayed from that of step 0.
STEPS = (4, 9, 10)
_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def sha(value: object) -> str:
    """Return the digest of a value as lowdiff encodes it."""
    return hashlib.sha256(encode(value)).hexdigest()


def write(folder: Path) -> dict[str, Any]:
    """Train everything once."""
    fork_processes()
    failed = {}
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name, build in sorted(TRAININGS.items()):
        own = folder / name
        own.mkdir()
        try:
            torch.manual_seed(17)
            random.seed(17)
            np.random.seed(17)
            states = trained(build(0, 1), own / "run")
        except Exception as error:  # whatever that PyTorch does not know of
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        (own / "states.json").write_text(json.dumps(states))
    dist.destroy_process_group()
    return {"failed": failed, "bits": dict(bits())}


def trained(made: Training, run: Path) -> dict[int, dict[str, str]]:
    """Train, and return what parameters and optimizers were after some steps."""
    states = {}
    with tempfile.TemporaryDirectory(prefix="lowdiff-", dir="/dev/shm") as staging:
        checkpointer = lowdiff.Checkpointer(
            run,
            staging=staging,
            **{
                "compressor": TopK(0.05, dense_below=64),
                **made.checkpointer,
                "snapshot_every": 1 << 20,
                "retention": None,
            },
        )
        checkpointer.attach(made.model, made.optimizer, **made.stateful)
        for number in range(1, STEPS[-1] + 1):
            made.step(number - 1)
            checkpointer.commit()
            if number in STEPS:
                states[number] = of_state(digests(made))
        checkpointer.close()
    return states


def of_state(found: dict[str, str]) -> dict[str, str]:
    """Return what model and optimizers hold, of all that a live training has."""
    return {name: digest for name, digest in found.items() if name.startswith(("model", "opt"))}


def read(folder: Path) -> dict[str, Any]:
    """Recover every run that was written, and compare."""
    outcome: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*/states.json")):
        states = json.loads(path.read_text())
        outcome[path.parent.name] = {
            step: compared(path.parent / "run", int(step), known) for step, known in states.items()
        }
    return {"outcome": outcome}


def compared(run: Path, step: int, known: dict[str, str]) -> str:
    """Return ``exact``, ``refused``, or what else came of a recovery."""
    try:
        state = lowdiff.recover(run, step)
    except ReplayMismatch as error:
        names_both = f"torch {torch.__version__}" in str(error) and "Start the training" in str(
            error
        )
        return "refused" if names_both else f"refused without the versions: {error}"[:300]
    except LowDiffError as error:
        return f"{type(error).__name__}: {error}"[:300]
    found = {f"model/{name}": sha(value) for name, value in state.model_state_dict().items()}
    for index in range(len(state.optimizers)):
        content = state.optimizer_state_dict(index)
        for number, entries in content["state"].items():
            for key, value in entries.items():
                found[f"optimizer/{index}/{number}/{key}"] = sha(value)
        found[f"optimizer/{index}/groups"] = sha(content["param_groups"])
    differing = sorted(n for n in found.keys() | known.keys() if found.get(n) != known.get(n))
    return "exact" if not differing else f"wrong: {differing[:3]}"


def bits() -> Iterator[tuple[str, str]]:
    """Yield rows of arithmetic, each with a digest of its results: which versions round alike."""
    for name in _OPTIMIZERS:
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            yield from _of_optimizer(name, kind)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(37, 130, generator=generator)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "layer norm": nn.LayerNorm(130),
        "softmax": lambda x: x.softmax(1),
        "gelu": nn.functional.gelu,
        "sum": lambda x: x.sum(0),
        "matrix product": lambda x: x @ x.T,
        "random normal": lambda x: torch.empty_like(x).normal_(generator=generator),
        "random exponential": lambda x: torch.empty_like(x).exponential_(generator=generator),
        "dropout": lambda x: _dropped(x),
    }
    for name, function in functions.items():
        with torch.no_grad():
            yield f"{name}, float32", sha(function(values))


def _dropped(values: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return nn.functional.dropout(values, 0.3)


def _of_optimizer(name: str, kind: Any) -> Iterator[tuple[str, str]]:
    for dtype_name, dtype in _DTYPES.items():
        for how in ("loop", "foreach", "fused"):
            options: dict[str, Any] = {} if how == "loop" else {how: True}
            if name == "SGD":
                options["momentum"] = 0.9
            with suppress(TypeError, RuntimeError, ValueError):  # where there is no such kernel
                make = partial(kind, lr=0.01, weight_decay=0.1, **options)
                twice = {_stepped(make, dtype) for _ in range(2)}
                yield f"{name} {how}, {dtype_name}", twice.pop() if len(twice) == 1 else VARIES


def _stepped(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(4)
    weight = nn.Parameter(torch.randn(67, 130, generator=generator).to(dtype))
    optimizer = make([weight])
    for _ in range(6):
        weight.grad = torch.randn(67, 130, generator=generator).to(dtype)
        optimizer.step()
    return sha([weight.detach(), optimizer.state_dict()["state"][0]])


def main(argv: Sequence[str] | None = None) -> None:
    """Write or read, on one thread: on two, last bits differ between processors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.monotonic()
    found = write(args.folder) if args.action == "write" else read(args.folder)
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    print(json.dumps({**found, **versions, "seconds": time.monotonic() - started}))  # noqa: T201


if __name__ == "__main__":
    main()
