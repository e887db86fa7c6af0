"""A new run's snapshot is written a tensor at a time: as anyone reads it, and in little memory."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from safetensors.torch import load

from lowdiff.core.layout import layout_of
from lowdiff.persistence.format.values import encode, same
from lowdiff.recovery.images import write_image
from lowdiff.recovery.inspect.branch import start_run
from lowdiff.recovery.state import OptimizerState, RecoveredState
from tests.processes import Script, peak_bytes
from tests.unit.recovery.test_plan import life
from tests.unit.recovery.training import part_sums


def write_alone(run: str) -> None:
    """Print how much more memory a process takes that writes a run of 64 MiB and more."""
    row = 1 << 11
    weight = torch.nn.Parameter(torch.empty(row, row, device="meta"))
    names = ["plain", "transposed"]
    fence = replace(
        life(0),
        layout=layout_of([("plain", weight), ("transposed", torch.nn.Parameter(weight.data.t()))]),
        names={"frozen": "frozen/f"},
    )
    adam: dict[str, Any] = {
        name: {"step": torch.ones(()), "exp_avg": torch.ones(row * row)} for name in names
    }
    state = RecoveredState(
        step=3,
        fence=fence,
        parameters={name: torch.arange(row * row, dtype=torch.float32) for name in names},
        optimizers=[OptimizerState([{"lr": 0.1}], adam)],
        items=[{"frozen/f": encode(torch.ones(1 << 20))}],
        held=(),
        residuals=[{}],
        base_step=3,
    )
    before = peak_bytes()
    start_run(state, run)
    sys.stdout.write(f"{peak_bytes() - before}\n")


def test_a_new_run_is_written_without_a_copy_of_the_state(tmp_path: Path) -> None:
    process = Script(write_alone, tmp_path / "run", output=tmp_path / "output.txt")
    assert process.wait() == 0, process.printed()
    grown = int(process.printed())
    (shard,) = (tmp_path / "run").rglob("*.safetensors")
    assert shard.stat().st_size > 64 << 20
    assert grown < 32 << 20


@pytest.mark.parametrize("piece_bytes", [1 << 20, 64, 8])
def test_an_image_is_what_safetensors_reads(limits: Callable[..., None], piece_bytes: int) -> None:
    limits(image_piece_bytes=piece_bytes)
    cube = torch.arange(2.0 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    tensors = {
        "plain": cube,
        "channels last": cube.to(memory_format=torch.channels_last),
        "transposed": cube[0, 0].t(),
        "half": cube.bfloat16().permute(3, 1, 0, 2),
        "whole numbers": torch.arange(5),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.ones(0, 3),
        "yes": torch.tensor([True, False]),
    }
    file = io.BytesIO()
    size, checksum, parts = write_image(file, {name: t.detach for name, t in tensors.items()})
    data = file.getvalue()
    assert (size, checksum) == (len(data), crc32c(data))
    assert list(parts) == part_sums(data)
    found = load(file.getvalue())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(found[name], tensor.contiguous()), name
