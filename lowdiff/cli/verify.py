"""``lowdiff verify``: check whether a run is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lowdiff.cli.output import (
    AsJson,
    Device,
    Imports,
    RunArgument,
    Staging,
    Workers,
    count,
    device_named,
    progress,
    say,
    show,
    span,
)

if TYPE_CHECKING:
    from lowdiff.recovery.inspect.verify import VerifyReport

_FAILED = 1


def verify(
    run: RunArgument,
    as_json: AsJson = False,
    staging: Staging = None,
    workers: Workers = None,
    device: Device = "cpu",
    imports: Imports = [],  # noqa: B006  (typer copies it)
) -> None:
    """Check every checksum, replay from snapshot to snapshot, compare bit for bit.

    Changes nothing, and reads all records instead of footers. Exit code 1 if anything is damaged,
    lost or different; the first difference is named. A record that was torn when its writer died is
    reported, but is no failure as long as no step depends on it.
    """
    from lowdiff.recovery.inspect.verify import verify as check
    from lowdiff.recovery.replay.replayer import ReplayOptions

    options = ReplayOptions(num_workers=workers, device=device_named(device))
    with progress("Replaying") as told:
        report = check(run, staging, options=options, progress=told)
    show(report, _print_report, as_json=as_json)
    raise typer.Exit(0 if report.ok else _FAILED)


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
        say(f"Rebuilt {span(*report.in_memory)} from memory, which a reboot ends")
    for remark in report.notes:
        say(f"Note: {remark.message}")
    for failure in report.failures:
        say(f"FAILED: {failure.message}", color="red")
    ranges = ", ".join(span(first, last) for first, last in report.recoverable)
    verdict = "The run is whole" if report.ok else f"{count(len(report.failures), 'failure')}"
    say(f"{verdict}; recoverable steps: {ranges or 'none'}")
