"""What something else than the optimizer wrote on an accelerator is known once the sums of its step have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lowdiff import testing
from lowdiff.core.digest import SUM64, entries_of, state_digest
from lowdiff.core.memory import byte_view
from lowdiff.core.sums.plain import plain_sums
from lowdiff.model.device_watch import DeviceWatch, Looks
from lowdiff.types import AverageStep
from tests.unit.model.test_watch import WRITES, Model, Write, all_of_it, one_element


def checksum(tensor: torch.Tensor) -> int:
    return SUM64.of_bytes(byte_view(tensor.detach()), 0)


class There(Model):
    """The same, as if on an accelerator."""

    def __init__(self, *, is_live: bool = True, ranks: tuple[int, int] = (0, 1)) -> None:
        super().__init__(is_live=is_live, ranks=ranks)
        self.device_watch = DeviceWatch(
            self.attached,
            {"ema": self.average},
            *ranks,
            sums=plain_sums,
            mode="live" if is_live else "recovery",
        )
        self.watch = self.device_watch  # type: ignore[assignment]

    def looks(self, step: int = 1, *, updated: bool = False, whole_state: bool = False) -> Looks:
        averages = {"ema": AverageStep(updated, "", 0.9, step)}
        return self.device_watch.at_commit(step, averages, whole_state=whole_state)

    def has_written(self, step: int = 1, *, updated: bool = False) -> bool:
        return self.looks(step, updated=updated).arrived()[1]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_write_is_noticed_at_its_step_and_forgotten(write: Write, index: int, place: str) -> None:
    made = There()
    made.step(0)
    made.step(1)
    assert not made.has_written(1)
    if place == "before":
        write(made.parameters[index])
    made.step(0)
    if place == "between":
        write(made.parameters[index])
    made.step(1)
    if place == "after":
        write(made.parameters[index])
    assert made.has_written(2)
    made.step(0)
    made.step(1)
    assert not made.has_written(3)


def test_a_step_is_compared_with_one_that_has_not_arrived() -> None:
    made = There()
    found = []
    with testing.late_copies(least_seconds=0.05, most_seconds=0.05):
        for step in range(1, 6):
            made.step(0)
            made.step(1)
            if step == 3:
                made.parameters[1].data[0] += 1
            found.append(made.looks(step))
            assert found[-1].fetch.travels
    made.step(0)  # what they hold is theirs
    assert [looks.arrived()[1] for looks in found] == [False, False, True, False, False]


@pytest.mark.parametrize("steps", [[], [1], [0, 1]])
def test_without_looks_around_the_step_nothing_is_noticed_and_sums_are_kept(
    steps: Sequence[int],
) -> None:
    made = There(is_live=False)
    all_of_it(made.parameters[2])
    for optimizer in steps:
        made.step(optimizer)
    one_element(made.parameters[1])
    seen, has_written = made.looks().arrived()
    assert not has_written
    assert seen.digests == tuple(map(checksum, made.parameters))
    assert seen.averages["ema"].digests == tuple(map(checksum, made.average.values()))


def test_each_rank_sums_its_share_and_state_in_turns() -> None:
    found: dict[int, int] = {}
    for rank in range(2):
        made = There(ranks=(rank, 2))
        for optimizer in made.optimizers:
            for group in optimizer.param_groups:
                group["momentum"] = 0.9
        made.step(0)
        made.step(1)
        whole, _ = made.looks(whole_state=True).arrived()
        for step in range(2, 10):
            turn, _ = made.looks(step).arrived()
            assert turn.states.items() <= whole.states.items()
            found |= turn.states
        assert set(whole.states) <= set(found)
        for i, value in whole.states.items():
            parameter = made.parameters[i]
            state = made.optimizers[i // 2].state[parameter]
            entries = entries_of(state, made.attached.layout.parameters[i])
            assert entries is not None
            assert value == state_digest({k: checksum(v) for k, v in entries.items()}, SUM64)
    assert set(found) == set(range(4))


def test_an_average_that_moves_without_an_update_is_noticed() -> None:
    made = There()
    made.average[2] += 1
    assert made.has_written(1)
    made.average[2] += 1
    assert not made.has_written(2, updated=True)
    made.average[0].data[0] = 3.0
    assert not made.watch.is_as_committed()
    assert made.has_written(3)
    assert made.watch.is_as_committed()


def test_a_write_that_is_undone_before_anybody_looks_is_none() -> None:
    made = There()
    before = made.parameters[2].detach().clone()
    all_of_it(made.parameters[2])
    assert not made.watch.is_as_committed()
    made.parameters[2].data = before
    assert made.watch.is_as_committed()
    assert made.watch.digests() == {i: checksum(p) for i, p in enumerate(made.parameters)}


def test_another_memory_order_is_read_in_the_old_one() -> None:
    made = There()
    weight = made.parameters[0]
    weight.data = weight.data.contiguous()
    assert made.watch.is_as_committed()
