"""What optimizers consume of whole buckets is read on the device, and what no rank sent is noticed there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.compressors.exchange import stamp_of
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.flat.selection import TorchSelection
from lowdiff.compressors.flat.sent import Places, SentBucket, TorchReading
from lowdiff.compressors.flat.topk import FlatTopKReducer
from lowdiff.core.layout import INT_OF_BYTES, layout_of
from lowdiff.errors import ReplayMismatch
from tests.contract.compressors import decoded
from tests.unit.compressors.flat.test_selection import WAYS, Ways, by_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
#: Of parameters in a bucket: elements, and how many of them each rank sent.
PARTS = st.lists(st.sampled_from([(1, 1), (5, 2), (40, 40), (70, 1), (200, 33)]), min_size=1)


@pytest.mark.parametrize("make", WAYS)
@given(
    parts=PARTS,
    ranks=st.integers(1, 3),
    passes=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_entries_are_read_and_strange_ones_noticed(
    make: Any, parts: list[tuple[int, int]], ranks: int, passes: int, dtype: torch.dtype, seed: int
) -> None:
    _, reading = make()
    if not isinstance(reading, TorchReading):
        reading.block, reading.chunk = 64, 16  # several programs for a parameter
    draw = torch.Generator().manual_seed(seed)
    lengths = dict(enumerate(n for n, _ in parts))
    starts = {i: sum(n for n, _ in parts[:i]) for i in lengths}
    counts = {i: k for i, (_, k) in enumerate(parts)}
    gradients = {i: torch.zeros(n, dtype=dtype) for i, n in lengths.items() if i != 1}
    sent = []
    exchanged = {i: set[int]() for i in lengths}
    for _ in range(passes):
        rows = []
        for _ in range(ranks):
            drawn = {i: torch.randperm(n, generator=draw)[: counts[i]] for i, n in lengths.items()}
            rows.append(torch.cat([drawn[i].sort().values + starts[i] for i in drawn]).int())
            for i, chosen in drawn.items():
                exchanged[i].update(chosen.tolist())
        seen = list(torch.cat(rows).chunk(ranks))
        sent.append(
            SentBucket(
                Places.of([(i, starts[i], lengths[i], counts[i]) for i in lengths], CPU), seen
            )
        )
    is_odd = {i: bool(torch.rand((), generator=draw) < 0.3) for i in gradients}
    for i, gradient in gradients.items():
        for place in exchanged[i]:
            gradient[place] = torch.randn((), generator=draw)
        free = sorted({*range(lengths[i])} - exchanged[i])
        if is_odd[i] and free:
            gradient[free[-1]] = [math.nan, -0.0, 1e-7][seed % 3]
    before = {i: gradient.clone() for i, gradient in gradients.items()}
    partial = [i for i in gradients if counts[i] < lengths[i]]
    if not partial:
        return
    reading.read(gradients, sent)
    found = reading.strange(gradients, sent, partial).tolist()
    for i, flag in zip(partial, found, strict=True):
        rest = before[i].clone()
        rest[sorted(exchanged[i])] = 0
        assert flag == bool(patterns(rest).any()), i
    for i, gradient in gradients.items():
        assert torch.equal(patterns(gradient), patterns(before[i]))
    for one in sent:
        for rank, positions in enumerate(one.seen):
            for part in one.places.partial:
                if part.parameter in gradients:
                    entries = slice(part.first, part.first + part.count)
                    own_places = positions[entries].long() - part.start
                    assert one.values is not None
                    read = one.values[rank, entries]
                    assert torch.equal(patterns(read), patterns(before[part.parameter][own_places]))


def patterns(values: torch.Tensor) -> torch.Tensor:
    return values.view(INT_OF_BYTES[values.element_size()])


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup | None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Run:
    """A reducer of two parameters in a process group of one, by whole buckets."""

    def __init__(self, ways: Ways, group: Any) -> None:
        self.layout = layout_of(
            [
                ("a", torch.nn.Parameter(torch.zeros(400))),
                ("b", torch.nn.Parameter(torch.zeros(300))),
            ]
        )
        self.compressor = TopK(0.02, dense_below=0)
        self.residual = RotatingResidual.zeros(self.compressor.residual_layout(self.layout), CPU)
        selection, reading = ways
        self.reducer = FlatTopKReducer(
            *(self.compressor, self.layout, self.residual, group),
            selection=selection,
            reading=reading,
        )
        self.step = 0

    def begin(self) -> None:
        self.step += 1
        self.reducer.begin(stamp_of(0, self.step))

    def backward(self) -> list[torch.Tensor]:
        buffer = torch.randn(700)
        parts = list(buffer.split([400, 300]))
        self.reducer.reduce([0, 1], parts, buffer).wait()
        return parts

    def train(
        self, *, odd: bool = False, factor: float = 1.0, turns: bool = False
    ) -> tuple[bool, bool]:
        """Make a step; whether its payload lacks something, and whether it decodes to what was consumed.

        Args:
            odd: Whether the second gradient has an entry that no rank sent.
            factor: What multiplies both.
            turns: Whether only the first one's optimizer steps.
        """
        self.begin()
        parts = self.backward()
        for part in parts:
            part.mul_(factor)
        if odd:
            parts[1][(parts[1] == 0).nonzero()[0]] = 3.0
        consumed = [parts[0].clone(), torch.zeros(300) if turns else parts[1].clone()]
        self.reducer.consume([parts[0], None if turns else parts[1]])
        return self.commit(parts, consumed)

    def commit(self, parts: list[torch.Tensor], consumed: list[torch.Tensor]) -> tuple[bool, bool]:
        for part in parts:
            part.fill_(99.0)
        self.residual.settle()
        self.residual.advance()
        payload = self.reducer.payload()
        if self.reducer.depart().has_missed:
            with pytest.raises(ReplayMismatch, match="did not store the gradient"):
                decoded(self.compressor, [payload], self.layout, 100)
            return True, False
        rebuilt = decoded(self.compressor, [payload], self.layout, 100)
        return False, all(
            torch.equal(patterns(ours), patterns(theirs))
            for ours, theirs in zip(rebuilt, consumed, strict=True)
        )


@pytest.mark.parametrize("make", WAYS)
def test_what_no_rank_sent_is_missed_once_and_stored_from_then_on(
    make: Any, group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(make(), group)
    assert run.train() == (False, True)
    assert run.train(odd=True) == (True, False)
    assert "'b' was changed" in caplog.text
    assert run.train(odd=True) == (False, True)
    assert run.train() == (False, True)
    assert run.train(odd=True) == (False, True)


@pytest.mark.parametrize("make", WAYS)
def test_clipping_by_nan_is_noticed(make: Any, group: Any) -> None:
    run = Run(make(), group)
    assert run.train(factor=0.3) == (False, True)
    assert run.train(factor=math.nan) == (True, False)


@pytest.mark.parametrize("make", WAYS)
def test_nothing_is_missed_of_a_step_that_a_kernel_skipped(make: Any, group: Any) -> None:
    run = Run(make(), group)
    run.begin()
    parts = run.backward()
    run.reducer.consume([parts[0].mul_(math.nan), parts[1]])
    run.reducer.skip([0])
    assert run.commit(parts, [torch.zeros(400), parts[1].clone()]) == (False, True)


@pytest.mark.parametrize("make", WAYS)
def test_what_was_strange_is_remembered_until_its_optimizer_steps_again(
    make: Any, group: Any
) -> None:
    run = Run(make(), group)
    assert run.train(odd=True) == (True, False)
    assert run.train(turns=True) == (False, True)
    assert run.train(odd=True) == (False, True)


@pytest.mark.parametrize("make", WAYS)
def test_an_exchange_that_broke_off_is_no_backward_pass(
    make: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make(), group)
    run.begin()

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.compressors.flat.topk.assigned", broken)
        with pytest.raises(KeyboardInterrupt):
            run.backward()
    parts = run.backward()
    consumed = [part.clone() for part in parts]
    run.reducer.consume(parts)
    assert run.commit(parts, consumed) == (False, True)


@pytest.mark.parametrize("make", WAYS)
def test_reading_that_fails_leaves_gradients_and_step_as_they_were(
    make: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make(), group)
    run.begin()
    parts = run.backward()
    consumed = [part.clone() for part in parts]

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(SentBucket, "room", full)
        with pytest.raises(MemoryError):
            run.reducer.consume(parts)
    assert all(map(torch.equal, parts, consumed))
    assert run.reducer.payload().sections == ()
    run.reducer.consume(parts)
    assert run.commit(parts, consumed) == (False, True)


def test_a_search_that_fails_puts_gradients_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reading = by_triton()
    from lowdiff.compressors.flat import reading as kernels

    gradient = torch.arange(40.0)
    seen = torch.tensor([3, 5, 8], dtype=torch.int32)
    sent = [SentBucket(Places.of([(0, 0, 40, 3)], CPU), [seen])]
    reading.read({0: gradient}, sent)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "_search", broken)
    with pytest.raises(KeyboardInterrupt):
        reading.strange({0: gradient}, sent, [0])
    assert torch.equal(gradient, torch.arange(40.0))


def test_what_departed_of_a_step_is_whole_though_others_have_begun(group: Any) -> None:
    run, departed, consumed = Run((TorchSelection(), TorchReading()), group), [], []
    with testing.late_copies(least_seconds=0.2, most_seconds=0.2):
        for _ in range(3):
            run.begin()
            parts = run.backward()
            consumed.append([part.clone() for part in parts])
            run.reducer.consume(parts)
            departed.append(run.reducer.depart())
            for part in parts:
                part.fill_(99.0)
            run.residual.settle()
            run.residual.advance()
        assert departed[-1].travels
        for own, expected in zip(departed, consumed, strict=True):
            rebuilt = decoded(run.compressor, [own.payload()], run.layout, 100)
            for ours, theirs in zip(rebuilt, expected, strict=True):
                assert torch.equal(patterns(ours), patterns(theirs))
