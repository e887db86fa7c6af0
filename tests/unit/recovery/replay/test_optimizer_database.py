"""Replay by units over PyTorch's own database of optimizers, and over made-up parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lowdiff
from lowdiff import testing
from lowdiff.core.digest import CRC32C, entry_digests
from lowdiff.core.layout import flat, layout_of
from lowdiff.errors import ConfigError, UnsupportedOptimizer
from lowdiff.persistence.format.values import same
from lowdiff.recovery.replay import optimizers
from lowdiff.recovery.replay.checksums import Checksums, Look
from lowdiff.recovery.replay.kernels import StepChooser
from lowdiff.recovery.replay.optimizers import build, class_name, register_optimizer, usable_on
from lowdiff.recovery.replay.replayer import ReplayOptions, plan_units
from lowdiff.recovery.replay.unit import Scratch, Step, UnitState
from lowdiff.recovery.state import OptimizerState, RecoveredState
from lowdiff.types import (
    Block,
    Differential,
    Environment,
    Fence,
    OptimizerSpec,
    OptimizerStep,
    Payload,
)
from tests.unit.recovery.training import train

pytestmark = pytest.mark.slow

optim_db = pytest.importorskip("torch.testing._internal.common_optimizers").optim_db

SHAPES = [(7, 29), (64, 5), (1, 1)]
STEPS = 4
REFUSED = {"SparseAdam", "LBFGS"}
NO_TENSOR_LR = (torch.optim.Adam, torch.optim.AdamW)

Parameters = list[torch.nn.Parameter]


def fence_of(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Fence:
    names = {id(p): f"p{i}" for i, p in enumerate(parameters)}
    groups = tuple(tuple(names[id(p)] for p in g["params"]) for g in optimizer.param_groups)
    return Fence(
        run_id="ab" * 16,
        incarnation=0,
        parent=None,
        base_step=0,
        rank=0,
        world_size=1,
        environment=Environment(
            "cpu", torch.__version__, "", "", 1, False, "", "float32", "highest"
        ),
        layout=layout_of((names[id(p)], p) for p in parameters),
        optimizers=(OptimizerSpec(class_name(optimizer), groups),),
        compressor={},
        names={},
        life="0" * 32,
        strategy="log",
    )


def consumed(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    )


def as_step(number: int, hyper: tuple[dict[str, Any], ...], gradients: list[torch.Tensor]) -> Step:
    def decode(block: Block, out: torch.Tensor) -> None:
        out.copy_(flat(gradients[block.parameter])[block.start : block.stop])

    done = OptimizerStep(stepped=True, consumed=hyper)
    shard = Differential(number, 0, 0, 1, (done,), (), (), Payload(()))
    return Step.of((shard,), lambda _: decode)


def assert_units_replay(
    parameters: Parameters, optimizer: torch.optim.Optimizer, lr_of: Callable[[int], float] | None
) -> None:
    """Step live, then replay the same gradients by units of 64 elements: the same bits."""
    fence = fence_of(parameters, optimizer)
    state = RecoveredState(
        step=0,
        fence=fence,
        parameters={f"p{i}": flat(p).clone() for i, p in enumerate(parameters)},
        optimizers=[OptimizerState(list(consumed(optimizer)), {})],
        items=[{}],
        held=(),
        residuals=[],
        base_step=0,
    )
    generator = torch.Generator().manual_seed(3)
    steps = []
    for number in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            if lr_of is not None:
                group["lr"] = lr_of(number)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        steps.append(as_step(number, consumed(optimizer), gradients))
        optimizer.step()

    chooser = StepChooser()
    units = [
        UnitState(unit, state, fence, chooser)
        for unit in plan_units(state, fence, ReplayOptions(block_elements=64))
    ]
    found, everything = Checksums(CRC32C), range(len(parameters))
    with torch.no_grad():
        for unit in units:
            scratch = Scratch(unit.unit.scratch_elements)
            for step in steps:
                unit.step(step, scratch)
            look = Look(STEPS, unit.look(), unit.look_at_states(everything))
            unit.add_checksums([look], found)
        for unit in units:
            unit.collect(state)
    for i, p in enumerate(parameters):
        kept = entry_digests(optimizer.state[p], fence.layout.parameters[i])
        assert found.states.get((STEPS, i), {}) == kept
    for i, p in enumerate(parameters):
        assert same(state.parameters[f"p{i}"], flat(p)), f"parameter {i}"
    recovered = state.optimizer_state_dict()["state"]
    # Before PyTorch 2.11 SGD leaves an empty entry where it keeps nothing.
    live = {number: kept for number, kept in optimizer.state_dict()["state"].items() if kept}
    assert same(recovered, live)


def configurations() -> Iterator[Any]:
    for info in optim_db:
        if info.optim_cls.__name__ in REFUSED:
            continue
        for how in ("single", "foreach", "fused"):
            if how == "single" or how in info.supported_impls:
                yield pytest.param(info, how, id=f"{info.optim_cls.__name__}-{how}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("info", "how"), list(configurations()))
def test_every_optimizer_and_configuration_of_torchs_database_replays(info: Any, how: str) -> None:
    choice = {} if how == "single" else {how: True}
    tried = 0
    for given_input in info.optim_inputs_func("cpu"):
        for dtype in (torch.float32, torch.float64):
            generator = torch.Generator().manual_seed(2)
            parameters = [
                torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES
            ]
            if (
                how == "foreach"
                and info.optim_cls in NO_TENSOR_LR
                and isinstance(given_input.kwargs.get("lr"), torch.Tensor)
            ):
                continue  # torch itself refuses to make it
            optimizer = info.optim_cls(parameters, **{**given_input.kwargs, **choice})
            assert_units_replay(parameters, optimizer, None)
            tried += 1
    assert tried >= 4


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_what_was_captured_in_a_cuda_graph_can_be_stepped_on_a_cpu(kind: Any) -> None:
    hyper = {"lr": torch.tensor(0.1), "capturable": True, "foreach": True}
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    spec = OptimizerSpec(class_name(kind([weight])), (("weight",),))
    optimizer = build(spec, [(usable_on(weight.device, hyper), [weight])])
    optimizer.step()
    assert bool((weight < 1).all())
    there = usable_on(torch.device("cuda"), hyper)
    assert there == hyper
    assert there["lr"] is hyper["lr"]


def test_what_cannot_be_replayed_is_refused_with_advice() -> None:
    assert {info.optim_cls.__name__ for info in optim_db} >= REFUSED
    for kind in (torch.optim.SparseAdam, torch.optim.LBFGS):
        with pytest.raises(UnsupportedOptimizer, match=r"lowdiff\.register_optimizer\("):
            class_name(kind([torch.nn.Parameter(torch.ones(3))]))


#: In older versions only the constructor of Adagrad makes its state, and no list is tried.
_IS_LAZY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
BY_LISTS = (
    *("Adadelta", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop", "SGD"),
    pytest.param("Adagrad", marks=pytest.mark.skipif(not _IS_LAZY, reason="from PyTorch 2.13 on")),
)


@pytest.mark.parametrize("name", BY_LISTS)
def test_lists_of_tensors_are_stepped_at_once_where_torch_keeps_the_bits(name: str) -> None:
    kind = getattr(torch.optim, name)
    optimizer = kind([torch.nn.Parameter(torch.ones(70)) for _ in range(3)], lr=0.1)
    assert StepChooser().choose(optimizer) is not inspect.unwrap(kind.step)


@pytest.mark.parametrize("name", ["ASGD", "NAdam", "RAdam", "Adafactor"])
def test_an_optimizer_whose_lists_have_other_bits_steps_tensor_by_tensor(name: str) -> None:
    kind = getattr(torch.optim, name)
    optimizer = kind([torch.nn.Parameter(torch.ones(7, 10)) for _ in range(3)], lr=0.1)
    assert StepChooser().choose(optimizer) is inspect.unwrap(kind.step)


def test_a_rate_that_is_a_tensor_is_stepped_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.ones(70))
    tensor = torch.optim.AdamW([weight], lr=torch.tensor(0.1))
    number = torch.optim.AdamW([weight], lr=0.1)
    betas = torch.optim.AdamW([{"params": [weight], "betas": (torch.tensor(0.9), 0.99)}], lr=0.1)
    chooser = StepChooser()
    bare = inspect.unwrap(torch.optim.AdamW.step)
    assert chooser.choose(number) is not bare
    assert chooser.choose(tensor) is bare
    assert chooser.choose(betas) is bare


def test_what_a_list_of_betas_holds_may_change() -> None:
    weights = [torch.nn.Parameter(torch.ones(70)) for _ in range(2)]
    chosen, real = (torch.optim.Adam([weight], lr=0.1) for weight in weights)
    chooser = StepChooser()
    for betas in ([0.5, 0.9], [0, 0.9], (torch.tensor(0.5), torch.tensor(0.9)), [0.5, 0.9]):
        for optimizer, weight in zip((chosen, real), weights, strict=True):
            optimizer.param_groups[0]["betas"] = betas
            weight.grad = torch.linspace(-1, 1, 70)
        with torch.no_grad():
            chooser.choose(chosen)(chosen)
        real.step()
        assert same(weights[0].detach(), weights[1].detach())


def test_what_lists_refuse_is_stepped_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.ones(70))
    groups = [{"params": [weight], "differentiable": True}]
    bare = inspect.unwrap(torch.optim.AdamW.step)
    assert StepChooser().choose(torch.optim.AdamW(groups)) is bare


def test_the_choice_of_a_group_stays_as_it_was() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(70))])
    before = [dict(group) for group in optimizer.param_groups]
    step = StepChooser().choose(optimizer)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(70)
    with torch.no_grad():
        step(optimizer)
    assert optimizer.param_groups == before


def test_one_half_precision_parameter_in_a_unit_is_enough_for_the_real_step() -> None:
    chooser = StepChooser()
    norm = [torch.nn.Parameter(torch.ones(70)) for _ in range(2)]
    bias = torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    bare = inspect.unwrap(torch.optim.AdamW.step)
    assert chooser.choose(torch.optim.AdamW(norm)) is not bare
    assert chooser.choose(torch.optim.AdamW([*norm, bias])) is bare


@settings(max_examples=15)
@example("AdamW", torch.bfloat16, [1], 1, [0.5, 0.5, 0.5, 0.25], 0.01)
@given(
    kind=st.sampled_from(["AdamW", "SGD", "RMSprop", "Adagrad", "NAdam"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    num_groups=st.integers(1, 3),
    lrs=st.lists(st.floats(1e-6, 0.5), min_size=STEPS, max_size=STEPS),
    decay=st.sampled_from([0, 0.0, 0.01]),
)
def test_shapes_dtypes_groups_and_schedules_replay(
    kind: str,
    dtype: torch.dtype,
    sizes: list[int],
    num_groups: int,
    lrs: list[float],
    decay: float,
) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
    groups = [{"params": parameters[g::num_groups]} for g in range(min(num_groups, len(sizes)))]
    optimizer = getattr(torch.optim, kind)(groups, lr=0.1, weight_decay=decay)
    assert_units_replay(parameters, optimizer, lambda number: lrs[number - 1])


class Signed(torch.optim.Optimizer):
    """A third party's: element-wise, with a scalar and a momentum."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    own = self.state[p]
                    if not own:
                        own.update(turn=torch.zeros(()), mean=torch.zeros_like(p))
                    own["turn"] += 1
                    own["mean"].lerp_(p.grad, 0.1)
                    p.sub_(own["mean"].sign() * group["lr"] / own["turn"])


