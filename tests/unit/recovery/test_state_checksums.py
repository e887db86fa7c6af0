"""What optimizers keep is summed by the live run, and compared by whoever replays its steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.core.digest import KINDS, Kind, entry_digests, state_digest
from lowdiff.core.layout import spec_of
from lowdiff.errors import DamagedFile, ReplayMismatch
from lowdiff.model.watch import in_turns
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.values import encode, same
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.types import Differential, Layout
from tests.unit.loops import Loop

#: Steps in which every state is summed once.
TURNS = 8
WRITTEN, LAST = 2 * TURNS, 2 * TURNS + 2
#: The last step before it at which the state was summed.
COMPARED = TURNS
NEVER = {"snapshot_every": 1000}


@pytest.fixture(autouse=True, params=["crc32c", "sum64"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """Checksums of a CPU's training, and those of an accelerator's."""
    with testing.late_looks() if request.param == "sum64" else nullcontext():
        yield KINDS[request.param]


class Own(torch.Tensor):
    """A tensor of a class of its own, as those of 8-bit optimizers are."""


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_weight(folder: Path, **settings: Any) -> Loop:
    """A training with a single parameter, whose turn to be summed is every eighth step."""
    torch.manual_seed(0)
    model = nn.Linear(20, 3, bias=False)
    return Loop(folder, model, make=momentum, settings=NEVER | settings)


def live(folder: Path, until: int, written: int, **settings: Any) -> Loop:
    """Train and die; behind the last optimizer step of ``written`` its state changes unnoticed."""
    loop = one_weight(folder, **settings)
    loop.attach()
    for number in loop.checkpointer.steps(until):
        if number + 1 == written and settings.get("compressor", loop) is None:
            # The step stays in the queue, whatever the replica could have made of it.
            testing.wait_until(
                loop.checkpointer, lambda stats: stats["replica_step"] >= written - 1
            )
            os.kill(loop.checkpointer.stats()["replica_pid"], signal.SIGSTOP)
        loop.step(number)
        if number + 1 == written:
            # Neither the parameter nor a version counter tells.
            buffer = loop.optimizer.state[loop.model.get_parameter("weight")]["momentum_buffer"]
            buffer.data[0, 0] += 1
    loop.die()
    return loop


def records(folder: Path) -> list[Differential]:
    catalog = scan(RunFolder(folder / "run"), [folder / "staging"])
    records = catalog.of(0, 0)
    return [read_differential(records[step], Codec()) for step in range(1, records.newest + 1)]


def recover(folder: Path, step: int | None = None) -> lowdiff.RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging")


def test_a_state_that_the_step_did_not_make_is_not_returned_as_the_steps(tmp_path: Path) -> None:
    live(tmp_path, WRITTEN, WRITTEN)
    with pytest.raises(ReplayMismatch, match=r"after step 16, the optimizer's state of 'weight'"):
        recover(tmp_path, WRITTEN)
    assert recover(tmp_path).step == COMPARED


def test_training_goes_on_before_such_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, WRITTEN, WRITTEN)
    loop = one_weight(tmp_path)
    assert loop.attach() == COMPARED
    assert "the optimizer's state of 'weight'" in caplog.text
    loop.checkpointer.close()


def test_every_state_has_its_turn_within_eight_steps(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make=momentum, settings=NEVER)
    loop.attach()
    for number in loop.checkpointer.steps(2 * TURNS + 1):
        loop.step(number)
    loop.die()
    found = [set(differential.state_digests) for differential in records(tmp_path)]
    number = len(list(loop.model.parameters()))
    for first in (1, 1 + TURNS):  # behind the first, which has all
        assert sorted(i for own in found[first : first + TURNS] for i in own) == list(range(number))


def test_the_first_step_behind_a_snapshot_has_all_of_them(tmp_path: Path) -> None:
    """So whatever begins with the snapshot compares all at its first step."""
    loop = Loop(tmp_path, make=momentum, settings={"snapshot_every": 3})
    loop.attach()
    for number in loop.checkpointer.steps(8):
        loop.step(number)
    loop.die()
    everything = len(list(loop.model.parameters()))
    whole = [r.step for r in records(tmp_path) if len(r.state_digests) == everything]
    assert whole == [1, 4, 7]


def test_the_checksum_is_of_what_the_optimizer_kept_at_the_step(tmp_path: Path, kind: Kind) -> None:
    loop = one_weight(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(TURNS):
        loop.step(number)
    weight = loop.model.get_parameter("weight")
    kept = entry_digests(loop.optimizer.state[weight], spec_of("weight", weight), kind)
    assert kept is not None
    loop.die()
    assert records(tmp_path)[-1].state_digests == {0: state_digest(kept, kind)}


def test_a_run_without_such_checksums_is_replayed_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lowdiff wrote before it took them: the same format without a key."""
    monkeypatch.setattr("lowdiff.model.watch.Watch.look_at_states", lambda *_: {})
    monkeypatch.setattr("lowdiff.model.device_watch.DeviceWatch._entries", lambda *_: [])
    loop = Loop(tmp_path, make=momentum, settings=NEVER)
    loop.attach()
    for number in loop.checkpointer.steps(LAST):
        loop.step(number)
    loop.die()
    assert not any(differential.state_digests for differential in records(tmp_path))
    state = recover(tmp_path)
    assert state.step == LAST
    assert same(state.optimizer_state_dict()["state"], loop.optimizer.state_dict()["state"])


