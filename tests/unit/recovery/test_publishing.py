"""Versions have the bits of the training that they are published from, whatever that goes through."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, ReplayMismatch, RunMismatch, StorageError
from lowdiff.persistence.versions.target import FolderTarget, Target
from lowdiff.recovery.publish.publishing import Publishing, published_names
from lowdiff.testing import wait_until
from lowdiff.types import Publisher
from tests.unit.cli.commands import Command, command
from tests.unit.recovery.live import Training, killed, training

__all__ = ["command"]


def publishing(live: Training, target: Target | None = None, **settings: Any) -> Publishing:
    chosen = Publisher(live.folder / "target", **settings)
    return Publishing(live.folder / "run", chosen, staging=live.folder / "staging", target=target)


def newest(folder: Path) -> lowdiff.Subscriber:
    subscriber = lowdiff.Subscriber(folder / "target")
    subscriber.newest()
    return subscriber


def assert_published(live: Training, dtype: torch.dtype | None = torch.bfloat16) -> None:
    version = newest(live.folder).version
    assert version is not None
    assert version.step == live.step
    found = version.state_dict()
    own = live.model.state_dict()
    assert found.keys() == own.keys()
    for name, tensor in own.items():
        is_rounded = dtype is not None and tensor.is_floating_point()
        assert torch.equal(found[name], tensor.to(dtype) if is_rounded else tensor), name


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, None])
def test_each_step_is_published_to_the_bit(tmp_path: Path, dtype: Any) -> None:
    own = None if dtype is None else getattr(torch, str(dtype).removeprefix("torch."))
    with (
        training(tmp_path, snapshot_every=4) as live,
        publishing(live, dtype=dtype, anchor_every=3) as publisher,
    ):
        made = publisher.next()
        assert made is not None
        assert (made.step, made.base) == (0, None)
        for _ in range(8):
            assert publisher.next() is None
            live.train()
            made = publisher.next()
            assert made is not None
            assert_published(live, own)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replica", "gradients"])
def test_without_a_compressor_a_run_is_published_as_well(tmp_path: Path, strategy: str) -> None:
    with training(tmp_path, strategy=strategy) as live, publishing(live) as publisher:
        for _ in range(5):
            live.train()
            if strategy == "replica":
                wait_until(live.checkpointer, lambda stats: stats["replica_step"] == live.step)
            while publisher.next() is not None:
                pass
            assert_published(live)


@pytest.mark.slow
def test_steps_are_published_one_by_one_and_merged_where_many_wait(tmp_path: Path) -> None:
    with training(tmp_path) as live, publishing(live) as publisher:
        publisher.next()
        live.train(5)
        steps = []
        while made := publisher.next():
            steps.append(made.step)
        assert steps == [1, 2, 3, 4, 5]
        live.train(40)
        steps = []
        while made := publisher.next():
            steps.append(made.step)
        assert steps == [6, 45]


def test_only_every_so_many_steps(tmp_path: Path) -> None:
    with training(tmp_path) as live, publishing(live, every=3) as publisher:
        steps = []
        for _ in range(10):
            live.train()
            if made := publisher.next():
                steps.append(made.step)
        assert steps == [0, 3, 6, 9]


class Failing(FolderTarget):
    """A target that is away for a while."""

    is_away = False

    def create(self, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        if self.is_away:
            raise StorageError("the target is away")
        return super().create(name, pieces)

    def remove(self, names: Iterable[str]) -> None:
        assert not self.is_away
        super().remove(names)


def test_versions_are_merged_while_the_target_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Failing(tmp_path / "target")
    with training(tmp_path) as live, publishing(live, target) as publisher:
        live.train()
        assert publisher.next() is not None
        target.is_away = True
        for _ in range(3):
            live.train()
            assert publisher.next() is None
        assert "the target is away" in publisher.error
        assert caplog.text.count("LD613") == 1
        target.is_away = False
        made = publisher.next()
        assert made is not None
        assert made.step == 4
        assert publisher.error == ""
        assert_published(live)


def test_steps_that_the_run_lost_are_withdrawn(tmp_path: Path) -> None:
    first = killed(tmp_path, 5, batch_size=64)
    with publishing(first) as publisher:
        while publisher.next():
            pass
        assert_published(first)
        holding = newest(tmp_path)
        shutil.rmtree(tmp_path / "staging")  # as a reboot does
        with training(tmp_path) as second:
            assert second.step == 0
            second.train(2)
            made = publisher.next()
            assert made is not None
            assert (made.step, made.base) == (2, None)
            assert_published(second)
            version = holding.newest()
            assert version is not None
            assert (version.step, version.incarnation) == (2, 1)
            # A publisher that comes later finds the same.
            second.train()
        publisher.close()
        with publishing(second) as another:
            assert another.next() is not None
            assert_published(second)


def test_a_new_publisher_withdraws_what_was_lost_before_it_came(tmp_path: Path) -> None:
    first = killed(tmp_path, 5, batch_size=64)
    with publishing(first) as publisher:
        while publisher.next():
            pass
    shutil.rmtree(tmp_path / "staging")
    with training(tmp_path) as second:
        second.train(1)
        late = lowdiff.Subscriber(tmp_path / "target")
        with publishing(second) as publisher:
            made = publisher.next()
            assert made is not None
        version = late.newest()
        assert version is not None
        assert (version.step, version.incarnation) == (1, 1)
        manifests = (tmp_path / "target").glob("v*.json")
        told = [json.loads(path.read_text()) for path in manifests]
        lost = {t["version"] for t in told if t["incarnation"] == 0 and t["step"] > 0}
        gone = {int(path.name[1:11]) for path in (tmp_path / "target").glob("*.withdrawn")}
        assert lost == gone


def test_a_run_that_takes_anothers_place_is_not_published_into_its_target(tmp_path: Path) -> None:
    with training(tmp_path) as first:
        first.train(3)
        publisher = publishing(first)
        while publisher.next() is not None:
            pass
        assert_published(first)
    shutil.rmtree(tmp_path / "run")
    with publisher, training(tmp_path) as second:
        torch.manual_seed(77)
        second.train(4)
        for _ in range(2):
            with pytest.raises(RunMismatch, match="holds the weights of run"):
                publisher.next()
        assert_published(first)
        shutil.rmtree(tmp_path / "target")
        assert publisher.next() is not None
        assert_published(second)


@pytest.mark.slow
def test_versions_of_a_life_that_another_one_replaced_are_withdrawn(tmp_path: Path) -> None:
    with training(tmp_path) as live:
        live.train(4)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    with training(tmp_path) as first:
        first.train(2)
        publisher = publishing(first)
        while publisher.next() is not None:
            pass
        assert_published(first)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "kept").rename(tmp_path / "run")
    holding = newest(tmp_path)
    with publisher, training(tmp_path) as second:
        torch.manual_seed(77)
        second.train(2)
        made = publisher.next()
        assert made is not None
        assert (made.incarnation, made.step, made.base) == (1, 6, None)
        assert_published(second)
        version = holding.newest()
        assert version is not None
        assert version.number == made.version
        withdrawn = {int(path.name[1:11]) for path in (tmp_path / "target").glob("*.withdrawn")}
        told = [json.loads(path.read_text()) for path in (tmp_path / "target").glob("v*.json")]
        lost = {t["version"] for t in told if t["incarnation"] == 1} - {made.version}
        assert lost == withdrawn != set()


def test_a_step_that_does_not_replay_while_the_target_is_away_ends_no_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Failing(tmp_path / "target")
    with training(tmp_path) as live, publishing(live, target) as publisher:
        target.is_away = True
        live.train()
        assert publisher.next() is None
        live.train()

        def refusing(*_: object) -> None:
            raise ReplayMismatch("step 2 does not replay", step=2)

        with monkeypatch.context() as patch:
            patch.setattr("lowdiff.recovery.follower.replay", refusing)
            assert publisher.next() is None
        target.is_away = False
        assert publisher.next() is not None


class Tied(nn.Module):
    """A head that is its embedding, and counts."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        made: torch.Tensor = self.head(self.embedding(tokens))
        return made


