"""The tool that lets other versions run: what it installs, compares and says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_fence, write_fence
from tests.crash.all_trainings import TRAININGS
from tests.versions import written
from tests.versions.__main__ import Tried, requirements, tables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One training of this version, as `written.write` leaves it."""
    own = tmp_path / "plain_module"
    states = written.trained(TRAININGS["plain_module"](0, 1), own / "run")
    (own / "states.json").write_text(json.dumps(states))
    return tmp_path


def test_its_own_runs_come_back_exact(folder: Path) -> None:
    outcome = written.read(folder)["outcome"]
    assert outcome == {"plain_module": {str(step): "exact" for step in written.STEPS}}


def test_other_bits_are_seen(folder: Path) -> None:
    path = folder / "plain_module" / "states.json"
    states = json.loads(path.read_text())
    name = next(iter(states["9"]))
    states["9"][name] = "0" * 64
    path.write_text(json.dumps(states))
    outcome = written.read(folder)["outcome"]["plain_module"]
    assert outcome["4"] == outcome["10"] == "exact"
    assert outcome["9"] == f"wrong: {[name]}"


def test_a_refusal_has_to_name_the_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(folder / "plain_module" / "run")
    fence = read_fence(run.fence(0, 0))
    run.fence(0, 0).unlink()
    write_fence(run, replace(fence, environment=replace(fence.environment, torch_version="2.6.0")))
    assert set(written.read(folder)["outcome"]["plain_module"].values()) == {"exact"}
    # As if this PyTorch rounded otherwise.
    monkeypatch.setattr("lowdiff.recovery.replay.checksums.state_digest", lambda *_: 1)
    outcome = written.read(folder)["outcome"]["plain_module"]
    assert outcome == {"4": "refused", "9": "refused", "10": "exact"}


@pytest.mark.slow
def test_arithmetic_is_the_same_twice() -> None:
    # Before PyTorch 2.15 SGD's fused kernel differs from itself in half widths.
    first, second = (
        {k: v for k, v in written.bits() if not k.startswith("SGD fused")} for _ in range(2)
    )
    assert first == second
    assert first["AdamW loop, float32"] == first["AdamW foreach, float32"]
    assert {name.split()[0] for name in first} >= {"SGD", "Muon", "softmax,"}


def test_the_tables_say_what_differs() -> None:
    rows = {
        "a": Tried("3.10.1", "2.10.0", "1.26.4", 40, [], 2, {}, {"x": "1", "y": "1", "z": "1"}),
        "b": Tried(
            "3.13.0", "2.15.0", "2.4.6", 41, ["t::u"], 0, {}, {"x": "1", "y": "2", "z": "varies"}
        ),
    }
    rows["a"].recovered = {"a": {"gpt": {"4": "exact"}}, "b": {"gpt": {"4": "refused"}}}
    rows["b"].recovered = {"a": {"gpt": {"4": "wrong: x"}}, "b": {"gpt": {"4": "exact"}}}
    text = tables(rows)
    assert "| 2.15.0 | 3.13.0 | 2.4.6 | 41 | 1 | 0 |" in text
    assert "| 2.10.0 | 1 exact | 0 exact, **1 wrong** |" in text
    assert "Refused: `gpt` (2.15.0 by 2.10.0)." in text
    assert "| y | a | b |" in text
    assert "| z | a | varies |" in text
    assert "| x |" not in text
    assert "1 further rows" in text
    assert [row.is_good for row in rows.values()] == [True, False]


def test_pytorch_and_numpy_are_chosen_and_all_else_is_required() -> None:
    names = requirements()
    assert {"pytest", "hypothesis", "zstandard"} <= set(names)
    assert not any(name.startswith(("torch>", "torch=", "numpy")) for name in names)
