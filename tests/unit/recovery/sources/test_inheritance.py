"""What a dead rank alone had: taken over where that is right, seeded anew, or lost by name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lowdiff.persistence.format.values import decode
from lowdiff.recovery.sources.inheritance import Known, inherited

SEED = ("run", 1, 7)
TORCH, PYTHON = "rng/torch", "rng/python"
BUFFER, LOADER, OBJECT = "buffer/norm.running_mean", "stateful/dataloader0", "stateful/best"


def known(now: dict[str, bytes], *, ahead: dict[str, bytes], before: dict[str, bytes]) -> Known:
    return Known(now, ahead, before)


def rebuilt(
    own: Known,
    ahead: dict[str, bytes] | None,
    before: dict[str, bytes],
    *,
    takes_buffers: bool = False,
) -> tuple[dict[str, bytes] | None, str]:
    return inherited(own, ahead, before, seed=SEED, takes_buffers=takes_buffers)


@pytest.mark.parametrize("name", [TORCH, BUFFER, LOADER])
def test_what_was_final_before_the_optimizer_is_the_dead_ranks_own(name: str) -> None:
    own = known({name: b"now"}, ahead={name: b"now"}, before={name: b"old"})
    assert rebuilt(own, {name: b"theirs"}, {name: b"their old"}) == ({name: b"theirs"}, "")


def test_what_moves_after_the_optimizer_is_the_survivors_where_both_had_it_alike() -> None:
    name = "stateful/scheduler"
    own = known({name: b"now"}, ahead={name: b"old"}, before={name: b"old"})
    assert rebuilt(own, {name: b"old"}, {name: b"old"}) == ({name: b"now"}, "")
    assert rebuilt(own, None, {name: b"old"}) == ({name: b"now"}, "")


def test_an_object_that_a_rank_alone_has_is_lost_unless_it_was_in_front_of_the_optimizer() -> None:
    own = known({OBJECT: b"a"}, ahead={OBJECT: b"a"}, before={OBJECT: b"a"})
    assert rebuilt(own, {OBJECT: b"b"}, {OBJECT: b"a"}) == ({OBJECT: b"b"}, "")
    found, why = rebuilt(own, None, {OBJECT: b"b"})
    assert found is None
    assert OBJECT in why
    found, why = rebuilt(known({}, ahead={}, before={}), None, {OBJECT: b"b"})
    assert found is None


def test_what_one_rank_moves_for_the_first_time_is_not_taken_for_alike() -> None:
    """The other has not moved it, so nothing is ahead of it there."""
    own = known({TORCH: b"0"}, ahead={}, before={TORCH: b"0"})
    assert rebuilt(own, {TORCH: b"moved"}, {TORCH: b"0"}) == ({TORCH: b"moved"}, "")
    own = known({TORCH: b"now"}, ahead={TORCH: b"mid"}, before={TORCH: b"0"})
    _, why = rebuilt(own, {TORCH: b"other"}, {TORCH: b"0"})
    assert "seeded anew" in why


@pytest.mark.parametrize(
    "name", ["stateful/checkpointer.state", "tensor/checkpointer.state/hidden"]
)
def test_what_the_script_keeps_is_never_taken_for_moved_alike(name: str) -> None:
    own = known({name: b"b"}, ahead={name: b"a"}, before={name: b"a"})
    found, why = rebuilt(own, None, {name: b"a"})
    assert found is None
    assert name in why
    own = known({name: b"a"}, ahead={name: b"a"}, before={name: b"a"})
    assert rebuilt(own, {name: b"best"}, {name: b"a"}) == ({name: b"best"}, "")
    found, why = rebuilt(own, None, {name: b"a"})
    assert found == {name: b"a"}
    assert "checkpointer.state" in why
    assert rebuilt(own, None, {name: b"other"})[0] is None


def test_an_item_that_is_gone_from_both_is_gone() -> None:
    own = known({}, ahead={OBJECT: b"a"}, before={OBJECT: b"a"})
    assert rebuilt(own, {OBJECT: b"a"}, {OBJECT: b"a"}) == ({}, "")


def test_buffers_of_a_rank_are_its_own_unless_they_are_overwritten() -> None:
    # Alike before the first batch, and not after it.
    own = known({BUFFER: b"now"}, ahead={BUFFER: b"now"}, before={BUFFER: b"0"})
    found, why = rebuilt(own, None, {BUFFER: b"0"})
    assert found is None
    assert BUFFER in why
    assert rebuilt(own, None, {BUFFER: b"0"}, takes_buffers=True) == ({BUFFER: b"now"}, "")
    constant = known({BUFFER: b"0"}, ahead={}, before={BUFFER: b"0"})
    assert rebuilt(constant, {}, {BUFFER: b"0"}) == ({BUFFER: b"0"}, "")


def test_generators_are_as_they_were_or_seeded_anew_by_run_rank_and_step() -> None:
    own = known({TORCH: b"now", PYTHON: b"same"}, ahead={}, before={TORCH: b"old", PYTHON: b"same"})
    before = {TORCH: b"their old", PYTHON: b"theirs"}
    found, why = rebuilt(own, None, before)
    assert found is not None
    assert found[PYTHON] == b"theirs"
    assert why == "its random generators (torch) are seeded anew from run, rank and step"
    again, _ = rebuilt(own, None, before)
    other, _ = inherited(own, None, before, seed=("run", 2, 7), takes_buffers=False)
    assert found == again
    assert other is not None
    assert other[TORCH] != found[TORCH]


def test_each_kind_of_generator_takes_its_new_state() -> None:
    names = [PYTHON, "rng/numpy", TORCH]
    own = known(dict.fromkeys(names, b"now"), ahead={}, before=dict.fromkeys(names, b"old"))
    found, _ = rebuilt(own, None, dict.fromkeys(names, b"their old"))
    assert found is not None
    kept = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        random.setstate(decode(found[PYTHON]))
        np.random.set_state(decode(found["rng/numpy"]))
        torch.set_rng_state(decode(found[TORCH]))
        drawn = random.random(), np.random.random(), torch.rand(()).item()
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert len(set(drawn)) == 3
