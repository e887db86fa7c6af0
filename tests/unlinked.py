"""Paths that delete by ``os.unlink`` and ``os.rmdir`` as they are now, also in Python 3.10."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest


def by_os(patch: pytest.MonkeyPatch) -> None:
    """Let paths see what a test puts in the place of these functions; Python 3.10 remembers those of before."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        with suppress(FileNotFoundError) if missing_ok else nullcontext():
            os.unlink(path)

    patch.setattr(Path, "unlink", unlink)
    patch.setattr(Path, "rmdir", lambda path: os.rmdir(path))
