"""A state that goes on with a run, in a process that does not train.

What LowDiff+'s replica does beside its trainer, from what a run leaves for everyone: staging memory on the same machine,
segments and snapshots in its folder or its store.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from typing_extensions import Self

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, NotARun, ReplayMismatch, RunMismatch, StepNotFound
from lowdiff.persistence.files.durable import remove_folder
from lowdiff.persistence.files.paths import RunFolder, staging_to_read, user_path
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.persistence.store.fetch import (
    fetch_differentials,
    fetch_history,
    temporary_folder,
)
from lowdiff.recovery.plan import (
    PlannedStep,
    confirm_steps,
    plan_recovery,
    recoverable,
    spans_of,
    steps_after,
    usable_snapshots,
)
from lowdiff.recovery.replay.replayer import ReplayOptions, replay
from lowdiff.recovery.reshard import whole_beside
from lowdiff.recovery.search import carry_out
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import whole_number

#: Looks at a live run, one after the other, each of which found what had just been removed.
_MOST_LOOKS = 5


class Follower:
    """Follow a run, step by step, and hold nobody up. Use it as a context manager, or `close` it.

    It reads what any recovery reads, writes nothing, and tells nobody that it is there. With a log it goes on by the
    differentials that all ranks have staged, or have made durable where it sees no staging memory. Without one it goes
    on by the queue of the replicas or by kept gradients, while these still have the steps, and else by snapshots.

    Large because each look weighs one state against the run: whether the run still holds the state, what leads on
    from it, and what has to be fetched for that.

    Args:
        run: The run folder, or the URL of its store. It may not exist yet.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.
        durable: Whether to pass over what lies in staging memory alone.

    Attributes:
        step: Step of the state; -1 before the first.
        incarnation: The incarnation that made the state.
        life: Random identity of that incarnation, see `Fence.life`; "" before the first state.
        newest: The newest step that the last `look` saw; -1 before.
        num_withdrawn: How many times the run had gone back behind the state, or another run or life had taken the
            place of the state's, so that the state began anew.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        staging: str | Path | None = None,
        options: ReplayOptions | None = None,
        durable: bool = False,
    ) -> None:
        self.step = self.incarnation = self.newest = -1
        self.num_withdrawn = 0
        self.life = ""
        self._catalog: Catalog | None = None
        self._roots = () if durable else (staging_to_read(staging),)
        self._options = options or ReplayOptions()
        self._state: RecoveredState | None = None
        #: The first step that does not replay; only a snapshot leads behind it.
        self._mismatch = -1
        self._open = ExitStack()
        self._store: ObjectStore | None = None
        #: Step of the store's newest snapshot on the run's history, fetched or not; -1 without a store.
        self._newest_stored = -1
        if is_url(run):
            self._store = ObjectStore(str(run))
            self._folder: RunFolder = self._open.enter_context(temporary_folder())
        else:
            self._folder = RunFolder(user_path("run", run))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the state, and what was fetched from a store."""
        self._state = None
        self._open.close()

    @property
    def has_state(self) -> bool:
        """Whether there is a state at `step` now; not where it was withdrawn, or did not replay, and none took its place."""
        return self._state is not None

    @property
    def state(self) -> RecoveredState:
        """The whole state at `step`; valid until the next `look`, which changes it in place.

        Raises:
            StepNotFound: If there is none yet.
        """
        return whole_beside(self._own())

    @property
    def weights(self) -> RecoveredState:
        """The same without what optimizers and averages keep, which takes less memory where there are shards."""
        return whole_beside(self._own(), has_optimizers=False)

    def _own(self) -> RecoveredState:
        if self._state is None:
            raise StepNotFound(str(self._folder.root), None, (), "nothing was followed yet")
        return self._state

    def is_lost(self, incarnation: int, step: int) -> bool:
        """Return whether the run went back behind a step that an incarnation had made, as the last `look` saw it."""
        catalog = self._catalog
        if catalog is None or incarnation not in catalog.incarnations:
            return False  # retention forgets old ones
        return not any(
            span.incarnation == incarnation and span.holds(step) for span in spans_of(catalog)
        )

    def life_of(self, incarnation: int) -> str | None:
        """Return the life that has an incarnation's number, as the last `look` saw it; None if there is none."""
        fence = None if self._catalog is None else self._catalog.incarnations.get(incarnation)
        return None if fence is None else fence.life

    def look(self, every: int = 1, most: int | None = None) -> bool:
        """Go on to the newest step there is.

        Args:
            every: Only to multiples of this number of steps, where differentials lead there.
            most: At most to the so-manieth next of them, where differentials lead there; None: to the last.

        Returns:
            Whether `state` is that of another step, perhaps an earlier one, as a run goes back behind steps that were
            lost; or of another life.

        Raises:
            DamagedFile: If what leads on cannot be read, and nothing else does.
            StoreError: If the store does not answer.
            ReplayMismatch: If the first steps do not replay.
        """
        every = max(1, whole_number("every", every))
        most = None if most is None else max(1, whole_number("most", most))
        before = self.life, self.step
        for look in range(1, _MOST_LOOKS + 1):
            try:
                self._catalog = catalog = self._seen(self.step if self.has_state else None)
                if catalog is not None:
                    self._go_on(catalog, every, most)
                break
            except DamagedFile:  # a trainer reuses its memory, and removes old snapshots
                self._state = None
                if look == _MOST_LOOKS:
                    if self._store is not None:  # what was fetched may be what is damaged
                        remove_folder(self._folder.root)
                    raise
        return self.has_state and (self.life, self.step) != before

    def _seen(self, after: int | None) -> Catalog | None:
        """List the run; None where there is none yet.

        Args:
            after: Of a store, fetch no snapshot, but the differentials after this step; None: what leads to its
                newest step.
        """
        try:
            if self._store is not None:
                try:
                    self._fetch(self._store, after)
                except RunMismatch:
                    # Another run or life is in the store; of what was fetched nothing is of use.
                    remove_folder(self._folder.root)
                    self._fetch(self._store, after)
            return scan(self._folder, self._roots)
        except (NotARun, StepNotFound):
            return None

    def _fetch(self, store: ObjectStore, after: int | None) -> None:
        if after is None:
            found = fetch_history(store, self._folder, None)
        else:
            found = fetch_differentials(store, self._folder, after)
        self._newest_stored = max(found, default=-1)

    def _why_withdrawn(self, catalog: Catalog, state: RecoveredState) -> str:
        """Say why the state is not on the run's history; empty if it is."""
        if catalog.run_id != state.fence.run_id:
            return f"run {catalog.run_id} took the place of run {state.fence.run_id}, whose step {self.step} was followed"
        life = self.life_of(self.incarnation)
        if life is not None and life != self.life:
            return f"another life {self.incarnation} took the place of the one whose step {self.step} was followed"
        if life is None or self.is_lost(self.incarnation, self.step):
            return f"the run went back behind step {self.step}"
        return ""

    def _go_on(self, catalog: Catalog, every: int, most: int | None) -> None:
        state = self._state
        is_whole = state is None  # then all that leads to the newest step was fetched
        why = "" if state is None else self._why_withdrawn(catalog, state)
        if why:
            Code.RUN_WENT_BACK.warn(f"{why}; following its new history")
            self.num_withdrawn += 1
            self._state, self._mismatch = None, -1
            state = None
        newest = max((s.step for s in usable_snapshots(catalog)), default=-1)
        newest = max(newest, self._newest_stored)
        if state is not None:
            steps = self._steps(catalog)
            self.newest = max(newest, self.step + len(steps))
            if self.newest == self.step + len(steps):
                last = self.newest // every
                if most is not None:
                    last = min(last, self.step // every + most)
                self._replay(state, steps[: max(0, last * every - self.step)], catalog)
                return
            last = self._limited(newest, newest + len(steps_after(catalog, newest, None)))
            if last - last % every <= self.step:
                return  # the snapshot leads to no multiple beyond the state yet
        if self._store is not None and not is_whole:
            whole = self._seen(None)
            if whole is None:
                return
            self._catalog = catalog = whole
        if state is None:
            self.newest = newest
        self._begin(catalog, every)
        if self.has_state:
            self.newest = max(self.newest, self.step)

    def _limited(self, newest: int, last: int) -> int:
        """Return the last step that a snapshot leads to: not beyond one that does not replay."""
        return self._mismatch - 1 if newest < self._mismatch <= last else last

    def _steps(self, catalog: Catalog) -> tuple[PlannedStep, ...]:
        """Return the differentials that follow the state, up to the first that does not replay."""
        limit = None if self._mismatch < 0 else self._mismatch - 1
        while True:
            steps = steps_after(catalog, self.step, limit)
            if not steps or confirm_steps(catalog, steps[0].step, steps[-1].step):
                return steps

    def _replay(
        self, state: RecoveredState, steps: tuple[PlannedStep, ...], catalog: Catalog
    ) -> None:
        if not steps:
            return
        try:
            self._take(replay(state, steps, catalog.incarnations.__getitem__, self._options))
        except ReplayMismatch as error:
            self._state = None  # some of it has gone on
            if error.step is None:
                raise
            self._mismatch = error.step
            Code.RECOVERY_WENT_BACK.warn(f"{error}; following the steps before it")

    def _begin(self, catalog: Catalog, every: int) -> None:
        """Load a snapshot, and replay what follows it, unless that leads no further than the state.

        Args:
            catalog: Of the run.
            every: See `look`.
        """
        ranges = recoverable(catalog)
        if not ranges:
            return
        first, last = ranges[-1]
        last = self._limited(usable_snapshots(catalog)[-1].step, last)
        step = max(first, last - last % every)
        if self.has_state and step <= self.step:
            return
        plan = plan_recovery(catalog, step)
        try:
            self._take(carry_out(catalog, plan, self._options))
        except ReplayMismatch as error:
            if error.step is None or error.step <= first:
                raise
            self._mismatch = error.step
            Code.RECOVERY_WENT_BACK.warn(f"{error}; following the steps before it")

    def _take(self, state: RecoveredState) -> None:
        self._state, self.step = state, state.step
        self.incarnation, self.life = state.fence.incarnation, state.fence.life
