"""Which versions of Python, PyTorch and NumPy were run: ``python -m tests.versions --out docs/results``.

Each gets an environment of its own, one at a time, which is removed afterwards unless ``--keep`` names a
folder. In the first round each environment runs some minutes of tests of exactness, crash and recovery, and
writes runs; in the second each recovers the runs of all. ``versions.json`` has everything, ``versions.md`` the
tables. A run of another version comes back exact, or is refused with both versions named; anything else,
or a failed test, is exit status 1.

A PyTorch with CUDA takes 3 GB of downloads and 7 GB of disk, so none of this is part of CI.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benches import ending
from benches.harness import machine
from tests.versions.written import VARIES

ROOT = Path(__file__).parents[2]
TESTED = (
    *("golden", "unit/recovery/replay", "unit/recovery/replica", "crash/test_new_in_torch.py"),
    *("unit/recovery/test_state_checksums.py", "unit/recovery/test_other_torch.py"),
    *("crash/test_resume.py", "crash/test_compressors.py", "crash/test_memory.py"),
    *("crash/sharded/test_log.py", "crash/launch/test_survivors_nodes.py"),
)
MARKERS = "not gpu and not framework and not campaign"
#: Python, PyTorch and NumPy, as pip writes versions; no NumPy takes what pip does. The first PyTorch is
#: the oldest that setup.cfg allows, and with it the oldest NumPy that has wheels for that Python.
ROWS = (
    "python3.10 2.10.0 2.0.2",
    "python3.12 2.11.0",
    "python3.11 2.13.0",
    "python3.13 2.15.0",
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass(frozen=True, slots=True)
class Row:
    """One environment.

    Attributes:
        python: Command of the interpreter.
        torch: Version.
        numpy: Version; empty for what pip takes.
    """

    python: str
    torch: str
    numpy: str = ""

    @property
    def name(self) -> str:
        """Short, as a folder and in tables."""
        return f"torch-{self.torch}"


@dataclass(slots=True)
class Tried:
    """What came of one environment.

    Attributes:
        python: Version of Python.
        torch: Version, with its build.
        numpy: Version.
        passed: Number of tests that passed.
        failed: Names of those that did not.
        skipped: Number of tests that lack something there.
        unwritten: Trainings that could not be run there -> why.
        bits: Rows of arithmetic -> digest of the result.
        recovered: Name of an environment -> training -> step -> ``exact``, ``refused`` or what else.
    """

    python: str
    torch: str = ""
    numpy: str = ""
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    unwritten: dict[str, str] = field(default_factory=dict)
    bits: dict[str, str] = field(default_factory=dict)
    recovered: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether all tests passed, and no run came back wrong or was refused without a reason."""
        outcomes = [
            o for runs in self.recovered.values() for run in runs.values() for o in run.values()
        ]
        return self.passed > 0 and not self.failed and {*outcomes} <= {"exact", "refused"}


def made(row: Row, folder: Path) -> Path:
    """Make an environment, unless it is there; returns its Python."""
    own = folder / "bin" / "python"
    if own.exists():
        return own
    subprocess.run([row.python, "-m", "venv", str(folder)], check=True)
    pip = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    chosen = [f"torch=={row.torch}", f"numpy=={row.numpy}" if row.numpy else "numpy"]
    subprocess.run([*pip, *chosen], check=True)
    # Other packages have the versions of all tests, as far as those do with this Python and this NumPy.
    free = ("torch", "numpy", "setuptools", *(("scipy", "scikit-learn") if row.numpy else ()))
    pinned = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned.write_text("\n".join(line for line in lines if line.partition("==")[0] not in free))
    # Chosen again: no requirement may move them. A wheel is built by a test, not by pip.
    needed = ["setuptools>=70.1", *requirements()]
    subprocess.run([*pip, "-c", str(pinned), *chosen, *needed], check=True)
    return own


