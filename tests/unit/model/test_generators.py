"""Generators are logged whenever they move, whichever NumPy's global one is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from lowdiff.model.items import ItemTracker

DRAWS: dict[str, Callable[[], object]] = {
    "rng/numpy": np.random.standard_normal,
    "rng/torch": lambda: torch.rand(()),
}


def tracker() -> ItemTracker:
    made = ItemTracker(dict, {}, torch.device("cpu"), {})
    made.start({}, is_under_way=False)
    made.changed()
    return made


@pytest.mark.parametrize("generator", ["MT19937", "PCG64", "Philox"])
def test_a_draw_from_numpys_generator_is_a_change(generator: str) -> None:
    before = mtrand.get_bit_generator()
    try:
        mtrand.set_bit_generator(getattr(np.random, generator)(1))
        items = tracker()
        assert items.changed()[0] == {}
        for _ in range(3):  # every other number was drawn with the one before
            np.random.standard_normal()
            assert items.changed()[0].keys() == {"rng/numpy"}
            assert items.changed()[0] == {}
    finally:
        mtrand.set_bit_generator(before)


def test_another_generator_is_a_change() -> None:
    before = mtrand.get_bit_generator()
    items = tracker()
    try:
        mtrand.set_bit_generator(np.random.PCG64(1))
        assert items.changed()[0].keys() == {"rng/numpy"}
    finally:
        mtrand.set_bit_generator(before)
    assert items.changed()[0].keys() == {"rng/numpy"}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_a_change_of_its_generator_alone(name: str) -> None:
    items = tracker()
    DRAWS[name]()
    assert items.changed()[0].keys() == {name}
