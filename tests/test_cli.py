"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lowdiff
from lowdiff.cli import main
from lowdiff.demo import run as demo_run
from lowdiff.errors import UsageError
from lowdiff.persistence.values import same
from tests.recovery.test_inspection import KEYS
from tests.recovery.training import Trained, flip, train

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err.strip()


Command = Callable[..., Result]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs ``lowdiff ARGUMENTS`` in this process."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["lowdiff", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("cli"), 12)


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Trained:
    return trained.copied(tmp_path)


# The command itself


def test_the_version_is_the_packages(command: Command) -> None:
    assert command("--version") == Result(0, f"lowdiff {lowdiff.__version__}\n", "")


def test_help_lists_the_commands(command: Command) -> None:
    result = command("--help")
    assert result.code == 0
    for name in ("demo", "inspect", "verify", "recover"):
        assert f"│ {name} " in result.out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("demo", ["--out", "--steps", "--workers", "--seed"]),
        ("inspect", ["RUN", "--json", "--staging"]),
        ("verify", ["RUN", "--json", "--staging", "--workers"]),
        ("recover", ["RUN", "--step", "--out", "--force", "--staging", "--workers"]),
    ],
)
def test_help_teaches_by_examples(command: Command, name: str, options: list[str]) -> None:
    result = command(name, "--help")
    assert result.code == 0
    assert f"Examples: lowdiff {name}" in " ".join(result.out.split())
    for option in options:
        assert option in result.out
    assert result.out == command(name, "-h").out


def test_help_loads_nothing_that_takes_long() -> None:
    code = "import sys, lowdiff.cli; print({'torch', 'numpy', 'rich.live'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["inspect"],
        ["inspect", "run", "--jsn"],
        ["recover", "run"],
        ["recover", "run", "--out", "x.pt", "--step", "-1"],
        ["recover", "run", "--out", "x.pt", "--step", "ten"],
        ["verify", "run", "--workers", "0"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_2(command: Command, arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.code == 2
    assert "Usage: lowdiff" in result.out + result.err or "give one of --out" in result.error


@pytest.mark.parametrize("name", ["inspect", "verify", "recover"])
def test_a_folder_that_is_no_run_is_named_in_one_line(
    command: Command, tmp_path: Path, name: str
) -> None:
    out = ["--out", tmp_path / "x.pt"] if name == "recover" else []
    result = command(name, tmp_path, *out)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"lowdiff: {tmp_path} is not a lowdiff run")


def test_an_error_of_the_system_is_one_line_too(command: Command) -> None:
    result = command("inspect", "x" * 5000)
    assert result.code == 1
    assert result.error.startswith("lowdiff: ")


# inspect


def test_inspect_prints_json_with_the_promised_keys(command: Command, trained: Trained) -> None:
    result = command("inspect", trained.run, "--json", "--staging", trained.staging)
    document = json.loads(result.out)
    assert result.code == 0
    assert list(document)[:4] == KEYS[:4]
    assert set(KEYS) <= set(document)
    assert set(document["differentials"]) >= {"first", "last", "count", "bytes"}
    assert document["recoverable"] == {"first": 0, "last": 12}


def test_inspect_prints_a_table(command: Command, trained: Trained) -> None:
    result = command("inspect", trained.run, "--staging", trained.staging)
    assert (result.code, result.err) == (0, "")
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    assert rows[0] == str(trained.run)
    assert "model 2,449 elements in 6 parameters" in rows
    assert "optimizer AdamW" in rows
    assert "compressor topk(density=0.1, dense_below=64, value_dtype=None, warmup=0)" in rows
    assert "ranks 1, 1 incarnation" in rows
    assert "recoverable steps 0 to 12" in rows
    assert any(row.startswith("snapshots 0, 5, 10, 12 (") for row in rows)
    assert any(row.startswith("differentials 12, of steps 1 to 12 (") for row in rows)


def test_inspect_says_what_is_damaged_and_what_is_left(command: Command, copy: Trained) -> None:
    flip(copy.segment(6), 100)
    rows = [
        " ".join(line.split())
        for line in command("inspect", copy.run, "--staging", copy.staging).out.splitlines()
    ]
    assert "recoverable steps 0 to 5, 10 to 12" in rows
    assert "damaged 1 file; `lowdiff verify` names it" in rows


def test_a_staging_folder_that_is_not_there_is_named(command: Command, trained: Trained) -> None:
    result = command("inspect", trained.run, "--staging", "shm-of-before")
    assert result.code == 0
    assert (
        result.error == "lowdiff: --staging shm-of-before is no folder, so only disk is looked at"
    )
    # What is asked of a step with a snapshot of its own is nothing but that snapshot.
    planned = command("recover", trained.run, "--staging", trained.staging, "--plan")
    assert "replay       nothing: the snapshot is of that step" in planned.out


# verify


def test_verify_prints_what_it_checked(command: Command, trained: Trained) -> None:
    result = command("verify", trained.run, "--staging", trained.staging, "--workers", 2)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "Checksums: 1 fence, 4 snapshot files, 3 segments, 0 staging files with 12 differentials",
        "Replayed 0 to 5: every bit as in snapshot 5",
        "Replayed 5 to 10: every bit as in snapshot 10",
        "Replayed 10 to 12: every bit as in snapshot 12",
        "The run is whole; recoverable steps: 0 to 12",
    ]


