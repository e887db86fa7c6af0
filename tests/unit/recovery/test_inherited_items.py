"""What ranks of a new world start with: generators by what they draw, all else by their number."""

from __future__ import annotations

import pytest

from lowdiff.recovery.state import inherit


def items(size: int) -> list[dict[str, bytes]]:
    """Each rank has a generator, a buffer and a shard that is frozen."""
    return [
        {name: f"{name} of {rank}".encode() for name in ("rng/torch", "buffer/x", "frozen/w")}
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("size", "before", "after", "new_size", "generators"),
    [
        (2, (), (), 2, (0, 1)),
        (2, (), (), 3, (0, 1, None)),
        (3, (), (), 2, (0, 1)),
        (2, (), (0, 0), 2, (0, 0)),  # copies become tensor parallelism
        (2, (0, 0), (), 2, (0, None)),  # and back: nobody drew as the second one will
        (2, (0, 0), (0, 0), 2, (0, 1)),
        (4, (0, 0, 1, 1), (0, 1, 0, 1), 4, (0, 2, 0, 3)),
        (4, (0, 0, 1, 1), (), 4, (0, 2, None, None)),
        (4, (), (0, 0, 1, 1), 4, (0, 0, 1, 1)),
        (2, (0, 0), (0, 0, 1, 1), 4, (0, 1, None, None)),
    ],
)
def test_generators_go_by_what_ranks_draw(
    size: int,
    before: tuple[int, ...],
    after: tuple[int, ...],
    new_size: int,
    generators: tuple[int | None, ...],
) -> None:
    found = inherit(items(size), before, after, new_size)
    assert len(found) == new_size
    for rank, (own, drawn) in enumerate(zip(found, generators, strict=True)):
        assert own["buffer/x"] == f"buffer/x of {rank % size}".encode()
        assert own["frozen/w"] == f"frozen/w of {rank % size}".encode()
        assert own.get("rng/torch") == (None if drawn is None else f"rng/torch of {drawn}".encode())