class Normed(Signed):
    """Couples its tensors: every update is divided by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm() + 1e-6
        for p in own:
            p.sub_(p.grad / norm, alpha=0.01)


class Careful(Signed):
    """Its constructor wants a rate, and sees to what it is given."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        if momentum <= 0:
            raise ValueError("no momentum")
        super().__init__(params, lr)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Registrations end with the test."""
    with testing.own_registrations():
        yield


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("kind", "granularity"), [(Signed, "element"), (Normed, "whole")])
def test_one_call_makes_a_third_partys_optimizer_replayable(
    kind: Any, granularity: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="register_optimizer"):
        train(tmp_path / "unknown", 2, build=lambda m: kind(m.parameters()))
    register_optimizer(kind, granularity, scalar_state=["turn"])
    trained = train(
        tmp_path, 6, build=lambda m: kind(m.parameters()), end="crash", snapshot_every=100
    )
    recover = partial(lowdiff.recover, trained.run, 6, staging=trained.staging)
    state = recover(options=ReplayOptions(block_elements=64))
    assert state.base_step == 0
    assert same(dict(state.model_state_dict()), dict(trained.models[6]))
    assert same(state.optimizer_state_dict()["state"], trained.optimizers[6][0]["state"])
    del optimizers.GRANULARITY[f"{kind.__module__}.{kind.__qualname__}"]
    with pytest.raises(UnsupportedOptimizer, match="as the training script did"):
        recover()


class Steered(Signed):
    """Names a state with an element per element as torch's ASGD and NAdam name numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                own = self.state[p]
                if not own:
                    own.update(eta=torch.ones(()), mu=torch.zeros_like(p))
                own["mu"].lerp_(p.grad, 0.1)
                own["eta"] *= 0.9
                p.sub_(own["mu"] * own["eta"])


