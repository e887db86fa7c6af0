"""What is sent in which idle span of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import ConfigError
from lowdiff.protect.copies.schedule import Chunk, Link, schedule

#: 100 bytes a second, after a tenth of a second: a part of 40 bytes takes half a second.
LINK = Link(100.0, 0.1)


def scheduled(
    idle: list[float], *, copies: int = 1, copy_bytes: int = 100, safety: float = 1.0
) -> tuple[Chunk, ...]:
    return schedule(
        idle,
        copies=copies,
        copy_bytes=copy_bytes,
        buffer_bytes=80,
        parts=2,
        link=LINK,
        safety=safety,
    )


def test_a_span_takes_whole_parts_and_then_what_still_fits() -> None:
    # 1.25 seconds: two parts in a second, 0.15 seconds of the rest send 15 bytes.
    assert scheduled([1.25]) == (
        Chunk(0, 0, 40),
        Chunk(0, 0, 40),
        Chunk(0, 0, 15),
        Chunk(1, 0, 5),
    )


def test_a_span_shorter_than_the_start_of_a_chunk_stays_empty() -> None:
    assert scheduled([0.1, 0.05, 0.5], copy_bytes=40) == (Chunk(2, 0, 40),)


def test_only_a_share_of_a_span_is_used() -> None:
    assert scheduled([1.0], copy_bytes=80, safety=0.5) == (Chunk(0, 0, 40), Chunk(1, 0, 40))


def test_the_next_copy_begins_where_one_is_done() -> None:
    assert scheduled([10.0], copies=2, copy_bytes=50) == (
        Chunk(0, 0, 40),
        Chunk(0, 0, 10),
        Chunk(0, 1, 40),
        Chunk(0, 1, 10),
    )


def test_without_idle_spans_everything_follows_the_step() -> None:
    assert scheduled([], copy_bytes=90) == (Chunk(0, 0, 40), Chunk(0, 0, 40), Chunk(0, 0, 10))


@pytest.mark.parametrize(("copies", "copy_bytes"), [(0, 100), (2, 0), (0, 0)])
def test_nothing_to_send_is_no_chunk(copies: int, copy_bytes: int) -> None:
    assert scheduled([1.0], copies=copies, copy_bytes=copy_bytes) == ()


@dataclass(frozen=True)
class Job:
    idle: list[float]
    copies: int
    copy_bytes: int
    buffer_bytes: int
    parts: int
    link: Link
    safety: float

    @property
    def part(self) -> int:
        return self.buffer_bytes // self.parts

    def chunks(self) -> tuple[Chunk, ...]:
        return schedule(
            self.idle,
            copies=self.copies,
            copy_bytes=self.copy_bytes,
            buffer_bytes=self.buffer_bytes,
            parts=self.parts,
            link=self.link,
            safety=self.safety,
        )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    parts = draw(st.integers(1, 8))
    part = draw(st.integers(20, 1000))
    return Job(
        idle=draw(st.lists(st.floats(0, 2), max_size=6)),
        copies=draw(st.integers(0, 3)),
        copy_bytes=draw(st.integers(0, 4000)),
        buffer_bytes=parts * part + draw(st.integers(0, parts - 1)),
        parts=parts,
        link=Link(draw(st.floats(50, 1e5)), draw(st.floats(0, 0.5))),
        safety=draw(st.floats(0.1, 1.0)),
    )


@given(jobs())
def test_every_copy_is_sent_whole_in_order(job: Job) -> None:
    chunks = job.chunks()
    for copy in range(job.copies):
        assert sum(c.bytes for c in chunks if c.copy == copy) == job.copy_bytes
    assert sum(c.bytes for c in chunks) == job.copies * job.copy_bytes
    for earlier, later in pairwise(chunks):
        assert (earlier.span, earlier.copy) <= (later.span, later.copy)


@given(jobs())
def test_no_chunk_is_larger_than_a_part_of_the_buffer(job: Job) -> None:
    assert all(0 < chunk.bytes <= job.part for chunk in job.chunks())


@given(jobs())
def test_no_span_is_overfilled_but_what_follows_them(job: Job) -> None:
    chunks = job.chunks()
    for span, seconds in enumerate(job.idle):
        used = math.fsum(job.link.seconds(c.bytes) for c in chunks if c.span == span)
        assert used <= job.safety * seconds * (1 + 1e-9) + 1e-9
    assert all(0 <= chunk.span <= len(job.idle) for chunk in chunks)


@given(jobs())
def test_a_span_is_left_only_when_no_byte_fits_any_more(job: Job) -> None:
    chunks = job.chunks()
    for span, seconds in enumerate(job.idle):
        if not any(chunk.span > span for chunk in chunks):
            continue
        used = math.fsum(job.link.seconds(c.bytes) for c in chunks if c.span == span)
        assert job.safety * seconds - used < job.link.seconds(1) + 1e-9


@given(jobs())
def test_chunks_behind_all_spans_are_whole_parts_or_the_end_of_a_copy(job: Job) -> None:
    behind = [chunk for chunk in job.chunks() if chunk.span == len(job.idle)]
    for chunk, following in pairwise(behind):
        assert chunk.bytes == job.part or following.copy != chunk.copy


@given(jobs())
def test_more_idle_time_never_leaves_more_for_the_end(job: Job) -> None:
    def behind(idle: list[float]) -> int:
        chunks = Job(**{**vars(job), "idle": idle}).chunks()
        return sum(chunk.bytes for chunk in chunks if chunk.span == len(idle))

    assert behind([*job.idle, 1.0]) <= behind(job.idle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": 0}, "cannot have 0 parts"),
        ({"buffer_bytes": 3, "parts": 4}, "buffer of 3 bytes cannot have 4 parts"),
        ({"copies": -1}, "nothing can send -1 copies"),
        ({"copy_bytes": -1}, "copies of -1 bytes"),
        ({"safety": 0.0}, "safety is the share"),
        ({"safety": 1.5}, "safety is the share"),
        ({"idle": [1.0, -0.5]}, "an idle span lasts 0 seconds or more, got -0.5"),
        ({"idle": [math.nan]}, "an idle span lasts 0 seconds or more, got nan"),
        ({"idle": [math.inf]}, "an idle span lasts 0 seconds or more, got inf"),
    ],
)
def test_values_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    job = Job([1.0], 1, 100, 80, 2, LINK, 0.9)
    with pytest.raises(ConfigError, match=message):
        Job(**{**vars(job), **change}).chunks()


@pytest.mark.parametrize(
    ("bandwidth", "startup", "message"),
    [
        (0.0, 0.1, "bytes_per_second is positive"),
        (math.nan, 0.1, "bytes_per_second is positive"),
        (math.inf, 0.1, "bytes_per_second is positive"),
        (1.0, -0.1, "startup_seconds is 0 or more"),
    ],
)
def test_a_link_that_cannot_be_is_refused(bandwidth: float, startup: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Link(bandwidth, startup)
