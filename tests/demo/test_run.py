from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowdiff.demo.run import plan_kill, run_demo
from lowdiff.errors import ConfigError


def test_the_kill_is_drawn_between_30_and_70_percent_of_the_run() -> None:
    plans = [plan_kill(seed, 60) for seed in range(500)]
    assert {plan.step for plan in plans} == set(range(18, 43))
    assert all(0 <= plan.share < 1 for plan in plans)


def test_the_same_seed_kills_at_the_same_instant() -> None:
    assert plan_kill(5, 60) == plan_kill(5, 60)


@pytest.mark.parametrize(("steps", "world_size"), [(9, 2), (60, 0)])
def test_settings_that_cannot_work_are_refused(tmp_path: Path, steps: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        run_demo(tmp_path, steps=steps, world_size=world_size)


def test_a_seed_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed"):
        run_demo(tmp_path, seed=-1)


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "thesis.pt").touch()
    with pytest.raises(ConfigError, match="no demo put there"):
        run_demo(tmp_path)
    assert (tmp_path / "runs" / "thesis.pt").exists()


def test_the_demo_starts_without_waiting_for_torch() -> None:
    code = """if True:
        import sys
        import lowdiff.demo.run, lowdiff.demo.report
        sys.exit("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
