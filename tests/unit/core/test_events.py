"""Log events: one line for people, and the same facts for a formatter."""

from __future__ import annotations

import logging

import pytest

from lowdiff.core.events import log_event

LOGGER = logging.getLogger("lowdiff.test_events")


def test_facts_are_in_the_line_and_on_the_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_event(LOGGER, logging.INFO, "durable", "100 % done", step=7, seconds=0.125, ok=True)
    (record,) = caplog.records
    assert record.getMessage() == "100 % done [event=durable step=7 seconds=0.125 ok=True]"
    formatter = logging.Formatter("%(levelname)s %(event)s %(step)d %(funcName)s")
    expected = "INFO durable 7 test_facts_are_in_the_line_and_on_the_record"
    assert formatter.format(record) == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain/path.log", "plain/path.log"),
        ("two words", '"two words"'),
        ('"quoted"', r'"\"quoted\""'),
        ("a=b", '"a=b"'),
        ("line\nbreak", r'"line\nbreak"'),
        ("", '""'),
    ],
)
def test_a_value_that_is_not_one_word_is_quoted_and_the_line_stays_one(
    caplog: pytest.LogCaptureFixture, value: str, shown: str
) -> None:
    log_event(LOGGER, logging.WARNING, "failed", "No\nway", error=value)
    assert caplog.messages == [f"No way [event=failed error={shown}]"]


def test_a_level_that_is_off_costs_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log_event(LOGGER, logging.DEBUG, "unseen", "Nothing")
    assert not caplog.records
