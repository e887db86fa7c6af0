"""When the network is idle, as told by hooks; nothing here waits for a clock."""

from __future__ import annotations

import pytest

from lowdiff.protect.copies.spans import Spans


class Told:
    """A training whose steps are told with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.spans = Spans(lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def exchange(self, seconds: float) -> None:
        self.spans.began()
        self.wait(seconds)
        self.spans.ended()

    def step(self, *idle: float) -> None:
        """A step with these spans, and an exchange of a second between each two."""
        first, *others = idle
        self.wait(first)
        for seconds in others:
            self.exchange(1.0)
            self.wait(seconds)
        self.spans.committed()


@pytest.fixture
def told() -> Told:
    return Told()


def test_nothing_is_known_before_twenty_steps_and_the_first_does_not_count(told: Told) -> None:
    told.step(500.0, 1.0)
    for _ in range(19):
        told.step(3.0, 0.5, 1.0)
        assert told.spans.idle_seconds == ()
    told.step(3.0, 0.5, 1.0)
    assert told.spans.idle_seconds == pytest.approx((3.0, 0.5, 1.0))


def test_lengths_are_means_over_the_steps_with_the_most_common_number_of_spans(told: Told) -> None:
    told.step(1.0)
    for number in range(20):
        if number % 4 == 0:
            told.step(90.0, 90.0)
        else:
            told.step(2.0 + number % 2, 1.0, 4.0)
    odd = sum(1 for n in range(20) if n % 4 and n % 2)
    mean = (15 * 2.0 + odd) / 15
    assert told.spans.idle_seconds == pytest.approx((mean, 1.0, 4.0))


def test_what_is_learnt_follows_the_training(told: Told) -> None:
    for length in (1.0, 7.0):
        for _ in range(21):
            told.step(length, 0.5)
    assert told.spans.idle_seconds == pytest.approx((7.0, 0.5))


def test_exchanges_that_overlap_leave_no_span_between_them(told: Told) -> None:
    told.spans.began()
    told.spans.began()
    told.spans.ended()
    assert not told.spans.is_open((0, 0))
    assert told.spans.position == (0, 0)
    told.spans.ended()
    assert told.spans.is_open((0, 1))
    assert told.spans.position == (0, 1)


def test_a_part_waits_until_its_span_or_a_later_one_begins(told: Told) -> None:
    spans = told.spans
    assert spans.is_open((0, 0))
    assert not spans.is_open((0, 1))
    told.exchange(1.0)
    assert spans.is_open((0, 1))
    assert not spans.is_open((1, 0))
    spans.committed()
    assert spans.is_open((0, 5)), "the step had fewer spans than usual"
    assert spans.is_open((1, 0))
    spans.began()
    assert not spans.is_open((0, 0)), "its span has passed, and an exchange runs"


def test_without_a_plan_only_the_span_after_a_commit_is_open(told: Told) -> None:
    assert told.spans.is_open(None)
    told.exchange(1.0)
    assert not told.spans.is_open(None)
    told.spans.committed()
    assert told.spans.is_open(None)


def test_where_training_stands_longer_than_a_step_takes_any_part_may_go(told: Told) -> None:
    for _ in range(3):
        told.step(2.0, 1.0)
    assert not told.spans.is_open((9, 0))
    told.wait(4.1)
    assert told.spans.is_open((9, 0))
    told.spans.began()
    told.wait(50.0)
    assert not told.spans.is_open((9, 0))


def test_a_pass_that_was_broken_off_ends_with_the_step(told: Told) -> None:
    told.spans.began()
    told.spans.committed()
    assert told.spans.is_open((1, 0))
    told.spans.ended()
    told.spans.began()
    assert not told.spans.is_open((1, 0))