def test_keys_and_memory_order_count() -> None:
    spec = spec_of("weight", torch.zeros(4, 3, 5, 2).to(memory_format=torch.channels_last))
    values = torch.randn(4, 3, 5, 2)
    inner = values.to(memory_format=torch.channels_last)
    assert entry_digests({"a": values}, spec) == entry_digests({"a": inner}, spec)
    assert state_digest({"a": 1, "b": 2}) != state_digest({"a": 2, "b": 1})
    assert state_digest({"a": 1, "b": 2}) == state_digest({"b": 2, "a": 1})
    assert state_digest({}) == 0
    own = torch.zeros(3).as_subclass(Own)
    assert entry_digests({"n": 3, "one": torch.ones(())}, spec) == entry_digests(
        {"one": torch.ones(())}, spec
    )
    # Replay may keep another one.
    assert entry_digests({"own": own, "one": torch.ones(())}, spec) is None
    assert entry_digests({0: torch.ones(())}, spec) is None
    holes = torch.randn(6, 2)[:, 0]
    assert entry_digests({"a": holes}, spec) == entry_digests({"a": holes.clone()}, spec)


def test_the_first_step_of_a_life_has_all_of_them_too(tmp_path: Path) -> None:
    for until in (7, 10):
        loop = Loop(tmp_path, make=momentum, settings=NEVER)
        loop.attach()
        for number in loop.checkpointer.steps(until):
            loop.step(number)
        loop.checkpointer.close()
    catalog = scan(RunFolder(tmp_path / "run"), [tmp_path / "staging"])
    first = read_differential(catalog.of(1, 0)[8], Codec())
    assert len(first.state_digests) == len(list(loop.model.parameters()))


def test_recovery_ends_where_a_state_was_compared_last(tmp_path: Path) -> None:
    """Of a parameter that is not used any more nothing else shows what happened to its state."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(20, 3, bias=False), nn.Linear(20, 3, bias=False)])
    loop = Loop(tmp_path, model, make=momentum, settings=NEVER)
    loop.attach()
    for number in loop.checkpointer.steps(2 * TURNS + 2):
        used = [part for part in model if part is model[0] or number < TURNS]
        loop.optimizer.zero_grad()
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        torch.stack([part(inputs) for part in used]).square().mean().backward()
        loop.optimizer.step()
        if number + 1 == TURNS + 3:  # between two turns of the second
            second = model[1].get_parameter("weight")
            loop.optimizer.state[second]["momentum_buffer"].data[0, 0] += 1
    loop.die()
    compared = [r.step for r in records(tmp_path) if 1 in r.state_digests]
    assert compared == [1, TURNS + 1, 2 * TURNS + 1]
    with pytest.raises(ReplayMismatch, match=f"last compared at step {TURNS + 1}") as caught:
        recover(tmp_path, 2 * TURNS + 1)
    assert caught.value.step == TURNS + 2
    assert recover(tmp_path).step == TURNS + 1


class ThirdParty(torch.optim.Optimizer):
    """Steps tensor by tensor, and counts its steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["turn"] = group.get("turn", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, group)

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """Step one parameter."""
        raise NotImplementedError


