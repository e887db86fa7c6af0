"""The save after a failure: the ranks that live write the state of the last step into memory.

In data parallelism every rank holds all parameters and all optimizer state, so a checkpoint can be taken
after another rank died, by those that live (Gupta et al., "Just-In-Time Checkpointing", EuroSys 2024).

Each survivor writes its own share of the state into the image that was set aside for it when training
began, and the first of the survivors writes those of the ranks that cannot. Items of a dead rank
(generators, buffers, stateful objects) lie in its staging memory as of its last two steps. The marks of all
ranks' images together are the manifest: without one of them the step does not count, and what was there
before does.

Nobody knows whether other nodes still live. So the first survivor of each node also writes the shares of
all ranks on other nodes, without items: recovery takes those from the rank's own staging memory if its
node is there, and else what all ranks had alike.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.images import share_of_items
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.locks import FileLock, is_held
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.image import ImageTensor, stage_image
from lowdiff.persistence.staging.items import read_items
from lowdiff.persistence.staging.status import (
    SavedStatus,
    StatusPage,
    SurvivorStatus,
    read_status,
)
from lowdiff.protect.survivors.standby import Standby
from lowdiff.recovery.sources.inheritance import alike_bits, items_of_dead
from lowdiff.step.states import Sealed

#: How long an optimizer's step, or a commit, may take to end before there is nothing to save.
_REST_SECONDS = 5.0
#: How long the survivors of a node wait for each other: within torchrun's 30 s.
_MEET_SECONDS, _SAVE_SECONDS = 1.0, 20.0
#: A process whose thread has not looked for so long is stopped.
_STOPPED_SECONDS = 2.0
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

    def peek_news(self) -> tuple[RankNews, ...] | None:
        """Return the newest news that are here of all ranks, of the last two steps; for any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank on this node, as others see it.

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
    """Saves the state of one rank, of the ranks of its node that died and of other nodes; for any thread.

    Large because all three shares are written under one agreement of the survivors of a node.

    Args:
        live: The training's state.
        training: Tells whether it can be saved now.
        standby: Has the items of its last step.
        stage: This rank's staging folder.
    """

    def __init__(
        self,
        live: Live,
        training: Training,
        standby: Standby,
        stage: StagingFolder,
    ) -> None:
        self._live = live
        self._training = training
        self._standby = standby
        self._stage = stage
        self._saving = threading.Lock()
        self._saved_step = -1
        self._refused = ""

    @property
    def path(self) -> Path:
        """The file in which the share of this rank would lie."""
        return self._stage.survivor_image

    def look(self, *, is_waiting: bool) -> None:
        """Tell the other ranks that this process lives, and whether its main thread waits for them."""
        self._standby.tell(seen_at_unix_seconds=time.time(), is_waiting=is_waiting)

    def all_wait(self) -> bool:
        """Whether every rank of this node that lives waits for other ranks."""
        pages = [read_status(stage.survivor_status, SurvivorStatus) for _, stage in self._stages()]
        return all(page.is_waiting or _is_stale(page) for page in pages)

    def has_lost_peer(self) -> bool:
        """Whether another rank of this node is dead or stopped."""
        return not all(peer.is_alive for peer in self._peers())

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
            if not self._standby.is_as_committed():
                self._refuse(
                    "parameters or optimizer state were written since the last commit, by no optimizer"
                )
                return None
            self._standby.tell(ready_step=step)  # until the next step is staged
            saved_step = self._save_with_others(sealed)
            if saved_step is None:
                return None
            self._saved_step = step
            Code.SAVED_AFTER_FAILURE.warn(
                f"{why}; the state of step {saved_step} is saved in memory, in "
                f"{self._stage.root.parent}; the next attach goes on from there, if it finds what each "
                "rank alone had",
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
            # A dead one may have been ready at a failure before, that was none.
            ready = [p.ready_step for p in peers if p.counts and p.ready_step >= step - 1]
            if not ready:
                self._refuse("somebody removed its staging memory")
                return None
            least = min(ready)
            missing = [peer for peer in peers if peer.saved_step != least]
            guests = self._missing_guests(least)
            writers = [peer.rank for peer in peers if peer.is_alive and peer.ready_step == least]
            if not missing and not (guests and writers):
                return least
            for peer in missing if least == step else ():
                own = peer.rank == self._live.rank
                absent = peer.rank not in writers
                if (own or (absent and writers[0] == self._live.rank)) and not self._write(
                    peer, sealed
                ):
                    return None
            # Last: the shares of this node count without them.
            if (
                not missing
                and writers[0] == self._live.rank
                and not all(self._write_guest(rank, sealed) for rank in guests)
            ):
                return None
            time.sleep(_LOOK_SECONDS)
        if not missing:
            return least
        self._refuse("the other ranks of this node did not save their share in time")
        return None

    def _missing_guests(self, step: int) -> list[int]:
        """Ranks on other nodes whose share this node has not saved at a step."""
        home = self._home
        saved = {
            rank: read_status(home.guest_saved(rank), SavedStatus).image
            for rank in self._standby.node.others
        }
        return [rank for rank, image in saved.items() if image is None or image.step != step]

    @property
    def _home(self) -> StagingFolder:
        """The folder for shares of ranks on other nodes, whoever of this node is alive."""
        return self._folder_of(self._standby.node.first)

    def _folder_of(self, rank: int) -> StagingFolder:
        """The staging folder of a rank, if it is on this node."""
        own = self._stage
        return StagingFolder.of(own.root.parent.parent, own.run_id, own.incarnation, rank)

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
                        and is_held(stage.trainer_lock)
                    ),
                    ready_step=page.ready_step,
                    saved_step=-1 if image is None else image.step,
                )
            )
        return found

    def _stages(self) -> list[tuple[int, StagingFolder]]:
        """The staging folders of this incarnation on this node."""
        every = ((rank, self._folder_of(rank)) for rank in range(self._live.world_size))
        return [(rank, stage) for rank, stage in every if stage.survivor_status.exists()]

    def _write(self, peer: Peer, sealed: Sealed) -> bool:
        """Write the share of one rank of this node; whether it is there, and of the step it should be of."""
        items = self._items_of(peer, sealed.differential.step)
        if items is None:
            return False

        def tensors() -> list[ImageTensor]:
            return share_of_items(self._live, sealed, peer.rank, items).images()

        stage = peer.stage
        return self._write_image(
            stage, stage.survivor_image, stage.survivor_saved, sealed, tensors, SavedStatus()
        )

    def _write_guest(self, rank: int, sealed: Sealed) -> bool:
        """Write the share of a rank on another node, without items; see `_write`."""

        def tensors() -> list[ImageTensor]:
            return share_of_items(self._live, sealed, rank, {}).images()

        home = self._home
        news = self._training.peek_news() or ()
        status = SavedStatus(
            maker=self._live.rank,
            takes_buffers=self._takes_buffers(rank),
            alike=alike_bits([(n.generators, n.buffers, n.objects) for n in news]) if news else 0,
            alike_step=news[0].step if news else -1,
        )
        return self._write_image(
            home, home.guest(rank), home.guest_saved(rank), sealed, tensors, status
        )

    def _write_image(
        self,
        stage: StagingFolder,
        image: Path,
        saved: Path,
        sealed: Sealed,
        tensors: Callable[[], Sequence[ImageTensor]],
        status: SavedStatus,
    ) -> bool:
        """Write an image and then its mark, unless training went on meanwhile.

        Args:
            stage: The staging folder in which both lie.
            image: The image's file.
            saved: The page with its mark.
            sealed: The step.
            tensors: Reads what the image holds.
            status: The page's further content.
        """
        lock = FileLock(stage.survivor_lock)
        if not lock.acquire(f"process {os.getpid()}, saving after a failure", timeout_seconds=1.0):
            return True  # another survivor is at it
        try:
            # Where a collective hangs, nothing behind it on the usual stream ever runs.
            with devices.aside(self._live.attached.device):
                size, checksum = stage_image(image, tensors(), torch.get_num_threads())
            if self._training.resting is not sealed or not self._standby.is_as_committed():
                self._refuse("training went on while it was saved")
                return False
            # Last, as a manifest: from here on the share counts.
            mark = ImageMark(sealed.differential.step, size, checksum)
            StatusPage(saved, replace(status, image=mark))
        except (OSError, StorageError) as error:
            self._refuse(str(error))
            return False
        finally:
            lock.release()
        return True

    def _items_of(self, peer: Peer, step: int) -> Mapping[str, bytes] | None:
        """All items of a rank of this node at a step; those that died with it as another rank has them."""
        if peer.rank == self._live.rank:
            items = read_items(peer.stage, step)
            if items is None:
                self._refuse("its items are not in staging memory any more")
            return items
        found, why = items_of_dead(
            step,
            peer.rank,
            self._stage,
            peer.stage,
            takes_buffers=self._takes_buffers(peer.rank),
        )
        if found is None:
            self._refuse(f"rank {peer.rank} died before it had staged step {step}, and {why}")
        elif why:
            Code.ITEMS_INHERITED.warn(why, rank=peer.rank, step=step)
        return found

    def _takes_buffers(self, rank: int) -> bool:
        """Whether the buffers of a rank are overwritten by rank 0's before their next use."""
        ddp = self._live.attached.ddp
        return ddp is not None and ddp.broadcast_buffers and rank != 0

    def _refuse(self, why: str) -> None:
        if why != self._refused:
            self._refused = why
            text = (
                f"the state is not saved after the failure: {why}; what is staged or durable counts"
            )
            Code.NOT_SAVED_AFTER_FAILURE.warn(text, rank=self._live.rank)


def _is_stale(page: SurvivorStatus) -> bool:
    return time.time() - page.seen_at_unix_seconds > _STOPPED_SECONDS
