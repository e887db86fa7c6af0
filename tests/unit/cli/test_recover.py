"""``lowdiff recover``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowdiff.persistence.format.values import same
from tests.unit.cli.commands import Command, command, copy, trained
from tests.unit.recovery.training import Trained, flip

__all__ = ["command", "copy", "trained"]  # fixtures

ROOT = Path(__file__).parents[3]


@pytest.mark.cases(3)
@pytest.mark.parametrize("step", [0, 3, 10, None])
def test_recover_writes_the_live_bits(
    command: Command, trained: Trained, tmp_path: Path, step: int | None
) -> None:
    out = tmp_path / "x.pt"
    wanted = [] if step is None else ["--step", step]
    result = command("recover", trained.run, "--out", out, *wanted, "--staging", trained.staging)
    assert (result.code, result.err) == (0, "")
    reached = 12 if step is None else step
    assert result.out.startswith(f"{out}: step {reached} of {trained.run}, ")
    content = torch.load(out, weights_only=True)
    assert content["step"] == reached
    assert same(content["model"], dict(trained.models[reached]))
    assert same(content["optimizer"], trained.optimizers[reached][0])


def test_recover_writes_weights_alone(command: Command, trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    assert command("recover", trained.run, "--out", out, "--staging", trained.staging).code == 0
    weights = load_file(out)
    assert weights.keys() == trained.models[12].keys()
    assert same(weights, {name: trained.models[12][name] for name in weights})


@pytest.mark.slow
def test_recover_needs_neither_training_code_nor_repository(
    trained: Trained, tmp_path: Path
) -> None:
    code = """if True:
        import sys
        from lowdiff.cli.app import main
        try:
            main()
        finally:
            assert not any(name.startswith("tests") for name in sys.modules)
            assert "lowdiff.checkpointer" not in sys.modules
    """
    arguments = ["recover", str(trained.run), "--step", "7", "--out", "x.pt"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--staging", str(trained.staging)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same(content["model"], dict(trained.models[7]))


def test_a_step_that_is_not_there_exits_with_1_and_says_which_are(
    command: Command, trained: Trained, tmp_path: Path
) -> None:
    result = command(
        "recover", trained.run, "--step", 13, "--out", tmp_path / "x.pt", "--staging", tmp_path
    )
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"lowdiff: step 13 of {trained.run} cannot be recovered")
    assert result.error.endswith("recoverable steps: 0 to 12")


def test_recover_refuses_other_endings_before_it_looks_at_the_run(command: Command) -> None:
    result = command("recover", "no run at all", "--out", "x.ckpt")
    assert result.code == 2
    assert ".pt" in result.error
    assert ".safetensors" in result.error


def test_recover_overwrites_only_by_force(
    command: Command, trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "x.pt"
    out.touch()
    arguments = ["recover", trained.run, "--out", out, "--staging", trained.staging]
    result = command(*arguments)
    assert result.code == 2
    assert "--force" in result.error
    assert out.stat().st_size == 0
    assert command(*arguments, "--force").code == 0
    assert out.stat().st_size > 1000


def test_recover_goes_around_a_damaged_snapshot_and_says_so(
    command: Command, copy: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(copy.shard(10), 700)
    arguments = ["recover", copy.run, "--step", "11", "--out", tmp_path / "x.pt"]
    assert command(*arguments, "--staging", copy.staging).code == 0
    assert f"{copy.shard(10)} is damaged" in caplog.text
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    assert same(content["model"], dict(copy.models[11]))


@pytest.mark.parametrize("name", ["verify", "recover"])
def test_progress_is_for_terminals(
    command: Command,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    out = ["--out", tmp_path / "x.pt"] if name == "recover" else []
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = command(name, trained.run, *out, "--staging", trained.staging)
    assert shown.code == 0
    assert "Replaying" in shown.err
    assert "Replaying" not in shown.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_device_that_is_not_there_is_bad_usage(command: Command, trained: Trained) -> None:
    refused = command("verify", trained.run, "--staging", trained.staging, "--device", "cuda")
    assert refused.code == 2
    assert "cuda" in refused.error
