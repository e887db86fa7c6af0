"""A run with Accelerate that nobody kills: what it refuses, and the snippet of the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lowdiff
from lowdiff.errors import ConfigError, RunMismatch, UsageError
from lowdiff.integrations.accelerate import LowDiffRun
from tests.docs.blocks import ROOT, blocks_of

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("default")]


def prepared(folder: Path, loader: Any = None, **config: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return what `LowDiffRun` takes, for a small training."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if loader is None:
        loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return [accelerator, folder / "run", model, optimizer, loader], {"staging": folder / "staging"}


def train(arguments: list[Any], settings: dict[str, Any], epochs: int = 2) -> LowDiffRun:
    """Train, and return the run."""
    accelerator, _, model, optimizer, loader = arguments
    with LowDiffRun(*arguments, **settings) as run:
        for _ in run.epochs(epochs):
            for (inputs,) in loader:
                accelerator.backward(model(inputs).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    return run


def test_training_is_left_as_it_is(tmp_path: Path) -> None:
    arguments, _ = prepared(tmp_path)
    accelerator, _, model, optimizer, loader = arguments
    for _ in range(2):
        for (inputs,) in loader:
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    again, settings = prepared(tmp_path)
    train(again, settings)
    assert torch.equal(model.weight, again[2].weight)
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 12
    assert torch.equal(state.model_state_dict()["weight"], model.weight)


def test_the_loader_is_the_users_again_after_the_run(tmp_path: Path) -> None:
    arguments, settings = prepared(tmp_path)
    kind, sampler = type(arguments[-1]), arguments[-1].batch_sampler
    train(arguments, settings)
    assert type(arguments[-1]) is kind
    assert arguments[-1].batch_sampler is sampler
    assert len(list(arguments[-1])) == 6


@pytest.mark.parametrize("how", ["range", "twice"])
def test_a_loader_that_is_read_beside_the_epochs_is_refused(tmp_path: Path, how: str) -> None:
    arguments, settings = prepared(tmp_path)
    with LowDiffRun(*arguments, **settings) as run:
        if how == "twice":
            assert next(run.epochs(2)) == 0
            next(iter(arguments[-1]))
        with pytest.raises(UsageError, match=r"once in each epoch of `for epoch in run.epochs"):
            next(iter(arguments[-1]))


def test_what_was_not_prepared_is_refused(tmp_path: Path) -> None:
    arguments, settings = prepared(tmp_path)
    plain = torch.optim.SGD(arguments[2].parameters())
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    given: list[list[Any]] = [[*arguments[:3], plain, arguments[4]], [*arguments[:4], loader]]
    for wrong in given:
        with pytest.raises(UsageError, match=r"takes what accelerator.prepare returned, and got"):
            LowDiffRun(*wrong, **settings)
    with pytest.raises(UsageError, match="got no optimizer"):
        LowDiffRun(arguments[0], tmp_path / "run", arguments[2], [], arguments[4], **settings)


def test_a_loader_of_another_run_is_refused(tmp_path: Path) -> None:
    arguments, settings = prepared(tmp_path)
    with LowDiffRun(*arguments, **settings):
        again = [arguments[0], tmp_path / "other", *arguments[2:]]
        with pytest.raises(UsageError, match="belongs to another LowDiffRun"):
            LowDiffRun(*again, **settings)


class Counting(IterableDataset[tuple[torch.Tensor]]):
    """Some rows, one after the other."""

    def __iter__(self) -> Any:
        yield from ((torch.ones(4),) for _ in range(8))


@pytest.mark.parametrize(
    ("loader", "config", "said"),
    [
        (DataLoader(Counting(), batch_size=4), {}, "IterableDataset does not reveal"),
        (None, {"dispatch_batches": True}, "dispatch_batches=True has one process load"),
    ],
)
def test_a_loader_without_a_place_is_refused(
    tmp_path: Path, loader: Any, config: dict[str, Any], said: str
) -> None:
    arguments, settings = prepared(tmp_path, loader, **config)
    with pytest.raises(ConfigError, match=said):
        LowDiffRun(*arguments, **settings)


def test_another_kind_of_training_is_refused_by_name(tmp_path: Path) -> None:
    arguments, settings = prepared(tmp_path)
    arguments[0].state.distributed_type = DistributedType.FSDP
    try:
        with pytest.raises(ConfigError, match="one process or DDP, not with FSDP"):
            LowDiffRun(*arguments, **settings)
    finally:
        arguments[0].state.distributed_type = DistributedType.NO


def test_a_run_of_another_loop_is_refused(tmp_path: Path) -> None:
    arguments, settings = prepared(tmp_path)
    model, optimizer = arguments[2], arguments[3].optimizer
    with lowdiff.Checkpointer(tmp_path / "run", **settings) as checkpointer:
        checkpointer.attach(model, optimizer)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.commit()
    with pytest.raises(RunMismatch, match="no place of Accelerate's loader"):
        LowDiffRun(*arguments, **settings)


def test_the_snippet_of_the_documentation_trains_and_goes_on(tmp_path: Path) -> None:
    (block,) = (
        block
        for block in blocks_of("docs/integrations.md")
        if block.text.startswith("from lowdiff.integrations.accelerate")
    )
    given = (
        "import torch\n"
        "from accelerate import Accelerator\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)\n"
        "loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.ones(64, 1)), batch_size=4, shuffle=True)\n"
        "loss_of = torch.nn.functional.mse_loss\n"
    )
    script = tmp_path / "script.py"
    script.write_text(given + block.text + "print(run.step)\n")
    steps = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        steps.append(int(done.stdout.splitlines()[-1]))
    assert steps == [0, 24]


class Registered:
    """What a user registers."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"seen": 3}


def test_all_that_accelerates_own_checkpoint_holds_is_known(tmp_path: Path) -> None:
    """A version that keeps something else there is noticed, so that a step is made to hold it too."""
    arguments, settings = prepared(tmp_path, use_seedable_sampler=True)
    accelerator = arguments[0]
    accelerator.register_for_checkpointing(Registered())
    train(arguments, settings)
    accelerator.save_state(str(tmp_path / "saved"), safe_serialization=False)
    held_as = {
        "pytorch_model.bin": "weights",
        "optimizer.bin": "optimizers",
        "random_states_0.pkl": "generators",
        "custom_checkpoint_0.pkl": "registered0",
    }
    assert {path.name for path in (tmp_path / "saved").iterdir()} == held_as.keys()
    states = torch.load(tmp_path / "saved/random_states_0.pkl", weights_only=False)
    # The step counts micro-batches, and is a multiple of those of an optimizer step where one ends.
    generators = {"random_state", "numpy_random_seed", "torch_manual_seed"}
    assert {name for name in states if "cuda" not in name} == {"step", *generators}
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert "registered0" in state.stateful


def test_functions_that_write_into_a_folder_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As scripts of diffusers register them, to save an average."""
    arguments, settings = prepared(tmp_path)
    arguments[0].register_save_state_pre_hook(lambda models, weights, folder: None)
    train(arguments, settings)
    assert len([line for line in caplog.messages if "LD322" in line]) == 1