def requirements() -> list[str]:
    """Return what lowdiff and its tests need, from setup.cfg, but PyTorch and NumPy."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    texts = config["options"]["install_requires"], config["options.extras_require"]["dev"]
    lines = (line.strip() for text in texts for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "torch>", "numpy"))]


def tested(python: Path, row: Tried, selection: Sequence[str]) -> None:
    """Run the tests there."""
    words = [str(python), "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-n", "2"]
    result = subprocess.run(
        [*words, "--dist", "worksteal", "-m", MARKERS, *(f"tests/{name}" for name in selection)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    counts = {what: int(n) for n, what in _SUMMARY.findall(lines[-1] if lines else "")}
    row.passed, row.skipped = counts.get("passed", 0), counts.get("skipped", 0)
    row.failed = _FAILED.findall(result.stdout)
    if not row.passed:
        row.failed.append(f"pytest ended with {result.returncode}: {result.stdout[-300:]}")


def asked(python: Path, action: str, folder: Path) -> dict[str, Any]:
    """Have an environment write or read runs; returns what it says of them."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(python), "-W", "ignore", "-m", "tests.versions.written", action, str(folder)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(words)}: {result.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def tables(tried: Mapping[str, Tried]) -> str:
    """Return what was run, which runs came back where, and which arithmetic differs, as Markdown."""
    versions = [row.torch for row in tried.values()]
    ran = [
        [
            row.torch,
            row.python,
            row.numpy,
            f"{row.passed:,}",
            str(len(row.failed)),
            str(row.skipped),
        ]
        for row in tried.values()
    ]
    came_back = [
        [row.torch, *(_counted(reader.recovered.get(writer, {})) for reader in tried.values())]
        for writer, row in tried.items()
    ]
    names = dict.fromkeys(name for row in tried.values() for name in row.bits)
    letters = [[name, *_letters([row.bits.get(name) for row in tried.values()])] for name in names]
    differing = [row for row in letters if {*row[1:]} - {"a", "-"}]
    parts = [
        _table(["PyTorch", "Python", "NumPy", "tests passed", "failed", "skipped"], ran),
        "Steps of runs that one version made (rows) and another recovered (columns): exact, or refused.",
        _table(["", *versions], came_back),
        f"Refused: {_refusals(tried) or 'none'}.",
        "Arithmetic whose results have other bits than those of another version, or each time:",
        _table(["", *versions], differing),
        f"Of all versions that have them {len(letters) - len(differing)} further rows have the same bits.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _letters(digests: Sequence[str | None]) -> list[str]:
    """Return a letter for each digest, the same one for the same digest."""
    known = list(dict.fromkeys(d for d in digests if d not in (None, VARIES)))
    return ["-" if d is None else d if d == VARIES else "abcdef"[known.index(d)] for d in digests]


def _counted(runs: Mapping[str, Mapping[str, str]]) -> str:
    outcomes = [outcome for steps in runs.values() for outcome in steps.values()]
    others = [o for o in outcomes if o not in ("exact", "refused")]
    words = [f"{outcomes.count('exact')} exact"]
    words += [f"{outcomes.count('refused')} refused"] if "refused" in outcomes else []
    return ", ".join([*words, *([f"**{len(others)} wrong**"] if others else [])])


def _refusals(tried: Mapping[str, Tried]) -> str:
    by_run: dict[str, list[str]] = {}
    for reader in tried.values():
        for writer, runs in reader.recovered.items():
            for run, steps in runs.items():
                if "refused" in steps.values():
                    by_run.setdefault(run, []).append(f"{tried[writer].torch} by {reader.torch}")
    return "; ".join(f"`{run}` ({', '.join(pairs)})" for run, pairs in sorted(by_run.items()))


def main(argv: Sequence[str] | None = None) -> None:
    """Make environments, test, write, read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument(
        "--rows", nargs="*", default=ROWS, help="'PYTHON TORCH [NUMPY]', each in quotes"
    )
    parser.add_argument("--tests", nargs="*", default=TESTED, help="below tests/; '' for all")
    parser.add_argument("--keep", type=Path, help="folder for the environments, which stay there")
    args = parser.parse_args(argv)
    rows = [Row(*words.split()) for words in args.rows]
    tried = {row.name: Tried(row.python) for row in rows}
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="lowdiff-versions-") as temporary:
        home, runs = args.keep or Path(temporary), Path(temporary) / "runs"
        for reads in (False, True):
            for row in rows:
                python, of_row = made(row, home / row.name), tried[row.name]
                if reads:
                    of_row.recovered = {
                        writer.name: asked(python, "read", runs / writer.name)["outcome"]
                        for writer in rows
                    }
                else:
                    version = [
                        str(python),
                        "-c",
                        "import platform; print(platform.python_version())",
                    ]
                    of_row.python = subprocess.check_output(version, text=True).strip()
                    found = asked(python, "write", runs / row.name)
                    of_row.torch, of_row.numpy = found["torch"], found["numpy"]
                    of_row.unwritten, of_row.bits = found["failed"], found["bits"]
                    tested(python, of_row, args.tests)
                if args.keep is None:
                    shutil.rmtree(home / row.name)
                done = ", ".join(f"{w}: {_counted(r)}" for w, r in of_row.recovered.items())
                said = done if reads else f"{of_row.passed} passed, {len(of_row.failed)} failed"
                print(f"{row.name}: {said}", flush=True)  # noqa: T201
                _save(args.out, facts, tried, args.tests)
    sys.exit(not all(row.is_good for row in tried.values()))


def _save(
    out: Path, facts: Mapping[str, Any], tried: Mapping[str, Tried], tests: Sequence[str]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": facts,
        "settings": {"tests": list(tests), "markers": MARKERS},
        "versions": {name: asdict(row) for name, row in tried.items()},
    }
    (out / "versions.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "versions.md").write_text(tables(tried))


if __name__ == "__main__":
    ending.run(main)
