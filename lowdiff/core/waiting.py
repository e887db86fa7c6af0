"""A mark on threads that wait for other ranks, for whoever looks for a hang.

From outside, a thread that waits in C++ shows only the Python line that called it. So lowdiff's own waits go
through `wait_for_ranks`, which marks the thread; that PyTorch's collectives wait, their own frames say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Threads that wait. Each adds and removes only itself, so no lock is needed.
_waiting: set[int] = set()


def wait_for_ranks(wait: Callable[..., object], *arguments: object) -> None:
    """Wait until other ranks have done their part, with this thread marked meanwhile.

    Args:
        wait: Method ``wait`` of a collective under way, or of a future that follows one.
        arguments: Its arguments: how long, or none for as long as the collective itself waits.

    Raises:
        RuntimeError: What ``wait`` raises, e.g. if a rank is gone.
    """
    thread = threading.get_ident()
    _waiting.add(thread)
    try:
        wait(*arguments)
    finally:
        _waiting.discard(thread)


def waits_for_ranks(thread: int) -> bool:
    """Whether a thread is in `wait_for_ranks`; for any thread.

    Args:
        thread: Its ``ident``.
    """
    return thread in _waiting
