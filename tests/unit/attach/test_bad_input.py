"""What cannot work is refused with a named error that says what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import (
    ConfigError,
    DamagedFile,
    NotARun,
    RunMismatch,
    StepNotFound,
    StorageError,
    UnsupportedModel,
    UnsupportedOptimizer,
    UsageError,
)
from lowdiff.persistence.format.document import copy_of, read_json, write_json
from lowdiff.persistence.format.values import same
from lowdiff.recovery.inspect.inspection import StepRange, inspect
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop, small_model
from tests.unit.recovery.training import flip


def attach(folder: Path, model: nn.Module, optimizer: Any, **options: Any) -> None:
    """Attach and close."""
    with lowdiff.Checkpointer(
        folder / "run", compressor=TopK(0.1), staging=folder / "staging"
    ) as checkpointer:
        checkpointer.attach(model, optimizer, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reproducible": True}, "always summed in rank order"),
        ({"snapshot_every": "auto", "compressor": None}, "with a compressor"),
        ({"batch_size": "auto", "compressor": None}, "with a compressor"),
        ({"snapshot_every": 0}, "snapshot_every counts steps, at least 1, got 0"),
        ({"batch_size": -2}, "batch_size counts steps, at least 1, got -2"),
        ({"snapshot_every": 2.5}, 'snapshot_every is a number of steps or "auto", got 2.5'),
        ({"retention": 0}, "retention keeps at least 1 snapshot"),
        ({"retention": "2"}, "retention is a number of snapshots, a lowdiff.Retention, or None"),
        ({"tuning": "auto"}, "tuning is a lowdiff.Tuning or None, got 'auto'"),
        ({"compressor": "topk"}, r"compressor is an object, e.g. TopK\(density=0.01\), got 'topk'"),
        ({"compressor": TopK}, "compressor is an object, .* got <class .*TopK'>"),
        ({"on_error": "ignore"}, "on_error is one of"),
        ({"residual": "none"}, "residual is one of"),
        ({"snapshot_every": True}, 'snapshot_every is a number of steps or "auto", got True'),
        ({"snapshot_every": 10**20}, "snapshot_every is a whole number, got 1000"),
        ({"retention": True}, "retention snapshots is a whole number, got True"),
        ({"optimizer_steps": True}, "optimizer_steps is one of .* got True"),
        ({"optimizer_steps": 1.0}, "optimizer_steps is one of .* got 1.0"),
        ({"staging": 3}, "staging is the path of a folder, got 3"),
        ({"staging": ""}, "staging is the path of a folder, got ''"),
        ({"store": 3}, "store is the URL of an object store or None, got 3"),
        ({"imports": 3}, "imports is a list of names of modules, .* got 3"),
        ({"imports": "abc"}, "imports is a list of names of modules, .* got 'abc'"),
        ({"imports": ["os; rm"]}, r"imports is a list of names of modules, .* got \['os; rm'\]"),
    ],
)
def test_settings_out_of_range(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lowdiff.Checkpointer(tmp_path, **{"compressor": TopK(0.1), **settings})


@pytest.mark.parametrize("run", [None, 3, b"run", "a\0b", ""])
def test_what_is_no_path_is_no_run(run: Any) -> None:
    with pytest.raises(ConfigError, match="run is the path of a folder, got "):
        lowdiff.Checkpointer(run, compressor=TopK(0.1))
    with pytest.raises(ConfigError, match="run is the path of a folder, got "):
        lowdiff.recover(run)


def test_numbers_of_steps_are_whole(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for step in ("3", 1.5, True):
        with pytest.raises(ConfigError, match=f"step is a whole number, got {step!r}"):
            loop.attach(step=step)
        with pytest.raises(ConfigError, match=f"step is a whole number, got {step!r}"):
            lowdiff.recover(tmp_path / "run", step)  # type: ignore[arg-type]
    loop.attach()
    for until in ("3", 2.5, None):
        with pytest.raises(ConfigError, match=f"until is a whole number, got {until!r}"):
            loop.checkpointer.steps(until)  # type: ignore[arg-type]
    loop.checkpointer.close()
    with pytest.raises(ConfigError, match="device='tpu9' is no device of torch"):
        lowdiff.recover(tmp_path / "run", device="tpu9")


@pytest.mark.parametrize("density", ["x", None, True])
def test_a_density_is_a_number(density: Any) -> None:
    with pytest.raises(ConfigError, match=f"density must be in .* got {density!r}"):
        TopK(density)


@pytest.mark.parametrize("place", ["/proc/foo/bar", "file/run", "n" * 300])
def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    loop = Loop(tmp_path)
    run = tmp_path / place
    loop.checkpointer = lowdiff.Checkpointer(run, compressor=TopK(0.1), staging=tmp_path / "s")
    with pytest.raises((StorageError, NotARun), match=re.escape(str(run))):
        loop.attach()


def test_an_error_of_the_users_own_object_keeps_its_type(tmp_path: Path) -> None:
    class Sampler:
        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise FileNotFoundError(2, "No such file", str(tmp_path / "data" / "index"))

    loop = Loop(tmp_path)
    loop.attach(sampler=Sampler())
    loop.checkpointer.close()
    with pytest.raises(FileNotFoundError):
        Loop(tmp_path).attach(sampler=Sampler())


class Handmade(torch.optim.SGD):
    """An optimizer that lowdiff does not know."""


def bad_optimizer(make: Callable[[nn.Module], Any]) -> Any:
    """A model and what ``make`` builds on it."""
    model = small_model()
    return model, make(model)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: [], ConfigError, "attach needs the optimizer"),
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            UnsupportedOptimizer,
            "LBFGS cannot be replayed",
        ),
        (
            lambda m: Handmade(m.parameters(), lr=0.1),
            UnsupportedOptimizer,
            "Handmade cannot be replayed",
        ),
        (
            lambda m: torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1),
            UnsupportedOptimizer,
            "no parameter of the model; if these are fp32 master copies",
        ),
        (
            lambda m: [torch.optim.SGD(m.parameters(), lr=0.1) for _ in range(2)],
            ConfigError,
            "is in two optimizers",
        ),
        (
            lambda m: torch.optim.SGD(list(m.parameters())[:2], lr=0.1),
            ConfigError,
            "belong to no attached optimizer",
        ),
    ],
)
def test_optimizers_that_cannot_be_replayed(
    tmp_path: Path, make: Callable[[nn.Module], Any], error: type[Exception], message: str
) -> None:
    model, optimizer = bad_optimizer(make)
    with pytest.raises(error, match=message):
        attach(tmp_path, model, optimizer)


def test_models_that_cannot_be_laid_out(tmp_path: Path) -> None:
    complex_model = nn.Linear(3, 3, dtype=torch.complex64)
    with pytest.raises(UnsupportedModel, match=r"dtype torch\.complex64; supported are"):
        attach(tmp_path, complex_model, torch.optim.SGD(complex_model.parameters(), lr=0.1))
    sharded = type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2)
    with pytest.raises(UnsupportedModel, match="wrap it in DistributedDataParallel"):
        attach(tmp_path, sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    model = small_model()
    next(model.children()).to("meta")  # as a part of a model on another accelerator would be
    with pytest.raises(
        UnsupportedModel, match="parameters lie on cpu, meta; lowdiff copies from one"
    ):
        attach(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    expanded = nn.Linear(3, 3)
    expanded.weight = nn.Parameter(torch.zeros(1, 3).expand(3, 3))
    with pytest.raises(UnsupportedModel, match="does not cover its memory densely"):
        attach(tmp_path, expanded, torch.optim.SGD(expanded.parameters(), lr=0.1))


def test_several_modules_are_told_to_come_under_one_roof(tmp_path: Path) -> None:
    first, second = Loop(tmp_path), Loop(tmp_path)
    several: Any
    for several in ([first.model, second.model], (first.model, second.model)):
        with pytest.raises(ConfigError, match=r"got a (list|tuple); wrap several in one torch\.nn"):
            first.checkpointer.attach(several, [first.optimizer, second.optimizer])
    first.attach()
    with pytest.raises(UsageError, match=r"attached already.*go into one torch\.nn\.ModuleDict"):
        first.checkpointer.attach(second.model, second.optimizer)
    first.die()


def test_a_stateful_object_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="sampler=object has no state_dict"):
        attach(tmp_path, model, optimizer, sampler=object())

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inside": [1, object()]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    with pytest.raises(ConfigError, match=r"sampler\['inside'\]\[1\]"):
        attach(tmp_path, model, optimizer, sampler=Odd())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "3", nn.Linear(60, 4)), r"'3.weight' was float32 \(3, 60\)"),
        (lambda m: m.append(nn.Linear(3, 3)), "parameter '4.weight' is new"),
        (lambda m: m.pop(3), "parameter '3.weight' is gone"),
        (lambda m: m.to(torch.float64), "now float64"),
    ],
)
def test_another_model_is_refused_with_a_way_out(
    tmp_path: Path, change: Callable[[nn.Module], Any], message: str
) -> None:
    Loop(tmp_path).run(2)
    model = small_model()
    change(model)
    with pytest.raises(RunMismatch, match=message) as caught:
        Loop(tmp_path, model=model).attach()
    assert "lowdiff recover RUN --out weights.safetensors" in str(caught.value)


def test_another_optimizer_class_is_refused(tmp_path: Path) -> None:
    Loop(tmp_path).run(2)
    other = Loop(tmp_path, make=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(RunMismatch, match=r"optimizer: torch.optim.adamw.AdamW, now torch.*SGD"):
        other.attach()


def test_folders_and_steps_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="no such folder"):
        lowdiff.recover(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARun, match=r"it has no run\.json"):
        lowdiff.recover(tmp_path / "empty")
    (tmp_path / "file.pt").touch()
    with pytest.raises(NotARun, match="it is a file"):
        lowdiff.recover(tmp_path / "file.pt")
    Loop(tmp_path).run(3)
    with pytest.raises(NotARun, match=r"it has no run\.json; runs in it: run;"):
        lowdiff.recover(tmp_path)
    with pytest.raises(StepNotFound, match=r"step 9 of .* recoverable steps: 0 to 3"):
        lowdiff.recover(tmp_path / "run", 9)


def test_a_damaged_file_is_named_and_an_older_way_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(7)
    whole = lowdiff.recover(tmp_path / "run", 6).model_state_dict()
    for step in (5, 7):
        path = tmp_path / f"run/snapshots/i000000-s{step:010d}/rank-0000.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    state = lowdiff.recover(tmp_path / "run", 6)
    assert state.base_step == 0
    assert "s0000000005/rank-0000.safetensors is damaged" in caplog.text
    assert all(torch.equal(whole[k], v) for k, v in state.model_state_dict().items())
    for name in ("run.json", "run.copy"):
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(DamagedFile, match=r"run.json is damaged"):
        lowdiff.recover(tmp_path / "run", 6)


def test_hooks_groups_and_closures_that_would_go_unseen(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    loop.step(0)
    loop.checkpointer.commit()
    with pytest.raises(UnsupportedOptimizer, match="without a closure"):
        loop.optimizer.step(lambda: 0.0)
    handle = loop.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="register it before attach"):
        loop.step(1)
    handle.remove()
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UsageError, match="parameter groups changed after attach"):
        loop.step(1)
    loop.die()


def test_calls_at_the_wrong_moment(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(UsageError, match="call attach"):
        loop.checkpointer.commit()
    loop.attach()
    with pytest.raises(UsageError, match="attached already"):
        loop.attach()
    loop.checkpointer.close()
    loop.checkpointer.close()


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["run.json", "incarnations/i000000/rank-0000.json"])
@pytest.mark.parametrize("way", ["gone", "damaged"])
def test_a_run_whose_identity_or_fence_is_lost_is_not_begun_anew(
    tmp_path: Path, name: str, way: str
) -> None:
    Loop(tmp_path).run(6)
    path = tmp_path / "run" / name
    copy_of(path).unlink()
    if way == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises((DamagedFile, StepNotFound), match=r"missing|damaged|fences"):
        Loop(tmp_path).attach()


@pytest.mark.parametrize("name", ["run.json", "incarnations/i000000/rank-0000.json"])
def test_a_run_whose_identity_or_fence_is_damaged_goes_on_by_its_copy_and_says_so(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(6)
    whole = lowdiff.recover(tmp_path / "run", 4).model_state_dict()
    path = tmp_path / "run" / name
    flip(path, 30)
    assert same(lowdiff.recover(tmp_path / "run", 4).model_state_dict(), whole)
    found = inspect(tmp_path / "run")
    assert found.recoverable == StepRange(0, 6)
    assert len(found.damage) == 1
    assert str(path) in found.damage[0]
    assert "its copy serves" in found.damage[0]
    report = verify(tmp_path / "run")
    assert [failure.path for failure in report.failures] == [str(path)]
    assert Loop(tmp_path).run(8) == 6
    assert f"{path} is damaged" in caplog.text


def test_what_is_damaged_here_is_whole_in_the_store(tmp_path: Path) -> None:
    Loop(tmp_path).run(4)
    for name in ("run.json", "incarnations/i000000/rank-0000.json"):
        flip(tmp_path / "run" / name, 30)
    url = f"file://{tmp_path / 'store'}"
    assert Loop(tmp_path, settings={"store": url}).run(6) == 4
    found = inspect(url)
    assert found.recoverable is not None
    assert (found.recoverable.last, found.damage) == (6, ())
    assert Loop(tmp_path, settings={"store": url}).run(7) == 6


def test_frozen_parameters_that_are_damaged_are_named(tmp_path: Path) -> None:
    model = small_model()
    model.get_parameter("0.weight").requires_grad_(False)
    Loop(tmp_path, model=model).run(3)
    [path] = (tmp_path / "run/constants").iterdir()
    assert not inspect(tmp_path / "run").damage
    flip(path, 200)
    assert [str(path) in damage for damage in inspect(tmp_path / "run").damage] == [True]


def test_files_without_a_fence_are_no_run_that_begins_anew(tmp_path: Path) -> None:
    Loop(tmp_path).run(3)
    shutil.rmtree(tmp_path / "run/incarnations")
    found = inspect(tmp_path / "run")
    assert any("holds no fence" in damage for damage in found.damage)


@pytest.mark.parametrize("name", ["run.copy", "incarnations/i000000/rank-0000.copy"])
def test_a_damaged_copy_is_named_while_it_can_be_made_again(tmp_path: Path, name: str) -> None:
    Loop(tmp_path).run(6)
    flip(tmp_path / "run" / name, 30)
    for failures in (
        inspect(tmp_path / "run").damage,
        [failure.message for failure in verify(tmp_path / "run").failures],
    ):
        assert [name in failure for failure in failures] == [True]
    assert inspect(tmp_path / "run").recoverable == StepRange(0, 6)


def test_a_damaged_fence_of_the_newest_incarnation_rolls_nothing_back_unasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(6)
    again = Loop(tmp_path)
    again.attach()
    for step in (6, 7, 8):
        again.step(step)
        again.checkpointer.commit()
    again.die()
    fence = tmp_path / "run/incarnations/i000001/rank-0000.json"
    copy_of(fence).unlink()
    whole = fence.read_bytes()
    fence.write_bytes(whole[:-90])
    with pytest.raises(
        DamagedFile, match=r"up to 9, can.*Put the file back.*attach.*step=6\)"
    ) as e:
        Loop(tmp_path).attach()
    assert e.value.path == fence
    assert "knows nothing of" not in caplog.text
    fence.write_bytes(whole)
    back = Loop(tmp_path)
    assert back.attach() == 9
    assert same(back.weights(), again.weights())
    back.checkpointer.close()


def test_an_incarnation_that_was_given_up_on_purpose_is_still_there_when_its_fence_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(9)
    again = Loop(tmp_path)
    assert again.attach(step=4) == 4
    expected = again.weights()
    for step in range(4, 8):
        again.step(step)
        again.checkpointer.commit()
    again.die()
    fence = tmp_path / "run/incarnations/i000001/rank-0000.json"
    copy_of(fence).unlink()
    whole = fence.read_bytes()
    fence.write_bytes(whole.replace(b"parent", b"parens"))
    with pytest.raises(StepNotFound, match="recoverable steps: 0 to 4"):
        lowdiff.recover(tmp_path / "run", 7, staging=tmp_path / "staging")
    with pytest.raises(DamagedFile, match=r"step=4\)"):
        Loop(tmp_path).attach()
    last = Loop(tmp_path)
    assert last.attach(step=4) == 4
    assert same(last.weights(), expected)
    assert f"{fence} is damaged" in caplog.text
    assert "knows nothing of" not in caplog.text
    last.checkpointer.close()
    after = Loop(tmp_path)
    assert after.attach() == 4, "a later incarnation can be read"
    after.checkpointer.close()
    shutil.rmtree(tmp_path / "staging")
    shutil.rmtree(tmp_path / "run/incarnations/i000002")
    shutil.rmtree(tmp_path / "run/incarnations/i000003")
    fence.write_bytes(whole)
    found = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert found.step == 8


def test_a_fence_that_continues_itself_is_refused(tmp_path: Path) -> None:
    Loop(tmp_path).run(2)
    fence = tmp_path / "run/incarnations/i000000/rank-0000.json"
    write_json(fence, {**read_json(fence), "parent": 0})
    with pytest.raises(StepNotFound, match="no incarnation has the fences"):
        lowdiff.recover(tmp_path / "run")
