"""TensorBoard: a Checkpointer's figures beside the losses.

::

    watch = lowdiff.metrics.Watch(checkpointer, TensorBoard("runs/x/logs"))
    for step in checkpointer.steps(until=10_000):
        ...
        watch.step()

Needs ``lowdiff[tensorboard]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowdiff.errors import ConfigError

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ConfigError(
        f"TensorBoard needs tensorboard: pip install 'lowdiff[tensorboard]' ({error})"
    ) from error

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes figures as scalars.

    Args:
        writer: The ``SummaryWriter`` that the losses go to, or a folder for one of its own.
    """

    def __init__(self, writer: SummaryWriter | str | Path) -> None:
        self._writer = SummaryWriter(str(writer)) if isinstance(writer, str | Path) else writer

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        """Write each value under its name."""
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left, and close the writer."""
        self._writer.close()
