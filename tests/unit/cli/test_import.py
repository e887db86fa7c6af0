"""``--import``: commands that replay learn of optimizers that are not torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

USER_MODULE = """
import lowdiff
from tests.crash.third_party import Lion

lowdiff.register_optimizer(Lion, "element")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained with Lion, and a user's module beside it."""
    folder: Path = tmp_path_factory.mktemp("lion")
    (folder / "my_optimizers.py").write_text(USER_MODULE)
    (folder / "broken.py").write_text("raise RuntimeError('no such thing')")
    code = "import sys; from tests.crash.third_party_run import main; main(*sys.argv[1:])"
    words = ["Lion", str(folder), "9", "-1", "log"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, *words], env=environment, check=True)
    return folder


def lowdiff_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as an installed one: without the current folder."""
    code = "import sys; sys.path[:] = [p for p in sys.path if p]; from lowdiff.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["recover", "run", "--step", "5", "--out", "x.pt"],
        ["verify", "run"],
        ["timeline", "run"],
    ],
    ids=lambda words: "-".join(words[:1] + words[2:3]),
)
def test_a_command_that_replays_needs_the_module_and_then_works(
    run: Path, words: list[str]
) -> None:
    staging = ["--staging", str(run / "staging")]
    without = lowdiff_command(run, *words, *staging)
    assert without.returncode != 0
    assert "--import MODULE" in without.stderr + without.stdout
    done = lowdiff_command(run, *words, *staging, "--import", "my_optimizers")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("module", "why"), [("nowhere", "No module named"), ("broken", "RuntimeError: no such thing")]
)
def test_a_module_that_cannot_be_imported_is_named(run: Path, module: str, why: str) -> None:
    done = lowdiff_command(run, "verify", "run", "--import", module)
    assert done.returncode == 2
    assert repr(module) in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
