"""The first loops of the generated ones; ``make soak`` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loops.check import check
from tests.loops.generate import generate


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(20))
def test_every_committed_step_of_a_loop_is_exact(tmp_path: Path, seed: int) -> None:
    loop = generate(seed)
    verdict = check(loop, tmp_path / "loop")
    assert verdict.kind in ("good", "named"), f"{verdict.reason}\n{loop}"
