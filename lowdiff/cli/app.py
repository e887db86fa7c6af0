"""The ``lowdiff`` command. Torch is imported only by the commands that need it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Option

from lowdiff import __version__
from lowdiff.cli.gc import gc
from lowdiff.cli.output import (
    AsJson,
    Device,
    Imports,
    RunArgument,
    Staging,
    Workers,
    count,
    device_named,
    plain_console,
    print_warnings,
    progress,
    say,
    show,
    size,
    span,
)
from lowdiff.cli.recover import recover
from lowdiff.cli.timeline import timeline
from lowdiff.cli.tune import plan, tune
from lowdiff.errors import ConfigError, LowDiffError

if TYPE_CHECKING:
    from rich.table import Table

    from lowdiff.persistence.run.progress import RunProgress
    from lowdiff.recovery.inspect.inspection import Inspection
    from lowdiff.recovery.inspect.verify import VerifyReport

_FAILED, _BAD_USAGE = 1, 2
_STEPS_SHOWN = 10

app = typer.Typer(
    name="lowdiff",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """Run the command line and exit: 0, 1 for bad data, 2 for bad usage."""
    print_warnings()
    try:
        app(prog_name="lowdiff")
    except ConfigError as error:
        _exit(error, _BAD_USAGE)
    except (LowDiffError, OSError) as error:
        _exit(error, _FAILED)
    sys.exit(0)


def _exit(error: Exception, code: int) -> NoReturn:
    say(f"lowdiff: {error}", err=True)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"lowdiff {__version__}")
        raise typer.Exit


@app.callback(epilog="Start with: lowdiff demo\n\nEvery command explains itself: lowdiff verify -h")
def _lowdiff(
    version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Differential checkpoints for PyTorch: every step saved, any step back.

    A training script writes checkpoints with lowdiff.Checkpointer; these commands look at the
    run folders it leaves, prove that they are whole, and get states out of them.
    """


@app.command(
    epilog="Examples:\n\n"
    "lowdiff demo\n\n"
    "lowdiff demo --workers 3 --steps 200 --seed 7 --out /tmp/demo"
)
def demo(
    out: Annotated[
        Path, Option(metavar="DIR", help="Folder for runs, their staging, logs and picture.")
    ] = Path("demo-output"),
    steps: Annotated[int, Option(metavar="N", help="Steps of each run.")] = 60,
    workers: Annotated[int, Option(metavar="N", help="Training processes.")] = 2,
    seed: Annotated[
        int | None, Option(metavar="N", help="Of training and kill; default: random.")
    ] = None,
) -> None:
    """Train a small GPT, kill it, resume it, and compare every bit.

    One run goes through undisturbed. Another is killed with SIGKILL at a random step and started
    again. Then losses, parameters, optimizer state and generators of the two are compared, and the
    time of a step with that after lowdiff was detached. Staging lies in the output
    folder, because /dev/shm is small in many containers. Takes about two minutes on two cores;
    exit code 1 if a step was lost or a bit differs.
    """
    try:
        from lowdiff.demo import report

        code = report.main(out, steps=steps, world_size=workers, seed=seed)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        raise ConfigError(
            "the demo draws a picture and needs matplotlib: pip install matplotlib"
        ) from error
    raise typer.Exit(code)


