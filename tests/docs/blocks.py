"""The fenced blocks of the documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        document: Path from the root of the repository.
        language: First word behind the fence.
        file: Name to save it under instead of running it, or ``""``.
        text: What is between the fences.
    """

    document: str
    language: str
    file: str
    text: str


def documents() -> list[str]:
    """README, docs and the examples' documents, from the root of the repository."""
    found = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks_of(document: str) -> list[Block]:
    """Its fenced blocks, in their order."""
    found = []
    for info, text in _FENCED.findall((ROOT / document).read_text(encoding="utf-8")):
        language, _, more = info.partition(" ")
        found.append(Block(document, language, more.removeprefix("file="), text))
    return found
