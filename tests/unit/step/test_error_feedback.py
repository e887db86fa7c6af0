"""What is owed to a parameter is sent once: whatever a loop does between two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.compressors.feedback import Scaled
from lowdiff.protocols import Compressor
from lowdiff.step.residual import StagedResidual, read_residual
from lowdiff.types import Layout, ParameterSpec
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

STEPS = 8
COMPRESSORS: dict[str, Compressor] = {
    "topk": TopK(0.1, dense_below=64),
    "topk of 2 bits": TopK(0.1, dense_below=64, value_bits=2),
    "cyclic": CyclicTopK(0.1, dense_below=64),
    "randomk": RandomK(0.1, dense_below=64),
    "powersgd": PowerSGD(2, dense_below=64),
    "8 bits to the nearest": Quantize(8, rounding="nearest"),
}
#: The others run with the slow tests.
FAST = {("topk", 2), ("powersgd", 1)}
Weights = list[torch.Tensor]


def checkpointer_in(folder: str, rank: int, compressor: Compressor) -> lowdiff.Checkpointer:
    return lowdiff.Checkpointer(
        f"{folder}/run", compressor=compressor, staging=f"{folder}/staging-{rank}"
    )


@contextmanager
def linear_training(
    folder: str, rank: int, compressor: Compressor, **settings: bool
) -> Iterator[tuple[lowdiff.Checkpointer, DistributedDataParallel, torch.optim.Optimizer]]:
    """One layer under DDP, attached."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(30, 20), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkpointer_in(folder, rank, compressor) as checkpointer:
        checkpointer.attach(model, optimizer)
        yield checkpointer, model, optimizer


def gan(rank: int, world_size: int, folder: str, compressor: Compressor, freezes: bool) -> Weights:
    """A generator's turn runs backward through the discriminator, which has stepped already."""
    torch.manual_seed(0)
    nets = nn.ModuleDict({"generator": nn.Linear(12, 30), "discriminator": nn.Linear(30, 8)})
    generator, discriminator = nets["generator"], nets["discriminator"]
    nets.forward = lambda x: discriminator(generator(x))
    model = wrapped(nets, find_unused_parameters=True)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (discriminator, generator)]
    weights = []
    with checkpointer_in(folder, rank, compressor) as checkpointer:
        checkpointer.attach(model, optimizers)
        for step in checkpointer.steps(STEPS):
            data = batch(step, rank, 6, 12)
            nets.zero_grad()
            model(data).square().mean().backward()
            optimizers[0].step()
            nets.zero_grad()
            discriminator.requires_grad_(not freezes)
            (model(data) - 1).square().mean().backward()
            discriminator.requires_grad_(True)
            optimizers[1].step()
            weights.append(torch.cat([p.detach().flatten() for p in nets.parameters()]))
    return weights


def looking_for_unused(
    rank: int, world_size: int, folder: str, compressor: Compressor, looks: bool
) -> Weights:
    """Two backward passes for one optimizer step, both of which use every parameter."""
    weights = []
    settings = {"find_unused_parameters": looks}
    with linear_training(folder, rank, compressor, **settings) as (checkpointer, model, optimizer):
        for step in checkpointer.steps(STEPS):
            optimizer.zero_grad()
            for number in (step, step + 100):
                model(batch(number, rank, 6, 30)).square().mean().backward()
            optimizer.step()
            weights.append(model.module.weight.detach().clone())
    return weights


def leaving_out(
    rank: int, world_size: int, folder: str, compressor: Compressor, spikes: bool
) -> Weights:
    """A step whose gradients the loop drops in its body, as they are large, or has not at all."""
    weights = []
    with linear_training(folder, rank, compressor) as (checkpointer, model, optimizer):
        for step in checkpointer.steps(STEPS):
            is_spike = step in (0, 3, 4)
            if spikes or not is_spike:
                loss = model(batch(step, rank, 6, 30)).square().mean()
                (loss * (1e4 if is_spike else 1.0)).backward()
                if not is_spike:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            weights.append(model.module.weight.detach().clone())
    return weights


def accumulating_beside(
    rank: int, world_size: int, folder: str, compressor: Compressor, others: bool
) -> Weights:
    """One optimizer accumulates over two bodies, perhaps while another one steps in each."""
    torch.manual_seed(0)
    first = nn.Linear(12, 30)
    nets = nn.ModuleDict({"left": first, "right": nn.Linear(12, 30)})
    nets.forward = lambda x: [net(x) for net in nets.values()]
    model = wrapped(nets)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]
    weights = []
    with checkpointer_in(folder, rank, compressor) as checkpointer:
        checkpointer.attach(model, optimizers)
        for step in checkpointer.steps(STEPS):
            left, right = model(batch(step, rank, 6, 12))
            (left.square().mean() + right.square().mean()).backward()
            if others:
                optimizers[1].step()
                optimizers[1].zero_grad()
            if step % 2:
                optimizers[0].step()
                optimizers[0].zero_grad()
            weights.append(first.weight.detach().clone())
    return weights


