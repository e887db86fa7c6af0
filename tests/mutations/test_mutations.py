"""Faults are found, put in, and told from one another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import KINDS, Mutation, draw, mutations

SOURCE = '''\
def write(file, names):
    """Größe."""
    os.fsync(file.fileno())
    if not names:
        raise ValueError("no names")
    for name in sorted(names):
        if len(name) > 3 and file.ready:
            file.wait()
    if file.ready:
        return reversed(names)
'''
CHANGED = {
    "left out": [("os.fsync(file.fileno())", "pass"), ("file.wait()", "pass")],
    "unchecked": [('raise ValueError("no names")', "pass")],
    "bound": [("len(name) > 3", "len(name) >= 3")],
    "unordered": [("sorted(names)", "list(names)"), ("reversed(names)", "list(names)")],
    "turned": [("file.ready", "not file.ready")],
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "made.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_is_found_where_it_can_be(tree: Path, kind: str) -> None:
    found = [m for m, _, _ in mutations(tree / "made.py", "made.py") if m.kind == kind]
    assert [(m.before, m.after) for m in found] == CHANGED[kind]
    assert {m.scope for m in found} == {"write"}


def test_a_fault_changes_its_own_place_alone_and_stays_python(tree: Path) -> None:
    for mutation, start, stop in list(mutations(tree / "made.py", "made.py")):
        assert SOURCE[start:stop] == mutation.before
        assert mutation.apply(tree)
        changed = (tree / "made.py").read_text(encoding="utf-8")
        assert changed == SOURCE[:start] + mutation.after + SOURCE[stop:]
        ast.parse(changed)
        (tree / "made.py").write_text(SOURCE, encoding="utf-8")


def test_a_fault_whose_text_is_gone_is_not_put_in(tree: Path) -> None:
    assert not Mutation("made.py", "left out", "write", "os.sync()", "pass").apply(tree)
    assert (tree / "made.py").read_text(encoding="utf-8") == SOURCE


@pytest.mark.slow
def test_a_seed_draws_two_of_each_kind_and_the_same_again() -> None:
    drawn = draw(1)
    assert drawn == draw(1) != draw(2)
    assert [m.kind for m in drawn] == [kind for kind in KINDS for _ in range(2)]
    assert not any(m.path.startswith("lowdiff/persistence") for m in drawn)
