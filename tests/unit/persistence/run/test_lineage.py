"""Which incarnation owns which steps, however often a run dies, rewinds or starts afresh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.run.fences import Span, lineage
from lowdiff.types import Fence
from tests.unit.persistence import made_runs


def fence(number: int, parent: int | None, base: int, world_size: int = 2) -> Fence:
    made = made_runs.fence(number, base=base, world_size=world_size)
    return replace(made, parent=parent)


def spans(*fences: Fence) -> list[tuple[int, int, int | None]]:
    found = lineage({f.incarnation: f for f in fences})
    return [(s.incarnation, s.base, s.last) for s in found]


def test_a_run_without_fences_has_no_history() -> None:
    assert lineage({}) == ()


def test_the_newest_incarnation_has_no_last_step_yet() -> None:
    assert spans(fence(0, None, 0)) == [(0, 0, None)]


def test_what_a_parent_recorded_beyond_its_childs_base_is_void() -> None:
    assert spans(fence(0, None, 0), fence(1, 0, 100)) == [(0, 0, 100), (1, 100, None)]


def test_a_rewind_behind_the_base_of_the_parent_leaves_the_parent_out() -> None:
    assert spans(fence(0, None, 0), fence(1, 0, 100), fence(2, 1, 50)) == [
        (0, 0, 50),
        (2, 50, None),
    ]


def test_a_rewind_to_the_base_of_the_parent_keeps_only_its_snapshot_of_that_step() -> None:
    assert spans(fence(0, None, 0), fence(1, 0, 100), fence(2, 1, 100)) == [
        (0, 0, 100),
        (1, 100, 100),
        (2, 100, None),
    ]
    (_, middle, _) = lineage({0: fence(0, None, 0), 1: fence(1, 0, 100), 2: fence(2, 1, 100)})
    assert middle.holds(100)
    assert not any(middle.owns(step) for step in range(90, 110))


def test_incarnations_that_died_before_all_fences_were_written_are_passed_over() -> None:
    # Numbers 1 and 2 are missing: not all of their ranks had written their fence.
    assert spans(fence(0, None, 0), fence(3, 0, 70)) == [(0, 0, 70), (3, 70, None)]


def test_a_start_without_restore_leaves_all_history_behind() -> None:
    assert spans(fence(0, None, 0), fence(1, 0, 100), fence(2, None, 0)) == [(2, 0, None)]


def test_the_chain_ends_where_a_fence_is_lost() -> None:
    assert spans(fence(1, 0, 100), fence(2, 1, 200)) == [(1, 100, 200), (2, 200, None)]


def test_every_span_knows_how_many_shards_its_steps_have() -> None:
    found = lineage({0: fence(0, None, 0, world_size=4), 1: fence(1, 0, 9, world_size=3)})
    assert [span.world_size for span in found] == [4, 3]


def test_a_span_owns_the_steps_after_its_base_and_holds_the_snapshots_from_it() -> None:
    span = Span(incarnation=1, world_size=2, base=10, last=12)
    assert [step for step in range(20) if span.owns(step)] == [11, 12]
    assert [step for step in range(20) if span.holds(step)] == [10, 11, 12]
    newest = Span(incarnation=1, world_size=2, base=10, last=None)
    assert newest.owns(10**9)
    assert newest.holds(10**9)


class Run:
    """A run that only remembers who made each step that leads to its present state."""

    def __init__(self) -> None:
        self.fences: dict[int, Fence] = {}
        self.num_incarnations = 0
        #: The start it came from, then the maker of each step.
        self.history: tuple[int, ...] = ()
        #: (incarnation, step) -> the history its state is the result of.
        self.snapshots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.resume(0, fresh=True, complete=True)

    def resume(self, step: int, *, fresh: bool, complete: bool) -> None:
        number = self.num_incarnations
        self.num_incarnations += 1
        if not complete:
            return  # it died while the fences were written
        step = 0 if fresh else step % len(self.history)
        parent = None if fresh else max(self.fences)
        self.fences[number] = fence(number, parent, step)
        self.history = (number,) if fresh else self.history[: step + 1]

    def train(self, num_steps: int) -> None:
        self.history += (max(self.fences),) * num_steps

    def snapshot(self) -> None:
        self.snapshots[max(self.fences), len(self.history) - 1] = self.history


actions: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.tuples(st.just("train"), st.fixed_dictionaries({"num_steps": st.integers(1, 5)})),
    st.tuples(st.just("snapshot"), st.just({})),
    st.tuples(
        st.just("resume"),
        st.fixed_dictionaries(
            {
                "step": st.integers(0, 30),
                "fresh": st.sampled_from([False, False, False, True]),
                "complete": st.sampled_from([True, True, True, False]),
            }
        ),
    ),
)


@given(st.lists(actions, max_size=30))
def test_owners_and_valid_snapshots_are_those_of_the_history_that_really_happened(
    sequence: list[tuple[str, dict[str, Any]]],
) -> None:
    run = Run()
    for name, arguments in sequence:
        getattr(run, name)(**arguments)
        chain = lineage(run.fences)
        for step in range(1, len(run.history)):
            assert [s.incarnation for s in chain if s.owns(step)] == [run.history[step]]
        for (incarnation, step), made_of in run.snapshots.items():
            held = any(s.incarnation == incarnation and s.holds(step) for s in chain)
            assert held == (made_of == run.history[: step + 1])
