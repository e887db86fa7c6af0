"""Futures of buffers: complete already, or after another future."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future whose result is ``buffer``.

    A future of an accelerator's tensor must know the device: only then does whoever waits for it
    wait for the work that is still queued there.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if buffer.is_cpu else [buffer.device]
    )
    done.set_result(buffer)
    return done


def chained(
    earlier: torch.futures.Future[Any],
    work: Callable[[torch.futures.Future[Any]], torch.Tensor],
    device: torch.device,
) -> torch.futures.Future[torch.Tensor]:
    """A future of what ``work`` returns, called with ``earlier`` once that is done.

    Python code that waits for it gets the exception of ``work`` itself: ``Future.then`` would make a
    RuntimeError of every exception. C++ code would get the exception as a value.

    Args:
        earlier: What to wait for.
        work: Called on the thread that completes ``earlier``, or here if that is done.
        device: Where the result is.
    """
    later: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if device.type == "cpu" else [device]
    )

    def settle(done: torch.futures.Future[Any]) -> None:
        try:
            result = work(done)
        except BaseException as error:  # noqa: BLE001  a future without an end would hang who waits
            kept = error if isinstance(error, Exception) else RuntimeError(repr(error))
            later.set_exception(kept)  # type: ignore[arg-type]
        else:
            later.set_result(result)

    earlier.add_done_callback(settle)
    return later
