"""What is done to gradients between DDP's hook and the optimizer, and what the log takes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError
from lowdiff.protocols import Compressor
from lowdiff.step.gradients import Scaling
from tests.contract.compressors import FAMILY
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import bound_reducers

#: Changes, one a step; the last two need more than one factor that nobody can guess.
CHANGES: dict[str, Callable[[lowdiff.Checkpointer, nn.Module], Any]] = {
    "none": lambda checkpointer, model: None,
    "pytorch": lambda checkpointer, model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "ours": lambda checkpointer, model: checkpointer.clip_grad_norm_(model.parameters(), 0.01),
    "ours, twice": lambda checkpointer, model: (
        checkpointer.clip_grad_norm_(model.parameters(), 0.017),
        checkpointer.clip_grad_norm_(model.parameters(), 0.003, foreach=False),
    ),
    "pytorch, twice": lambda checkpointer, model: (
        nn.utils.clip_grad_norm_(model.parameters(), 0.017),
        nn.utils.clip_grad_norm_(model.parameters(), 0.003),
    ),
    "by value": lambda checkpointer, model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
}


def train(rank: int, world_size: int, folder: str, compressor: Compressor) -> list[set[str]]:
    """A pool's job: the kinds of section of each step; recovers every step and compares bits."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(40, 90, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kinds: list[set[str]] = []
    live = []
    with (
        bound_reducers(type(compressor)) as reducers,
        lowdiff.Checkpointer(
            f"{folder}/run", compressor=compressor, staging=f"{folder}/staging", retention=None
        ) as checkpointer,
    ):
        checkpointer.attach(model, optimizer)
        for step, change in enumerate(CHANGES.values()):
            optimizer.zero_grad()
            model(batch(step, rank, 16, 40)).square().mean().backward()
            change(checkpointer, model)
            optimizer.step()
            kinds.append({s.name.partition("/")[0] for s in reducers[-1].payload().sections})
            checkpointer.commit()
            live.append(model.module.weight.detach().clone())
    for step, weight in enumerate(live, start=1):
        found = lowdiff.recover(f"{folder}/run", step=step).model_state_dict()["weight"]
        assert torch.equal(found, weight), list(CHANGES)[step - 1]
    return kinds


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["cast to bfloat16", "8 bits", "powersgd", "topk bfloat16"])
def test_clipping_costs_a_number_and_only_what_no_number_tells_costs_the_values(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    found = pool.run(train, 1, str(tmp_path), FAMILY[name])[0]
    kinds = dict(zip(CHANGES, found, strict=True))
    own = kinds["none"]
    values = "indices" if name.startswith("topk") else "whole"
    assert "changed" not in own
    assert values not in own
    for change in ("pytorch", "ours", "ours, twice"):
        assert kinds[change] == own | {"changed"}, change
    assert values in kinds["by value"]


def test_clipping_needs_an_attached_run(tmp_path: Path) -> None:
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", compressor=FAMILY["topk"])
    with pytest.raises(UsageError, match="call attach"):
        checkpointer.clip_grad_norm_([torch.nn.Parameter(torch.zeros(3))], 1.0)


def train_with_noise(rank: int, world_size: int, folder: str, is_everywhere: bool) -> list[bool]:
    """A pool's job: noise in three steps, over whole buckets; which steps took a snapshot, and bits of all compared."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(40, 90, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    live: list[torch.Tensor] = []
    with (
        testing.whole_buckets(),
        lowdiff.Checkpointer(
            f"{folder}/run",
            compressor=TopK(0.05, dense_below=64),
            staging=f"{folder}/staging",
            retention=None,
            snapshot_every=100,
        ) as checkpointer,
    ):
        checkpointer.attach(model, optimizer)
        for step in checkpointer.steps(9):
            optimizer.zero_grad()
            model(batch(step, rank, 16, 40)).square().mean().backward()
            gradient = model.module.weight.grad
            assert gradient is not None
            if step in (2, 3, 4) and is_everywhere:
                gradient.add_(torch.randn(90, 40, generator=torch.Generator().manual_seed(step)))
            elif step in (2, 3, 4):  # in the last rank's range
                last = gradient[-1]
                last[(last == 0).nonzero()[-1]] = 0.5
            if step == 6:
                gradient.mul_(torch.nan).nan_to_num_(0.25)
            optimizer.step()
            live.append(model.module.weight.detach().clone())
    own = [Path(folder) / "run", Path(folder) / "staging"]
    states = [lowdiff.recover(own[0], step, staging=own[1]) for step in range(1, 10)]
    for number, state in enumerate(states):
        assert torch.equal(state.model_state_dict()["weight"], live[number]), number + 1
    return [state.base_step == state.step for state in states]


@pytest.mark.parametrize(("world_size", "is_everywhere"), [(1, True), (2, True), (2, False)])
def test_noise_over_whole_buckets_costs_its_first_step_a_snapshot(
    pool: Pool, tmp_path: Path, world_size: int, is_everywhere: bool
) -> None:
    found = pool.run(train_with_noise, world_size, str(tmp_path), is_everywhere)
    # Step 3 is the first with noise; step 7's is another one.
    assert [[i + 1 for i, took in enumerate(own) if took] for own in found] == [
        [3, 9]
    ] * world_size  # close() takes the last


def test_factors_of_gradients_are_those_they_were_clipped_by() -> None:
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    for parameter in (first, second):
        parameter.grad = torch.ones(3)
    scaling = Scaling(None)
    both = {0: first, 7: second}
    scaling.clip_grad_norm_(both.values(), 0.5)
    ((members, together),) = scaling.factors(both)
    assert members == {0, 7}
    assert len(together) == 1
    scaling.clip_grad_norm_(second, 0.1)
    found = {tuple(members): factors for members, factors in scaling.factors(both)}
    assert found[(0,)] == together
    assert found[(7,)][:1] == together
    assert len(found[(7,)]) == 2
    scaling.end_step()
    assert [*scaling.factors(both)] == [({0, 7}, ())]
