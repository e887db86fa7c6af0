"""Memory of trainer and writer does not grow with the number of steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

#: A leak of one record per step would be ten times as much: they have 50 kB.
GROWTH_BYTES = 4 << 20


@pytest.mark.slow
@pytest.mark.launch
def test_memory_stays_flat_over_a_thousand_steps(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.crash.launch.memory", tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    held = json.loads((tmp_path / "memory.json").read_text())
    for process in ("trainer", "writer"):
        # Staging, which is shared memory, has its own cap.
        early, late = (held[end][process]["RssAnon"] for end in ("300", "1000"))
        assert late - early < GROWTH_BYTES, f"{process}: from {early} to {late} bytes"
