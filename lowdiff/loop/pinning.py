"""Pin a step of a run that is being trained."""

from __future__ import annotations

from lowdiff.attach.begin import Opened
from lowdiff.errors import ConfigError, StepNotFound
from lowdiff.persistence.retention.collect import retention_locked, take_inventory
from lowdiff.persistence.retention.plan import is_on, owner_of
from lowdiff.persistence.run.catalog import begun_fences, scan
from lowdiff.persistence.run.fences import lineage, read_fence, read_run_id
from lowdiff.persistence.run.journal import Pin, check_label, write_pin
from lowdiff.recovery.plan import plan_recovery, recoverable
from lowdiff.settings import Settings


def keep_step(settings: Settings, opened: Opened, step: int | None, label: str | None) -> int:
    """Pin a step in this rank's run folder.

    Returns:
        The step.

    Raises:
        ConfigError: If the label cannot be a file name.
        StepNotFound: If the step does not exist any more, or not yet.
        RunInUse: If old files are being removed for longer than ``settings.lock_seconds``.
    """
    folder, session = settings.folder, opened.session
    session.settle()
    if step is None:
        step = session.committed_step
    if step < 0:
        raise ConfigError(f"steps count from 0, got {step}")
    label = f"step-{step}" if label is None else label
    check_label(label)
    run_id = read_run_id(folder)
    if step > session.step:
        ranges = recoverable(scan(folder, [settings.staging_root]))
        raise StepNotFound(settings.run, step, ranges, "it is not committed yet")
    with retention_locked(folder, timeout_seconds=settings.lock_seconds, shared=True):
        inventory = take_inventory(folder, run_id)
        whole = [s.step for s in inventory.snapshots if s.complete and is_on(inventory.spans, s)]
        # Steps after the newest snapshot are never removed and may be only in staging, also of
        # another machine. Everything before that snapshot is durable.
        if step < max(whole, default=0):
            plan_recovery(scan(folder), step)
        elif not session.queue.logs_steps and step not in (*whole, session.queue.images.due_step):
            why = (
                "without a compressor only full snapshots are kept, and there is none of it; "
                "Retention(every_steps=K) takes one at each K-th step"
            )
            raise StepNotFound(settings.run, step, [(s, s) for s in whole], why, can="pin")
        # With a run folder per node, other ranks' fences of this incarnation are not here yet.
        own = read_fence(folder.fence(opened.staging.folder.incarnation, opened.ranks.rank))
        fences = {**begun_fences(folder, run_id), own.incarnation: own}
        owner = owner_of(lineage(fences), step)
        if owner is None:
            ranges = recoverable(scan(folder, [settings.staging_root]))
            raise StepNotFound(settings.run, step, ranges, "it is not part of the run's history")
        write_pin(folder, run_id, Pin(label, step, owner))
    return step
