from __future__ import annotations

from dataclasses import replace

import pytest

from benches.bench_effective_time import drawn, summary_of
from benches.effective_figures import life_of, refuse_other_bits, strikes_of
from benches.effective_reference import Turn
from benches.effective_supervisor import NODE, PROCESS, Strike, Struck, without_turns
from benches.effective_tables import of_effective_time
from benches.survivors_life import Line

#: Killed after 4.5 s of steps of one second; the second attempt resumes at step 2.
STRUCK = [Struck(Strike(4.5, NODE, 1), killed=104.5, ended=105.0)]


def lines_of(attempt: int, start: int, began: float, steps: int) -> list[Line]:
    found = []
    for rank in range(2):
        marks = (("up", -0.3), ("joined", -0.2), ("made", -0.1), ("attached", 0.0))
        for what, offset in marks:
            step = start if what == "attached" else 0
            found.append(Line(what, attempt, rank, 1, step, 0, began + offset))
        for number in range(1, steps + 1):
            step = start + number
            found.append(Line("step", attempt, rank, 1, step, 7 * step, began + number))
    return sorted(found, key=lambda line: line.when)


LINES = [*lines_of(0, 0, 100.0, 4), *lines_of(1, 2, 106.0, 6)]


@pytest.mark.parametrize(("failures", "nodes"), [(1, 1), (2, 1), (4, 2), (5, 3)])
def test_a_trace_has_its_mean_and_both_kinds(failures: int, nodes: int) -> None:
    trace = drawn(600, failures, seed=3)
    assert trace == drawn(600, failures, seed=3)
    assert trace != drawn(600, failures, seed=4)
    assert sum(trace.gaps_steps) == pytest.approx(600 * failures)
    assert len(trace.gaps_steps) == failures + 1
    assert trace.kinds.count(NODE) == nodes
    assert trace.kinds.count(PROCESS) == failures - nodes
    strikes = strikes_of(trace.gaps_steps, trace.kinds, trace.victims)
    assert [strike.at_seconds for strike in strikes] == sorted(s.at_seconds for s in strikes)
    assert strikes[-1].at_seconds < 600 * failures


def test_a_life_is_read_from_what_was_noted() -> None:
    life = life_of(100.0, STRUCK, LINES)
    assert (life.wall_seconds, life.steps, life.made_again) == (12.0, 8, 2)
    assert life.loop_seconds == pytest.approx(1.0)
    (failure,) = life.failures
    assert (failure.reached, failure.resumed) == (4, 2)
    assert failure.seconds["new_step"] == pytest.approx(4.5)
    assert failure.restart_seconds == pytest.approx(1.5)
    assert failure.open_seconds == pytest.approx(0.5)
    assert failure.starting_seconds == pytest.approx(0.9)
    assert life.as_row()["lost_seconds"] == pytest.approx(2.5)


def test_parts_of_wall_time_add_up_and_the_simulator_agrees() -> None:
    row = {
        **life_of(100.0, STRUCK, LINES).as_row(),
        "arm": "torch_save", "mean_steps": 600, "interval": 2, "gaps_seconds": [4.5, 7.5],
        "kinds": [NODE], "plain_seconds": [1.125, 0.9], "compressed_over_plain": 1.2,
        "losses_compared": 4,
    }  # fmt: skip
    row["failures"] = [dict(f) for f in row["failures"]]
    found = summary_of([row])
    shares = [found[f"torch_save/600/{part}_share"] for part in ("effective", "slower", "restart", "lost")]  # fmt: skip
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] == pytest.approx(8 / 12)
    assert found["torch_save/600/effective_error"] == pytest.approx(0.1125 * 8 / 12)
    assert "| 66.7 % ± 7.5 |" in of_effective_time(found)
    # Step 4 was saved, so only the half step in flight is lost there; here, two more were.
    assert found["torch_save/600/simulated_share"] == pytest.approx(10 / 12, abs=0.01)
    assert "effective_share_10min" not in found  # lowdiff has no life here


def test_a_step_made_again_must_have_its_loss() -> None:
    assert refuse_other_bits("survivors", STRUCK, LINES) == 4
    *rest, last = [line for line in LINES if line.what == "step" and line.step <= 4]
    changed = [*rest, replace(last, checksum=1)]
    with pytest.raises(AssertionError, match="differs at step 4"):
        refuse_other_bits("survivors", STRUCK, changed)
    # Error feedback went with the node, so the log's steps behind it may be others.
    assert refuse_other_bits("log", STRUCK, changed) == 0


def test_a_life_does_not_age_while_another_training_has_its_turn() -> None:
    turns = [Turn(102.0, 105.0, step_seconds=0.5), Turn(110.0, 111.0, step_seconds=0.5)]
    own = [without_turns(when, turns) for when in (101.0, 103.0, 105.0, 107.0, 112.0)]
    assert own == [101.0, 102.0, 102.0, 104.0, 108.0]
