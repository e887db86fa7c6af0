"""What is large and seldom changes is stored once, or not at all because replay rebuilds it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff.errors import ConfigError, DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.inspect.verify import verify
from lowdiff.types import Differential
from tests.unit.loops import Loop


def differentials(folder: Path) -> list[Differential]:
    """What rank 0 logged, in order of steps."""
    catalog = scan(RunFolder(folder / "run"), [folder / "staging"])
    stored = {s: r for by_step in catalog.records.values() for s, r in by_step.items()}
    return [read_differential(stored[step], Codec()) for step in sorted(stored)]


def averaged_loop(folder: Path, **settings: Any) -> tuple[Loop, AveragedModel]:
    loop = Loop(folder, settings=settings)
    return loop, AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def test_an_average_is_rebuilt_at_every_step_and_logs_nothing_of_its_size(tmp_path: Path) -> None:
    loop, average = averaged_loop(tmp_path, snapshot_every=4)
    loop.attach(ema=average)
    live = {}
    for number in loop.checkpointer.steps(10):
        loop.step(number)
        average.update_parameters(loop.model)
        live[number + 1] = {k: v.clone() for k, v in average.state_dict().items()}
    loop.checkpointer.close()
    for step, expected in live.items():
        found = lowdiff.recover(tmp_path / "run", step).stateful["ema"]
        assert list(found) == list(expected)
        assert same(dict(found), expected)
    logged = [data for d in differentials(tmp_path) for n, data in d.items.items() if "ema" in n]
    assert 10 <= len(logged)
    assert max(map(len, logged)) < sum(p.nbytes for p in average.parameters()) / 4
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.ok
    assert report.steps_replayed == 10


@pytest.mark.slow
def test_an_average_that_was_written_behind_its_back_is_found(tmp_path: Path) -> None:
    loop, average = averaged_loop(tmp_path, snapshot_every=1000)
    loop.attach(ema=average)
    for number in loop.checkpointer.steps(70):
        loop.step(number)
        average.update_parameters(loop.model)
        if number == 2:  # .data moves no version counter
            next(average.parameters()).data[3, 3] += 0.5
    loop.die()
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert "as 'ema' averages it" in report.failures[0].message


def test_an_average_that_nothing_could_be_restored_into_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with torch.inference_mode():
        average = AveragedModel(loop.model)
    with pytest.raises(ConfigError, match=r"ema was made under torch\.inference_mode\(\)"):
        loop.attach(ema=average)


def test_an_average_attached_later_begins_with_a_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path, settings={"snapshot_every": 1000}).run(3)
    loop, average = averaged_loop(tmp_path, snapshot_every=1000)
    with caplog.at_level(logging.INFO):
        assert loop.attach(ema=average) == 3
    assert "averages of the parameters ['ema'] instead of []" in caplog.text
    for number in loop.checkpointer.steps(6):
        loop.step(number)
        average.update_parameters(loop.model)
    expected = {k: v.clone() for k, v in average.state_dict().items()}
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert recovered.step == 6
    assert same(dict(recovered.stateful["ema"]), expected)


def frozen_loop(folder: Path, **settings: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 500), nn.ReLU(), nn.Linear(500, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return Loop(
        folder,
        model,
        make=lambda _: torch.optim.AdamW(model[2].parameters(), lr=1e-2),
        settings={"snapshot_every": 2, **settings},
    )


def test_frozen_parameters_are_stored_once_per_run(tmp_path: Path) -> None:
    frozen_loop(tmp_path).run(4)
    loop = frozen_loop(tmp_path)
    assert loop.run(8) == 4
    (stored,) = (tmp_path / "run/constants").glob("*")
    assert sorted(load_file(stored)) == ["frozen/0.bias", "frozen/0.weight"]
    shards = list((tmp_path / "run/snapshots").glob("*/rank-0000.safetensors"))
    assert len(shards) >= 4
    assert not any(name.startswith("frozen/") for s in shards for name in load_file(s))
    for step in (0, 3, 8):
        weights = lowdiff.recover(tmp_path / "run", step).model_state_dict()
        assert torch.equal(weights["0.weight"], loop.model.get_parameter("0.weight"))
    assert verify(tmp_path / "run", tmp_path / "staging").ok


def test_a_frozen_parameter_that_is_written_after_all_is_exact_at_every_step(
    tmp_path: Path,
) -> None:
    loop = frozen_loop(tmp_path, snapshot_every=3)
    loop.attach()
    live = {}
    for number in loop.checkpointer.steps(10):
        loop.step(number)
        if number in (4, 7):
            with torch.no_grad():
                loop.model.get_parameter("0.bias").add_(1.0)
        if number == 8:
            with torch.no_grad():
                loop.model.get_parameter("0.bias").sub_(2.0)
        live[number + 1] = loop.weights()
    loop.die()
    for step, expected in live.items():
        recovered = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert same(dict(recovered.model_state_dict()), expected)
    assert frozen_loop(tmp_path).run(11) == 10


def test_frozen_parameters_of_an_abandoned_history_go_with_its_last_snapshot(
    tmp_path: Path,
) -> None:
    frozen_loop(tmp_path, retention=1).run(4)
    (before,) = (tmp_path / "run/constants").glob("*")
    other = frozen_loop(tmp_path, retention=1)
    with torch.no_grad():
        other.model.get_parameter("0.bias").fill_(7.0)
    other.attach(restore="none")
    assert {p.name for p in (tmp_path / "run/constants").glob("*")} > {before.name}
    for number in other.checkpointer.steps(8):
        other.step(number)
    other.checkpointer.close()
    (after,) = (tmp_path / "run/constants").glob("*")
    assert after != before
    assert verify(tmp_path / "run", tmp_path / "staging").ok
    weights = lowdiff.recover(tmp_path / "run").model_state_dict()
    assert torch.equal(weights["0.bias"], torch.full((500,), 7.0))


def test_a_damaged_file_of_frozen_parameters_is_named(tmp_path: Path) -> None:
    frozen_loop(tmp_path).run(4)
    (stored,) = (tmp_path / "run/constants").glob("*")
    content = bytearray(stored.read_bytes())
    content[-5] ^= 1
    stored.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"constants.*hash"):
        lowdiff.recover(tmp_path / "run")
    assert not verify(tmp_path / "run", tmp_path / "staging").ok
    with pytest.raises(DamagedFile):
        frozen_loop(tmp_path).attach()
    stored.unlink()
    with pytest.raises(DamagedFile, match="missing"):
        lowdiff.recover(tmp_path / "run")


class Features:
    """A large tensor that changes when told to."""

    def __init__(self) -> None:
        self.values = torch.zeros(400_000)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


def test_what_costs_more_than_a_megabyte_in_a_step_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop, features = Loop(tmp_path), Features()
    with caplog.at_level(logging.INFO):
        loop.attach(features=features)
    assert "features/values (1.6 MB)" in caplog.text
    for number in loop.checkpointer.steps(4):
        loop.step(number)
        features.values[0] = number // 2  # as before in every other step
    loop.checkpointer.close()
    assert "tensor/features/values changed, which costs 1.6 MB" in caplog.text
    assert loop.checkpointer.stats()["large_items"].keys() == {"tensor/features/values"}
    logged = ["tensor/features/values" in d.items for d in differentials(tmp_path)]
    # At first because no record holds it yet, then when it changed.
    assert logged == [True, False, True, False]
