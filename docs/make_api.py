"""Writes docs/api.md from the docstrings: ``python docs/make_api.py``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lowdiff
import lowdiff.compressors
import lowdiff.errors
import lowdiff.metrics
import lowdiff.protocols
import lowdiff.recovery
import lowdiff.testing
from lowdiff.loop import dataloader

PAGE = Path(__file__).with_name("api.md")
#: Chapter -> module and the names of it that a user may need.
CHAPTERS: dict[str, tuple[ModuleType, list[str]]] = {
    "lowdiff": (lowdiff, lowdiff.__all__),
    "lowdiff.compressors": (
        lowdiff.compressors,
        sorted(set(lowdiff.compressors.__all__) - {"Dense", "from_settings"}),
    ),
    "What checkpointer.dataloader(...) returns": (
        dataloader,
        ["ResumableLoader", "StatefulEpochs"],
    ),
    "lowdiff.metrics": (lowdiff.metrics, ["collector"]),
    "lowdiff.testing": (lowdiff.testing, ["kill", "wait_until"]),
    "lowdiff.recovery": (lowdiff.recovery, ["ReplayOptions"]),
    "lowdiff.protocols": (lowdiff.protocols, ["Compressor", "Reducer"]),
}


def page() -> str:
    """The whole document."""
    lines = [
        "# API",
        "",
        "Made from the docstrings by `python docs/make_api.py`; a test keeps it so. The command line explains itself:",
        "`lowdiff --help`, `lowdiff recover --help`.",
    ]
    for chapter, (module, names) in CHAPTERS.items():
        lines += ["", f"## {chapter}"]
        for name in names:
            lines += described(name, getattr(module, name), level=3)
    tree = inspect.getdoc(lowdiff.errors) or ""
    lines += ["", "## lowdiff.errors", "", "```text", _tree(tree), "```", ""]
    lines += ["What to do about each: [operations](operations.md#errors).", ""]
    return "\n".join(lines)


def described(name: str, thing: object, *, level: int) -> Iterator[str]:
    """Heading, signature and docstring of a class or function, and of a class's public members."""
    yield from ("", f"{'#' * level} {name}", "")
    if callable(thing):
        yield from ("```text", *_signature(name, thing), "```", "")
    # As text, because docstrings are laid out by their indentation.
    yield from ("```text", inspect.getdoc(thing) or "", "```")
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            target = value.fget if isinstance(value, property) else value
            if not member.startswith("_") and inspect.isroutine(target) and target.__doc__:
                what = value if isinstance(value, property) else target
                yield from described(f"{name}.{member}", what, level=level + 1)


def _signature(name: str, thing: object) -> list[str]:
    """One line if it fits, else a line per parameter."""
    assert callable(thing)
    try:
        signature = inspect.signature(thing)
    except ValueError:  # an exception or protocol without one of its own
        return [name]
    given = [p for p in signature.parameters.values() if p.name != "self"]
    # Annotations are postponed, so they are text, which would come out in quotes.
    parts = [
        str(p).replace(repr(p.annotation), str(p.annotation)).replace("= Ellipsis", "= ...")
        for p in given
    ]
    named = next((i for i, p in enumerate(given) if p.kind is p.KEYWORD_ONLY), None)
    if named is not None:
        parts.insert(named, "*")
    returns = signature.return_annotation
    is_told = returns is not inspect.Signature.empty and not inspect.isclass(thing)
    end = (
        f") -> {returns if isinstance(returns, str) else inspect.formatannotation(returns)}"
        if is_told
        else ")"
    )
    whole = f"{name}({', '.join(parts)}{end}"
    return [whole] if len(whole) <= 100 else [f"{name}(", *(f"    {part}," for part in parts), end]


def _tree(text: str) -> str:
    """The drawing in the module's docstring."""
    lines = text.splitlines()
    drawn = [
        i
        for i, line in enumerate(lines)
        if line.strip().startswith(("LowDiffError", "├", "│", "└"))
    ]
    return "\n".join(line.removeprefix("    ") for line in lines[drawn[0] : drawn[-1] + 1])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