def one_skipped(
    rank: int, world_size: int, folder: str, compressor: Compressor, scales: bool
) -> Weights:
    """One of two optimizers is skipped in a step: by a scaler, or because its loss is left out."""
    torch.manual_seed(0)
    nets = nn.ModuleDict({"left": nn.Linear(12, 30), "right": nn.Linear(12, 30)})
    nets.forward = lambda x, both: [nets[name](x) for name in ("left", "right")[: 1 + both]]
    model = wrapped(nets, find_unused_parameters=True)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2, enabled=scales)
    weights = []
    with checkpointer_in(folder, rank, compressor) as checkpointer:
        checkpointer.attach(model, optimizers)
        for step in checkpointer.steps(STEPS):
            is_bad = step == 4
            nets.zero_grad()
            left, *right = model(batch(step, rank, 6, 12), scales or not is_bad)
            loss = left.square().mean()
            for out in right:
                loss = loss + out.square().mean() * (torch.inf if is_bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            if right:
                scaler.step(optimizers[1])
            scaler.update(1.0 if scales else None)
            weights.append(torch.cat([p.detach().flatten() for p in nets.parameters()]))
    return weights


def turn_by_turn(rank: int, world_size: int, folder: str, compressor: Compressor) -> None:
    """Two heads, whose losses have a backward pass each before the optimizer's step.

    DDP hands the first head's gradients to the hook again in the pass that does not use them, and
    drops what comes of it.
    """
    torch.manual_seed(0)
    nets = nn.ModuleDict({"actor": nn.Linear(12, 30), "critic": nn.Linear(12, 30)})
    nets.forward = lambda x, names: sum(nets[name](x).square().mean() for name in names)
    model = wrapped(nets, find_unused_parameters=True)
    optimizer = torch.optim.SGD(nets.parameters(), lr=0.1)
    weights = []
    with checkpointer_in(folder, rank, compressor) as checkpointer:
        checkpointer.attach(model, optimizer)
        for step in checkpointer.steps(STEPS):
            optimizer.zero_grad()
            for names in (["actor"], ["critic"]):
                model(batch(step, rank, 6, 12), names).backward()
            optimizer.step()
            weights.append(torch.cat([p.detach().flatten() for p in nets.parameters()]))
    for step, live in enumerate(weights, 1):
        found = lowdiff.recover(f"{folder}/run", step).model_state_dict()
        recovered = torch.cat([found[name].flatten() for name, _ in nets.named_parameters()])
        assert torch.equal(recovered, live), step


JOBS: dict[str, Callable[..., Weights]] = {
    "a backward pass after the step is as none": gan,
    "a skipped optimizer is as one without a loss": one_skipped,
    "a step that was left out has not been": leaving_out,
    "a commit for another optimizer changes nothing": accumulating_beside,
    "parameters that might be unused are not": looking_for_unused,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("compressor", "world_size"),
    [
        pytest.param(name, size, marks=[] if (name, size) in FAST else pytest.mark.slow)
        for name in COMPRESSORS
        for size in (1, 2)
    ],
)
@pytest.mark.turns(5)
@pytest.mark.parametrize("job", JOBS)
def test_the_weights_have_the_same_bits_where(
    pool: Pool, tmp_path: Path, job: str, compressor: str, world_size: int
) -> None:
    made = COMPRESSORS[compressor]
    runs = [
        pool.run(JOBS[job], world_size, str(tmp_path / str(way)), made, way)
        for way in (True, False)
    ]
    for rank in range(world_size):
        for step, (a, b) in enumerate(zip(*(run[rank] for run in runs), strict=True)):
            assert torch.equal(a, b), f"rank {rank}, step {step}: {(a - b).abs().max():.1e}"


def test_a_pass_that_uses_some_parameters_is_recovered_exactly(pool: Pool, tmp_path: Path) -> None:
    pool.run(turn_by_turn, 2, str(tmp_path), COMPRESSORS["topk"])


# Where the residual lies


def test_a_record_finds_its_residual_until_the_third_step_after_it_writes(tmp_path: Path) -> None:
    layout = Layout((ParameterSpec("a", (3,), (1,), "float32", 0),))
    residual = StagedResidual(tmp_path / "residual", layout, Scaled())
    marks = {0: residual.mark()}

    def found(step: int) -> list[float] | None:
        tensors = read_residual(tmp_path / "residual", layout, marks[step])
        return None if tensors is None else tensors[0].tolist()

    for step in range(1, 8):
        residual.pair(0)[1].fill_(step)
        residual.written(0)
        assert found(step - 1) == [step - 1] * 3
        assert step < 2 or found(step - 2) == [step - 2] * 3
        assert step < 3 or found(step - 3) is None
        residual.settle()
        residual.advance()
        marks[step] = residual.mark()
        assert found(step) == [step] * 3


def test_a_step_that_consumes_nothing_keeps_the_residual_and_its_name(tmp_path: Path) -> None:
    layout = Layout((ParameterSpec("a", (3,), (1,), "float32", 0),))
    residual = StagedResidual(tmp_path / "residual", layout, Scaled())
    before = residual.mark()
    residual.pair(0)[1].fill_(1)
    residual.written(0)
    residual.advance()
    assert residual.mark() == before
    tensors = read_residual(tmp_path / "residual", layout, before)
    assert tensors is not None
    assert not tensors[0].any()


def test_what_is_loaded_has_a_name_of_its_own(tmp_path: Path) -> None:
    layout = Layout((ParameterSpec("a", (3,), (1,), "float32", 0),))
    residual = StagedResidual(tmp_path / "residual", layout, Scaled())
    before = residual.mark()
    residual.load([torch.ones(3)])
    assert read_residual(tmp_path / "residual", layout, before) is None
    tensors = read_residual(tmp_path / "residual", layout, residual.mark())
    assert tensors is not None
    assert tensors[0].tolist() == [1.0] * 3
