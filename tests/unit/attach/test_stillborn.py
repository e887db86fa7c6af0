"""A life that begins afresh and dies in ``attach``: the one before it is the run's history still."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowdiff.commit.session import Session
from lowdiff.commit.staging import Staging
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from tests.unit.loops import PATIENCE_SECONDS, Loop, wait_until

KILLED, END = 7, 10


def killed_life(folder: Path) -> None:
    """One that ends by SIGKILL."""
    killed = Loop(folder)
    killed.attach()
    for number in range(KILLED):
        killed.step(number)
        killed.checkpointer.commit()
    killed.die()


@pytest.mark.parametrize("restore", ["none", pytest.param("model", marks=pytest.mark.slow)])
def test_what_was_owed_to_killed_steps_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore: str
) -> None:
    whole = Loop(tmp_path / "whole")
    whole.run(END)
    killed_life(tmp_path)

    def dies(self: Session, *_: object, **__: object) -> None:
        """Before its first snapshot is staged, when its writer has done all that it can."""
        wait_until(lambda: scan(RunFolder(tmp_path / "run")).of(0, 0).ranges == [(1, KILLED)])
        self.storage.writer.finish(PATIENCE_SECONDS)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "snapshot", dies)
        with pytest.raises(KeyboardInterrupt):
            Loop(tmp_path).attach(restore=restore)
    resumed = Loop(tmp_path)
    assert resumed.run(END) == KILLED
    assert same(resumed.weights(), whole.weights())


@pytest.mark.slow
def test_what_was_owed_is_found_in_a_life_before_the_one_that_was_killed_in_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory of the life that made the step goes as soon as the next one names the residual."""
    whole = Loop(tmp_path / "whole")
    whole.run(END)
    killed_life(tmp_path)
    idle = Loop(tmp_path)
    assert idle.attach() == KILLED
    wait_until(lambda: [s.name[:7] for s in (tmp_path / "staging").glob("*/*")] == ["i000001"])
    idle.die()

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "stage_base", dies)
        with pytest.raises(KeyboardInterrupt):
            Loop(tmp_path).attach()
    resumed = Loop(tmp_path)
    assert resumed.run(END) == KILLED
    assert "is not in staging memory" not in caplog.text
    assert same(resumed.weights(), whole.weights())