def test_tied_tensors_are_published_once_under_both_names(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"embedding.weight": "wte", "head.weight": "lm_head", "steps": None}
    with lowdiff.Checkpointer(
        tmp_path / "run",
        staging=tmp_path / "staging",
        compressor=TopK(0.5, dense_below=1),
        publish=Publisher(tmp_path / "target", names=names.get),
    ) as checkpointer:
        checkpointer.attach(model, optimizer)
        model(torch.arange(9)).square().sum().backward()
        optimizer.step()
        checkpointer.commit()
    version = newest(tmp_path).version
    assert version is not None
    assert version.step == 1
    assert version.aliases == {"lm_head": "wte"}
    assert version.tensors.keys() == {"wte", "lm_head"}
    assert torch.equal(version.state_dict()["lm_head"], model.head.weight.bfloat16())


def test_names_are_one_to_one() -> None:
    with pytest.raises(ConfigError, match=r"gives 'x' to both 'a' and 'b'"):
        published_names(["a", "b"], lambda name: "x")
    with pytest.raises(ConfigError, match=r"names\('a'\) is 3"):
        published_names(["a"], lambda name: 3)  # type: ignore[arg-type, return-value]
    assert published_names(["a", "b"], {"a": "c"}.get) == {"a": "c", "b": None}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "publish every counts from 1"),
        ({"dtype": "int8"}, "publish dtype is one of bfloat16"),
        ({"names": "to_hf"}, "publish names is a function"),
        ({"target": ""}, "publish target is a folder or a URL"),
    ],
)
def test_a_publisher_that_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Publisher(**{"target": "weights", **settings})


