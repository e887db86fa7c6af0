"""When batches are asked for: before which step, on which thread, and what is done with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from lowdiff.core.events import Code
from lowdiff.errors import UsageError

_WAY_OUT = (
    "A run that resumes leaves out what is asked for before a commit and trained on after it. Let the "
    "loader fetch ahead itself, by num_workers and prefetch_factor, or keep the batch in "
    "checkpointer.state"
)


@dataclass(frozen=True, slots=True)
class Body:
    """Position of a loop over steps.

    Attributes:
        step: Number of completed steps.
        is_over: Whether a body of ``steps()`` has made its optimizer step, which is committed when the
            body ends.
        thread: Identifier of the thread that committed the last step; 0 before the first one.
    """

    step: int = 0
    is_over: bool = False
    thread: int = 0


class Count:
    """How many batches of its epoch a resumed loader leaves out, for loops that count inside an epoch.

    Attributes:
        is_known: Whether the loop has asked for it, or was told.
    """

    def __init__(self) -> None:
        self.is_known = False

    def goes_on(self, number: int) -> None:
        """An epoch goes on behind so many batches of a resumed run: say so once."""
        if number and not self.is_known:
            self.is_known = True
            Code.EPOCH_GOES_ON.warn(
                f"the epoch of a loader goes on where the resumed step was: its first {number} batch(es) are left out. "
                "Where the loop counts batches: enumerate(loader, start=checkpointer.batch_of(loader)), which "
                "silences this line",
                batches=number,
            )


class Fetches:
    """The iterations over one loader: refuses or names batches that are fetched ahead of their step."""

    def __init__(self, body: Callable[[], Body]) -> None:
        """Look at no iteration yet.

        Args:
            body: Returns the loop's position.
        """
        self.body = body
        self._ended: FetchWatch | None = None
        self._has_warned = False

    def begin(self) -> FetchWatch:
        """Watch an iteration, from before its first batch on."""
        return FetchWatch(self)

    def look_at(self, watch: FetchWatch) -> None:
        """Warn once if a batch of this iteration, or all of the one that ended last, were fetched ahead."""
        ended, self._ended = self._ended, None
        if self._has_warned:
            return
        now = self.body()
        if watch.is_on_other_thread(now):
            self._warn(
                f"a batch was asked for on thread {threading.current_thread().name!r}, and its step "
                "committed on another one, so batches may wait between the two. "
            )
        elif ended is not None and ended is not watch and ended.was_ahead(now.step):
            self._warn(
                f"{ended.num_ahead} more batch(es) were asked for before the first commit of an epoch "
                "than before each later one, and as many steps were committed after the loader had "
                "said that there are no more: the loop fetches ahead of the step that it trains. "
            )

    def note_end(self, watch: FetchWatch) -> None:
        """An iteration has no more batches."""
        self._ended = watch

    def _warn(self, seen: str) -> None:
        self._has_warned = True
        Code.BATCH_AHEAD.warn(seen + _WAY_OUT)


class FetchWatch:
    """One iteration over a loader: refuses the next step's batch in a body of ``steps()`` that is over."""

    def __init__(self, fetches: Fetches) -> None:
        """Begin an iteration over a loader.

        Args:
            fetches: Of the loader.
        """
        self._fetches = fetches
        # A loader that starts after the step (an evaluation, say) belongs to this step. So do
        # batches after the step if earlier batches of the loader came in the same body.
        self._is_behind, self._fetched_in = fetches.body().is_over, -1
        #: Steps that were committed when the first batch came, and when the end did; -1 before.
        self._first_in = self._ended_in = -1
        #: Batches before the first commit, and whether each later step so far got one.
        self._num_first, self._is_regular = 0, True
        self._thread = 0  # that asked for the last batch

    def batch_came(self) -> None:
        """Note a batch before it is handed out.

        Raises:
            UsageError: If a body of ``steps()`` fetches the next step's batch.
        """
        now = self._fetches.body()
        self._is_behind &= now.is_over
        if now.is_over and not self._is_behind and self._fetched_in not in (-1, now.step):
            raise UsageError(
                "the next batch was fetched after optimizer.step() and before steps() committed "
                "the body, so a run that resumes there would leave that batch out; begin each "
                "body with its batch: for step, batch in zip(checkpointer.steps(N), loader), in "
                "this order"
            )
        self._fetches.look_at(self)
        if self._first_in in (-1, now.step):
            self._first_in = now.step
            self._num_first += 1
        else:
            self._is_regular &= now.step == self._fetched_in + 1
        self._fetched_in, self._thread = now.step, threading.get_ident()

    def is_on_other_thread(self, now: Body) -> bool:
        """Whether the last batch was asked for on another thread than that of the commit behind it."""
        return self._fetched_in not in (-1, now.step) and now.thread != self._thread

    def ended(self) -> None:
        """Note that there are no more batches."""
        if self._ended_in == -1:
            self._ended_in = self._fetches.body().step
            self._fetches.note_end(self)

    @property
    def num_ahead(self) -> int:
        """Batches before the first commit, but one."""
        return self._num_first - 1

    def was_ahead(self, step: int) -> bool:
        """Whether each step of the iteration trained on a batch that was asked for before an earlier commit.

        A loop that accumulates asks for several batches before each commit, and one that looks at a batch
        commits nothing behind the end.

        Args:
            step: Steps that are committed when the next iteration begins.
        """
        return (
            self.num_ahead > 0
            and self._is_regular
            and self._first_in < self._fetched_in
            and self._ended_in == self._fetched_in + 1
            and step - self._ended_in == self.num_ahead
        )


class Gradients:
    """The gradients of some parameters at a moment, which it does not keep in memory."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._before = [
            (p, None if p.grad is None else (weakref.ref(p.grad), p.grad._version))
            for p in parameters
        ]

    def were_written(self) -> bool:
        """Whether a backward pass has made or changed one since; one that was cleared does not tell."""
        return any(
            p.grad is not None
            and (before is None or before[0]() is not p.grad or before[1] != p.grad._version)
            for p, before in self._before
        )
