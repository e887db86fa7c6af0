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

#: Control and format characters (C0, C1, bidi overrides), separators of lines, halves of surrogates.
_UNPRINTABLE = ("Cc", "Cf", "Zl", "Zp", "Cs")


def printable(text: str) -> str:
    """Text of a run, perhaps a stranger's, as one line that changes nothing but what it writes to.

    Names of parameters, classes and objects, and errors of others, may hold anything. Terminals obey
    some characters, and a new line looks like lowdiff's own: all these become Python's escapes.
    """
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNPRINTABLE else c
        for c in text
    )


def log_event(logger: logging.Logger, level: int, event: str, text: str, **fields: Any) -> None:
    """Log one notable event as one line.

    Args:
        logger: The module's.
        level: ``logging.INFO`` for the expected, ``logging.WARNING`` for what needs somebody.
        event: Name of the kind of event, in snake case; never changes.
        text: Finished sentence.
        fields: Facts: numbers, booleans or text. Their names are attributes of the record, so
            none may be one of ``logging.LogRecord``'s own.
    """
    if logger.isEnabledFor(level):
        facts = {"event": event, **fields}
        pairs = " ".join(f"{name}={_quoted(value)}" for name, value in facts.items())
        # The level up is the caller's: it is their line that %(lineno)d shall name.
        logger.log(
            level,
            "%s [%s]",
            printable(" ".join(text.splitlines())),
            pairs,
            extra=facts,
            stacklevel=2,
        )


def _quoted(value: Any) -> str:
    """As a value of ``key=value``: in quotes where it would not be one word."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not set(text) & set(' "[]=')
    return text if plain and text else json.dumps(text)
