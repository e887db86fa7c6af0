"""Builds a wheel and proves it in empty environments: ``python -m tests.packaging --out dist --python python3.12``.

Each Python gets an environment of its own with the versions of constraints.txt, and runs
tests/packaging/smoke.py outside the repository. One that cannot have torch (``--without-torch``)
gets all other requirements, and its command line reads the run of one that has it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benches import ending

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
#: What a wheel is made of; build/ and others' traces stay out of it.
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("lowdiff", "compressors", "examples", "persistence", "recovery", "tuner")


def build(out: Path) -> Path:
    """Build a wheel from a clean copy of the tree: an old build/ would lend it modules that are gone."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        for name in SOURCES:
            shutil.copy(ROOT / name, source)
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        made = source / "dist"
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made), folder]
        subprocess.run(pip, check=True, cwd=folder)
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel needs without its extras, but torch."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        lines = file.read(name).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [need for need in needs if "extra ==" not in need and not need.startswith("torch")]


def prove(wheel: Path, python: str, folder: Path, run: Path | None) -> str:
    """Install a wheel into an empty environment and use it there; returns the line that tells.

    Args:
        wheel: The wheel.
        python: The interpreter that makes the environment.
        folder: Where to make it.
        run: Where torch cannot be had: a run to read.
    """
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = folder / "bin/python"
    pip = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pinned = ["-c", str(ROOT / "constraints.txt")]
    if run is None:
        subprocess.run([*pip, *pinned, str(wheel)], check=True)
    else:
        subprocess.run([*pip, *pinned, *requirements(wheel)], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    return smoked(own, folder, run)


def smoked(python: Path, folder: Path, run: Path | None = None) -> str:
    """Run the smoke test with an environment's Python in a folder outside the repository."""
    words = [str(python), str(shutil.copy(SMOKE, folder)), *([] if run is None else [str(run)])]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(f"{python}: {result.stdout}{result.stderr}")
    return result.stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Build and prove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--python", nargs="*", default=[sys.executable])
    parser.add_argument("--without-torch", nargs="*", default=[])
    args = parser.parse_args(argv)
    wheel = build(args.out)
    print(wheel, flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        for number, python in enumerate(args.python):
            print(prove(wheel, python, Path(folder) / f"env{number}", None), flush=True)  # noqa: T201
        run = Path(folder) / "env0/killed/run"
        for number, python in enumerate(args.without_torch):
            print(prove(wheel, python, Path(folder) / f"bare{number}", run), flush=True)  # noqa: T201


if __name__ == "__main__":
    ending.run(main)
