"""``--import``: commands that replay learn of optimizers that are not torch's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowdiff.cli.app import main
from tests.crash import third_party_run
from tests.processes import Script

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
    words = ["Lion", folder, 9, -1, "log"]
    trained = Script(third_party_run.main, *words, output=folder / "output.txt")
    assert trained.wait() == 0, trained.printed()
    return folder


def installed(*_: str) -> None:
    """The command, as an installed one finds modules: not in the current folder."""
    sys.path[:] = [path for path in sys.path if path]
    main()


def lowdiff_command(folder: Path, *words: str) -> tuple[int, str]:
    """Exit status and all that was printed, in a process that has loaded no module of the user's."""
    (folder / "output.txt").unlink()
    process = Script(installed, *words, output=folder / "output.txt", cwd=folder)
    return process.wait(), process.printed()


@pytest.mark.slow
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
    code, printed = lowdiff_command(run, *words, *staging)
    assert code != 0
    assert "--import MODULE" in printed
    code, printed = lowdiff_command(run, *words, *staging, "--import", "my_optimizers")
    assert code == 0, printed


@pytest.mark.parametrize(
    ("module", "why"), [("nowhere", "No module named"), ("broken", "RuntimeError: no such thing")]
)
def test_a_module_that_cannot_be_imported_is_named(run: Path, module: str, why: str) -> None:
    code, printed = lowdiff_command(run, "verify", "run", "--import", module)
    assert code == 2
    assert repr(module) in printed
    assert why in printed
    assert "Traceback" not in printed