def test_a_run_that_cannot_be_published_is_refused(tmp_path: Path) -> None:
    for settings, said in (
        ({"publish": Publisher(tmp_path / "run" / "weights")}, "lie in one another"),
        ({"publish": "weights"}, "publish is a lowdiff.Publisher"),
        ({"publish": Publisher("x"), "strategy": "survivors"}, "keeps no steps outside"),
        ({"publish": Publisher("x", durable=True)}, "durable=True waits until"),
    ):
        with pytest.raises(ConfigError, match=said):
            lowdiff.Checkpointer(tmp_path / "run", **settings)


def test_a_target_of_another_run_is_refused_in_attach(tmp_path: Path) -> None:
    chosen = Publisher(tmp_path / "target")
    with training(tmp_path / "a", publish=chosen) as live:
        live.train()
    with pytest.raises(RunMismatch, match="holds the weights of run"):
        Training(tmp_path / "b", publish=chosen)


@pytest.mark.slow
def test_a_checkpointer_publishes_in_a_process_of_its_own(tmp_path: Path) -> None:
    chosen = Publisher(tmp_path / "target", anchor_every=5)
    with training(tmp_path, publish=chosen) as live:
        for _ in range(3):
            live.train()
            wait_until(live.checkpointer, lambda stats: stats["published_step"] == live.step)
            assert_published(live)
        stats = live.checkpointer.stats()
        assert stats["published_versions"] >= 3
        assert stats["published_bytes"] > 0
        assert stats["publisher_error"] == ""
        live.train(30)
    assert_published(live)  # the last version arrives
    assert not (tmp_path / "staging").exists() or not list((tmp_path / "staging").iterdir())


def test_a_publisher_that_dies_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path, publish=Publisher(tmp_path / "target")) as live:
        live.train()
        stats = wait_until(live.checkpointer, lambda stats: stats["published_step"] == 1)
        os.kill(stats["publisher_pid"], signal.SIGKILL)
        live.train()
        wait_until(live.checkpointer, lambda stats: stats["published_step"] == 2)
        assert live.checkpointer.stats()["publisher_restarts"] == 1
        assert_published(live)
    assert "LD615" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["log", "gradients"])
