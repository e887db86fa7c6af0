"""A Checkpointer's figures in TensorBoard's own files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lowdiff.integrations.tensorboard import TensorBoard
from tests.docs.blocks import ROOT, blocks_of

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What was written, by name: steps and values."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        name: [(event.step, event.value) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def test_values_are_written_beside_the_losses(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 2.5, 3)
        TensorBoard(writer).log({"lowdiff/steps": 3.0}, step=3)
    assert scalars(tmp_path) == {"loss": [(3, 2.5)], "lowdiff/steps": [(3, 3.0)]}


def test_the_snippet_of_the_documentation_writes_figures(tmp_path: Path) -> None:
    (block,) = (
        block
        for block in blocks_of("docs/integrations.md")
        if block.text.startswith("import lowdiff.metrics")
    )
    given = (
        "import torch, lowdiff\n"
        "model = torch.nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "checkpointer = lowdiff.Checkpointer('runs/x', staging='staging')\n"
        "checkpointer.attach(model, optimizer)\n"
        "def train_one_step():\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(given + block.text + "checkpointer.close()\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = scalars(tmp_path / "runs" / "x-logs")
    assert len(found["lowdiff/steps"]) == 10
    assert all(value > 0 for _, value in found["lowdiff/stall_seconds"])
    assert found["lowdiff/writer_in_trouble"][-1][1] == 0
