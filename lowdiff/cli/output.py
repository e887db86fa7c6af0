"""How commands print: whatever they print passes here, where what a terminal would obey goes out."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer
from typer import Option

from lowdiff.core.events import printable
from lowdiff.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def say(line: str, *, err: bool = False, color: str | None = None) -> None:
    """Print one line."""
    typer.secho(printable(line), err=err, fg=color)


def plain_console() -> Console:
    """A rich console for text of others: no markup, no emoji, and nothing that a terminal obeys."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:  # of cells, titles and lines
            return super().render_str(printable(text), **options)

    return Plain(markup=False, emoji=False)


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def print_warnings() -> None:
    """Send warnings of the library to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("lowdiff: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _staging_there(folder: Path | None) -> Path | None:
    # No error: a restarted machine has none any more, and what is on disk can still be read.
    if folder is not None and not folder.is_dir():
        say(f"lowdiff: --staging {folder} is no folder, so only disk is looked at", err=True)
    return folder


def _imported(names: list[str]) -> list[str]:
    """Import modules that call ``lowdiff.register_optimizer``; looked for in the current folder first."""
    if names:
        from lowdiff.recovery.replay.optimizers import import_modules

        sys.path.insert(0, os.getcwd())  # as ``python -m`` has it, and an installed command has not
        import_modules(names)
    return names


AsJson = Annotated[bool, Option("--json", help="Print one JSON document instead of text.")]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder given to lowdiff.Checkpointer(...), or the URL given to it as store=...",
    ),
]
Staging = Annotated[
    Path | None,
    Option(
        callback=_staging_there,
        metavar="DIR",
        help="Folder given to Checkpointer(staging=...), if one was. Steps that a crashed "
        "trainer had not yet on disk are there.",
    ),
]
Workers = Annotated[
    int | None, Option(min=1, metavar="N", help="Replay threads; default: all cores.")
]
Imports = Annotated[
    list[str],
    Option(
        "--import",
        callback=_imported,
        metavar="MODULE",
        help="Import MODULE first, which runs its code: one that calls lowdiff.register_optimizer for "
        "an optimizer of the run that is not torch's own. May be given several times.",
    ),
]
Device = Annotated[
    str,
    Option(
        metavar="DEVICE",
        help="Where to replay, e.g. cuda: a run comes back bit for bit where it was trained.",
    ),
]


class _Documented(Protocol):
    def document(self) -> dict[str, Any]: ...


_Found = TypeVar("_Found", bound=_Documented)


def show(found: _Found, as_text: Callable[[_Found], None], *, as_json: bool) -> None:
    """Print what a command found, as JSON or as text."""
    if as_json:
        print_json(found.document())
    else:
        as_text(found)


def print_json(document: dict[str, Any]) -> None:
    """One document on stdout, in ASCII: all text is as it is, and what is not printable escaped."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=True))


def count(number: int, noun: str) -> str:
    """A number of things, in the right number."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def span(first: int, last: int | str) -> str:
    """Steps from one to another, both included."""
    return f"{first}" if first == last else f"{first} to {last}"


def device_named(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: If there is none here.
    """
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def check_writable(path: Path) -> None:
    """Refuse an output whose folder takes no files, before the work is done; leaves no trace.

    Raises:
        StorageError: As writing there would.
    """
    from lowdiff.persistence.files.durable import unwritable

    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def size(num_bytes: int) -> str:
    """Bytes as people read them."""
    from rich.filesize import decimal

    return decimal(num_bytes)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with the time left, on stderr, while there is somebody to see it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("steps"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=max(done, total))
