from __future__ import annotations

from dataclasses import replace

import pytest

from lowdiff.demo.records import Attached, Finished, StepDone
from lowdiff.demo.result import (
    IncompleteLog,
    Life,
    compare,
    make_life,
    measure_cost,
    measure_resumption,
)

STEPS = 6


def done(step: int, *, before: int = 0) -> StepDone:
    """A step whose life began after ``before`` steps and stages 100 bytes a step."""
    staged = 100 * (step - before - 1)
    return StepDone(step, (1 / step).hex(), 0.25, 1000.0 + step, staged)


def finished(steps: int) -> Finished:
    stats = {
        "staged_bytes": 100 * steps,
        "steps": steps,
        "durable_bytes": 30 * steps,
        "training_thread_seconds": 0.002 * steps,
    }
    return Finished((0.5).hex(), 10, 120, stats, {"parameter a": "aa", "scheduler": "bb"})


WHOLE = Life(Attached(0, 0.1, 1000.0), tuple(done(s) for s in range(1, 7)), finished(STEPS))
KILLED = Life(Attached(0, 0.1, 1000.0), tuple(done(s) for s in range(1, 4)), None)
RESUMED = Life(Attached(3, 0.5, 1003.5), tuple(done(s, before=3) for s in range(4, 7)), finished(3))


def differences(killed: Life, resumed: Life) -> tuple[str, ...]:
    return compare([WHOLE], [killed], [resumed], steps=STEPS).differences


def test_equal_runs_have_no_differences() -> None:
    comparison = compare([WHOLE] * 2, [KILLED] * 2, [RESUMED] * 2, steps=STEPS)
    assert comparison.differences == ()
    assert comparison.num_losses == 2 * STEPS
    assert comparison.num_tensors == 2 * 2


def test_a_step_done_before_and_after_the_kill_is_compared_twice() -> None:
    resumed = replace(RESUMED, steps=(done(3), *RESUMED.steps))
    assert compare([WHOLE], [KILLED], [resumed], steps=STEPS).num_losses == STEPS + 1
    resumed = replace(RESUMED, steps=(replace(done(3), loss=(9.0).hex()), *RESUMED.steps))
    assert differences(KILLED, resumed) == (
        f"rank 0, step 3: loss 9.0 instead of {float.fromhex(done(3).loss)!r}",
    )


def test_a_loss_that_differs_in_its_last_bit_is_found() -> None:
    wrong = replace(done(5), loss=(0.2 + 2**-55).hex())
    resumed = replace(RESUMED, steps=(RESUMED.steps[0], wrong, RESUMED.steps[2]))
    [difference] = differences(KILLED, resumed)
    assert "step 5" in difference


def test_a_missing_loss_is_a_difference() -> None:
    killed = replace(KILLED, steps=KILLED.steps[:-1])
    assert differences(killed, RESUMED) == ("rank 0: no loss of step 3",)


@pytest.mark.parametrize(
    "digests",
    [
        {"parameter a": "xx", "scheduler": "bb"},
        {"scheduler": "bb"},
        {"parameter a": "aa", "scheduler": "bb", "parameter b": "cc"},
    ],
)
def test_a_tensor_that_differs_or_is_in_one_run_alone_is_named(digests: dict[str, str]) -> None:
    resumed = replace(RESUMED, finished=replace(finished(3), digests=digests))
    [difference] = differences(KILLED, resumed)
    assert "parameter" in difference


def test_a_different_held_out_loss_is_found() -> None:
    resumed = replace(RESUMED, finished=replace(finished(3), held_out_loss=(0.4).hex()))
    assert differences(KILLED, resumed) == ("rank 0: the held-out loss differs",)


def test_a_run_without_an_end_is_not_identical() -> None:
    assert differences(KILLED, replace(RESUMED, finished=None)) == ("rank 0: no final state",)


def test_a_step_is_committed_when_the_next_one_was_exchanged() -> None:
    assert KILLED.committed == 2
    assert replace(RESUMED, steps=()).committed == 3


def test_the_time_to_resume_is_split_without_a_rest() -> None:
    resumption = measure_resumption(RESUMED, started=1001.0)
    assert resumption.launch_seconds == pytest.approx(2.0)
    assert resumption.attach_seconds == pytest.approx(0.5)
    assert resumption.first_step_seconds == pytest.approx(0.5)
    assert resumption.total_seconds == pytest.approx(1004.0 - 1001.0)


def test_cost_is_per_step_and_per_rank() -> None:
    cost = measure_cost([WHOLE, WHOLE], segment_bytes=7)
    assert cost.staged_bytes == ((100,) * STEPS,) * 2
    assert cost.durable_bytes_per_step == (30.0, 30.0)
    assert cost.training_thread_seconds == pytest.approx(0.002)
    assert cost.step_seconds == pytest.approx(0.25)


def test_missing_records_are_named_errors() -> None:
    with pytest.raises(IncompleteLog, match="rank1"):
        make_life([done(1)], source="rank1.jsonl")
    with pytest.raises(IncompleteLog, match="no step"):
        measure_resumption(replace(RESUMED, steps=()), started=0.0)
    with pytest.raises(IncompleteLog, match="end"):
        measure_cost([KILLED], segment_bytes=0)
