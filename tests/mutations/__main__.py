"""Faults put into lowdiff on purpose, to see whether tests notice: ``python -m tests.mutations run``.

``draw --seed N`` chooses ten places of the product, two of each kind, and writes them to ``drawn.json``
beside this file; whoever changes the tests draws first. ``run`` puts one after the other into a work tree of
HEAD and runs the tests there until one fails. A drawn fault is found again by its text, also where lines have
moved; one whose text is gone has to be drawn anew.

Kinds: a call that waits or makes something durable is left out; a check does not raise; a comparison includes
its bound, or no longer does; an order is not made; a condition is turned round.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benches import ending
from benches.against import work_tree

ROOT = Path(__file__).parents[2]
DRAWN = Path(__file__).with_name("drawn.json")
FOLDERS = ("lowdiff", "compressors", "persistence", "recovery", "tuner")
_CALLS = frozenset(
    {"fsync", "fdatasync", "fsync_directory", "flush", "wait", "join", "add_done_callback", "check"}
    | {"advance", "settle", "synchronize", "truncate", "unlink", "update"}
)
_BOUNDS: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_PER_KIND = 2
#: Exit code of pytest where no test was chosen.
_NO_TESTS = 5
_ANYWHERE = ["-n", "3", "--dist", "worksteal", "-m"]
#: What the Makefile's targets run, the second without what the first has run.
TIERS = {
    "test": [*_ANYWHERE, "not slow and not gpu and not framework and not campaign"],
    "test-all": [
        "--hypothesis-profile=thorough",
        *(*_ANYWHERE, "(slow or hypothesis) and not gpu and not framework and not campaign"),
    ],
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Attributes:
        path: Of the file, below the repository's root.
        kind: Key of `KINDS`.
        scope: Function around it.
        before: Source that is replaced.
        after: What takes its place.
    """

    path: str
    kind: str
    scope: str
    before: str
    after: str

    def apply(self, tree: Path) -> bool:
        """Put it into a work tree; False where its text is gone."""
        for found, start, stop in mutations(tree / self.path, self.path):
            if found == self:
                source = (tree / self.path).read_text(encoding="utf-8")
                changed = source[:start] + self.after + source[stop:]
                (tree / self.path).write_text(changed, encoding="utf-8")
                return True
        return False


def _left_out(node: ast.AST, source: str) -> tuple[ast.AST, str] | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name.lstrip("_") in _CALLS:
            return node, "pass"
    return None


def _unchecked(node: ast.AST, source: str) -> tuple[ast.AST, str] | None:
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
        return node.body[0], "pass"
    return None


def _bound(node: ast.AST, source: str) -> tuple[ast.AST, str] | None:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BOUNDS:
        kind = type(node.ops[0])
        left, right = (
            ast.get_source_segment(source, side) for side in (node.left, node.comparators[0])
        )
        return node, f"{left} {_BOUNDS[kind]} {right}"
    return None


def _unordered(node: ast.AST, source: str) -> tuple[ast.AST, str] | None:
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("sorted", "reversed"):
        return node, f"list({ast.get_source_segment(source, node.args[0])})"
    return None


def _turned(node: ast.AST, source: str) -> tuple[ast.AST, str] | None:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        return node.test, f"not {ast.get_source_segment(source, node.test)}"
    return None


KINDS: dict[str, Callable[[ast.AST, str], tuple[ast.AST, str] | None]] = {
    "left out": _left_out,
    "unchecked": _unchecked,
    "bound": _bound,
    "unordered": _unordered,
    "turned": _turned,
}


def mutations(file: Path, path: str) -> Iterator[tuple[Mutation, int, int]]:
    """Yield every fault that a file could have, with where its text begins and ends."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        # The tree counts columns in bytes.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def visit(node: ast.AST, scope: str) -> Iterator[tuple[Mutation, int, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = f"{scope}.{node.name}".lstrip(".")
        for kind, of_node in KINDS.items():
            found = of_node(node, source)
            if found is not None:
                at, after = found
                assert isinstance(at, ast.expr | ast.stmt)
                assert at.end_lineno is not None
                assert at.end_col_offset is not None
                start = place(at.lineno, at.col_offset)
                stop = place(at.end_lineno, at.end_col_offset)
                yield Mutation(path, kind, scope, source[start:stop], after), start, stop
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    yield from visit(ast.parse(source), "")


@cache
def _everything() -> list[Mutation]:
    return [
        mutation
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        # The links in lowdiff/ lead to the other folders.
        if not any(part.is_symlink() for part in (file, *file.parents) if ROOT in part.parents)
        for mutation, _, _ in mutations(file, str(file.relative_to(ROOT)))
    ]


def draw(seed: int) -> list[Mutation]:
    """Choose faults, the same ones of the same tree by the same seed."""
    choice = random.Random(seed)
    return [
        chosen
        for kind in KINDS
        for chosen in choice.sample([m for m in _everything() if m.kind == kind], _PER_KIND)
    ]


def run(mutation: Mutation, tiers: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Put a fault into a work tree and run the tests there, tier by tier, until one fails.

    Returns:
        The fault, the tier that noticed it (empty: none did), the test that failed, and how long it took.
    """
    found: dict[str, object] = {**asdict(mutation), "tier": "", "by": ""}
    started = time.monotonic()
    with work_tree("HEAD") as tree:
        if not mutation.apply(tree):
            sys.exit(f"its text is gone, draw anew: {mutation}")
        for tier, words in tiers.items():
            # The tree's own packages, not those that the environment was installed from.
            result = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-x",
                    "-rfE",
                    "-p",
                    "no:cacheprovider",
                    *words,
                ],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode not in (0, _NO_TESTS):
                failed = [
                    l for l in result.stdout.splitlines() if l.startswith(("FAILED", "ERROR"))
                ]
                if not failed:  # the tests could not run, which says nothing of the fault
                    sys.exit(result.stdout[-3000:] + result.stderr[-3000:])
                found |= {"tier": tier, "by": failed[0]}
                break
    return {**found, "seconds": round(time.monotonic() - started)}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw or run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("draw", "run"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="these of the drawn ones, from 0")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="folders or files; by default all tests"
    )
    args = parser.parse_args(argv)
    if args.action == "draw":
        text = json.dumps([asdict(mutation) for mutation in draw(args.seed)], indent=1)
        DRAWN.write_text(text + "\n", encoding="utf-8")
        return
    drawn = [Mutation(**entry) for entry in json.loads(DRAWN.read_text(encoding="utf-8"))]
    caught: Counter[object] = Counter()
    for number in args.only or range(len(drawn)):
        tiers = {tier: [*words, *args.tests] for tier, words in TIERS.items()}
        found = run(drawn[number], tiers)
        caught[found["tier"]] += 1
        print(json.dumps(found), flush=True)  # noqa: T201
    print(", ".join(f"{tier or 'not noticed'}: {n}" for tier, n in caught.items()))  # noqa: T201


if __name__ == "__main__":
    ending.run(main)
