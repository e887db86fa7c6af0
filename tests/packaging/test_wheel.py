"""A wheel, installed into an environment of its own and used outside the repository."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import lowdiff
from tests.packaging.__main__ import build, requirements, smoked

pytestmark = pytest.mark.slow


def test_a_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """What it needs is lent by this environment; `make wheel` installs it all."""
    wheel = build(tmp_path / "dist")
    assert wheel.name == f"lowdiff-{lowdiff.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {
        "lowdiff/py.typed",
        "lowdiff/compressors/topk.py",
        "lowdiff/recovery/engine.py",
    } <= names
    assert not [name for name in names if name.split("/")[0] in ("tests", "benches", "docs")]
    assert any(need.startswith("safetensors") for need in requirements(wheel))

    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin/python"
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True)
    packages = Path(own.stdout.strip())
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    # A .pth file of a folder that is added by one is not read, so lowdiff itself is not lent.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    assert "killed and resumed with the same bits" in smoked(python, environment)
