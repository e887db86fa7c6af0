"""Log lines for people and for machines: a sentence, then ``key=value`` pairs.

::

    lowdiff.trouble WARNING rank 1: checkpoints are not durable now [event=writer_error rank=1 error="..."]

The same pairs are attributes of the ``LogRecord``, so a formatter of the user's may print them as
``%(event)s`` or collect them as JSON. lowdiff configures no logger and no handler.
"""

from __future__ import annotations

import json
import logging
from typing import Any


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
        logger.log(level, "%s [%s]", " ".join(text.splitlines()), pairs, extra=facts, stacklevel=2)


def _quoted(value: Any) -> str:
    """As a value of ``key=value``: in quotes where it would not be one word."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not set(text) & set(' "[]=')
    return text if plain and text else json.dumps(text)