@app.command(
    epilog="Examples:\n\n"
    "lowdiff inspect runs/gpt\n\n"
    "lowdiff inspect runs/gpt --json | jq .recoverable.last\n\n"
    "lowdiff inspect runs/gpt --watch"
)
def inspect(
    run: RunArgument,
    as_json: AsJson = False,
    staging: Staging = None,
    watch: Annotated[
        bool, Option("--watch", help="Show how far each rank is, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, Option(min=0.1, metavar="SECONDS", help="Between refreshes of --watch.")
    ] = 1.0,
) -> None:
    """Say what a run holds and which steps can be recovered.

    Reads headers and checksums only, and of large runs the index of their segments; `verify` reads
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


@app.command(
    epilog="Examples:\n\n"
    "lowdiff verify runs/gpt\n\n"
    "lowdiff verify runs/gpt --json | jq -r '.failures[].message'"
)
def verify(
    run: RunArgument,
    as_json: AsJson = False,
    staging: Staging = None,
    workers: Workers = None,
    device: Device = "cpu",
    imports: Imports = [],  # noqa: B006  (typer copies it)
) -> None:
    """Check every checksum, replay from snapshot to snapshot, compare bit for bit.

    Changes nothing, and believes no index of segments. Exit code 1 if anything is damaged, lost or
    different; the first difference is named. A record that was torn when its writer died is a note,
    not a failure, as long as no step depends on it.
    """
    from lowdiff.recovery.inspect.verify import verify as check
    from lowdiff.recovery.replay.replayer import ReplayOptions

    options = ReplayOptions(num_workers=workers, device=device_named(device))
    with progress("Replaying") as told:
        report = check(run, staging, options=options, progress=told)
    show(report, _print_report, as_json=as_json)
    raise typer.Exit(0 if report.ok else _FAILED)


app.command(
    epilog="Examples:\n\n"
    "lowdiff recover runs/gpt --out newest.pt\n\n"
    "lowdiff recover runs/gpt --step 4217 --out step4217.safetensors\n\n"
    "lowdiff recover runs/gpt --step 4217 --plan\n\n"
    "lowdiff recover runs/gpt --step 4217 --as-run runs/gpt-from-4217"
)(recover)


app.command(
    epilog="Examples:\n\n"
    "lowdiff timeline runs/gpt --out timeline.png\n\n"
    "lowdiff timeline runs/gpt --json | jq '.steps[] | [.step, .gradient_norm]'"
)(timeline)


app.command(
    epilog="Examples:\n\n"
    "lowdiff gc runs/gpt --dry-run\n\n"
    "lowdiff gc runs/gpt --keep-snapshots 5 --every-steps 10000\n\n"
    "lowdiff gc --staging\n\n"
    "lowdiff gc runs/gpt --staging --yes"
)(gc)


app.command(
    epilog="Examples:\n\n"
    "lowdiff tune runs/gpt --mtbf 4h\n\n"
    "lowdiff tune runs/gpt --mtbf 3h --world-size 16384 --html report.html"
)(tune)
app.command(
    epilog="Example:\n\n"
    "lowdiff plan --params 1.3e9 --optimizer adamw --density 0.01 --gpus 16 --mtbf 8h --disk 1GB/s"
)(plan)


def _print_inspection(run: str, found: Inspection) -> None:
    from rich import box
    from rich.table import Table

    table = Table(show_header=False, box=box.SIMPLE)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(found):
        table.add_row(name, value)
    console = plain_console()
    console.print(run, style="italic", highlight=False, soft_wrap=True)
    console.print(table)


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
        told += f" ({span(first, last)}: in the replicas' memory, until a reboot)"
    yield "recoverable", told
    if found.pins:
        pins = (f"{p.label}: step {p.step}{' (void)' if p.is_void else ''}" for p in found.pins)
        yield "pinned", ", ".join(pins)
    if found.damaged:
        names = "names it" if found.damaged == 1 else "names them"
        yield "damaged", f"{count(found.damaged, 'file')}; `lowdiff verify` {names}"


def _watch(run: Path, staging: Path | None, every_seconds: float) -> None:
    """Show how far a run is until Ctrl-C, which is the way to end it and no error."""
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
    """How far each rank of a run is."""
    from rich import box
    from rich.table import Table

    life = "no incarnation yet" if found.incarnation is None else f"incarnation {found.incarnation}"
    steps = {"committed": found.committed_step, "durable": found.durable_step}
    told = ", ".join(f"{name} {_step(step)}" for name, step in steps.items())
    table = Table(title=f"{run}: {life}", caption=f"{told}; Ctrl-C ends", box=box.SIMPLE)
    for name in ("rank", "trainer", "staged", "durable", "snapshot", "on disk", "writer"):
        table.add_column(name, overflow="fold")
    for rank in found.ranks:
        said = ", preempted" if rank.preempted else ""
        if rank.commit_age_seconds is not None:
            said += f", {rank.commit_age_seconds:.0f} s ago"
        table.add_row(
            str(rank.rank),
            rank.trainer + said,
            _step(rank.staged_step),
            _step(rank.durable_step),
            "none" if rank.durable_snapshot < 0 else str(rank.durable_snapshot),
            size(rank.disk_bytes),
            rank.error or "ok",
        )
    return table


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)


def _print_report(report: VerifyReport) -> None:
    checked = report.checked
    say(
        f"Checksums: {count(checked.fences, 'fence')} of "
        f"{count(checked.incarnations, 'incarnation')}, {count(checked.shards, 'snapshot file')}, "
        f"{count(checked.segments, 'segment')}, {count(checked.chunks, 'staging file')} with "
        f"{count(checked.records, 'differential')}"
    )
    for replay in report.replays:
        against = f"every bit as in snapshot {replay.last}"
        if not replay.compared:
            against = "agrees with the digests of the live run"
        say(f"Replayed {replay.first} to {replay.last}: {against}")
    if report.in_memory is not None:
        say(f"Rebuilt {span(*report.in_memory)} from the replicas' memory, which a reboot ends")
    for note in report.notes:
        say(f"Note: {note.message}")
    for failure in report.failures:
        say(f"FAILED: {failure.message}", color="red")
    ranges = ", ".join(span(first, last) for first, last in report.recoverable)
    verdict = "The run is whole" if report.ok else f"{count(len(report.failures), 'failure')}"
    say(f"{verdict}; recoverable steps: {ranges or 'none'}")


def _list(steps: tuple[int, ...]) -> str:
    shown = [str(step) for step in steps[-_STEPS_SHOWN:]]
    return ", ".join(["...", *shown] if len(steps) > _STEPS_SHOWN else shown) or "none"
