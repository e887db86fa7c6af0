"""How an incarnation ends: with a snapshot that all ranks take together, if nothing failed."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from lowdiff.attach.begin import Opened
from lowdiff.commit.session import Session
from lowdiff.core.events import Code
from lowdiff.errors import RankLost, WriterFailed
from lowdiff.persistence.format.image import is_complete
from lowdiff.persistence.staging.status import WriterStatus

_MEET_SECONDS = 60.0
_FINISH_SECONDS = 600.0
_ABANDON_SECONDS = 10.0
_PUBLISH_SECONDS = 60.0
_LOOK_SECONDS = 0.01
#: For what ranks said after the last commit: it is here, or does not come.
_HEAR_SECONDS = 1.0


def finish(opened: Opened, *, failed: bool, detaches: bool = False) -> None:
    """Commit a finished step, take a last snapshot, and wait until everything is durable.

    Args:
        opened: What runs.
        failed: Whether an exception ended the training: then nothing is committed, and neither is
            it when another trainer has taken over the run.
        detaches: Whether training goes on without the run: then nothing is committed, storage that
            is in trouble or behind gets no last snapshot, and none of its trouble is an error.

    Raises:
        WriterFailed: If storage does not take everything in time; nothing is lost. After a failure
            that is what comes out: then storage gets little time, and its trouble is a warning.
    """
    session = opened.session
    is_lenient = failed or detaches
    deadline = session.end_within(_FINISH_SECONDS)
    try:
        if not is_lenient and session.has_finished_step and not session.agreement.has_lost_run:
            session.commit()
        if not failed:
            session.keep_staging()
            session.settle(_ABANDON_SECONDS if detaches else _FINISH_SECONDS)
            try:
                session.hear(_MEET_SECONDS)
            except RankLost as error:
                Code.LAST_STEP_UNCONFIRMED.warn(
                    f"the last step is perhaps not committed on all ranks: {error}"
                )
    except BaseException as error:
        _abandon(opened)
        if is_lenient and isinstance(error, Exception):
            Code.LAST_COMMIT_FAILED.warn(f"the last commit is left to the next attach: {error}")
            return
        raise
    patience = _ABANDON_SECONDS
    if failed and not session.agreement.has_lost_run:
        patience = _secure(opened)
    session.storage.stop()
    is_last_snapshot = not failed and _take_last_snapshot(opened, at_leisure=not detaches)
    if is_last_snapshot:
        patience = _MEET_SECONDS
    opened.session.meter.end("failed" if failed else "closed")
    try:
        if not is_lenient:
            patience = max(_ABANDON_SECONDS, deadline - time.monotonic())
        status = session.storage.writer.finish(patience)
    except WriterFailed as error:
        if not is_lenient:
            raise
        Code.WRITER_NOT_FINISHED.warn(error)
        return
    publisher = session.storage.publisher
    if publisher is not None:
        publisher.finish(_ABANDON_SECONDS if is_lenient else _PUBLISH_SECONDS)
    if is_last_snapshot:
        _remove_staging(opened, status)


def settle_soon(session: Session) -> None:
    """Have steps staged that are on their way from an accelerator, which may be what failed: it gets little time."""
    with suppress(Exception):  # what ended the training says more
        session.settle(_HEAR_SECONDS)


def _secure(opened: Opened) -> float:
    """Make the newest committed step durable: memory goes with a container. Returns what is left of the time for it.

    Each rank by itself: others may hang. All have told the same of the last commit, if they came to it.
    """
    session, queue = opened.session, opened.session.queue
    deadline = time.monotonic() + _ABANDON_SECONDS
    settle_soon(session)
    with suppress(Exception):  # what ended the training says more
        session.hear(_HEAR_SECONDS)
    aim = step = session.committed_step
    with suppress(Exception):  # a survivor has saved the live state by now, if it could
        aim = session.secure(takes_live=not opened.protection.saves_live)
    while queue.durable_step < aim and time.monotonic() < deadline:
        if queue.attend().writer.error:
            break
        time.sleep(_LOOK_SECONDS)
    durable = queue.durable_step
    if durable < step:
        Code.STEPS_AT_RISK.warn(
            f"steps {durable + 1} to {step} are committed and lie in memory alone, in "
            f"{opened.staging.folder.root}: attach on this machine goes on from there; with a container, or a reboot, "
            "they go",
            rank=opened.ranks.rank,
            step=step,
            durable_step=durable,
        )
    return max(_HEAR_SECONDS, deadline - time.monotonic())


def _remove_staging(opened: Opened, status: WriterStatus) -> None:
    """Give staging memory back once every rank's share of the last snapshot is durable.

    A writer also ends well behind a mark that was damaged in memory, of whose snapshot it never heard.
    """
    session = opened.session
    # The snapshot exists only with every rank's shard, and one that failed here does not come.
    why = opened.ranks.meet(_MEET_SECONDS)
    if not why:
        session.agree_on(session.step)
        shares = opened.ranks.gather(status.durable_snapshot >= session.step)
        if all(shares):
            # Where nodes have disks of their own, a node that is lost later takes its shares along.
            sees_all = opened.ranks.gather(_sees_all_shares(opened, status))
            opened.protection.close(removes=all(sees_all))
            opened.staging.folder.remove()
            return
        why = f"the last snapshot was damaged in memory on rank {shares.index(False)}"
    Code.STAGING_KEPT.warn(
        f"{why}, so {opened.staging.folder.root} is kept; the next attach resumes with its help"
    )


def _sees_all_shares(opened: Opened, status: WriterStatus) -> bool:
    """Whether the last snapshot lies whole in this rank's run folder, or in the store."""
    step, settings = opened.session.step, opened.settings
    if settings.store is not None:
        return status.remote_snapshot >= step
    snapshot = settings.folder.snapshot(opened.staging.folder.incarnation, step)
    return is_complete(snapshot, opened.ranks.world_size)