def gradient_of(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


class Rotated(ThirdParty):
    """Keeps a basis for long that lies in memory column by column."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        own = self.state[p]
        if not own:
            square = torch.eye(p.numel()) + torch.outer(p.flatten(), p.flatten())
            own["basis"] = torch.linalg.qr(square)[0]
        # A product of matrices would round by how they lie in memory.
        p.sub_(own["basis"].diagonal().reshape(p.shape) * gradient_of(p) * group["lr"])


@pytest.mark.parametrize("compressor", [TopK(0.1), None], ids=["log", "replica"])
def test_state_in_another_memory_order_comes_through_snapshots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compressor: Any
) -> None:
    lowdiff.register_optimizer(Rotated, "tensor")
    settings = {"snapshot_every": 7, "compressor": compressor, "imports": [__name__]}
    loop = Loop(tmp_path, nn.Linear(20, 3), make=Rotated, settings=settings)
    loop.attach()
    assert not loop.optimizer.state
    for number in loop.checkpointer.steps(11):
        loop.step(number)
    basis = loop.optimizer.state[loop.model.get_parameter("weight")]["basis"]
    assert not basis.is_contiguous()
    weights = loop.weights()
    loop.die()
    state = recover(tmp_path)
    assert state.step == 11
    assert same(dict(state.model_state_dict()), dict(weights))
    assert not {"LD605", "LD606", "LD701"} & {getattr(r, "code", "") for r in caplog.records}


class Restarts(ThirdParty):
    """Forgets at every fifth step what it kept."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if group["turn"] % 5 == 0 or not self.state[p]:
            self.state[p] = {"m": torch.zeros_like(p)}
        else:
            self.state[p]["n"] = torch.ones_like(p)
        self.state[p]["m"].lerp_(gradient_of(p), 0.1)
        p.sub_(self.state[p]["m"] * group["lr"])


class Numbered(ThirdParty):
    """Keeps its state under a number."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p].setdefault(0, torch.zeros_like(p)).lerp_(gradient_of(p), 0.1)
        p.sub_(self.state[p][0] * group["lr"])


def test_what_is_kept_under_a_number_has_no_such_checksum(tmp_path: Path) -> None:
    lowdiff.register_optimizer(Numbered, "element")
    loop = Loop(tmp_path, make=Numbered, settings=NEVER)
    loop.attach()
    for number in loop.checkpointer.steps(6):
        loop.step(number)
    weights = loop.weights()
    loop.die()
    assert not any(differential.state_digests for differential in records(tmp_path))
    assert same(dict(recover(tmp_path, 6).model_state_dict()), dict(weights))


def test_state_may_go_and_come_within_the_steps_that_are_replayed_at_once(tmp_path: Path) -> None:
    lowdiff.register_optimizer(Restarts, "element")
    loop = Loop(tmp_path, make=Restarts, settings=NEVER)
    loop.attach()
    expected = {}
    # The tenth step is proven, and refused for what it dropped.
    for number in loop.checkpointer.steps(9):
        loop.step(number)
        expected[number + 1] = loop.weights()
    loop.die()
    for step in (4, 5, 9):
        options = ReplayOptions(block_elements=64)
        staging = tmp_path / "staging"
        state = lowdiff.recover(tmp_path / "run", step, staging=staging, options=options)
        assert same(dict(state.model_state_dict()), dict(expected[step]))


class Marked(nn.Module):
    """One of its parameters is a tensor of a class of its own, which its optimizer's state inherits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 3)
        self.scale = nn.Parameter(torch.randn(3).as_subclass(Own))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = (self.layer(inputs) * self.scale).as_subclass(torch.Tensor)
        return scaled


def test_a_parameter_of_a_class_of_its_own_has_no_such_checksum(tmp_path: Path) -> None:
    loop = Loop(tmp_path, Marked(), settings=NEVER)
    loop.attach()
    for number in loop.checkpointer.steps(6):
        loop.step(number)
    weights = loop.weights()
    loop.die()
    assert set(records(tmp_path)[0].state_digests) == {1, 2}
    assert same(
        dict(recover(tmp_path, 6).model_state_dict()),
        {n: v.as_subclass(torch.Tensor) for n, v in weights.items()},
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "pair", [[b"", b"\0\0\0\0"], [b"\1\0\0\0" * 2, b"\0" * 8], [b"\0" * 3, b""], b"", [1, 2]]
)
def test_malformed_checksums_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Any
) -> None:
    def encoded(value: Any) -> bytes:
        return encode({**value, "state_digests": pair} if "steps" in value else value)

    monkeypatch.setattr("lowdiff.persistence.format.differentials.encode", encoded)
    loop = one_weight(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(2):
        loop.step(number)
    loop.die()
    with pytest.raises(DamagedFile, match="is no differential"):
        records(tmp_path)


def test_turns_are_even() -> None:
    sizes = [1000, 10, 400, 600, 990, 1, 500, 700, 800, 450]
    specs = [spec_of(f"p{i}", torch.empty(n)) for i, n in enumerate(sizes)]
    offsets = [sum(spec.numel for spec in specs[:i]) for i in range(len(specs))]
    layout = Layout(tuple(replace(spec, offset=o) for spec, o in zip(specs, offsets, strict=True)))
    turns = in_turns(layout, range(len(specs)))
    assert sorted(i for turn in turns for i in turn) == [*range(len(specs))]
    assert sorted(sum(specs[i].numel for i in turn) for turn in turns) == [
        411,
        450,
        500,
        600,
        700,
        800,
        990,
        1000,
    ]
