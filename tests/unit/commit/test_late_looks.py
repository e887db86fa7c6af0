"""Looks that arrive late, as an accelerator's: every write costs a snapshot at its step, and a wrong step is found by replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.core.digest import SUM64
from lowdiff.core.layout import flat
from lowdiff.core.memory import byte_view
from lowdiff.errors import ReplayMismatch, RunMismatch
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.document import read_either, write_twice
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.types import Differential
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop

NEVER: dict[str, Any] = {"snapshot_every": 1000}


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with as_from_an_accelerator(0):
        yield


def attached(folder: Path, **settings: Any) -> Loop:
    loop = Loop(folder, settings=NEVER | settings)
    loop.attach()
    return loop


def records(folder: Path) -> list[Differential]:
    stored = scan(RunFolder(folder / "run"), [folder / "staging"]).of(0, 0)
    return [read_differential(record, Codec()) for _, record in sorted(stored.items())]


def recover(folder: Path, step: int | None = None, **options: Any) -> lowdiff.RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging", **options)


def one_element(loop: Loop) -> None:
    """No version counter sees it."""
    flat(loop.model[0].weight.data)[7] += 1e-3  # type: ignore[index]


@pytest.mark.parametrize("place", ["between steps", "before the step", "after the step"])
@pytest.mark.parametrize("strategy", ["log", "gradients", "replica"])
def test_a_write_through_data_costs_a_snapshot_at_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, strategy: str
) -> None:
    settings = {"compressor": TopK(0.1) if strategy == "log" else None, "strategy": strategy}
    loop = attached(tmp_path, **settings)
    taken = []
    for number in range(6):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        is_it = number == 3
        if is_it and place == "between steps":
            one_element(loop)
        loop.optimizer.zero_grad()
        loop.model(inputs).square().mean().backward()
        if is_it and place == "before the step":
            one_element(loop)
        loop.optimizer.step()
        if is_it and place == "after the step":
            one_element(loop)
        loop.checkpointer.commit()
        loop.settle()
        taken.append(loop.checkpointer.stats()["snapshot_step"])
    # But with a replica the step itself is on its way when its commit returns: the next one knows what was found.
    assert taken == ([0, 0, 0, 4, 4, 4] if strategy == "replica" else [0, 0, 0, 0, 5, 5])
    assert "LD203" in caplog.text
    weights = loop.weights()
    loop.die()
    again = Loop(tmp_path, settings=NEVER | settings)
    assert again.attach() == 6
    assert same(again.weights(), weights)
    again.checkpointer.close()


def test_every_step_has_sums_that_any_cut_of_a_replay_meets(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    for number in range(5):
        loop.step(number)
        loop.checkpointer.commit()
    loop.settle()
    expected = [SUM64.of_bytes(byte_view(p.detach()), 0) for p in loop.model.parameters()]
    weights = loop.weights()
    loop.die()
    assert records(tmp_path)[-1].digests == tuple(expected)
    for options in (ReplayOptions(), ReplayOptions(block_elements=64), ReplayOptions(whole=True)):
        state = recover(tmp_path, options=options)
        assert state.fence.digests == "sum64"
        assert same(dict(state.model_state_dict()), weights)


def test_a_replay_that_misses_one_bit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = attached(tmp_path)
    for number in range(5):
        loop.step(number)
        loop.checkpointer.commit()
    loop.settle()
    loop.die()
    from lowdiff.recovery.replay.unit import UnitState

    real = UnitState.step

    def flipping(self: UnitState, step: Any, *given: Any) -> None:
        real(self, step, *given)
        if step.shards[0].step == 4:
            flat(self._looked[0]).view(torch.int32)[0] ^= 1

    monkeypatch.setattr(UnitState, "step", flipping)
    with pytest.raises(ReplayMismatch, match="after step 4") as caught:
        recover(tmp_path, 5)
    assert caught.value.step == 4
    assert recover(tmp_path).step == 3


def rewritten(folder: Path, **fields: Any) -> None:
    """Give fences of a run other fields."""
    for *_, path in RunFolder(folder / "run").fences():
        document = {**read_either(path), **fields}
        for name in ("format", "crc32c"):
            document.pop(name, None)
        path.unlink()
        path.with_suffix(".copy").unlink(missing_ok=True)
        write_twice(path, document)


def test_checksums_of_an_unknown_kind_name_the_version_that_took_them(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    loop.step(0)
    loop.checkpointer.commit()
    loop.die()
    rewritten(tmp_path, digests="sum128", version="9.9.9")
    with pytest.raises(RunMismatch, match=r"'sum128'.*lowdiff 9\.9\.9"):
        recover(tmp_path)


def test_another_kind_of_device_may_part_from_them_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = attached(tmp_path)
    for number in range(5):
        loop.step(number)
        loop.checkpointer.commit()
    loop.settle()
    loop.die()
    monkeypatch.setattr("lowdiff.recovery.replay.replayer.makes_same_bits", lambda *_: False)
    assert recover(tmp_path).step == 5
    assert "LD618" not in caplog.text  # on this one they are met
    monkeypatch.setattr("lowdiff.recovery.replay.checksums.state_digest", lambda *_: 1)
    assert recover(tmp_path).step == 5
    assert caplog.text.count("LD618") == 1


def test_a_fence_of_a_cpu_says_nothing_of_them(tmp_path: Path) -> None:
    loop = attached(tmp_path / "late")
    loop.die()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowdiff.core.devices.sums_there", lambda _: False)
        plain = attached(tmp_path / "plain")
        plain.die()
    for name, expected in (("late", "sum64"), ("plain", None)):
        ((*_, path),) = RunFolder(tmp_path / name / "run").fences()
        assert json.loads(path.read_bytes()).get("digests") == expected