def _abandon(opened: Opened) -> None:
    """End replica and writer, which would hold the run; the next attach adopts what is staged."""
    storage = opened.session.storage
    settle_soon(opened.session)
    storage.stop()
    opened.session.meter.end("failed")
    try:
        storage.writer.finish(_ABANDON_SECONDS)
    except WriterFailed:
        storage.writer.stop()


def release(opened: Opened) -> None:
    """Let go of optimizer, process group, publisher and locks."""
    opened.session.detach()
    publisher = opened.session.storage.publisher
    if publisher is not None:
        publisher.orphan()
    opened.protection.close(removes=False)
    opened.ranks.close()
    opened.staging.release()
    opened.lock.release()


def _take_last_snapshot(opened: Opened, *, at_leisure: bool) -> bool:
    """Make staging memory, which alone holds the newest residual, unnecessary.

    Args:
        opened: What runs.
        at_leisure: Whether to wait for storage that is in trouble or behind.

    Returns:
        Whether a snapshot of the last step was staged on every rank.
    """

    def any_rank(why: str) -> str:
        return next(filter(None, opened.ranks.gather(why)), "")

    why = opened.ranks.meet(_MEET_SECONDS)
    why = why or any_rank(_why_no_snapshot(opened, at_leisure=at_leisure))
    why = why or any_rank(_failure_of_snapshot(opened))
    if why:
        opened.protection.save(why)
        Code.NO_LAST_SNAPSHOT.warn(
            f"no last snapshot is taken: {why}; the next attach resumes with the help of what "
            f"{opened.staging.folder.root} holds"
        )
    return not why


def _why_no_snapshot(opened: Opened, *, at_leisure: bool) -> str:
    if not (at_leisure or _is_storage_ready(opened)):
        return "storage is in trouble or behind"
    if opened.session.agreement.has_lost_run:
        return "another trainer has taken over the run"
    unfinished = opened.session.unfinished
    if unfinished:
        return (
            f"after the last commit (step {opened.session.step}) {unfinished}, so their "
            "step may not be over; if it is, call commit() before close()"
        )
    if not opened.session.is_as_sealed():
        return f"the model changed after its last commit (step {opened.session.step})"
    return ""


def _is_storage_ready(opened: Opened) -> bool:
    """Whether storage would take a snapshot without stopping training, soon and without trouble."""
    session, deadline = opened.session, time.monotonic() + _ABANDON_SECONDS
    while not (is_ready := session.is_storage_ready()) and time.monotonic() < deadline:
        if session.has_storage_error:
            break
        time.sleep(_LOOK_SECONDS)
    return is_ready and not session.has_storage_error


def _failure_of_snapshot(opened: Opened) -> str:
    """Take the snapshot; what went wrong, which the other ranks wait to hear, or nothing."""
    try:
        opened.session.snapshot(required=True)
    except Exception as failure:
        logging.getLogger("lowdiff").debug("the last snapshot failed", exc_info=True)
        return str(failure) or type(failure).__name__
    return ""
