"""Every rank hears the news of all ranks, once a step, and no rank is taken for being elsewhere."""

from __future__ import annotations

from dataclasses import astuple, fields, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowdiff.commit import session
from lowdiff.commit.agreement import News, RankNews
from lowdiff.errors import RankLost, UsageError
from tests.crash.pool import Pool
from tests.unit.loops import Loop

WORDS = st.integers(0, 2**63 - 1)
NEWS = st.builds(
    RankNews,
    **{field.name: st.booleans() if field.type == "bool" else WORDS for field in fields(RankNews)},
)


def world() -> dist.ProcessGroup:
    """The group of a pool's processes."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def news_of(rank: int, step: int) -> RankNews:
    return RankNews(
        incarnation=2,
        step=step,
        is_preempted=rank == 1,
        owes_snapshot=step == 8,
        interval=rank + 1,
        consumed=2**32 - 1 - rank,
        own=step,
        watched=rank,
    )


def tell(rank: int, world_size: int) -> list[tuple[RankNews, ...]]:
    """A pool's job: two steps."""
    news = News(world())
    heard = []
    for step in (7, 8):
        news.tell(news_of(rank, step))
        heard.append(news.hear(timeout_seconds=60.0))
    return heard


def test_every_rank_hears_what_every_rank_told_in_each_step(pool: Pool) -> None:
    expected = [tuple(news_of(rank, step) for rank in range(3)) for step in (7, 8)]
    assert pool.run(tell, 3) == [expected] * 3


def steps_apart(rank: int, world_size: int, what: str) -> str:
    """A pool's job: the last rank is elsewhere."""
    odd = rank == world_size - 1
    news = News(world())
    news.tell(RankNews(5 + (odd and what == "incarnation"), 7 + (odd and what == "step")))
    try:
        news.hear()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "elsewhere", "here"),
    [
        ("step", "step 8 of incarnation 5", "step 7 of incarnation 5"),
        ("incarnation", "step 7 of incarnation 6", "step 7 of incarnation 5"),
    ],
)
def test_ranks_at_different_steps_or_in_different_lives_are_refused_on_all(
    pool: Pool, what: str, elsewhere: str, here: str
) -> None:
    *others, odd = pool.run(steps_apart, 3, what)
    for text in others:
        assert f"rank 2 has committed {elsewhere} while this rank has committed {here}" in text
    assert f"rank 0 has committed {here} while this rank has committed {elsewhere}" in odd


def one_is_late(rank: int, world_size: int) -> str:
    """A pool's job: the last rank tells nothing before the first has given up."""
    own = dist.new_group(timeout=timedelta(seconds=60))
    assert isinstance(own, dist.ProcessGroup)
    news, raised = News(own), ""
    if rank == 0:
        news.tell(RankNews(0, 1))
        try:
            news.hear(timeout_seconds=0.2)
        except RankLost as error:
            raised = str(error)
    dist.barrier()
    return raised


def test_a_rank_that_does_not_speak_in_time_counts_as_lost(pool: Pool) -> None:
    first, _ = pool.run(one_is_late, 2)
    assert first


def tell_all(rank: int, world_size: int, all_told: list[RankNews]) -> list[tuple[RankNews, ...]]:
    """A pool's job: each rank tells its part, one after the other."""
    news = News(world())
    heard = []
    for told in all_told:
        news.tell(replace(told, watched=rank))
        heard.append(news.hear())
    return heard


@given(all_told=st.lists(NEWS, min_size=1, max_size=20))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_field_travels_as_it_is(pool: Pool, all_told: list[RankNews]) -> None:
    first, second = pool.run(tell_all, 2, all_told)
    assert first == second
    for told, heard in zip(all_told, first, strict=True):
        assert heard == tuple(replace(told, watched=rank) for rank in range(2))
        assert [type(value) for value in astuple(heard[0])] == [
            bool if field.type == "bool" else int for field in fields(RankNews)
        ]


def test_a_single_process_builds_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RankNews", None)
    loop = Loop(tmp_path)
    loop.run(4)
    assert loop.checkpointer.stats()["committed_step"] == 4
