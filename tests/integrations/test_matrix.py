"""Each cell of the table of features is shown by a training that is killed, or by the test of its refusal."""

from __future__ import annotations

import importlib

import pytest

from tests.integrations.matrix import DOCUMENT, FRAMEWORKS, MATRIX, Exact, Refused, written

#: Each exact cell is killed at so many places.
_PLACES = 3


def test_the_documentation_has_the_table() -> None:
    text = DOCUMENT.read_text()
    assert written(text) == text, "run python -m tests.integrations.matrix"


@pytest.mark.framework
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_cell_is_shown(framework: str) -> None:
    pytest.importorskip(framework)
    here = f"tests.integrations.{framework}"
    places = importlib.import_module(f"{here}.test_resume").PLACES
    for feature, cells in MATRIX.items():
        cell = cells[framework]
        if isinstance(cell, Exact):
            few = [kind for kind in cell.kinds if len(places[kind]) < _PLACES]
            assert not few, feature
        elif isinstance(cell, Refused):
            module, name = cell.test
            assert hasattr(importlib.import_module(f"{here}.{module}"), name), feature