def steered(model: torch.nn.Module) -> torch.optim.Optimizer:
    model.get_parameter("scale").requires_grad_(False)
    return Steered(p for p in model.parameters() if p.requires_grad)


@pytest.mark.usefixtures("forgotten")
def test_a_third_partys_state_of_elements_may_have_the_name_of_a_number(tmp_path: Path) -> None:
    register_optimizer(Steered, "element")
    trained = train(tmp_path, 3, build=steered, end="crash", snapshot_every=4)
    more = train(tmp_path, 10, build=steered, end="crash", snapshot_every=4)
    bases = set()
    for step in (2, 7, 10):
        expected = trained if step <= 3 else more
        options = ReplayOptions(block_elements=64)
        state = lowdiff.recover(trained.run, step, staging=trained.staging, options=options)
        bases.add(state.base_step)
        assert same(dict(state.model_state_dict()), dict(expected.models[step]))
        assert same(state.optimizer_state_dict()["state"], expected.optimizers[step][0]["state"])
    assert {0, 8} < bases


@pytest.mark.usefixtures("forgotten")
def test_what_its_constructor_refuses_a_group_may_hold() -> None:
    register_optimizer(Careful)
    weight = torch.nn.Parameter(torch.ones(3))
    spec = OptimizerSpec(class_name(Careful([weight], 0.1)), (("weight",),))
    hyper = {"lr": 0.2, "momentum": 0.0}
    made = build(spec, [(hyper, [weight])])
    assert made.param_groups == [{**hyper, "params": [weight]}]
    assert hyper == {"lr": 0.2, "momentum": 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.nn.Linear,), "takes an optimizer class"),
        ((Signed, "row"), "granularity of .* is one of"),
        ((torch.optim.SGD, "whole"), "is known already"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_optimizer(*arguments)
