"""``lowdiff inspect``: print the content of a run, once or repeatedly."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lowdiff.cli.output import (
    AsJson,
    RunArgument,
    Staging,
    count,
    duration,
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

#: So that a screen is enough.
_FILES_SHOWN, _REASONS_SHOWN = 3, 4


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
    """Say what a run is, whether it is whole, which steps can be had, which cannot and why, and what to do next.

    Reads a small run whole, and of a larger one headers and footers alone; `verify` reads
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

    show(look(run, staging), partial(_print_inspection, run, staging), as_json=as_json)


def _print_inspection(run: str, staging: Path | None, found: Inspection) -> None:
    console = plain_console()
    console.print(run, style="italic", highlight=False, soft_wrap=True)
    shown = table((), ())
    for rows in (_what(found), _whole(found), _there(found), _lost(found)):
        for row in rows:
            shown.add_row(*row)
        shown.add_section()
    console.print(shown)
    commands = next_commands(run, staging, found)
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        console.print(f"  {command:<{width}}  # {what}", soft_wrap=True, highlight=False)


def _what(found: Inspection) -> Iterator[tuple[str, str]]:
    """Describe the run, and who trains it now."""
    written = found.written_at_unix_seconds
    age = "" if written is None else f", last written {duration(time.time() - written)} ago"
    yield "run id", found.run_id + age
    if found.trainer:
        yield "trains now", found.trainer
    if found.compressor is None:
        return
    optimizer = found.optimizer if isinstance(found.optimizer, tuple) else (found.optimizer,)
    yield "model", f"{found.elements:,} elements in {found.parameters} parameters"
    yield "optimizer", ", ".join(str(name).rpartition(".")[2] for name in optimizer)
    settings = ", ".join(f"{k}={v}" for k, v in found.compressor["settings"].items())
    compressor = f", {found.compressor['name']}({settings})" if found.strategy == "log" else ""
    yield "strategy", f"{found.strategy}{compressor}"
    incarnations = count(found.incarnations, "incarnation")
    yield (
        "ranks",
        f"{found.world_size}, {incarnations}; {found.device}, torch {found.torch_version}",
    )


def _whole(found: Inspection) -> Iterator[tuple[str, str]]:
    """Name what is damaged."""
    if not found.damaged:
        what = "nothing, by every checksum; `lowdiff verify` replays, too"
        if not found.is_read:
            what = "nothing seen in headers; `lowdiff verify` reads every byte"
        yield "damaged", what
        return
    for damage in _first_files(found.damage):
        yield "damaged", damage


def _there(found: Inspection) -> Iterator[tuple[str, str]]:
    """List what can be had."""
    ranges = [span(r.first, r.last) for r in found.recoverable_ranges]
    told = f"steps {', '.join(_newest(ranges))}" if ranges else "no step"
    if found.in_memory is not None:
        first, last = found.in_memory.first, found.in_memory.last
        told += f" ({span(first, last)}: in memory, until a reboot)"
    yield "recoverable", told
    snapshots = ", ".join(_newest([str(step) for step in found.snapshots])) or "none"
    yield "snapshots", f"{snapshots} ({size(found.snapshot_bytes)})" if found.snapshots else "none"
    stored = found.differentials
    if stored is not None:
        mean = size(round(stored.bytes / stored.count))
        steps = f"{stored.count}, of steps {span(stored.first, stored.last)}"
        staged = f", {stored.staged} only in staging" if stored.staged else ""
        yield "differentials", f"{steps} ({size(stored.bytes)}, {mean} a step{staged})"
    if found.copies_of:
        yield "copies", f"of rank {', '.join(map(str, found.copies_of))}, on other nodes"
    if found.pins:
        pins = (f"{p.label}: step {p.step}{' (void)' if p.is_void else ''}" for p in found.pins)
        yield "pinned", ", ".join(pins)


def _lost(found: Inspection) -> Iterator[tuple[str, str]]:
    """List what cannot be had, each stretch with its reason."""
    for decision in found.lost_tails:
        yield "predicted" if decision.chosen else "lost", str(decision)
    steps: dict[str, list[str]] = {}
    for missing in found.missing:
        last = missing.last
        told = f"after {missing.first - 1}" if last is None else span(missing.first, last)
        steps.setdefault(missing.why, []).append(told)
    if len(steps) > _REASONS_SHOWN:
        yield "not there", f"and {len(steps) - _REASONS_SHOWN} earlier stretches; --json has all"
    for why, spans in list(steps.items())[-_REASONS_SHOWN:]:
        yield "not there", f"{', '.join(_newest(spans))}: {why}"


def next_commands(run: str, staging: Path | None, found: Inspection) -> list[tuple[str, str]]:
    """Return what may be done next: commands, each with what it does."""
    where = [] if staging is None else ["--staging", str(staging)]

    def command(name: str, *options: str) -> str:
        return shlex.join(["lowdiff", name, run, *options, *where])

    if found.trainer:
        return [(command("inspect", "--watch"), "follow the training")]
    made = []
    if found.damaged:
        made.append((command("verify"), "name all damage, and what still leads around it"))
        if found.recoverable is None:
            made.append(("bring the damaged files back", "nothing is left that leads to a step"))
    if found.staging_elsewhere:
        elsewhere = ["lowdiff", "inspect", run, "--staging", found.staging_elsewhere]
        made.append((shlex.join(elsewhere), "are there more steps? On the machine that trained"))
    if found.recoverable is None:
        if not found.incarnations and not found.damaged:
            made.append(("start the training script", "it begins anew, nothing is there yet"))
        elif not found.damaged:
            made.append((command("verify"), "what is missing?"))
        return made
    first, last = found.recoverable.first, found.recoverable.last
    made.append((command("recover", "--out", "newest.pt"), f"step {last}, for torch.load"))
    if first < last:
        earlier = ("--step", str(first), "--out", f"step{first}.pt")
        made.append((command("recover", *earlier), f"any step from {first} to {last}"))
    if found.strategy == "log" and found.differentials is not None and not found.damaged:
        made.append((command("timeline"), "which step went wrong?"))
    doubt = " at least, or where that leads" if found.staging_elsewhere else ""
    made.append(("start the training script again", f"it goes on at step {last}{doubt}"))
    return made


def _first_files(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    more = len(lines) - _FILES_SHOWN
    return [*lines[:_FILES_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _newest(parts: Sequence[str], number: int = 10) -> list[str]:
    """Return the last parts, behind dots if there are more."""
    return [*(["..."] if len(parts) > number else []), *parts[-number:]]


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
