"""``lowdiff recover``: write any step as a file, as a folder, or as the start of a new run."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lowdiff.cli.output import (
    AsJson,
    Device,
    Imports,
    RunArgument,
    Staging,
    Workers,
    check_writable,
    count,
    device_named,
    progress,
    say,
    show,
    size,
)
from lowdiff.errors import ConfigError

if TYPE_CHECKING:
    from lowdiff.recovery.inspect.inspection import Forecast


def recover(
    run: RunArgument,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE|DIR",
            help="FILE.pt: a dict of model, optimizer, stateful and step, for "
            "torch.load(FILE, weights_only=True). FILE.safetensors: the model's weights only. "
            "A name without an ending: a folder for torch.distributed.checkpoint.load.",
        ),
    ] = None,
    step: Annotated[
        int | None, Option(min=0, metavar="N", help="Step to recover; default: the newest.")
    ] = None,
    as_run: Annotated[
        Path | None,
        Option(
            metavar="NEW",
            help="Start a new run in folder NEW from that step: one snapshot, nothing shared. "
            "Give NEW to lowdiff.Checkpointer to go on from there.",
        ),
    ] = None,
    plan: Annotated[
        bool, Option("--plan", help="Print what would be read and replayed; write nothing.")
    ] = False,
    as_json: AsJson = False,
    force: Annotated[bool, Option("--force", help="Overwrite FILE.")] = False,
    staging: Staging = None,
    workers: Workers = None,
    device: Device = "cpu",
    imports: Imports = [],  # noqa: B006  (typer copies it)
) -> None:
    """Rebuild the state after any committed step, without the training code.

    Loads the nearest snapshot before the step and replays the differentials on it. If the step
    cannot be recovered, the error lists the steps that can. `lowdiff timeline` helps to choose one.
    """
    if plan:
        from lowdiff.recovery.inspect.inspection import forecast

        show(forecast(run, step, staging), partial(_print_plan, run), as_json=as_json)
        return
    if as_json:
        raise ConfigError("--json belongs to --plan; without it the output is a file")
    if (out is None) == (as_run is None):
        raise ConfigError("give one of --out FILE|DIR, --as-run NEW, or --plan")
    from lowdiff.recovery import recover as rebuild
    from lowdiff.recovery.inspect.branch import start_run
    from lowdiff.recovery.inspect.export import check_output, export
    from lowdiff.recovery.inspect.weights import recover_weights
    from lowdiff.recovery.replay.replayer import ReplayOptions

    options = ReplayOptions(num_workers=workers, device=device_named(device))
    if out is not None:
        check_output(out, overwrite=force)
    if as_run is not None and as_run.exists():
        raise ConfigError(f"{as_run} exists; give the name of a new folder")
    started = time.perf_counter()
    with progress("Replaying") as told:
        check_writable(out or as_run or Path())
        if out is not None and out.suffix == ".safetensors":
            target = out
            state = recover_weights(run, out, step, staging=staging, options=options, progress=told)
        else:
            state = rebuild(run, step, staging=staging, options=options, progress=told)
            target = (
                start_run(state, as_run) if as_run else export(state, out or "", overwrite=force)
            )
    written = sum(f.stat().st_size for f in [target, *target.rglob("*")] if f.is_file())
    say(
        f"{out or as_run}: step {state.step} of {run}, {size(written)}, rebuilt from step "
        f"{state.base_step} in {time.perf_counter() - started:.1f} s"
    )


def _print_plan(run: str, found: Forecast) -> None:
    say(f"Step {found.step} of {run}")
    base = f"snapshot {found.base}"
    if found.in_memory:
        base = f"step {found.base} in memory, which a reboot ends"
    say(f"  base         {base}, {size(found.snapshot_bytes)}")
    if found.differentials:
        steps = count(found.differentials, "differential")
        say(f"  replay       {steps}, {size(found.differential_bytes)}")
    else:
        held = "memory" if found.in_memory else "the snapshot"
        say(f"  replay       nothing: {held} is of that step")
    say(f"  memory       up to {size(found.memory_bytes)}, {size(found.free_bytes)} are free")
