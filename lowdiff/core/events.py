"""Log lines for people and for machines: a sentence, then ``key=value`` pairs.

::

    lowdiff.commit.health WARNING rank 1: checkpoints are not durable now [event=writer_error rank=1 error="..."]

The same pairs are attributes of the ``LogRecord``, so a formatter of the user's may print them as
``%(event)s`` or collect them as JSON. lowdiff configures no logger and no handler.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from typing import Any

#: Control and format characters (C0, C1, bidi overrides), line separators, lone surrogates.
_UNPRINTABLE = ("Cc", "Cf", "Zl", "Zp", "Cs")


def printable(text: str) -> str:
    """Return text of a run as one line without characters that control a terminal.

    Names of parameters, classes and objects, and other libraries' errors, may hold anything.
    Terminals obey some characters, and a new line may imitate a line of lowdiff, so both become
    Python escapes.
    """
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNPRINTABLE else c
        for c in text
    )


def log_event(logger: logging.Logger, level: int, event: str, text: str, **fields: Any) -> None:
    """Log one notable event as one line.

    Args:
        logger: Logger of the calling module.
        level: ``logging.INFO`` for expected events, ``logging.WARNING`` if the user should act.
        event: Name of the kind of event, in snake case; never changes.
        text: Finished sentence.
        fields: Facts: numbers, booleans or text. Their names become attributes of the record, so
            none may be an attribute of ``logging.LogRecord`` itself.
    """
    if logger.isEnabledFor(level):
        facts = {"event": event, **fields}
        pairs = " ".join(f"{name}={_quoted(value)}" for name, value in facts.items())
        # One level up is the caller, whose line %(lineno)d shall name.
        logger.log(
            level,
            "%s [%s]",
            printable(" ".join(text.splitlines())),
            pairs,
            extra=facts,
            stacklevel=2,
        )


def _quoted(value: Any) -> str:
    """Format the value of ``key=value``: in quotes if it would not be one word."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not set(text) & set(' "[]=')
    return text if plain and text else json.dumps(text)
