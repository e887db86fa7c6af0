"""A residual on its way to another node: whole or not at all, in the spans that have room for it."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crc32c import crc32c

from lowdiff.compressors.feedback import Scaled
from lowdiff.core.layout import torch_dtype
from lowdiff.errors import RankLost
from lowdiff.protect.copies.line import Receiver, Sender
from lowdiff.protect.copies.residuals import KeptResidual, Outgoing, Part, Plan
from lowdiff.protect.copies.spans import Spans
from lowdiff.step.residual import StagedResidual, read_residual
from lowdiff.testing import limits
from lowdiff.types import Layout, ParameterSpec, ResidualLayout, ResidualMark
from tests.crash.pool import Pool
from tests.unit.protect.copies.test_spans import Told

LAYOUT = Layout(
    (
        ParameterSpec("a", (700,), (1,), "float32", 0),
        ParameterSpec("b", (31,), (1,), "float32", 700),
    )
)
SIZE = ResidualLayout(LAYOUT).slot_bytes


def staged(folder: Path, *values: float) -> tuple[StagedResidual, list[ResidualMark]]:
    """A residual after some steps, each of which filled it with one value."""
    residual = StagedResidual(folder / "own", LAYOUT, Scaled())
    return residual, [advanced(residual, value) for value in values]


def advanced(residual: StagedResidual, value: float) -> ResidualMark:
    for parameter in range(len(LAYOUT.parameters)):
        _, target = residual.pair(parameter)
        target.fill_(value)
        residual.written(parameter)
    residual.settle()
    residual.advance()
    return residual.mark()


def put(kept: KeptResidual, part: Part) -> None:
    target = kept.target(part.generation, part.step, part.offset, part.data.nbytes)
    target.copy_(part.data)
    kept.take(target, part.checksum)


def parts_of(value: int, step: int, *, cuts: int = 2) -> list[Part]:
    """The parts of a residual of equal bytes, with its step's number as generation."""
    data = torch.full((SIZE,), value, dtype=torch.uint8)
    edges = [SIZE * i // cuts for i in range(cuts + 1)]
    return [
        Part(None, 0, step, 1000 + step, start, data[start:stop], crc32c(data[:stop].numpy().data))
        for start, stop in pairwise(edges)
    ]


def read(folder: Path, step: int) -> list[torch.Tensor] | None:
    # The owner's slot is another one.
    return read_residual(folder / "residual", LAYOUT, ResidualMark(2, 1000 + step))


@pytest.fixture
def kept(tmp_path: Path) -> KeptResidual:
    return KeptResidual(tmp_path / "residual", LAYOUT)


def test_a_residual_is_read_once_all_its_parts_are_there(
    kept: KeptResidual, tmp_path: Path
) -> None:
    first, last = parts_of(7, 3)
    put(kept, first)
    assert read(tmp_path, 3) is None
    put(kept, last)
    found = read(tmp_path, 3)
    assert found is not None
    for tensor, spec in zip(found, LAYOUT.parameters, strict=True):
        assert tensor.dtype == torch_dtype(spec.dtype)
        assert set(tensor.view(torch.uint8).tolist()) == {7}


def test_a_flipped_bit_of_what_is_kept_is_noticed(kept: KeptResidual, tmp_path: Path) -> None:
    for part in parts_of(7, 3):
        put(kept, part)
    path = tmp_path / "residual"
    data = bytearray(path.read_bytes())
    for place in (128, 128 + SIZE - 1):
        data[place] ^= 1
        path.write_bytes(data)
        assert read(tmp_path, 3) is None
        data[place] ^= 1
    path.write_bytes(data)
    assert read(tmp_path, 3) is not None


def test_a_part_that_comes_otherwise_than_it_was_sent_ends_the_line(kept: KeptResidual) -> None:
    first, _ = parts_of(7, 3)
    target = kept.target(first.generation, first.step, first.offset, first.data.nbytes)
    target.copy_(first.data)
    target[5] = 6
    with pytest.raises(RankLost, match="residual of step 3 fails its checksum"):
        kept.take(target, first.checksum)


def test_the_newest_three_stay_and_one_that_is_being_written_is_not_read(
    kept: KeptResidual, tmp_path: Path
) -> None:
    for step in range(1, 6):
        for part in parts_of(step, step):
            put(kept, part)
    assert [step for step in range(1, 6) if read(tmp_path, step) is not None] == [3, 4, 5]
    put(kept, parts_of(6, 6)[0])
    assert [step for step in range(1, 7) if read(tmp_path, step) is not None] == [4, 5]


def test_what_follows_a_lost_beginning_is_passed_over(kept: KeptResidual, tmp_path: Path) -> None:
    first, last = parts_of(1, 1)
    put(kept, first)
    (tmp_path / "residual").unlink()
    kept.begin_anew()
    put(kept, last)
    assert read(tmp_path, 1) is None
    for part in parts_of(2, 2):
        put(kept, part)
    assert read(tmp_path, 2) is not None


def test_a_slot_that_is_written_again_is_not_copied(tmp_path: Path) -> None:
    residual, (first, second) = staged(tmp_path, 1.0, 2.0)
    target = bytearray(SIZE)
    assert residual.read(first, memoryview(target))
    assert torch.frombuffer(target, dtype=torch.float32)[0] == 1.0
    advanced(residual, 3.0)
    residual.pair(0)  # the next step begins to write
    assert not residual.read(first, memoryview(target))
    assert residual.read(second, memoryview(target))


def learnt(told: Told, *idle: float) -> Told:
    for _ in range(21):
        told.step(*idle)
    return told


def cut(
    told: Told, *, size: int = 1000, keepers: int = 1, rate: float = 100.0
) -> tuple[list[Part], bool]:
    """The parts of a residual on a link that was measured, and whether one step takes them all."""
    plan = Plan(told.spans, keepers, rank=0)
    for _ in range(3):
        plan.measured(1, 0.0)
        plan.measured(1 << 20, (1 << 20) / rate)
    parts = plan.cut(torch.zeros(size, dtype=torch.uint8), 21, 5)
    return parts, plan.fits


def test_before_spans_are_known_parts_of_sixteen_mib_go_after_a_commit() -> None:
    found, _ = cut(Told(), size=40 << 20)
    assert [part.data.nbytes for part in found] == [16 << 20, 16 << 20, 8 << 20]
    assert [part.offset for part in found] == [0, 16 << 20, 32 << 20]
    assert {part.position for part in found} == {None}


def test_a_small_part_may_go_in_any_span_before_they_are_known() -> None:
    found, _ = cut(Told(), size=1000)
    assert [part.position for part in found] == [(0, 0)]


def test_parts_fill_the_spans_of_one_step_where_they_fit() -> None:
    told = learnt(Told(), 5.0, 0.0, 10.0)
    found, fits = cut(told)
    # 100 bytes a second, in 80 % of 5 and of 10 seconds.
    assert [(part.position, part.data.nbytes) for part in found] == [
        ((21, 0), 400),
        ((21, 2), 600),
    ]
    assert found[-1].checksum == crc32c(bytes(1000))
    assert fits


def test_each_keeper_gets_a_whole_one() -> None:
    found, _ = cut(learnt(Told(), 15.0, 5.0), size=500, keepers=2)
    assert [(part.keeper, part.offset, part.data.nbytes) for part in found] == [
        (0, 0, 500),
        (1, 0, 500),
    ]
    assert {part.checksum for part in found} == {crc32c(bytes(500))}


def test_where_a_step_is_too_short_the_parts_go_on_in_the_steps_after_it_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = learnt(Told(), 5.0, 0.0)
    found, fits = cut(told)
    assert [(part.position, part.data.nbytes) for part in found] == [
        ((21, 0), 400),
        ((22, 0), 400),
        ((23, 0), 200),
    ]
    assert not fits
    assert caplog.text.count("LD902") == 1
    assert "one every 3 steps" in caplog.text


def test_a_step_that_is_never_idle_leaves_residuals_to_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, _ = cut(learnt(Told(), 0.0, 0.0), size=2 << 20)
    assert [part.position for part in found] == [None]
    assert "whenever training pauses" in caplog.text


def test_what_begins_within_a_step_begins_with_the_span_under_way() -> None:
    told = learnt(Told(), 5.0, 0.0, 10.0)
    told.exchange(1.0)
    told.exchange(1.0)
    found, _ = cut(told)
    assert [(part.position, part.data.nbytes) for part in found] == [
        ((21, 2), 800),
        ((22, 0), 200),
    ]


class Training:
    """A rank's residual and what is sent of it, without ranks."""

    def __init__(self, folder: Path) -> None:
        self.residual, _ = staged(folder)
        self.told = Told()
        self.outgoing = Outgoing(self.residual, Plan(self.told.spans, 1, rank=0))

    def commit(self, step: int) -> ResidualMark:
        mark = advanced(self.residual, float(step))
        with self.outgoing.changed:
            self.told.spans.committed()
            self.outgoing.offer(step, mark)
        return mark

    def send(self) -> list[int]:
        """Send all that may be sent now; returns the steps."""
        found = []
        while self.outgoing.is_due():
            part = self.outgoing.next_part()
            if part is not None:
                found.append(part.step)
                self.outgoing.sent()
        return found


def test_a_residual_that_has_not_begun_gives_way_to_a_newer_one(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.commit(1)
    training.commit(2)
    assert training.send() == [2]
    assert training.outgoing.sent_step == 2


def test_one_that_was_overwritten_is_dropped(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.commit(1)
    for value in (2.0, 3.0):
        advanced(training.residual, value)
    training.residual.pair(0)
    assert training.send() == []
    assert training.outgoing.sent_step == -1
    assert not training.outgoing.holds_back(1)


def test_a_step_without_a_new_residual_has_the_one_that_was_sent(tmp_path: Path) -> None:
    training = Training(tmp_path)
    mark = training.commit(1)
    training.send()
    with training.outgoing.changed:
        training.outgoing.offer(2, mark)
    assert training.send() == []
    assert training.outgoing.sent_step == 2


def test_no_residual_takes_the_place_of_one_that_recovery_may_go_back_to(tmp_path: Path) -> None:
    training = Training(tmp_path)
    found = []
    for step in range(1, 5):
        training.commit(step)
        found += training.send()
    assert found == [1, 2, 3]  # of step 1 all have heard that it is held, and three have a place
    training.outgoing.hear(2)
    assert training.send() == [4]


def test_where_nothing_is_replicated_any_more_residuals_go_on(tmp_path: Path) -> None:
    training = Training(tmp_path)
    found = []
    for step in range(1, 8):
        training.commit(step)
        found += training.send()
    assert found == [1, 2, 3, 6, 7]


def test_a_note_waits_for_its_residual_but_not_for_long(tmp_path: Path) -> None:
    training = Training(tmp_path)
    outgoing = training.outgoing
    training.told.spans.began()  # nothing is sent
    with outgoing.changed:
        outgoing.offer(1, advanced(training.residual, 1.0))
    outgoing.next_part()  # copies it
    assert not outgoing.holds_back(0)
    assert outgoing.holds_back(1)
    with outgoing.changed:
        outgoing.offer(2, advanced(training.residual, 2.0))
    assert outgoing.holds_back(1)
    assert outgoing.holds_back(2)
    with outgoing.changed:
        outgoing.offer(3, advanced(training.residual, 3.0))
    assert not outgoing.holds_back(1)
    training.told.spans.ended()
    training.told.spans.committed()
    assert training.send() == [1, 3]
    assert not outgoing.holds_back(3)


@limits(residual_buffer_bytes=2000)  # three parts and more
def sent(rank: int, world_size: int, folder: str) -> Any:
    """Rank 0 sends two residuals between notes; rank 1 keeps them."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        residual, marks = staged(Path(folder), 1.0, 2.0)
        spans = Spans()
        outgoing = Outgoing(residual, Plan(spans, 1, rank=0))
        sender = Sender(group, [1], outgoing)
        spans.began()  # training exchanges gradients
        sender.send(b"one", 1, marks[0])
        sender.send(b"two", 2, marks[1])
        threading.Event().wait(0.2)
        before = sender.bytes_sent
        spans.committed()
        for _ in range(1000):
            if outgoing.sent_step == 2:
                break
            threading.Event().wait(0.01)
        sender.send(b"three", 3, None)
        sender.close()
        dist.barrier()
        return marks, before, sender.error
    kept = KeptResidual(Path(folder) / "residual", LAYOUT)
    receiver = Receiver(group, 0)
    order: list[str | int] = []
    while (head := receiver.head()) is not None:
        if not head.generation:
            order.append(receiver.note(head).decode())
            continue
        target = kept.target(head.generation, head.step, head.offset, head.length)
        receiver.part(target)
        kept.take(target, head.checksum)
        order.append(head.step)
    dist.barrier()
    return order


def test_parts_wait_for_the_end_of_an_exchange_and_notes_for_their_parts(
    pool: Pool, tmp_path: Path
) -> None:
    (marks, before, error), order = pool.run(sent, 2, str(tmp_path))
    assert not error
    numbers = [word for word in order if isinstance(word, int)]
    assert numbers == sorted(numbers)
    assert len(numbers) >= 3
    assert order[-2:] == ["two", "three"]
    assert order.index("two") > max(i for i, word in enumerate(order) if word == 2)
    found = read_residual(tmp_path / "residual", LAYOUT, marks[1])
    assert found is not None
    assert all(bool((tensor == 2.0).all()) for tensor in found)
    assert before <= 3 * (40 + 5)
