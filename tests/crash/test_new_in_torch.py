"""What PyTorch 2.14 and 2.15 brought: killed runs with it end with the bits of uninterrupted ones."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.errors import UnsupportedOptimizer
from lowdiff.persistence.format.values import same
from lowdiff.recovery.replay.optimizers import class_name
from tests.crash.lives import Kill, assert_identical, history
from tests.crash.pool import Pool
from tests.crash.sharded.test_sharded import assert_a_kill_costs_nothing
from tests.crash.trainings import Training, classifier, classify, plain_loop, wrapped
from tests.unit.loops import Loop

LAST = 12
SETTINGS: dict[str, dict[str, Any]] = {"topk": {}, "no compressor": {"compressor": None}}


def lazy_buckets(rank: int, world_size: int) -> Training:
    """DDP allocates each bucket as its gradients become ready."""
    model = wrapped(classifier(), lazy_bucket_allocation=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model, optimizer, plain_loop(model, optimizer, rank))


def finalized_by_hand(rank: int, world_size: int) -> Training:
    """The loop waits for DDP's exchange itself, after the backward pass."""
    model = wrapped(classifier())
    model.require_manual_backward_finalization = True  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(t: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = classify(model, t, rank)
        loss.backward()
        model.finalize_backward()  # type: ignore[operator]
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


_HAS = hasattr(DistributedDataParallel, "finalize_backward")


@pytest.mark.skipif(not _HAS, reason="DDP has it from PyTorch 2.15 on")
@pytest.mark.parametrize("build", [lazy_buckets, finalized_by_hand])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_new_ways_of_ddp(pool: Pool, tmp_path: Path, build: Any, settings: dict[str, Any]) -> None:
    def lives(folder: Path, kills: list[Kill]) -> Any:
        return history(
            pool, build, folder, world_size=2, until=LAST, kills=kills, settings=settings
        )

    killed = lives(tmp_path / "killed", [Kill(5, staged_by=frozenset({0, 1}))])
    assert killed.resumed == [5]
    assert_identical(killed, lives(tmp_path / "whole", []))


_OVERRIDES = "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        pytest.param(
            kind,
            feature,
            marks=pytest.mark.skipif(not is_there, reason="FSDP2 has it from PyTorch 2.15 on"),
        )
        for feature, is_there in (
            ("finalized", hasattr(FSDPModule, "finalize_backward")),
            ("half,overridden", _OVERRIDES),
        )
        for kind in ("even", "hsdp")
    ],
)
def test_new_ways_of_fsdp2(tmp_path: Path, kind: str, feature: str) -> None:
    assert_a_kill_costs_nothing(tmp_path, kind, "fused", feature, "replica")


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_every_rule_of_muons_rate_is_replayed(tmp_path: Path, rule: str) -> None:
    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.02, adjust_lr_fn=rule)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60, bias=False), nn.Linear(60, 3, bias=False))
    try:
        loop = Loop(tmp_path, model, make=muon, settings={"snapshot_every": 1000})
    except ValueError:
        pytest.skip(f"Muon has {rule!r} from PyTorch 2.15 on")
    loop.attach()
    for number in loop.checkpointer.steps(6):
        loop.step(number)
    loop.die()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 6
    assert same(dict(state.model_state_dict()), dict(loop.weights()))
    assert same(state.optimizer_state_dict()["state"], loop.optimizer.state_dict()["state"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_sgd_is_refused_where_its_momentum_is_not_what_the_formula_says(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """PyTorch 2.10 to 2.13 on a CPU: two equal runs differ in it. 2.15 has it right."""

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, fused=True)

    torch.manual_seed(0)
    model = nn.Linear(20, 3, bias=False).to(dtype)
    weight = copy.deepcopy(model.weight)
    optimizer = fused([weight])
    for _ in range(2):
        gradient = torch.arange(60.0).to(dtype).view(3, 20)
        weight.grad = gradient.clone()
        optimizer.step()
    is_right = same(optimizer.state[weight]["momentum_buffer"], 1.5 * gradient)
    loop = Loop(tmp_path, model, make=fused, settings={"snapshot_every": 1000})
    if not is_right:
        with pytest.raises(UnsupportedOptimizer, match=r"is broken in PyTorch .* leave fused out"):
            loop.attach()
        return
    loop.attach()
    for number in loop.checkpointer.steps(6):
        loop.optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number)).to(dtype)
        loop.model(inputs).square().mean().backward()
        loop.optimizer.step()
    loop.die()
    state = lowdiff.recover(tmp_path / "run", 6, staging=tmp_path / "staging")
    assert same(dict(state.model_state_dict()), dict(loop.weights()))
    assert same(state.optimizer_state_dict()["state"], loop.optimizer.state_dict()["state"])


def test_a_fused_sgd_over_a_frozen_half_width_layer_is_none_of_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 3))
    model[0].to(torch.bfloat16).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "staging") as checkpointer:
        assert checkpointer.attach(model, optimizer) == 0


def test_lbfgs_is_refused_whatever_it_can_do() -> None:
    try:
        optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(3))], maximize=True)  # type: ignore[call-arg]
    except TypeError:
        pytest.skip("LBFGS has maximize from PyTorch 2.14 on")
    with pytest.raises(UnsupportedOptimizer, match="LBFGS cannot be replayed"):
        class_name(optimizer)
