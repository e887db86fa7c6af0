"""``residual="snapshot"``: error feedback as of the last snapshot, and no staging memory for it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from lowdiff.protocols import Compressor
from tests.crash.lives import owed_by
from tests.mounts import tmpfs_or_skip
from tests.unit.loops import Loop, wait_until

LOST = "the continuation is perhaps not bit-identical"


def loop_in(folder: Path, compressor: Compressor | None = None, residual: str = "snapshot") -> Loop:
    settings = {"compressor": compressor or TopK(0.1, dense_below=64), "residual": residual}
    return Loop(folder, settings=settings)


def owed(loop: Loop) -> dict[str, torch.Tensor]:
    return owed_by(loop.checkpointer)


def trained(loop: Loop, until: int) -> dict[int, dict[str, torch.Tensor]]:
    """Train on, and return what was owed after each step."""
    after = {}
    for number in range(until):
        loop.step(number)
        loop.checkpointer.commit()
        after[number + 1] = owed(loop)
    return after


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressor", [TopK(0.1, dense_below=64), PowerSGD(2, dense_below=64)])
def test_a_killed_run_has_its_state_exactly_and_the_residual_of_its_snapshot(
    tmp_path: Path, compressor: Compressor, caplog: pytest.LogCaptureFixture
) -> None:
    killed = loop_in(tmp_path, compressor)
    killed.attach()
    after = trained(killed, 8)
    assert not same(after[5], after[8])
    assert not list((tmp_path / "staging").rglob("residual"))
    expected = killed.weights()
    wait_until(lambda: 5 in {s.step for s in scan(RunFolder(tmp_path / "run")).snapshots})
    killed.die()
    resumed = loop_in(tmp_path, compressor)
    assert resumed.attach() == 8
    assert same(resumed.weights(), expected)
    assert same(owed(resumed), after[5])
    assert LOST in caplog.text
    assert "using that of snapshot 5" in caplog.text
    resumed.checkpointer.close()


def test_before_the_first_snapshot_nothing_is_owed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = loop_in(tmp_path)
    killed.attach()
    trained(killed, 3)
    killed.die()
    resumed = loop_in(tmp_path)
    assert resumed.attach() == 3
    assert not any(values.any() for values in owed(resumed).values())
    assert LOST in caplog.text
    resumed.checkpointer.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(("first", "then"), [("snapshot", "exact"), ("exact", "snapshot")])
def test_a_closed_run_goes_on_bit_for_bit_whichever_is_chosen_next(
    tmp_path: Path, first: str, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_in(tmp_path, residual=first)
    loop.attach()
    after = trained(loop, 8)
    loop.checkpointer.close()
    resumed = loop_in(tmp_path, residual=then)
    assert resumed.attach() == 8
    assert same(owed(resumed), after[8])
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    resumed.checkpointer.close()


def test_a_life_that_stages_none_takes_over_what_the_killed_one_before_it_staged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = loop_in(tmp_path, residual="exact")
    killed.attach()
    after = trained(killed, 8)
    killed.die()
    resumed = loop_in(tmp_path)
    assert resumed.attach() == 8
    taken = owed(resumed)
    assert all(same(taken[name], values) for name, values in after[8].items())
    assert LOST not in caplog.text
    resumed.checkpointer.close()


def test_it_fits_where_three_slots_do_not(tmp_path: Path) -> None:
    def wide(residual: str) -> Loop:
        loop = Loop(
            tmp_path,
            torch.nn.Sequential(torch.nn.Linear(20, 6000), torch.nn.Linear(6000, 3)),
            settings={"residual": residual, "staging": tmp_path / "memory"},
        )
        return loop

    with tmpfs_or_skip(tmp_path / "memory", 6):
        with pytest.raises(ConfigError, match=r"residuals"):
            wide("exact").attach()
        loop = wide("snapshot")
        assert loop.attach() == 0
        loop.checkpointer.close()
