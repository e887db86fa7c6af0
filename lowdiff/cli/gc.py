"""Options of ``lowdiff gc``. The work is imported only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lowdiff.cli.output import AsJson
from lowdiff.errors import ConfigError


def gc(
    run: Annotated[
        str | None,
        Argument(metavar="RUN", help="Run folder; with --staging also one that was deleted."),
    ] = None,
    keep_snapshots: Annotated[
        int | None, Option(min=1, metavar="N", help="Keep the newest N, and all later steps.")
    ] = None,
    every_steps: Annotated[
        int | None, Option(min=1, metavar="K", help="Keep every K-th step for ever.")
    ] = None,
    age_hours: Annotated[
        float | None, Option(metavar="H", help="Also keep snapshots younger than H hours.")
    ] = None,
    total_bytes: Annotated[
        str | None,
        Option(
            metavar="SIZE", help="Keep fewer snapshots until all fits, e.g. 80GB or 80000000000."
        ),
    ] = None,
    unpin: Annotated[
        list[str] | None,
        Option(metavar="LABEL", help="Remove this pin first; may be repeated."),
    ] = None,
    staging: Annotated[
        bool, Option("--staging", help="List what dead runs left in memory (tmpfs) instead.")
    ] = False,
    staging_folder: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="With --staging: folder passed to Checkpointer(staging=...), if any.",
        ),
    ] = None,
    all_runs: Annotated[
        bool, Option("--all-runs", help="With --staging and --yes: of every run.")
    ] = False,
    yes: Annotated[
        bool, Option("--yes", help="With --staging, and RUN or --all-runs: remove what may go.")
    ] = False,
    force: Annotated[
        bool, Option("--force", help="With --staging: also steps that are nowhere else.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old steps of a run, or the staging memory of dead runs.

    Applies the retention policy of the run's trainer; each option replaces one part of the policy.
    The newest snapshot, all steps after it, and pinned steps always stay. Only snapshots whose
    checksums hold count. Safe while the run is training, and when interrupted.

    With --staging, lists which staging folders of dead runs can be removed, for RUN or for all
    runs. Removes them only with --yes, together with RUN or --all-runs.
    """
    from lowdiff.cli.collect import clear_memory, collect_run
    from lowdiff.persistence.store.client import is_url
    from lowdiff.tuner import units

    if run is not None and is_url(run):
        raise ConfigError(
            f"{run} is an object store; collecting works on a run folder, give that folder"
        )
    options = {
        "snapshots": keep_snapshots,
        "every_steps": every_steps,
        "age_hours": age_hours,
        "total_bytes": None if total_bytes is None else int(units.num_bytes(total_bytes)),
    }
    changes = {name: value for name, value in options.items() if value is not None}
    if staging:
        if changes or unpin:
            raise ConfigError("--staging goes with its own options, --dry-run and --json only")
        if run is not None and all_runs:
            raise ConfigError("--staging takes either a run or --all-runs")
        if yes and run is None and not all_runs:
            raise ConfigError(
                "--yes needs a run or --all-runs: lowdiff gc RUN --staging --yes removes that run's "
                "memory only"
            )
        clear_memory(
            staging_folder,
            None if run is None else Path(run),
            force=force,
            dry_run=dry_run or not yes,
            as_json=as_json,
        )
        return
    of_staging = {
        "--force": force, "--yes": yes, "--all-runs": all_runs,
        "--staging-folder": staging_folder is not None,
    }  # fmt: skip
    wrong = [name for name, is_given in of_staging.items() if is_given]
    if wrong:
        raise ConfigError(f"{wrong[0]} goes with --staging only")
    if run is None:
        raise ConfigError("say which run: lowdiff gc RUN, or lowdiff gc --staging")
    collect_run(Path(run), changes, unpin or [], dry_run, as_json)
