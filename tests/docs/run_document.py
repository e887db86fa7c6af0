"""Runs what a document shows, in its order and in the current folder: DOCUMENT [GIVEN_NAMES]."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lowdiff.persistence.files.trust import shared_staging_root
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.listed import is_listed


def main(document: str, *given: str) -> None:
    """Python blocks share this process, shell blocks get one each."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have workers
    names: dict[str, Any] = runpy.run_path(given[0]) if given else {}
    saved: list[str] = []
    try:
        for block in blocks_of(document):
            if is_listed(block):
                continue
            if block.file:
                Path(block.file).write_text(block.text)
                saved.append(block.file)
            elif block.language == "python":
                Path("block.py").write_text(block.text)
                names = runpy.run_path("block.py", init_globals=names)
            elif block.language == "bash":
                run(block.text)
                if any(name in block.text for name in saved):
                    again = run(block.text, stdout=subprocess.PIPE)
                    assert again == b"", f"started again when it had finished, it prints {again!r}"
    finally:
        for identity in Path("runs").glob("*/run.json"):
            run_id = json.loads(identity.read_text())["run_id"]
            shutil.rmtree(shared_staging_root() / run_id, ignore_errors=True)


def run(commands: str, stdout: int | None = None) -> bytes | None:
    """Run shell commands that must succeed; what they print, if it is asked for."""
    command = ["bash", "-euxc", commands]
    return subprocess.run(command, check=True, env=environment(), stdout=stdout).stdout


def environment() -> dict[str, str]:
    """The commands of this environment come first, as after ``. .venv/bin/activate``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "FIRST_NODE": "localhost"}
