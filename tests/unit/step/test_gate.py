"""The gate that keeps a step whole while another thread interrupts training."""

from __future__ import annotations

import threading
import time

import pytest

from lowdiff.errors import RankLost
from lowdiff.step.gate import StepGate


def test_a_closed_gate_lets_no_step_begin() -> None:
    gate = StepGate()
    assert gate.close(0.0)
    with pytest.raises(RankLost, match="training begins anew"):
        gate.enter()


def test_closing_waits_for_the_step_that_began_and_for_its_further_optimizers() -> None:
    gate = StepGate()
    gate.enter()
    ends: list[float] = []

    def close() -> None:
        assert gate.close(60.0)
        ends.append(time.monotonic())

    closing = threading.Thread(target=close)
    closing.start()
    while not gate._is_closed:
        time.sleep(0.001)
    gate.enter()
    time.sleep(0.05)
    assert not ends
    left = time.monotonic()
    gate.leave()
    closing.join()
    assert ends[0] >= left
    with pytest.raises(RankLost):
        gate.enter()


def test_closing_gives_up_on_a_step_that_does_not_end() -> None:
    gate = StepGate()
    gate.enter()
    assert not gate.close(0.01)
