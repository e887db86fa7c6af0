"""What a script builds otherwise than the run began with, and history overrides, is said once, with old and new."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_fence
from tests.unit.loops import Loop

_CODE = "LD319"


class Stopping:
    """An object with a setting in its state, and one beside it."""

    def __init__(self, patience: int, name: str = "loss") -> None:
        self.patience, self.name, self.best = patience, name, float("inf")

    def state_dict(self) -> dict[str, Any]:
        return {"patience": self.patience, "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.patience, self.best = state_dict["patience"], state_dict["best"]


def live(folder: Path, until: int, loop: Loop | None = None, **stateful: Any) -> Loop:
    """Attach, train, close."""
    loop = loop or Loop(folder)
    loop.attach(**stateful)
    for number in loop.checkpointer.steps(until):
        loop.step(number)
        for thing in stateful.values():
            if isinstance(thing, LRScheduler):
                thing.step()
    loop.checkpointer.close()
    return loop


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning about it; empty if there is none."""
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(_CODE)]
    caplog.clear()
    assert len(lines) < 2
    return "".join(lines)


def test_settings_of_an_optimizer_are_named_with_old_and_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, 3)
    other = Loop(
        tmp_path, make=lambda p: torch.optim.AdamW(p, lr=5.0, weight_decay=0.3, foreach=True)
    )
    live(tmp_path, 4, other)
    text = said(caplog)
    for words in (
        "lr of group 0 of AdamW: built as 5.0, before as 0.01; 0.01 is back",
        "weight_decay of group 0 of AdamW: built as 0.3, before as 0.01",
        "foreach of group 0 of AdamW: built as True, before as None",
    ):
        assert words in text
    assert other.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda o, new: lr_scheduler.CosineAnnealingLR(o, 40 if new else 20),
            "scheduler.T_max: built as 40, before as 20",
        ),
        (
            lambda o, new: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40 if new else 20),
            "scheduler.total_steps: built as 40, before as 20",
        ),
        (
            lambda o, new: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.1, 1.0, 4 if new else 2), lr_scheduler.StepLR(o, 3)],
                [4 if new else 2],
            ),
            "scheduler._schedulers[0].total_iters: built as 4, before as 2",
        ),
    ],
    ids=["cosine", "one_cycle", "sequential"],
)
def test_settings_of_schedulers_are(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[torch.optim.Optimizer, bool], LRScheduler],
    words: str,
) -> None:
    for until, new in ((3, False), (5, False), (7, True)):
        assert said(caplog) == ""
        loop = Loop(tmp_path)
        live(tmp_path, until, loop, scheduler=make(loop.optimizer, new))
    assert words in said(caplog)


def test_settings_of_objects_are_where_their_state_overrides_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, 2, stopping=Stopping(3))
    live(tmp_path, 3, stopping=Stopping(3, "accuracy"))
    assert said(caplog) == ""  # its name is the script's
    stopping = Stopping(5)
    live(tmp_path, 4, stopping=stopping)
    assert "stopping.patience: built as 5, before as 3; 3 is back" in said(caplog)
    assert stopping.patience == 3


def test_it_is_said_at_every_start_until_the_run_is_changed_on_purpose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, 2)
    for until in (3, 4):
        live(tmp_path, until, Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, lr=0.5)))
        assert "built as 0.5, before as 0.01" in said(caplog)
    loop = Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, lr=0.5))
    loop.attach()
    assert said(caplog)
    loop.optimizer.param_groups[0]["lr"] = 0.5
    for number in loop.checkpointer.steps(5):
        loop.step(number)
    loop.checkpointer.close()
    live(tmp_path, 6, Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, lr=0.5)))
    assert said(caplog) == ""


def test_a_new_setting_and_a_run_that_recorded_none_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, 2)
    loop = Loop(tmp_path)
    loop.optimizer.param_groups[0]["note"] = "new"
    live(tmp_path, 3, loop, stopping=Stopping(3))
    assert said(caplog) == ""
    built = read_fence(RunFolder(tmp_path / "run").fence(1, 0)).built
    assert built["stopping.patience"] == "3"
    assert built["note of group 0 of AdamW"] == "'new'"


class Client(Stopping):
    """Holds what is nobody else's business, and what no text can be made of."""

    def __init__(self, patience: int, token: str, ratio: object, started: float) -> None:
        super().__init__(patience)
        self.token, self.ratio, self.headers = token, ratio, {"Authorization": token}
        self.started = started + random.random()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"started": self.started, "ratio": None}


def test_what_an_object_does_not_store_goes_to_no_disk_and_nothing_hinders_attach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for until in (2, 3):
        ratio = torch.empty(1, device="meta") if until == 2 else Fraction(10**400)
        live(tmp_path, until, client=Client(3, "secret", ratio, 1.0))
    built = read_fence(RunFolder(tmp_path / "run").fence(1, 0)).built
    assert "client.patience" in built
    assert not any("secret" in text for text in built.values())
    assert not [
        p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"secret" in p.read_bytes()
    ]


def test_what_training_made_of_an_object_is_not_what_a_script_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a notebook, where the same objects are attached again."""
    loop = Loop(tmp_path)
    scheduler = lr_scheduler.StepLR(loop.optimizer, 2, 0.1)
    for until in (3, 5):
        live(tmp_path, until, loop, scheduler=scheduler)
    for until in (6, 7):
        again = Loop(tmp_path)
        live(tmp_path, until, again, scheduler=lr_scheduler.StepLR(again.optimizer, 2, 0.1))
    assert said(caplog) == ""
