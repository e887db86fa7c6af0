"""``lowdiff inspect``: print the content of a run, once or repeatedly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lowdiff.cli.output import (
    AsJson,
    RunArgument,
    Staging,
    count,
    plain_console,
    show,
    size,
    span,
    table,
)
from lowdiff.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from lowdiff.persistence.run.progress import RunProgress
    from lowdiff.recovery.inspect.inspection import Inspection

_STEPS_SHOWN = 10


def inspect(
    run: RunArgument,
    as_json: AsJson = False,
    staging: Staging = None,
    watch: Annotated[
        bool, Option("--watch", help="Show the progress of each rank until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, Option(min=0.1, metavar="SECONDS", help="Time between refreshes of --watch.")
    ] = 1.0,
) -> None:
    """List the content of a run and the steps that can be recovered.

    Reads only headers and checksums, and the footers of sealed segments; `verify` reads
    every byte. Safe while the run is training. JSON keys: run_id,
    world_size, parameters, elements, snapshots, differentials (first, last, count, bytes, staged),
    recoverable (first, last), bytes_per_step, compressor, optimizer, and some more. Ranges include
    both ends.
    """
    if watch:
        from lowdiff.persistence.store.client import is_url

        if is_url(run):
            raise ConfigError("--watch follows a run folder, where its trainers are; give that")
        if as_json:
            raise ConfigError(
                "--watch prints a table; for JSON call inspect --json again and again"
            )
        _watch(Path(run), staging, every)
        return
    from lowdiff.recovery.inspect.inspection import inspect as look

    show(look(run, staging), partial(_print_inspection, run), as_json=as_json)


def _print_inspection(run: str, found: Inspection) -> None:
    console = plain_console()
    console.print(run, style="italic", highlight=False, soft_wrap=True)
    console.print(table((), _rows(found)))


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    optimizer = found.optimizer if isinstance(found.optimizer, tuple) else (found.optimizer,)
    yield "run id", found.run_id
    yield "model", f"{found.elements:,} elements in {found.parameters} parameters"
    yield "optimizer", ", ".join(str(name).rpartition(".")[2] for name in optimizer)
    if found.compressor is not None:
        settings = ", ".join(f"{k}={v}" for k, v in found.compressor["settings"].items())
        yield "compressor", f"{found.compressor['name']}({settings})"
    yield "ranks", f"{found.world_size}, {count(found.incarnations, 'incarnation')}"
    yield "snapshots", f"{_list(found.snapshots)} ({size(found.snapshot_bytes)})"
    stored = found.differentials
    if stored is None:
        yield "differentials", "none"
    else:
        mean = size(round(stored.bytes / stored.count))
        steps = f"{stored.count}, of steps {span(stored.first, stored.last)}"
        staged = f", {stored.staged} only in staging" if stored.staged else ""
        yield "differentials", f"{steps} ({size(stored.bytes)}, {mean} a step{staged})"
    ranges = [span(r.first, r.last) for r in found.recoverable_ranges]
    told = f"steps {', '.join(ranges)}" if ranges else "no step"
    if found.in_memory is not None:
        first, last = found.in_memory.first, found.in_memory.last
        told += f" ({span(first, last)}: in memory, until a reboot)"
    yield "recoverable", told
    for decision in found.lost_tails:
        yield "predicted" if decision.chosen else "lost", str(decision)
    if found.copies_of:
        yield "copies", f"of rank {', '.join(map(str, found.copies_of))}, on other nodes"
    if found.pins:
        pins = (f"{p.label}: step {p.step}{' (void)' if p.is_void else ''}" for p in found.pins)
        yield "pinned", ", ".join(pins)
    if found.damaged:
        names = "names it" if found.damaged == 1 else "names them"
        yield "damaged", f"{count(found.damaged, 'file')}; `lowdiff verify` {names}"


def _watch(run: Path, staging: Path | None, every_seconds: float) -> None:
    """Show the progress of a run until Ctrl-C, which ends it without an error."""
    from rich.live import Live

    from lowdiff.persistence.files.paths import RunFolder, staging_to_read
    from lowdiff.persistence.run.progress import RunWatch

    looks = RunWatch(RunFolder(run), staging_to_read(staging))
    shown = Live(console=plain_console(), auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), shown:
        while True:
            shown.update(progress_table(run, looks.look(time.time())), refresh=True)
            time.sleep(every_seconds)


def progress_table(run: Path, found: RunProgress) -> Table:
    """Return a table with the progress of each rank of a run."""
    incarnation = (
        "no incarnation yet" if found.incarnation is None else f"incarnation {found.incarnation}"
    )
    steps = {"committed": found.committed_step, "durable": found.durable_step}
    told = ", ".join(f"{name} {_step(step)}" for name, step in steps.items())
    heads = ("rank", "trainer", "staged", "durable", "snapshot", "on disk", "writer")
    rows = []
    for rank in found.ranks:
        said = ", preempted" if rank.preempted else ""
        if rank.commit_age_seconds is not None:
            said += f", {rank.commit_age_seconds:.0f} s ago"
        snapshot = "none" if rank.durable_snapshot < 0 else str(rank.durable_snapshot)
        of_steps = (_step(rank.staged_step), _step(rank.durable_step), snapshot)
        of_rank = (str(rank.rank), rank.trainer + said, *of_steps)
        rows.append((*of_rank, size(rank.disk_bytes), rank.error or "ok"))
    return table(heads, rows, title=f"{run}: {incarnation}", caption=f"{told}; Ctrl-C ends")


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)


def _list(steps: tuple[int, ...]) -> str:
    shown = [str(step) for step in steps[-_STEPS_SHOWN:]]
    return ", ".join(["...", *shown] if len(steps) > _STEPS_SHOWN else shown) or "none"
