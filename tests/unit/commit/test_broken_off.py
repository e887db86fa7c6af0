"""A commit that was broken off, and the next body that goes on all the same: nothing is lost silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.compressors.lane import Lane
from lowdiff.errors import StorageError, UsageError, WriterFailed
from lowdiff.model.watch import Watch
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.writer.handle import WriterProcess

DONE = 5
KINDS: dict[str, dict[str, Any]] = {
    "several optimizer steps": {"optimizer_steps": "any"},
    "a body without an optimizer's step": {"compressor": TopK(0.5)},
}


class Training:
    """A small run in a folder, which may be attached again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", snapshot_every=100, **settings
        )
        self.resumed = self.checkpointer.attach(self.model, self.optimizer)

    def body(self, number: int, *, steps: bool = True) -> None:
        self.checkpointer.state["number"] = number
        self.optimizer.zero_grad()
        seeded = torch.Generator().manual_seed(number)
        loss = self.model(torch.randn(4, 8, generator=seeded)).square().mean()
        if steps:
            loss.backward()
            self.optimizer.step()


def broken_once(error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    errors = [error]

    def call(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*arguments, **options)

    return call


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["while it is sealed", "while it is staged"])
def test_the_step_is_a_snapshot_that_holds_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    training = Training(tmp_path, **KINDS[kind])
    for number in range(DONE):
        training.body(number)
        training.checkpointer.commit()
    training.body(DONE, steps=kind == "several optimizer steps")
    training.checkpointer.state["number"] = 77
    with monkeypatch.context() as patch:
        if where == "while it is sealed":
            real, error = Watch.at_commit, KeyboardInterrupt()
            patch.setattr(Watch, "at_commit", broken_once(error, real))
        else:
            full = StorageError("no memory")
            patch.setattr(StagingLog, "append", broken_once(full, StagingLog.append))
        with pytest.raises((KeyboardInterrupt, StorageError)):
            training.checkpointer.commit()
    training.body(DONE + 1)
    training.checkpointer.state["number"] = 77
    training.checkpointer.commit()
    assert training.checkpointer.stats()["snapshot_step"] == DONE + 1
    expected = {name: value.clone() for name, value in training.model.state_dict().items()}
    testing.kill(training.checkpointer)
    again = Training(tmp_path, **KINDS[kind])
    assert again.resumed == DONE + 1
    assert again.checkpointer.state["number"] == 77
    found = again.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    again.checkpointer.close()


@pytest.mark.parametrize("backpressure", ["block", "degrade"])
def test_a_replicas_run_raises_an_error_of_storage_at_the_commit_that_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backpressure: str
) -> None:
    training = Training(tmp_path, on_error="raise", backpressure=backpressure)
    training.body(0)
    training.checkpointer.commit()
    training.body(1)
    real = WriterProcess.read_status
    with monkeypatch.context() as patch:
        patch.setattr(WriterProcess, "read_status", lambda self: real(self).with_errors("no disk"))
        with pytest.raises(WriterFailed, match="no disk"):
            training.checkpointer.commit()
    testing.kill(training.checkpointer)


def test_alone_an_interrupted_exchange_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook's cell, which is then run again."""
    training = Training(tmp_path, compressor=PowerSGD(2))
    for number in range(DONE):
        training.body(number)
        training.checkpointer.commit()
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "mean_of", broken_once(KeyboardInterrupt(), Lane.mean_of))
        with pytest.raises(KeyboardInterrupt):
            training.body(DONE)
    for number in (DONE, DONE + 1):
        training.body(number)
        training.checkpointer.commit()
    expected = {name: value.clone() for name, value in training.model.state_dict().items()}
    testing.kill(training.checkpointer)
    again = Training(tmp_path, compressor=PowerSGD(2))
    assert again.resumed == DONE + 2
    assert all(
        torch.equal(value, expected[name]) for name, value in again.model.state_dict().items()
    )
    again.checkpointer.close()


@pytest.mark.parametrize(
    ("place", "name", "resumed"),
    [(torch.optim.AdamW, "_init_group", 1), (Watch, "at_commit", 2)],
    ids=["in the optimizer", "in commit, which close() ends"],
)
def test_an_interruption_later_on_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: type, name: str, resumed: int
) -> None:
    training = Training(tmp_path, compressor=PowerSGD(2))
    training.body(0)
    training.checkpointer.commit()

    def interrupted() -> None:
        training.body(1)
        training.checkpointer.commit()

    with monkeypatch.context() as patch:
        patch.setattr(place, name, broken_once(KeyboardInterrupt(), getattr(place, name)))
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    with pytest.raises(UsageError, match=r"Ctrl-C in a notebook\), attach again"):
        training.body(1)
    training.checkpointer.close()
    again = Training(tmp_path, compressor=PowerSGD(2))
    assert again.resumed == resumed
    again.checkpointer.close()
