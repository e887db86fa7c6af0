from __future__ import annotations

import os
import stat
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lowdiff.errors import ConfigError, StorageError
from lowdiff.persistence.format.values import encode, same
from lowdiff.recovery import RecoveredState, recover
from lowdiff.recovery.inspect.export import check_output, export
from tests.unit.recovery.training import Model, Trained, train, two_optimizers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("export"), 12)


@pytest.fixture
def state(trained: Trained) -> RecoveredState:
    return recover(trained.run, 7, staging=trained.staging)


def loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


@pytest.mark.parametrize("step", [0, 1, 4, 5, 7, 12])
def test_a_pt_file_holds_the_bits_of_the_live_objects(
    trained: Trained, tmp_path: Path, step: int
) -> None:
    content = loaded(export(recover(trained.run, step, staging=trained.staging), tmp_path / "x.pt"))
    assert list(content) == ["model", "optimizer", "stateful", "step"]
    assert content["step"] == step
    assert list(content["model"]) == list(trained.models[step])
    assert same(content["model"], dict(trained.models[step]))
    assert same(content["optimizer"], trained.optimizers[step][0])
    assert same(content["stateful"]["scheduler"], trained.stateful[step]["scheduler"])


def test_a_pt_file_loads_into_new_objects(state: RecoveredState, tmp_path: Path) -> None:
    content = loaded(export(state, tmp_path / "x.pt"))
    model = Model()
    model.load_state_dict(content["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(content["optimizer"])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    scheduler.load_state_dict(content["stateful"]["scheduler"])
    assert scheduler.milestones == Counter({3: 1, 6: 2})
    assert scheduler.last_epoch == 7


def test_tied_weights_stay_tied_in_a_pt_file(state: RecoveredState, tmp_path: Path) -> None:
    model = loaded(export(state, tmp_path / "x.pt"))["model"]
    assert model["first.weight"].data_ptr() == model["first_again.weight"].data_ptr()


def test_several_optimizers_are_a_list(tmp_path: Path) -> None:
    trained = train(tmp_path, 3, build=two_optimizers)
    content = loaded(export(recover(trained.run, staging=trained.staging), tmp_path / "x.pt"))
    assert same(content["optimizer"], trained.optimizers[3])


def test_numpy_values_and_containers_become_what_torch_loads(
    trained: Trained, state: RecoveredState, tmp_path: Path
) -> None:
    memory = loaded(export(state, tmp_path / "x.pt"))["stateful"]["memory"]
    live = trained.stateful[7]["memory"]
    assert same(memory["recent"], list(live["recent"]))
    assert same(memory["counts"], torch.from_numpy(live["counts"]))
    assert same(memory["mean"], float(live["mean"]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (deque([1, 2], 5), [1, 2]),
        (frozenset({1, 2}), {1, 2}),
        (defaultdict(int, a=1), {"a": 1}),
        (OrderedDict(a=(1, np.int8(2))), OrderedDict(a=(1, 2))),
        (Counter("aab"), Counter("aab")),
        (np.float32(0.5), 0.5),
        (np.array([1, 2], ">i2"), torch.tensor([1, 2], dtype=torch.int16)),
        (np.array(True), torch.tensor(True)),
        ({np.int64(3): 1j, (1, 2): 2**100}, {3: 1j, (1, 2): 2**100}),
        (torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16)),
        ([None, True, "\udc80", b"\0", torch.Size([2]), torch.float16, torch.device("cpu")],) * 2,
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_value_has_a_plain_form(
    state: RecoveredState, tmp_path: Path, value: Any, expected: Any
) -> None:
    state.items[0]["stateful/thing"] = encode({"value": value})
    found = loaded(export(state, tmp_path / "x.pt"))["stateful"]["thing"]["value"]
    assert same(found, expected)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (range(3), r"thing\['value'\] holds a range"),
        ([slice(1)], r"thing\['value'\]\[0\] holds a slice"),
        ({frozenset({1}): 2}, "holds a frozenset"),
        ({frozenset({1})}, "holds a frozenset"),
    ],
    ids=["range", "slice", "key", "member"],
)
def test_a_value_without_a_plain_form_is_named(
    state: RecoveredState, tmp_path: Path, value: Any, named: str
) -> None:
    state.items[0]["stateful/thing"] = encode({"value": value})
    with pytest.raises(ConfigError, match=named):
        export(state, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())
    export(state, tmp_path / "x.safetensors")


def test_a_safetensors_file_holds_every_weight_and_buffer(
    trained: Trained, state: RecoveredState, tmp_path: Path
) -> None:
    path = export(state, tmp_path / "x.safetensors")
    weights = load_file(path)
    assert same(weights, {name: trained.models[7][name] for name in weights})
    Model().load_state_dict(weights, strict=True)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "lowdiff_step": "7"}


def test_a_strided_weight_is_written_in_its_logical_order(
    state: RecoveredState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strided = torch.arange(6.0).reshape(2, 3).T
    monkeypatch.setattr(RecoveredState, "model_state_dict", lambda _: {"w": strided})
    assert same(load_file(export(state, tmp_path / "x.safetensors")), {"w": strided.contiguous()})


def test_a_dtype_that_safetensors_lacks_is_the_users_choice_of_file(
    state: RecoveredState, tmp_path: Path
) -> None:
    state.items[0]["buffer/norm.running_mean"] = encode(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"complex128.*\.pt"):
        export(state, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x.bin", "x.PT", ".pt"])
def test_other_endings_are_refused_with_those_there_are(
    state: RecoveredState, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"\.pt.*\.safetensors"):
        export(state, tmp_path / name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.pt").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_output(tmp_path / "x.pt", overwrite=True)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_an_existing_file_is_replaced_only_on_demand(
    state: RecoveredState, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text("precious")
    with pytest.raises(ConfigError, match="--force"):
        export(state, path)
    assert path.read_text() == "precious"
    export(state, path, overwrite=True)
    assert path.stat().st_size > 1000


def test_missing_folders_are_made(state: RecoveredState, tmp_path: Path) -> None:
    assert export(state, tmp_path / "a" / "b" / "x.pt").exists()


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    state: RecoveredState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / name).write_text("precious")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"x\..* could not be written: .*No space left"):
        export(state, tmp_path / name, overwrite=True)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_is_as_readable_as_any_other(
    state: RecoveredState, tmp_path: Path, name: str
) -> None:
    (tmp_path / "any").touch()
    mode = stat.S_IMODE((tmp_path / "any").stat().st_mode)
    assert stat.S_IMODE(export(state, tmp_path / name).stat().st_mode) == mode
