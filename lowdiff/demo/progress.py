"""Shows the demo's lives while they run: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from typing_extensions import Self

_PLAIN_LINES = 6


class LifeProgress:
    """One life after the other, each with its step and loss."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._name = ""
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:<17}"),
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )

    def begin(self, name: str) -> None:
        """A life starts: its processes are being launched."""
        self._name = name
        if self._bars is None:
            self._console.print(f"{name}: starting the processes")
        else:
            self._task = self._bars.add_task(name, total=self._steps, note="starting the processes")

    def attached(self, completed: int) -> None:
        """The checkpointer is attached and training goes on from ``completed``."""
        note = f"resumed from step {completed}" if completed else "starts from step 0"
        if self._bars is None:
            self._console.print(f"{self._name}: {note}")
        else:
            self._bars.update(self._task, completed=completed, note=note)

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        if self._bars is not None:
            self._bars.update(self._task, completed=step, note=f"loss {loss:.3f}")
        elif step % max(1, self._steps // _PLAIN_LINES) == 0:
            self._console.print(f"{self._name}: step {step} of {self._steps}, loss {loss:.3f}")

    def end(self, note: str) -> None:
        """The life is over."""
        if self._bars is None:
            self._console.print(f"{self._name}: {note}")
        else:
            self._bars.update(self._task, note=note)
            self._bars.stop_task(self._task)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
