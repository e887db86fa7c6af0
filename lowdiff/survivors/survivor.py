"""The save after a failure: the ranks that live write the state of the last step into memory.

In data parallelism every rank holds all parameters and all optimizer state, so a checkpoint can be taken
after another rank died, by those that live (Gupta et al., "Just-In-Time Checkpointing", EuroSys 2024).

Each survivor writes its own share of the state into the image that was set aside for it when training
began, and the first of the survivors writes those of the ranks that cannot. Items of a dead rank
(generators, buffers, stateful objects) lie in its staging memory as of its last two steps. The marks of all
ranks' images together are the manifest: without one of them the step does not count, and what was there
before does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from lowdiff.commit.staging import share_of_items
from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.image import stage_image
from lowdiff.persistence.staging.items import read_ahead, read_items
from lowdiff.persistence.staging.status import (
    SavedStatus,
    StatusPage,
    SurvivorStatus,
    read_status,
)
from lowdiff.step.states import Sealed
from lowdiff.survivors.inheritance import Known, inherited
from lowdiff.survivors.queue import SurvivorsQueue

#: How long an optimizer's step, or a commit, may take to end before there is nothing to save.
_REST_SECONDS = 10.0
#: How long the survivors of a node wait for each other: within torchrun's 30 s.
_MEET_SECONDS, _SAVE_SECONDS = 1.0, 20.0
#: A process whose thread has not looked for so long is stopped.
STOPPED_SECONDS = 2.0
_LOOK_SECONDS = 0.01


class Training(Protocol):
    """The training whose state is saved.

    Attributes:
        resting: Its last step while the live state is that of this step: no optimizer of the open body
            has stepped. None otherwise.
    """

    @property
    def resting(self) -> Sealed | None:
        """See the class."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known of another rank on this node.

    Attributes:
        rank: Its number.
        stage: Its staging folder.
        is_alive: Whether its process is there, and not stopped.
        ready_step: Step that it could save; -1 if it has not said so.
        saved_step: Step of its saved share; -1 for none.
    """

    rank: int
    stage: StagingFolder
    is_alive: bool
    ready_step: int
    saved_step: int

    @property
    def counts(self) -> bool:
        """Whether its step is to be saved: it can save it, or did before it ended."""
        return self.ready_step >= 0 and (self.is_alive or self.saved_step == self.ready_step)


class Survivor:
    """Saves the state of one rank, and of the ranks of its node that died; for any thread.

    Args:
        live: The training's state.
        training: Tells whether it can be saved now.
        queue: Has the items of its last step.
        stage: This rank's staging folder.
    """

    def __init__(
        self,
        live: Live,
        training: Training,
        queue: SurvivorsQueue,
        stage: StagingFolder,
    ) -> None:
        self._live = live
        self._training = training
        self._queue = queue
        self._stage = stage
        self._saving, self._telling = threading.Lock(), threading.Lock()
        self._saved_step = -1
        self._refused = ""

    @property
    def path(self) -> Path:
        """Where the share of this rank would lie."""
        return self._stage.survivor_image

    def look(self, *, is_waiting: bool) -> None:
        """Tell the other ranks that this process lives, and whether its main thread waits for them."""
        resting = self._training.resting
        has_gone_on = (
            resting is not None and resting.differential.step > self._queue.page.status.ready_step
        )
        changes = {"ready_step": -1} if has_gone_on else {}
        self._tell(seen_at_unix_seconds=time.time(), is_waiting=is_waiting, **changes)

    def _tell(self, **changes: object) -> None:
        with self._telling:
            self._queue.page.update(**changes)

    def all_wait(self) -> bool:
        """Whether every rank of this node that lives waits for other ranks."""
        pages = [read_status(stage.survivor_status, SurvivorStatus) for _, stage in self._stages()]
        return all(page.is_waiting or _is_stale(page) for page in pages)

    def save(self, why: str) -> int | None:
        """Save the state of the last step; once a step.

        Args:
            why: What happened, for the log.

        Returns:
            The step; None if the state is that of no step, or there is no memory.
        """
        with self._saving:
            sealed = self._wait_for_rest()
            if sealed is None:
                self._refuse(
                    "the open body's optimizers have stepped, and it did not reach its commit"
                )
                return None
            step = sealed.differential.step
            if self._saved_step == step:
                return step
            if not self._queue.has_same_parameters():
                self._refuse("parameters were written since the last commit, by no optimizer")
                return None
            self._tell(ready_step=step)
            saved_step = self._save_with_others(sealed)
            if saved_step is None:
                return None
            self._saved_step = step
            Code.SAVED_AFTER_FAILURE.warn(
                f"{why}; the state of step {saved_step} is saved in memory, in "
                f"{self._stage.root.parent}, and goes to the run folder; the next attach goes on from "
                "there",
                rank=self._live.rank,
                step=saved_step,
            )
            return saved_step

    def _wait_for_rest(self) -> Sealed | None:
        """Wait until no optimizer is at work; the last step, or None if its state is gone."""
        is_here = threading.current_thread() is threading.main_thread()
        deadline = time.monotonic() + (0.0 if is_here else _REST_SECONDS)
        while (sealed := self._training.resting) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return sealed

    def _save_with_others(self, sealed: Sealed) -> int | None:
        """Write until the shares of all ranks of this node are there; their step, None if they are not."""
        step, began = sealed.differential.step, time.monotonic()
        while time.monotonic() - began < _SAVE_SECONDS:
            peers = self._peers()
            is_meeting = time.monotonic() - began < _MEET_SECONDS
            if is_meeting and any(peer.is_alive and peer.ready_step < 0 for peer in peers):
                time.sleep(_LOOK_SECONDS)
                continue
            # Ranks may be a step apart: the step that all of them reached is the one to save.
            least = min(peer.ready_step for peer in peers if peer.counts)
            missing = [peer for peer in peers if peer.saved_step != least]
            if not missing:
                return least
            writers = [peer.rank for peer in peers if peer.is_alive and peer.ready_step == least]
            for peer in missing if least == step else ():
                own = peer.rank == self._live.rank
                absent = peer.rank not in writers
                if (own or (absent and writers[0] == self._live.rank)) and not self._write(
                    peer, sealed
                ):
                    return None
            time.sleep(_LOOK_SECONDS)
        self._refuse("the other ranks of this node did not save their share in time")
        return None

    def _peers(self) -> list[Peer]:
        found = []
        for rank, stage in self._stages():
            page = read_status(stage.survivor_status, SurvivorStatus)
            image = read_status(stage.survivor_saved, SavedStatus).image
            is_self = rank == self._live.rank
            found.append(
                Peer(
                    rank,
                    stage,
                    # One that saves does not look meanwhile.
                    is_alive=is_self
                    or (
                        (page.ready_step >= 0 or not _is_stale(page))
                        and _is_held(stage.trainer_lock)
                    ),
                    ready_step=page.ready_step,
                    saved_step=-1 if image is None else image.step,
                )
            )
        return found

    def _stages(self) -> list[tuple[int, StagingFolder]]:
        """The staging folders of this incarnation on this node."""
        root = self._stage.root.parent.parent
        every = (
            (rank, StagingFolder.of(root, self._stage.run_id, self._stage.incarnation, rank))
            for rank in range(self._live.world_size)
        )
        return [(rank, stage) for rank, stage in every if stage.survivor_status.exists()]

    def _write(self, peer: Peer, sealed: Sealed) -> bool:
        """Write the share of one rank; whether it is there, and of the step it should be of."""
        step = sealed.differential.step
        items = self._items_of(peer, step)
        if items is None:
            return False
        lock = FileLock(peer.stage.replica_lock)
        if not lock.acquire(f"process {os.getpid()}, saving after a failure", timeout_seconds=1.0):
            return True  # another survivor is at it
        try:
            # Where a collective hangs, nothing behind it on the usual stream ever runs.
            device = self._live.attached.device
            aside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else None
            with aside or nullcontext():
                tensors = share_of_items(self._live, sealed, peer.rank, items)
                size, checksum = stage_image(
                    peer.stage.survivor_image, tensors, torch.get_num_threads()
                )
            if self._training.resting is not sealed or not self._queue.has_same_parameters():
                self._refuse("training went on while it was saved")
                return False
            # Last, as a manifest: from here on the share counts.
            mark = ImageMark(step, size, checksum)
            StatusPage(peer.stage.survivor_saved, SavedStatus(mark))
        except (OSError, StorageError) as error:
            self._refuse(str(error))
            return False
        finally:
            lock.release()
        return True

    def _items_of(self, peer: Peer, step: int) -> Mapping[str, bytes] | None:
        """All items of a rank at a step; those that died with it as another rank has them."""
        items = read_items(peer.stage, step)
        if items is not None or peer.rank == self._live.rank:
            if items is None:
                self._refuse("its items are not in staging memory any more")
            return items
        here = [read_items(self._stage, number) for number in (step, step - 1)]
        before = read_items(peer.stage, step - 1)
        if here[0] is None or here[1] is None or before is None:
            self._refuse(f"what rank {peer.rank} alone had is lost")
            return None
        ddp = self._live.attached.ddp
        found, why = inherited(
            Known(here[0], read_ahead(self._stage, step), here[1]),
            read_ahead(peer.stage, step),
            before,
            seed=(self._stage.run_id, peer.rank, step),
            takes_buffers=ddp is not None and ddp.broadcast_buffers and peer.rank != 0,
        )
        if found is None:
            self._refuse(f"rank {peer.rank} died before it had staged step {step}, and {why}")
        elif why:
            Code.ITEMS_INHERITED.warn(why, rank=peer.rank, step=step)
        return found

    def _refuse(self, why: str) -> None:
        if why != self._refused:
            self._refused = why
            text = f"the state is not saved after the failure: {why}; the last full snapshot counts"
            Code.NOT_SAVED_AFTER_FAILURE.warn(text, rank=self._live.rank)


def _is_stale(page: SurvivorStatus) -> bool:
    return time.time() - page.seen_at_unix_seconds > STOPPED_SECONDS


def _is_held(path: Path) -> bool:
    lock = FileLock(path)
    is_free = lock.acquire("a survivor that looks", shared=True)
    lock.release()
    return not is_free
