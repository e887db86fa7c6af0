"""Log events: one line for people, and the same facts for a formatter."""

from __future__ import annotations

import logging
import re

import pytest

from lowdiff.core.events import Code, inform


def test_facts_are_in_the_line_and_on_the_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        inform("100 % done", event="durable", step=7, seconds=0.125, ok=True)
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
    Code.WRITE_FAILED.warn("No\nway", error=value)
    assert caplog.messages == [f"LD112: No way [event=write_failed error={shown}]"]


def test_a_level_that_is_off_costs_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    inform("Nothing", event="unseen")
    assert not caplog.records


def test_a_warning_begins_with_its_code_which_the_record_has_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Code.LEASE_NOT_RENEWED.warn("disk is 5 % away")
    Code.WAITING.warn("5 % done")
    assert caplog.messages == ["LD503: disk is 5 % away", "LD106: 5 % done"]
    formatter = logging.Formatter("%(levelname)s %(code)s %(event)s %(funcName)s")
    expected = "test_a_warning_begins_with_its_code_which_the_record_has_as_well"
    assert formatter.format(caplog.records[0]) == f"WARNING LD503 lease_not_renewed {expected}"


def test_facts_of_a_warning_follow_its_sentence_on_the_same_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Code.WRITE_FAILED.warn("100 % full\nhere", rank=1, task="_write")
    (record,) = caplog.records
    said = "LD112: rank 1: 100 % full here [event=write_failed rank=1 task=_write]"
    assert (record.getMessage(), vars(record)["task"]) == (said, "_write")


def test_a_warning_at_error_level_may_carry_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("a bug")
    except ValueError:
        Code.UPLOADS_ENDED.warn("ended", level=logging.ERROR, exc_info=True)
    assert "ERROR" in caplog.text
    assert "ValueError: a bug" in caplog.text


def test_codes_are_two_letters_and_a_number_and_each_is_there_once() -> None:
    values = [code.value for code in Code.__members__.values()]
    assert len(set(values)) == len(Code.__members__), "one of them is only another name"
    assert all(re.fullmatch(r"LD[1-9][0-9]{2}", value) for value in values)
