"""Steps that a run had made and that cannot be had, each stretch with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.records import shared_ranges
from lowdiff.recovery.plan import spans_of, why_not


@dataclass(frozen=True, slots=True)
class MissingSteps:
    """Steps that cannot be had.

    Attributes:
        first: First step.
        last: Last step, inclusive; None if nothing tells how far training had come.
        why: In plain words.
    """

    first: int
    last: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Died:
    """A trainer that is gone and had not closed the run.

    Attributes:
        committed: The newest step that it is known to have committed; -1 where nothing tells.
        staging: Where its staging memory lies, and is not seen of all ranks; "" if it is seen.
        is_gone: Whether this is the place that was looked at, so that there is nothing more to look for.
        who: Describes it.
        other: Another run folder, of which this one is a copy or was one, whose staging memory is in that place; "" for none.
    """

    committed: int
    staging: str
    is_gone: bool
    who: str
    other: str = ""


def missing_steps(
    catalog: Catalog, ranges: Sequence[tuple[int, int]], died: Died | None
) -> tuple[MissingSteps, ...]:
    """List what cannot be had of the run's history, and what it made void by going back; ascending.

    Args:
        catalog: What there is.
        ranges: Steps that can be had, both ends inclusive, ascending.
        died: The newest trainer; None if it trains, or closed the run.
    """
    found = [*_gaps(catalog, ranges), *_void(catalog)]
    if died is not None:
        found += _tail(catalog, ranges, died)
    joined: list[MissingSteps] = []
    for missing in sorted(found, key=lambda missing: missing.first):
        before = joined[-1] if joined else None
        if before and before.last == missing.first - 1 and before.why == missing.why:
            joined[-1] = MissingSteps(before.first, missing.last, missing.why)
        else:
            joined.append(missing)
    return tuple(joined)


def _tail(
    catalog: Catalog, ranges: Sequence[tuple[int, int]], died: Died
) -> Iterator[MissingSteps]:
    """Name what a trainer may have committed behind the newest step that can be had."""
    spans = spans_of(catalog)
    if not spans:
        return
    newest = ranges[-1][1] if ranges else spans[-1].base
    last = died.committed if died.committed > newest else None
    if not catalog.incarnations[spans[-1].incarnation].stages_steps:
        why = "lost with the processes that held them"
    elif died.other:
        why = f"if any, in staging memory alone: that in {died.staging} is of {died.other}, which has the same id"
    elif died.staging and died.is_gone:
        why = f"if any, in staging memory alone, and {died.staging} has not that of all ranks"
    elif died.staging:
        why = f"if any, in staging memory alone: {died.staging} on the machine of {died.who}"
    elif last is not None:
        why = "not in staging memory any more, or damaged there"
    else:
        return
    yield MissingSteps(newest + 1, last, why)


def _gaps(catalog: Catalog, ranges: Sequence[tuple[int, int]]) -> Iterator[MissingSteps]:
    spans = spans_of(catalog)
    if not spans:
        return
    if spans[0].base and catalog.incarnations[spans[0].incarnation].parent is not None:
        before = min([spans[0].base, *(first for first, _ in ranges)])
        yield MissingSteps(
            0, before - 1, "of incarnations of which retention, or damage, left nothing"
        )
    begin = spans[0].base
    for first, last in ranges:
        if begin < first:
            yield from _parts(catalog, spans, begin, first - 1)
        begin = last + 1


def _parts(
    catalog: Catalog, spans: Sequence[Span], first: int, last: int
) -> Iterator[MissingSteps]:
    """Divide a gap by the incarnations that made its steps, since each may have its own reason."""
    for span in spans:
        # The base of a later one is a step of the one before.
        begin = max(first, span.base + (span is not spans[0]))
        end = last if span.last is None else min(last, span.last)
        fence = catalog.incarnations[span.incarnation]
        if begin <= end and not fence.logs_steps:
            why = f"strategy {fence.strategy} keeps steps between snapshots in memory alone"
            yield MissingSteps(begin, end, why)
        elif begin <= end:
            yield from _of_log(catalog, span, begin, end)


def _of_log(catalog: Catalog, span: Span, first: int, last: int) -> Iterator[MissingSteps]:
    """Divide steps of a log into those that retention removed, and those that are missing for another reason."""
    begin = first
    for owner, a, b in catalog.collected.ranges:
        if owner != span.incarnation or a > last or b < begin:
            continue
        a -= a - 1 == span.base  # the snapshot that it follows went with it
        if begin < a:
            yield MissingSteps(begin, a - 1, why_not(catalog, begin))
        yield MissingSteps(max(begin, a), min(last, b), "removed by retention")
        begin = b + 1
    if begin <= last:
        yield MissingSteps(begin, last, why_not(catalog, begin))


def _void(catalog: Catalog) -> Iterator[MissingSteps]:
    """List what all ranks had of an incarnation beyond the step that the next one began from."""
    spans = spans_of(catalog)
    for span, after in pairwise(spans):
        assert span.last is not None
        shards = [catalog.of(span.incarnation, rank) for rank in range(span.world_size)]
        for first, last in shared_ranges(shards, span.last + 1):
            why = f"void, since incarnation {after.incarnation} went on from step {after.base}"
            yield MissingSteps(first, last, why)
