"""What a command cannot do, it says in one line, and before it replays anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowdiff import timeline_command
from lowdiff.recovery import engine
from tests.commands import Command, command, trained
from tests.recovery.training import Trained

__all__ = ["command", "trained"]  # fixtures


@pytest.fixture
def no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(*_: object) -> None:
        raise AssertionError("nothing was to be replayed")

    monkeypatch.setattr(engine, "replay", replay)


# Where the command runs


@pytest.mark.parametrize("others", [{}, {"RANK": "3", "MASTER_ADDR": "nowhere"}], ids=str)
def test_what_a_batch_system_exports_is_no_group_of_processes(
    command: Command,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: dict[str, str],
) -> None:
    for name, value in {"WORLD_SIZE": "8", **others}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "x.pt"
    result = command("recover", trained.run, "--out", out, "--staging", trained.staging)
    assert (result.code, result.err) == (0, "")
    assert torch.load(out, weights_only=True)["step"] == 12


# Files of others


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"hello\n", 1, "cannot be read"),
        (b"\x80\x02}q", 1, "cannot be read"),
        (b"", 1, "cannot be read"),
        ({1: torch.zeros(2)}, 2, "holds a dict with 1 for a tensor's name"),
        ({"model": {("a", 2): torch.zeros(2)}}, 2, "holds a dict with ('a', 2) for"),
        ({"model": {}, "optimizer": {"state": [1]}}, 2, "optimizer's state_dict() under"),
        ({"model": {}, "optimizer": {"state": {0: 5}}}, 2, "optimizer's state_dict() under"),
        ({"model": {}, "optimizer": [{"param_groups": [3]}]}, 2, "optimizer's state_dict() under"),
        ({"model": {}, "optimizer": {"param_groups": 3}}, 2, "optimizer's state_dict() under"),
    ],
    ids=["text", "pickle", "empty", "number", "tuple", "list", "entry", "group", "groups"],
)
def test_a_file_that_holds_something_else_is_named(
    command: Command, trained: Trained, tmp_path: Path, content: Any, code: int, message: str
) -> None:
    file = tmp_path / "x.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    result = command("verify", trained.run, "--against", file, "--staging", trained.staging)
    assert (result.code, result.out) == (code, "")
    assert result.error.startswith(f"lowdiff: {file} ")
    assert message in result.error


@pytest.mark.parametrize("strange", [torch.zeros(()).to_sparse(), torch.empty((), device="meta")])
def test_a_tensor_in_another_form_is_a_difference(
    command: Command, trained: Trained, tmp_path: Path, strange: torch.Tensor
) -> None:
    torch.save({"scale": strange}, tmp_path / "x.pt")
    result = command(
        "verify", trained.run, "--against", tmp_path / "x.pt", "--staging", trained.staging
    )
    assert result.code == 1
    assert "DIFFERENT: scale: torch.float32 () against torch.float32 () " in result.out


# Names


@pytest.mark.parametrize("name", ["r[lr=0.1]", "r[/x]", "r:smile:", "[bold]r", "r\\"])
def test_the_name_of_a_run_is_printed_as_it_is(
    command: Command, trained: Trained, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(trained.run)
    result = command("inspect", tmp_path / name, "--staging", trained.staging)
    assert result.code == 0
    assert result.out.splitlines()[0].rstrip() == str(tmp_path / name)


# Outputs


@pytest.mark.parametrize("kind", ["--out", "--as-run"])
@pytest.mark.parametrize("place", ["file/below/x", "/proc/x"])
@pytest.mark.usefixtures("no_replay")
def test_recover_refuses_a_place_where_nothing_can_be_written(
    command: Command, trained: Trained, tmp_path: Path, kind: str, place: str
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / (place + ".pt" if kind == "--out" else place)
    result = command("recover", trained.run, kind, out, "--staging", trained.staging)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"lowdiff: {out} could not be written: ")


@pytest.mark.parametrize(
    ("place", "code", "message"),
    [
        ("file/x.png", 1, "could not be written"),
        ("/proc/x.png", 1, "could not be written"),
        ("folder.png", 2, "is a folder"),
        ("x.pdf", 2, "does not end in .png"),
    ],
)
@pytest.mark.usefixtures("no_replay")
def test_timeline_refuses_a_picture_that_cannot_be_written(
    command: Command, trained: Trained, tmp_path: Path, place: str, code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    out = tmp_path / place
    result = command("timeline", trained.run, "--out", out, "--staging", trained.staging)
    assert (result.code, result.out) == (code, "")
    assert result.error.startswith(f"lowdiff: {out} {message}")


@pytest.mark.usefixtures("no_replay")
def test_timeline_says_how_to_get_matplotlib_before_it_replays(
    command: Command, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = command(
        "timeline", trained.run, "--out", tmp_path / "x.png", "--staging", trained.staging
    )
    assert (result.code, result.out) == (2, "")
    assert result.error.endswith("needs matplotlib: pip install matplotlib")


def test_a_picture_that_fails_in_the_end_costs_no_numbers(
    command: Command, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.png"

    def check(_: Path) -> None:
        out.parent.joinpath("x.png").mkdir()  # somebody else makes it while the run is replayed

    monkeypatch.setattr(timeline_command, "_check_picture", check)
    result = command("timeline", trained.run, "--json", "--out", out, "--staging", trained.staging)
    assert result.code == 1
    assert len(json.loads(result.out)["steps"]) == 12
    assert result.error.startswith(f"lowdiff: {out} could not be written: ")


def test_what_is_refused_leaves_no_trace(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "no run"
    assert command("recover", run, "--out", tmp_path / "new/folder/x.pt").code == 1
    assert command("timeline", run, "--out", tmp_path / "new/x.png").code == 1
    assert not list(tmp_path.iterdir())
