"""Weights come straight into a file: the bytes of an export, and memory for few tensors at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import StorageError
from lowdiff.recovery import recover
from lowdiff.recovery.inspect import weights
from lowdiff.recovery.inspect.export import export
from lowdiff.recovery.inspect.weights import recover_weights
from tests.crash.third_party import Whitening
from tests.processes import Script, peak_bytes
from tests.unit.loops import Loop
from tests.unit.recovery.training import Trained, flip, refuse_blocks, train, two_optimizers

#: 48 million elements are trained, 576 MB with AdamW's state; 8 million are frozen.
_WIDTH, _TRAINED, _FROZEN, _STEPS = 2000, 12, 2, 3


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]) -> list[int]:
    """Recover every tensor by itself; how many groups there were at each attempt."""
    limits(weights_group_bytes=1, weights_groups=1 << 40)
    monkeypatch.setattr(weights, "bytes_of", lambda _: 0)
    made, found = weights._shares, []

    def counted(*args: Any) -> list[Any]:
        shares = made(*args)
        found.append(len(shares))
        return shares

    monkeypatch.setattr(weights, "_shares", counted)
    return found


def assert_same_bytes(run: Path, staging: Path, folder: Path, step: int | None = None) -> None:
    """Compare with what a whole state is exported to."""
    exported = export(recover(run, step, staging=staging), folder / "exported.safetensors")
    found = folder / "found.safetensors"
    state = recover_weights(run, found, step, staging=staging)
    assert found.read_bytes() == exported.read_bytes()
    assert step in (None, state.step)


@pytest.mark.parametrize("step", [0, 3, 5, 7, None])
@pytest.mark.parametrize("which", ["closed", "crashed"])
def test_the_file_has_the_bytes_of_an_export(
    request: pytest.FixtureRequest,
    groups: list[int],
    tmp_path: Path,
    which: str,
    step: int | None,
) -> None:
    trained: Trained = request.getfixturevalue(which)
    assert_same_bytes(trained.run, trained.staging, tmp_path, step)
    assert groups == [6]


def channels_last(model: nn.Module) -> Any:
    model.kernel = nn.Parameter(
        torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    )
    model.get_parameter("last.weight").requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def coupled(model: nn.Module) -> Any:
    lowdiff.register_optimizer(Whitening, "whole")
    return Whitening(model.parameters())


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("build", "expected"),
    [(two_optimizers, 6), (channels_last, 6), (coupled, 1)],
    ids=["two optimizers", "frozen and channels last", "coupled"],
)
def test_optimizers_decide_what_is_recovered_alone(
    groups: list[int], tmp_path: Path, build: Callable[[nn.Module], Any], expected: int
) -> None:
    trained = train(tmp_path, 7, build=build, end="crash")
    assert_same_bytes(trained.run, trained.staging, tmp_path)
    assert groups == [expected]


def test_a_damaged_snapshot_costs_a_second_attempt(
    groups: list[int], closed: Trained, tmp_path: Path
) -> None:
    copy = closed.copied(tmp_path)
    flip(copy.shard(10), copy.shard(10).stat().st_size - 5)  # of a tensor of a later group
    assert_same_bytes(copy.run, copy.staging, tmp_path, 11)
    assert groups == [6, 6]


def test_where_blocks_fail_all_groups_are_replayed_whole(
    groups: list[int],
    crashed: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = export(recover(crashed.run, 7, staging=crashed.staging), tmp_path / "x.safetensors")
    refuse_blocks(monkeypatch)
    recover_weights(crashed.run, tmp_path / "y.safetensors", 7, staging=crashed.staging)
    assert (tmp_path / "y.safetensors").read_bytes() == expected.read_bytes()
    assert caplog.text.count("replaying whole tensors instead of blocks") == 1


def test_progress_goes_once_from_the_first_step_to_the_last(
    groups: list[int], crashed: Trained, tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(first_replay_window_bytes=1)
    told: list[tuple[int, int]] = []
    recover_weights(
        crashed.run,
        tmp_path / "x.safetensors",
        9,
        staging=crashed.staging,
        progress=lambda *seen: told.append(seen),
    )
    assert told == sorted(told)
    assert told[-1] == (4, 4)


def test_a_replicas_memory_is_taken_whole(groups: list[int], tmp_path: Path) -> None:
    loop = Loop(
        tmp_path,
        nn.Linear(20, 3),
        settings={"compressor": None, "snapshot_every": 1000},
    )
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    loop.die()
    assert_same_bytes(tmp_path / "run", tmp_path / "staging", tmp_path, 3)
    assert not groups


def test_a_full_disk_leaves_the_old_file_and_no_other(
    crashed: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "x.safetensors"
    out.write_text("precious")
    monkeypatch.setattr(weights, "pieces_of", full)
    with pytest.raises(StorageError, match=r"x\..* could not be written: .*No space left"):
        recover_weights(crashed.run, out, 7, staging=crashed.staging)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def large(folder: str) -> None:
    """Train a model with frozen layers beside those that are trained; its log leads to the last step."""
    model = nn.Sequential(
        *(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_TRAINED + _FROZEN))
    )
    model[_TRAINED:].requires_grad_(False)
    trained = list(model[:_TRAINED].parameters())
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(0.01), snapshot_every=1000, staging=f"{folder}/staging"
    )
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    checkpointer.attach(model, optimizer)
    for step in checkpointer.steps(_STEPS):
        for parameter in trained:
            parameter.grad = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(step)
            )
        optimizer.step()
        optimizer.zero_grad()
    testing.wait_until(checkpointer, lambda stats: stats["durable_step"] == _STEPS)
    os._exit(0)


def growth(folder: str, way: str) -> None:
    """Write the weights of the last step, and note how much memory that takes."""
    torch.set_num_threads(1)
    run, staging, out = f"{folder}/run", f"{folder}/staging", Path(folder, f"{way}.safetensors")
    recover_weights(run, Path(folder, "first.safetensors"), 0, staging=staging)  # loads all code
    before = peak_bytes()
    if way == "weights":
        recover_weights(run, out, _STEPS, staging=staging)
    else:
        export(recover(run, _STEPS, staging=staging), out)
    Path(folder, f"{way}.json").write_text(json.dumps(peak_bytes() - before))


@pytest.mark.slow
@pytest.mark.launch
def test_memory_is_a_part_of_the_state(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    script = Script(large, tmp_path, output=output)
    assert script.wait() == 0, script.printed()
    taken = {}
    for way in ("whole", "weights"):
        script = Script(growth, tmp_path, way, output=output)
        assert script.wait() == 0, script.printed()
        taken[way] = json.loads((tmp_path / f"{way}.json").read_text())
    files = [(tmp_path / f"{way}.safetensors").read_bytes() for way in taken]
    assert files[0] == files[1]
    state_bytes = 3 * 4 * _TRAINED * _WIDTH**2
    assert taken["whole"] > state_bytes
    assert taken["weights"] < state_bytes / 2, taken
