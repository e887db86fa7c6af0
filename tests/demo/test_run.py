from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lowdiff.demo.report import print_report
from lowdiff.demo.run import LaunchOutput, plan_kill, run_demo
from lowdiff.errors import ConfigError


def test_the_kill_is_drawn_between_30_and_70_percent_of_the_run() -> None:
    drawn = [plan_kill(seed, 60) for seed in range(500)]
    assert {step for step, _ in drawn} == set(range(18, 43))
    assert all(0 <= share < 1 for _, share in drawn)


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


@pytest.mark.slow
def test_the_demo_starts_without_waiting_for_torch() -> None:
    code = """if True:
        import sys
        import lowdiff.demo.run, lowdiff.demo.report, lowdiff.demo.picture
        sys.exit("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_ranks_print_into_one_line_is_heard() -> None:
    life = LaunchOutput()
    for after, line in enumerate(
        (
            "W1125 03:30:01.000 torch/distributed/run.py: a warning\n",
            "starting at step 3\n",
            "step 4: loss 5.74921703\n",
            "step 5: loss 1e-05\n",
            "step 6: loss nan\n",
            "rank 1: weights 0ce1, lowdiff 4.000 ms a steprank 0: weights 0ce2, lowdiff 2.5 ms a step\n",
            "\n",
        )
    ):
        life.hear(line, 2.0 * after)
    assert (life.resumed_from, life.attached_after) == (3, 2.0)
    assert life.losses == {4: "5.74921703", 5: "1e-05", 6: "nan"}
    assert life.times == {4: 4.0, 5: 6.0, 6: 8.0}
    assert life.step_seconds(4, 5) == 2.0
    assert life.weights == {0: "0ce2", 1: "0ce1"}
    assert life.lowdiff_seconds == {0: 0.0025, 1: 0.004}


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_promises_and_the_commands_that_it_ends_with_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_demo(tmp_path / "out", steps=10, seed=1)
    assert result.failures == ()
    assert result.resumed.resumed_from > 0
    assert len(result.reference.losses) == 20, "it trains on without lowdiff"
    halves = [result.reference.step_seconds(first, first + 9) for first in (1, 11)]
    assert min(halves) > 0
    assert list(result.stored_bytes) == list(range(1, 11))
    assert result.full_checkpoint_bytes > 20 * result.mean_stored_bytes > 0
    print_report(result, Console(), picture="demo.png")
    shown = capsys.readouterr().out
    commands = [
        line.partition("  #")[0] for line in shown.splitlines() if line[:10] == "  lowdiff "
    ]
    assert len(commands) == 3
    monkeypatch.chdir(tmp_path)
    for line in commands:
        words = shlex.split(line)[1:]
        ran = subprocess.run([sys.executable, "-m", "lowdiff", *words], check=False)
        assert ran.returncode == 0, line
