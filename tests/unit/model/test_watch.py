"""Whatever but the optimizer writes to a parameter is noticed, and logged as the values it left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from lowdiff.core.digest import join
from lowdiff.core.layout import flat, share_owners
from lowdiff.core.memory import bits
from lowdiff.model.binding import Attached, describe
from lowdiff.model.watch import Seen, Watch
from lowdiff.types import AverageStep, Bits
from tests.unit.core.checksums import checksum

Write = Callable[[nn.Parameter], None]


def one_element(parameter: nn.Parameter) -> None:
    flat(parameter.data)[-1] += 0.25


def one_row(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[0] = 0.5


def all_of_it(parameter: nn.Parameter) -> None:
    parameter.data.clamp_(-1e-3, 1e-3)


def another_tensor(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 2.0 + 1.0


def one_sign(parameter: nn.Parameter) -> None:
    flat(parameter.data)[7] *= -1.0


WRITES = [one_element, one_row, all_of_it, another_tensor, one_sign]


class Model:
    """Two optimizers, of which each has a part of the model, and what is looked at."""

    def __init__(self, *, is_live: bool = True, ranks: tuple[int, int] = (0, 1)) -> None:
        torch.manual_seed(0)
        weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
        bias = torch.full((30,), 0.1)
        bias[7] = 0.0  # of which only the bits tell the sign
        self.parameters = [
            nn.Parameter(weight),
            nn.Parameter(bias),
            nn.Parameter(torch.randn(5, 6, dtype=torch.float64)),
            nn.Parameter(torch.randn(8, 2).bfloat16()),
        ]
        self.optimizers = [
            torch.optim.SGD(part, lr=0.1) for part in (self.parameters[:2], self.parameters[2:])
        ]
        self.attached: Attached = describe(nn.ParameterList(self.parameters), self.optimizers)
        self.average = {i: p.detach().clone() for i, p in enumerate(self.parameters)}
        self.watch = Watch(
            self.attached, {"ema": self.average}, *ranks, mode="live" if is_live else "recovery"
        )

    def step(self, optimizer: int) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.watch.before_step(optimizer)
        self.optimizers[optimizer].step()
        self.watch.after_step(optimizer)

    def commit(self, step: int = 1, *, updated: bool = False) -> Seen:
        averages = {"ema": AverageStep(updated, "", 0.9, step)}
        return self.watch.at_commit(step, averages, whole_state=False)

    def values(self, *indices: int) -> dict[int, Bits]:
        return {i: bits(flat(self.parameters[i]).clone()) for i in indices}


def assert_same(found: Mapping[int, Bits], expected: Mapping[int, Bits]) -> None:
    assert found.keys() == expected.keys()
    for index, values in found.items():
        np.testing.assert_array_equal(values, expected[index])


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_optimizer_is_logged_as_it_was_found(write: Write, index: int) -> None:
    made = Model()
    write(made.parameters[index])
    expected = made.values(index)
    for optimizer in (0, 1):
        made.step(optimizer)
    seen = made.commit()
    assert_same(seen.written.before, expected)
    assert not seen.written.after
    assert seen.digests == tuple(checksum(p) for p in made.parameters)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("steps", [[], [1], [0, 1]])
def test_a_write_behind_the_optimizer_is_logged_as_it_is_at_commit(
    write: Write, index: int, steps: Sequence[int]
) -> None:
    made = Model()
    for optimizer in steps:
        made.step(optimizer)
    write(made.parameters[index])
    seen = made.commit()
    assert not seen.written.before
    assert_same(seen.written.after, made.values(index))


def test_a_write_between_two_optimizers_belongs_before_the_second_of_them() -> None:
    made = Model()
    made.step(0)
    one_row(made.parameters[0])
    one_row(made.parameters[2])
    found = made.values(2)
    made.step(1)
    seen = made.commit()
    assert_same(seen.written.before, found)
    assert_same(seen.written.after, made.values(0))


def test_what_only_optimizers_wrote_is_no_news_and_every_step_is_forgotten() -> None:
    made = Model()
    for step in range(1, 4):
        made.step(0)
        made.step(1)
        if step == 2:
            all_of_it(made.parameters[1])
            one_element(made.parameters[1])
        seen = made.commit(step)
        assert not seen.written.before
        assert set(seen.written.after) == ({1} if step == 2 else set())
        assert made.watch.is_as_committed()


def test_a_write_that_is_undone_before_anybody_looks_is_none() -> None:
    made = Model()
    before = made.parameters[2].detach().clone()
    all_of_it(made.parameters[2])
    assert not made.watch.is_as_committed()
    made.parameters[2].data.copy_(before)
    assert made.watch.is_as_committed()
    made.step(1)
    assert not made.commit().written.before


def test_without_a_live_watch_only_digests_are_taken() -> None:
    made = Model(is_live=False, ranks=(0, 1))
    one_row(made.parameters[0])
    made.step(0)
    one_row(made.parameters[0])
    seen = made.commit()
    assert not seen.written.before
    assert not seen.written.after
    assert seen.digests == tuple(checksum(p) for p in made.parameters)
    assert seen.averages["ema"].digests == tuple(checksum(p) for p in made.average.values())


def test_the_user_is_told_once_per_parameter(caplog: pytest.LogCaptureFixture) -> None:
    made = Model()
    for step, written in enumerate([[1], [1], [1, 2, 3], [0]], 1):
        for index in written:
            one_element(made.parameters[index])
        made.commit(step)
    first, second, third = [record.getMessage() for record in caplog.records]
    assert "wrote to '1' in step 1" in first
    assert "wrote to '2' and 1 more in step 3" in second
    assert "wrote to '0' in step 4" in third


# Averages


def test_an_average_that_moved_without_an_update_is_logged_and_one_that_was_updated_is_not() -> (
    None
):
    made = Model()
    made.average[3].mul_(0.5)
    seen = made.commit(1, updated=False)
    assert_same(seen.written.averages["ema"], {3: bits(flat(made.average[3]).clone())})
    made.average[3].mul_(0.5)
    seen = made.commit(2, updated=True)
    assert not seen.written.averages
    assert seen.averages["ema"].digests == tuple(checksum(a) for a in made.average.values())


def test_an_updated_average_of_a_parameter_that_was_written_too_is_logged() -> None:
    """Nobody knows which of the two came first."""
    made = Model()
    made.step(0)
    one_row(made.parameters[0])
    made.average[0].mul_(0.5)
    made.average[1].mul_(0.5)
    seen = made.commit(updated=True)
    assert_same(seen.written.averages["ema"], {0: bits(flat(made.average[0]).clone())})


def test_an_average_that_the_step_does_not_name_is_let_alone() -> None:
    """Averages that replay cannot follow are stored as items."""
    made = Model()
    made.average[0].mul_(0.5)
    seen = made.watch.at_commit(1, {}, whole_state=False)
    assert not seen.averages
    assert not seen.written.averages


# Several ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_divide_the_parameters_and_look_at_one_other_share_in_turn(world_size: int) -> None:
    ranks = [Model(ranks=(rank, world_size)) for rank in range(world_size)]
    owners = share_owners(ranks[0].attached.layout, world_size)
    shares = [[i for i, o in enumerate(owners) if o == rank] for rank in range(world_size)]
    for rank, made in enumerate(ranks):
        watched = set()
        for step in range(1, world_size):
            seen = made.commit(step)
            sums = [checksum(p) for p in made.parameters]
            assert seen.digests == tuple(sums[i] for i in shares[rank])
            assert seen.own == join(seen.digests)
            assert seen.other == join(sums[i] for i in shares[seen.watched])
            watched.add(seen.watched)
        assert watched == set(range(world_size)) - {rank}


def test_each_rank_logs_the_writes_to_its_own_share_only() -> None:
    logged = []
    for rank in range(3):
        made = Model(ranks=(rank, 3))
        for parameter in made.parameters:
            one_element(parameter)
        logged += [*made.commit().written.after]
    assert sorted(logged) == [0, 1, 2, 3]
