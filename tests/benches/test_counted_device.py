"""The device that counts counts what a CUDA device would be asked for, and each wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowdiff
from benches.bench_device_ops import ARMS, counts, hook_of_eight, on_device, trainee
from benches.counted_device import DEVICE, TRAILING, CountedDevice, Tally
from benches.gpu.training import MODELS
from lowdiff.compressors import TopK
from lowdiff.compressors.exchange import Wire
from lowdiff.core import devices

#: What makes the host wait for a device, by what people write.
WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "if": lambda x: bool(x[0] > 1),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "into ordinary memory": lambda x: torch.empty(len(x)).copy_(x, non_blocking=True),
    "from the host": lambda _: torch.ones(3).to(DEVICE),
    "into the device": lambda x: x.copy_(torch.ones(len(x))),
    "set by a mask": lambda x: x.__setitem__(x > 1, x),
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: devices.settle(x.device),
    "stream": lambda x: devices.on_host([x]),
    "what is fetched": lambda x: devices.fetch([x]).arrived(),
}


def tally_of(work: Callable[[torch.Tensor], object], n: int = 100_000) -> Tally:
    with CountedDevice() as counted:
        x = torch.empty(n, device=DEVICE)
        counted.reset()
        with counted.part("work"):
            work(x)
    return counted.parts.get("work", Tally())


@pytest.mark.parametrize("name", WAITS)
def test_each_way_to_wait_is_one_wait_that_names_its_place(name: str) -> None:
    waits = tally_of(WAITS[name]).waits
    assert sum(waits.values()) == 1
    assert all(place.startswith(("tests/benches/test_counted", "lowdiff/core")) for place in waits)


@pytest.mark.parametrize(
    ("work", "launches", "bytes_per_element"),
    [
        (lambda x: x.add_(1), 1, 8),
        (lambda x: x + x, 1, 8),
        (lambda x: torch.add(x, x.clone(), out=x), 2, 8 + 12),
        (lambda x: x.zero_(), 1, 4),
        (lambda x: x.view(10, -1)[2:4].detach().t(), 0, 0),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: x.copy_(x.half()), 2, 6 + 6),
        (lambda x: x.index_fill_(0, torch.empty(0, dtype=torch.int64, device=DEVICE), 0), 1, 0),
        (lambda x: torch.add(x, x.half(), out=torch.empty_like(x)), 2, 6 + 10),
        (lambda x: torch._foreach_add_([x, x.clone()], 1), 2, 8 + 16),
        (
            lambda x: x.index_fill_(0, torch.empty(len(x), dtype=torch.int64, device=DEVICE), 0),
            1,
            16,
        ),
        (lambda x: x.to("cpu", non_blocking=True), 1, 4),
        (lambda x: torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, True), 1, 4),
    ],
)
def test_launches_and_bytes(
    work: Callable[[torch.Tensor], object], launches: int, bytes_per_element: float
) -> None:
    tally = tally_of(work)
    assert tally.launches == launches
    assert tally.num_bytes / 100_000 == pytest.approx(bytes_per_element, abs=0.01)
    assert not tally.waits


def test_a_copy_to_the_host_is_one_copy_and_its_memory_is_page_locked_while_it_lives() -> None:
    tally = tally_of(lambda x: x.cpu())
    assert (tally.launches, tally.num_bytes, tally.link_bytes) == (1, 400_000, 400_000)

    def in_turns(x: torch.Tensor) -> None:
        for _ in range(10):
            torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            torch.empty(len(x)).copy_(x, non_blocking=True)

    assert sum(tally_of(in_turns).waits.values()) == 10


def test_the_host_keeps_its_values_and_the_device_is_asked_in_one_place() -> None:
    with CountedDevice():
        x = torch.empty(5, device=DEVICE)
        assert not devices.may_look(x)
        assert devices.may_look(torch.ones(3))
        assert (torch.ones(3) * 2).tolist() == [2, 2, 2]
        assert x.sum().item() == 0
    assert not devices.fetch([torch.ones(3)]).travels


def test_buffers_and_a_rate_that_lie_on_the_device_cost_no_wait_and_come_back_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS["tiny"][0]
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plain, own = (
            counts(ARMS[prefix], config, 2, tmp_path / prefix, {}) for prefix in ("", "buffers_")
        )
        for without, with_them in zip(plain, own, strict=True):
            assert with_them["commit"].waits == without["commit"].waits
            assert not with_them["pre-hook"].waits
        # What is compared after it was restored has no values here.
        monkeypatch.setattr("lowdiff.attach.resume.check_restored", lambda *_: None)
        with CountedDevice():
            ddp, optimizer = trainee(ARMS["buffers_"], config)
            (group,) = optimizer.param_groups
            group["lr"] = 0.1  # a script may leave the tensor to lowdiff
            folder = tmp_path / "buffers_"
            checkpointer = lowdiff.Checkpointer(
                folder / "run", staging=folder / "staging", compressor=TopK(0.01)
            )
            assert checkpointer.attach(ddp, optimizer) == 6
            assert group["lr"].device == DEVICE
            checkpointer.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_no_hook_waits_for_values_in_few_bits() -> None:
    assert sum(hook_of_eight(MODELS["tiny"][0], value_bits=2).waits.values()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["item", "cpu", "tolist", "numpy", "nonzero"])
def test_a_wait_that_is_put_into_the_hook_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(hook_of_eight(MODELS["tiny"][0]).waits.values()) == 0
    write = Wire.empty

    def waiting(*given: Any) -> Wire:
        made = write(*given)
        WAITS[name](made.values)
        return made

    monkeypatch.setattr(Wire, "empty", waiting)
    assert sum(hook_of_eight(MODELS["tiny"][0]).waits.values()) == 1


@pytest.mark.parametrize("prefix", ["", "powersgd_", "survivors_"])
def test_a_snapshot_is_copied_beside_the_next_step_whose_optimizer_waits_for_nothing(
    tmp_path: Path, prefix: str
) -> None:
    config = MODELS["tiny"][0]
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        steps = counts(ARMS[prefix], config, 3, tmp_path / "run", {})
    finally:
        dist.destroy_process_group()
    ((first, taken),) = [(i, one) for i, one in enumerate(steps) if "snapshot" in one]
    following = steps[first + 1]
    with CountedDevice():
        elements = sum(p.numel() for p in on_device(config).parameters())
    trailing = [one[TRAILING].link_bytes for one in (taken, following) if TRAILING in one]
    assert sum(trailing) == 3 * 4 * elements
    assert not any(sum(one[TRAILING].waits.values()) for one in steps if TRAILING in one)
    assert taken["snapshot"].link_bytes < sum(trailing)
    assert not following.get("pre-hook", Tally()).waits
    assert not taken["snapshot"].waits