def test_after_a_kill_of_the_trainer_the_rest_is_published_and_the_next_goes_on(
    tmp_path: Path, strategy: str
) -> None:
    chosen = Publisher(tmp_path / "target")
    first = Training(tmp_path, publish=chosen, strategy=strategy)
    first.train(4)
    wait_until(first.checkpointer, lambda stats: stats["published_step"] >= 1)
    first.train(1)
    lowdiff.testing.kill(first.checkpointer, processes=False)
    with training(tmp_path, publish=chosen, strategy=strategy) as second:
        assert second.step == 5
        second.train(2)
    assert_published(second)
    told = [json.loads(path.read_text()) for path in sorted((tmp_path / "target").glob("v*.json"))]
    steps = [t["step"] for t in told]
    assert steps == sorted(steps)
    assert not list((tmp_path / "target").glob("*.withdrawn"))


@pytest.mark.parametrize("strategy", ["log", pytest.param("gradients", marks=pytest.mark.slow)])
def test_what_was_committed_before_a_kill_of_all_is_published_by_a_life_without_a_step(
    tmp_path: Path, strategy: str
) -> None:
    chosen = Publisher(tmp_path / "target")
    killed(tmp_path, 3, publish=chosen, strategy=strategy)
    with training(tmp_path, publish=chosen, strategy=strategy) as second:
        assert second.step == 3
    assert_published(second)


def test_a_dtype_that_cannot_be_published_is_refused_in_attach(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.uint16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for names, is_refused in ((None, True), ({"weight": "w", "bias": "b"}.get, False)):
        chosen = Publisher(tmp_path / "target", names=names)
        with lowdiff.Checkpointer(
            tmp_path / "run", staging=tmp_path / "staging", publish=chosen
        ) as checkpointer:
            if is_refused:
                with pytest.raises(ConfigError, match=r"phase is of torch.uint16.*leave it out"):
                    checkpointer.attach(model, optimizer)
                continue
            checkpointer.attach(model, optimizer)
    version = newest(tmp_path).version
    assert version is not None
    assert version.tensors.keys() == {"w", "b"}


def test_the_commands_publish_pull_and_convert(tmp_path: Path, command: Command) -> None:
    with training(tmp_path) as live:
        live.train(4)
        target, staging = str(tmp_path / "target"), f"--staging={tmp_path / 'staging'}"
        done = command(
            "publish", str(tmp_path / "run"), "--to", target, staging, "--until", "4", "--json"
        )
        assert done.code == 0, done
        told = [json.loads(line) for line in done.out.splitlines()]
        assert told[-1]["step"] == 4
        assert_published(live)
    file = tmp_path / "model.safetensors"
    done = command("pull", target, "--out", str(file))
    assert (done.code, done.out) == (0, f"version {told[-1]['version']} (step 4): {file}\n")
    from safetensors.torch import load_file

    loaded = load_file(file)
    assert all(
        torch.equal(loaded[n], t.bfloat16())
        for n, t in live.model.state_dict().items()
        if t.is_floating_point()
    )
    assert command("convert", target, str(tmp_path / "slime"), "--to", "slime").out == "step 4\n"
    done = command("pull", str(tmp_path / "nothing"), "--out", str(file))
    assert (done.code, "holds no version" in done.err) == (1, True)
    assert command("pull", target, "--out", "model.pt").code == 2
    done = command("convert", str(tmp_path / "typo"), str(tmp_path / "other"))
    assert (done.code, "holds no version of layout lowdiff" in done.err) == (2, True)
    done = command("publish", str(tmp_path / "run"), "--to", target, "--names", "nowhere:f")
    assert (done.code, "give MODULE:FUNCTION" in done.err) == (2, True)
