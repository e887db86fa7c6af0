"""A replica's file survives the death of its owner at any instant, and steps as the live run did."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowdiff.compressors import Dense
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.core.digest import entry_digests, state_digest
from lowdiff.core.layout import flat
from lowdiff.core.memory import byte_view
from lowdiff.core.numerics import environment_of
from lowdiff.errors import DamagedFile, ReplayMismatch
from lowdiff.model.binding import describe, hyper_parameters
from lowdiff.persistence.format.values import encode
from lowdiff.recovery.load import empty_state
from lowdiff.recovery.replay.unit import Step, UnitState
from lowdiff.recovery.replica.file import ReplicaFile, SlotTooSmall
from lowdiff.recovery.replica.share import Shard, contents_of, look
from lowdiff.recovery.state import OptimizerState, RecoveredState, is_aligned
from lowdiff.types import Differential, Fence, Layout, OptimizerStep, Payload, Section
from tests.unit.core.checksums import checksum

STEPS = 4


class Died(Exception):
    """The replica was killed here."""


class Mortal(ReplicaFile):
    """Dies at its n-th write, either before it is made or with the tensors half written."""

    countdown = 1 << 30
    seen = 0

    def _write(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.seen += 1
        self.countdown -= 1
        if self.countdown == 0:
            for tensor in tensors:
                flat(tensor)[: tensor.numel() // 2 + 1].fill_(12345.0)
            raise Died

    def save(self, unit: int, tensors: Iterable[torch.Tensor]) -> None:
        kept = list(tensors)
        self._write()
        super().save(unit, kept)
        self._write(kept)

    def finish(self, unit: int, step: int, values: bytes) -> None:
        self._write()
        self._write_unit_slot(unit, step, values)
        self._write()
        super().finish(unit, step, values)
        self._write()

    def finish_step(self, step: int, values: bytes) -> None:
        self._write()
        super().finish_step(step, values)
        self._write()


class Live:
    """A training whose every step is kept as a replica would be given it."""

    def __init__(self, kind: type[torch.optim.Optimizer], **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        self.optimizer = kind(self.model.parameters(), **settings)
        attached = describe(self.model, [self.optimizer])
        self.fence = Fence(
            run_id="0" * 32,
            incarnation=0,
            parent=None,
            base_step=0,
            rank=0,
            world_size=1,
            environment=environment_of(torch.device("cpu")),
            layout=attached.layout,
            optimizers=attached.specs,
            compressor={"name": "dense", "settings": {"reproducible": False}},
            names=attached.names,
            life="0" * 32,
            strategy="replica",
        )
        self._attached = attached
        self._step(0)  # so that the optimizer has state
        self.start = self.state(1)
        self.steps = [self._step(t) for t in range(2, STEPS + 2)]
        self.end = self.state(STEPS + 1)

    def make(self) -> nn.Module:
        # The first parameter spans three units, the small ones share one.
        return nn.ParameterDict(
            {
                "large": nn.Parameter(torch.randn(20, 17)),
                "bias": nn.Parameter(torch.randn(33)),
                "scale": nn.Parameter(torch.randn(())),
            }
        )

    def _step(self, number: int) -> Step:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        nothing = RotatingResidual.zeros(Layout(()), torch.device("cpu"))
        reducer = Dense().bind(self.fence.layout, nothing, None)
        reducer.begin(number)
        reducer.consume(self._attached.gradients(0))
        payload = Payload(
            tuple(Section(s.name, s.coding, s.data.copy()) for s in reducer.payload().sections)
        )
        consumed = copy.deepcopy(hyper_parameters(self.optimizer))
        self.optimizer.step()
        done = OptimizerStep(stepped=True, consumed=consumed)
        items = {"stateful/count": encode(number)}
        digests = tuple(checksum(parameter) for parameter in self._attached.parameters.values())
        state_digests = {}
        for i, parameter in self._attached.parameters.items():
            kept = entry_digests(self.optimizer.state[parameter], self.fence.layout.parameters[i])
            assert kept is not None
            state_digests[i] = state_digest(kept)
        differential = replace(
            Differential(number, 0, 0, 1, (done,), (), (), payload, items, digests=digests),
            state_digests=state_digests,
        )
        return Step.of(
            (differential,), lambda payloads: Dense().decoder(payloads, self.fence.layout)
        )

    def state(self, step: int) -> RecoveredState:
        state = empty_state(step, self.fence)
        state.parameters = {n: flat(p).clone() for n, p in self.model.named_parameters()}
        entries = {
            name: {
                key: flat(value).clone() if is_aligned(key, value, p.numel()) else value.clone()
                for key, value in self.optimizer.state[p].items()
            }
            for name, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        state.optimizers = [OptimizerState(list(hyper_parameters(self.optimizer)), entries)]
        state.items = [{"stateful/count": encode(step)}]
        return state


def image(state: RecoveredState) -> dict[str, Any]:
    found: dict[str, Any] = {"step": state.step, "items": state.items[0]["stateful/count"]}
    for name, values in state.parameters.items():
        found[name] = bits(values)
    for name, entries in state.optimizers[0].state.items():
        found |= {f"{name}/{k}": bits(v) for k, v in entries.items()}
    return found


def bits(values: torch.Tensor) -> bytes:
    return bytes(byte_view(values.flatten().contiguous()))


@pytest.fixture(scope="module", params=["AdamW", "NAdam", "ASGD"])
def live(request: pytest.FixtureRequest) -> Live:
    return Live(getattr(torch.optim, request.param), lr=0.01)


def step_twice(shard: Shard, live: Live) -> None:
    for step in live.steps[:2]:
        shard.apply(step)


def made(live: Live, path: Path) -> Mortal:
    file = Mortal.create(path, contents_of(live.start, whole=False, block_elements=128))
    assert isinstance(file, Mortal)
    return file


def test_a_shard_steps_as_the_live_run_did(live: Live, tmp_path: Path) -> None:
    file = made(live, tmp_path / "state")
    assert len(file.units) > 2
    shard = Shard(file, live.fence, journaled=True)
    for step in live.steps:
        shard.apply(step)
    assert image(shard.state) == image(live.end)
    reopened = Shard(ReplicaFile.open(file.path, private=False), live.fence, journaled=True)
    assert image(reopened.state) == image(live.end)


def without_moments(state: RecoveredState) -> dict[str, Any]:
    found = image(state)
    for spec in state.fence.layout.parameters:
        for key, value in state.optimizers[0].state[spec.name].items():
            if is_aligned(key, value, spec.numel):
                del found[f"{spec.name}/{key}"]
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_steps", [0, STEPS])
def test_whatever_byte_of_a_file_changes_no_other_bits_come_from_it_but_of_moments(
    live: Live, tmp_path: Path, num_steps: int
) -> None:
    path = made(live, tmp_path / "state").path
    owner = Shard(ReplicaFile.open(path, private=False), live.fence, journaled=True)
    for step in live.steps[:num_steps]:
        owner.apply(step)
    expected, content = without_moments(owner.state), path.read_bytes()
    lines = [i for i in range(0, len(content), 64) if any(content[i : i + 64])]
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for place in (i for line in lines for i in range(line + line // 64 % 16, line + 64, 16)):
            file.seek(place)
            file.write(bytes([content[place] ^ 0x10]))
            try:
                heir = Shard(ReplicaFile.open(path, private=True), live.fence, journaled=False)
                if (heir.file.unit_steps > heir.step).any():  # the record is still in the queue
                    heir.apply(live.steps[heir.step - 1])
                if heir.step == owner.step:  # else recovery says that the file is of no one step
                    assert without_moments(heir.state) == expected, place
            except DamagedFile:
                refused += 1
            file.seek(place)
            file.write(content[place : place + 1])
    assert refused > 50


def test_a_changed_parameter_is_noticed_where_the_trainer_takes_no_checksums(
    live: Live, tmp_path: Path
) -> None:
    file = made(live, tmp_path / "state")
    shard = Shard(file, live.fence, journaled=True)
    for step in live.steps:
        shard.apply(replace(step, shards=(replace(step.shards[0], digests=()),)))
    assert image(shard.state) == image(live.end)
    shard.state.parameters["large"][-1] *= -1
    with pytest.raises(DamagedFile, match=r"'large' .* checksum"):
        Shard(ReplicaFile.open(file.path, private=True), live.fence, journaled=False)


def test_averages_are_among_what_a_unit_has_its_checksum_of(live: Live) -> None:
    averages = {"swa": ("bias",), "ema": ("scale", "large", "bias")}
    fence = replace(live.fence, averages=averages)
    state = live.state(1)
    state.fence = fence
    state.averages = {
        average: {name: torch.randn(state.parameters[name].numel()) for name in followed}
        for average, followed in averages.items()
    }
    for unit in contents_of(state, whole=False, block_elements=128).units:
        before = look(state, unit)
        assert UnitState(unit, state, fence).look() == before
        block = next(b for b in unit.blocks if b.stop > b.start)
        name = fence.layout.parameters[block.parameter].name
        state.averages["ema"][name][block.start] += 1
        assert look(state, unit) != before


def test_whoever_reads_privately_leaves_the_file_as_it_is(live: Live, tmp_path: Path) -> None:
    path = made(live, tmp_path / "state").path
    before = path.read_bytes()
    shard = Shard(ReplicaFile.open(path, private=True), live.fence, journaled=False)
    for step in live.steps:
        shard.apply(step)
    assert image(shard.state) == image(live.end)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_death_at_any_write_loses_nothing(live: Live, tmp_path: Path) -> None:
    counted = made(live, tmp_path / "counted")
    step_twice(Shard(counted, live.fence, journaled=True), live)
    assert counted.seen > 30
    for death in range(1, counted.seen + 1):
        file = made(live, tmp_path / "state")
        file.countdown = death
        shard = Shard(file, live.fence, journaled=True)
        with pytest.raises(Died):
            step_twice(shard, live)
        for private in (True, False):
            heir = Shard(ReplicaFile.open(file.path, private=private), live.fence, journaled=True)
            for step in live.steps:
                if step.shards[0].step > heir.step:
                    heir.apply(step)
            assert image(heir.state) == image(live.end), (death, private)
        file.path.unlink()


def test_a_parameter_that_was_changed_elsewhere_is_noticed(live: Live, tmp_path: Path) -> None:
    shard = Shard(made(live, tmp_path / "state"), live.fence, journaled=True)
    step = live.steps[0]
    digests = list(step.shards[0].digests)
    changed = [spec.name for spec in live.fence.layout.parameters].index("large")
    digests[changed] ^= 1
    told = replace(step.shards[0], digests=tuple(digests))
    with pytest.raises(ReplayMismatch, match=r"'large' .* differs from those of the trainer"):
        shard.apply(replace(step, shards=(told,)))


def test_what_outgrows_its_place_is_told_and_harms_nothing(live: Live, tmp_path: Path) -> None:
    file = made(live, tmp_path / "state")
    shard = Shard(file, live.fence, journaled=True)
    step = live.steps[0]
    grown = replace(step.shards[0], items={"stateful/large": encode(np.zeros(1 << 16))})
    with pytest.raises(SlotTooSmall):
        shard.apply(replace(step, shards=(grown,)))
    heir = Shard(ReplicaFile.open(file.path, private=True), live.fence, journaled=False)
    heir.apply(replace(step, shards=(grown,)))
    assert heir.step == 2
    assert "stateful/large" in heir.state.items[0]


def test_a_file_that_is_none_is_refused(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(DamagedFile):
        ReplicaFile.open(path, private=True)
    whole = made(live, tmp_path / "whole").path.read_bytes()
    cut = [whole[:length] for length in range(0, len(whole), 64)]
    assert len(cut) > 50
    for content in (b"x" * 100, *cut):
        path.write_bytes(content)
        with pytest.raises(DamagedFile):
            ReplicaFile.open(path, private=True)
