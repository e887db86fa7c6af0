"""Output of commands: every text passes here, where characters that control terminals are removed."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    from rich.table import Table


def say(line: str, *, err: bool = False, color: str | None = None) -> None:
    """Print one line."""
    typer.secho(printable(line), err=err, fg=color)


def plain_console() -> Console:
    """Return a rich console for others' text: no markup, no emoji, no control characters."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:  # of cells, titles and lines
            return super().render_str(printable(text), **options)

    return Plain(markup=False, emoji=False)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], **options: Any) -> Table:
    """Return a rich table; without heads it is one of names, in bold, and their values."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, show_header=bool(heads), title_justify="left", **options)
    if not heads:
        made.add_column(style="bold")
        made.add_column(overflow="fold")
    for number, head in enumerate(heads):
        made.add_column(head, overflow="fold", no_wrap=number == 0)
    for row in rows:
        made.add_row(*row)
    return made


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def print_warnings() -> None:
    """Send warnings of the library to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("lowdiff: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _staging_there(folder: Path | None) -> Path | None:
    # No error, because a restarted machine has no staging, and the disk can still be read.
    if folder is not None and not folder.is_dir():
        say(f"lowdiff: --staging {folder} is no folder, so only disk is looked at", err=True)
    return folder


# Typer asks whether each annotation is a class, and on Python 3.10 list[str] fails that question.
def _imported(names: Any) -> Any:
    """Import modules that call ``lowdiff.register_optimizer``, from the current folder first."""
    if names:
        from lowdiff.recovery.replay.optimizers import import_modules

        sys.path.insert(
            0, os.getcwd()
        )  # ``python -m`` adds this folder, an installed command does not
        import_modules(names)
    return names


AsJson = Annotated[bool, Option("--json", help="Print one JSON document instead of text.")]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder passed to lowdiff.Checkpointer(...), or the URL passed as store=...",
    ),
]
Staging = Annotated[
    Path | None,
    Option(
        callback=_staging_there,
        metavar="DIR",
        help="Folder passed to Checkpointer(staging=...), if any. It holds the steps that a "
        "crashed trainer had not written to disk yet.",
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
        help="Import MODULE first, which runs its code: a module that calls "
        "lowdiff.register_optimizer for an optimizer that is not torch's own. May be repeated.",
    ),
]
Device = Annotated[
    str,
    Option(
        metavar="DEVICE",
        help="Device of the replay, e.g. cuda; bits are equal on the kind of device that trained.",
    ),
]


class _Documented(Protocol):
    def document(self) -> dict[str, Any]: ...


_Found = TypeVar("_Found", bound=_Documented)


def show(found: _Found, as_text: Callable[[_Found], None], *, as_json: bool) -> None:
    """Print a command's result, as JSON or as text."""
    if as_json:
        print_json(found.document())
    else:
        as_text(found)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document to stdout in ASCII; other characters are escaped."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=True))


def count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return a time in its largest unit, rounded down."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return count(int(seconds // length), unit)
    return f"{max(0, int(seconds))} s"


def span(first: int, last: int | str) -> str:
    """Return a range of steps as text, both ends included."""
    return f"{first}" if first == last else f"{first} to {last}"


def device_named(name: str) -> torch.device:
    """Return the device of a name.

    Raises:
        ConfigError: If this machine has no such device.
    """
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def check_writable(path: Path) -> None:
    """Check that an output's folder can be written to, before the work begins; leaves no trace.

    Raises:
        StorageError: If it cannot be written to.
    """
    from lowdiff.persistence.files.durable import unwritable

    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def size(num_bytes: int) -> str:
    """Return a number of bytes in a readable unit."""
    from rich.filesize import decimal

    return decimal(num_bytes)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar with the time left on stderr, if stderr is a terminal."""
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