@pytest.mark.parametrize("what", ["snapshot", "segment", "missing segment"])
def test_verify_exits_with_1_and_names_the_first_difference(
    command: Command, copy: Trained, what: str
) -> None:
    path = copy.shard(10) if what == "snapshot" else copy.segment(6)
    if what == "missing segment":
        path.unlink()
    else:
        flip(path, 700)
    result = command("verify", copy.run, "--staging", copy.staging)
    failures = [line for line in result.out.splitlines() if line.startswith("FAILED: ")]
    assert (result.code, result.err) == (1, "")
    assert str(path) in failures[0]
    assert "The run is whole" not in result.out
    assert f"{len(failures)} failure" in result.out.splitlines()[-1]


def test_verify_prints_notes(command: Command, copy: Trained) -> None:
    copy.shard(10).with_suffix(".json").unlink()
    result = command("verify", copy.run, "--staging", copy.staging)
    assert result.code == 0
    assert f"Note: {copy.shard(10).parent} is not complete" in result.out


def test_verify_prints_json(command: Command, copy: Trained) -> None:
    flip(copy.shard(10), 700)
    result = command("verify", copy.run, "--json", "--staging", copy.staging)
    document = json.loads(result.out)
    assert result.code == 1
    assert document["ok"] is False
    assert document["failures"][0]["path"] == str(copy.shard(10))
    assert document["replays"][0] == {"first": 0, "last": 5, "compared": True}


# recover


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


def test_recover_needs_neither_training_code_nor_repository(
    trained: Trained, tmp_path: Path
) -> None:
    code = """if True:
        import sys
        from lowdiff.cli import main
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


# demo


def test_demo_hands_its_options_over_and_its_verdict_back(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def run(output: Path, **options: object) -> int:
        seen.extend([output, options])
        return 1

    monkeypatch.setattr(demo_run, "main", run)
    assert command("demo", "--out", "d", "--steps", 20, "--workers", 3, "--seed", 5).code == 1
    assert seen == [Path("d"), {"steps": 20, "world_size": 3, "seed": 5}]
    command("demo")
    assert seen[2:] == [Path("demo-output"), {"steps": 60, "world_size": 2, "seed": None}]


def test_demo_refuses_settings_that_cannot_work(command: Command, tmp_path: Path) -> None:
    result = command("demo", "--out", tmp_path / "d", "--steps", 1)
    assert result.code == 2
    assert "at least 10 steps" in result.error


def test_demo_says_how_to_get_matplotlib(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> int:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(demo_run, "main", run)
    result = command("demo")
    assert result.code == 2
    assert "pip install 'lowdiff[plot]'" in result.error


def test_our_own_mistakes_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(demo_run, "main", run)
    monkeypatch.setattr(sys, "argv", ["lowdiff", "demo"])
    with pytest.raises(ZeroDivisionError):
        main()


def test_every_error_of_lowdiff_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> int:
        raise UsageError("called too early")

    monkeypatch.setattr(demo_run, "main", run)
    assert command("demo") == Result(1, "", "lowdiff: called too early\n")


# Runs in a store


def test_a_store_is_given_by_its_url(command: Command, trained: Trained, tmp_path: Path) -> None:
    url = f"file://{trained.run}"  # a store holds the very names that a run folder does
    result = command("inspect", url, "--json", "--staging", trained.staging)
    assert json.loads(result.out)["recoverable"] == {"first": 0, "last": 12}
    result = command("verify", url, "--staging", trained.staging)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("The run is whole; recoverable steps: 0 to 12\n")
    out = tmp_path / "x.pt"
    result = command("recover", url, "--out", out, "--step", 7, "--staging", trained.staging)
    assert result.out.startswith(f"{out}: step 7 of {url}, ")
    assert same(torch.load(out, weights_only=True)["model"], dict(trained.models[7]))


def test_a_store_without_a_run_is_named_in_one_line(command: Command, tmp_path: Path) -> None:
    result = command("verify", f"file://{tmp_path}")
    assert result.code == 1
    assert "is not a lowdiff run: it has no run.json" in result.error
    result = command("verify", "nfs://server/run")
    assert result.code == 2
    assert "begins with one of s3://" in result.error
