"""Virtual environments of the competitors: made on first use, with the versions that are pinned here.

None holds a copy of torch: the bench's own packages are seen behind the environment's, so that every
system runs with the same torch, and pip takes what is there as installed.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

#: What each environment is made from; constraints.txt pins the rest, torch above all.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torchsnapshot": ("torchsnapshot==0.1.0",),
    # Its torch extra lacks what its Flash Checkpoint imports.
    "dlrover": ("dlrover[torch]==0.6.1", "grpcio==1.85.3", "protobuf==7.36.2"),
    "orbax": ("orbax-checkpoint==0.12.8", "jax==0.10.2"),
    "lightning": ("lightning==2.6.6",),
    "deepspeed": ("deepspeed==0.19.8",),
    "torch_checkpointing": ("torch_checkpointing==0.1.1",),
}
_STAMP = "installed-by-bench_peers"


class CannotRun(Exception):
    """A system does not run here; the message is the real failure."""


def python_of(name: str, environments: Path) -> Path:
    """The interpreter of an environment, which is made if it is not there.

    Args:
        name: Key of ``REQUIREMENTS``, or empty for the bench's own.
        environments: Folder of all.

    Raises:
        CannotRun: If it cannot be installed.
    """
    if not name:
        return Path(sys.executable)
    folder = environments.absolute() / name
    python, stamp = folder / "bin" / "python", folder / _STAMP
    # pip leaves out what the bench's own environment has, so one made beside another may lack it.
    wanted = "\n".join((*REQUIREMENTS[name], sys.version, *_own_packages()))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making the environment of {name} in {folder} ...", flush=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _show_own_packages(folder)
        constraints = ROOT / "constraints.txt"
        install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        _run([*install, "-c", str(constraints), *REQUIREMENTS[name]])
        found = _run([str(python), "-c", "import torch; print(torch.__version__)"])
        if found != torch.__version__:
            raise CannotRun(f"it needs torch {found}, the bench has {torch.__version__}")
        stamp.write_text(wanted, encoding="utf-8")
    else:
        _show_own_packages(folder)  # the clone that made it may be gone
    return python


def _own_packages() -> list[str]:
    found = ((d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
    return sorted({f"{name}=={version}" for name, version in found if name != "lowdiff"})


def _show_own_packages(folder: Path) -> None:
    (packages,) = folder.glob("lib/python3*/site-packages")
    own = Path(torch.__file__).resolve().parents[1]
    (packages / "packages_of_the_bench.pth").write_text(f"{own}\n", encoding="utf-8")


def versions_in(python: Path, name: str) -> dict[str, str]:
    """Versions of what an environment was made from."""
    names = [text.split("==")[0].split("[")[0] for text in REQUIREMENTS.get(name, ())]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    return dict(zip(names, _run([str(python), "-c", code, *names]).split(), strict=True))


def _run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        CannotRun: If it fails; the message is the last line it printed.
    """
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CannotRun(last_error(ran.stderr or ran.stdout))
    return ran.stdout.strip()


def last_error(text: str) -> str:
    """The line of an output that says most about a failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or ["it failed without a word"])[-1][:300]
