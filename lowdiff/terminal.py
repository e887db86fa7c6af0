"""How commands print."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder given to lowdiff.Checkpointer(...), or the URL given to it as store=...",
    ),
]


def print_json(document: dict[str, Any]) -> None:
    """One document on stdout."""
    typer.echo(json.dumps(document, indent=2))


def count(number: int, noun: str) -> str:
    """A number of things, in the right number."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(num_bytes: int) -> str:
    """Bytes as people read them."""
    from rich.filesize import decimal

    return decimal(num_bytes)
