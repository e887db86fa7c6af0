"""``lowdiff follow``: a state that stays seconds behind a run, in a process that does not train."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

from typer import Option

from lowdiff.cli.output import Imports, RunArgument, Staging, Workers, say
from lowdiff.errors import ConfigError


def follow(
    run: RunArgument,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="FILE.pt or FILE.safetensors, written anew at each step that is followed; see "
            "`lowdiff recover`.",
        ),
    ] = None,
    every: Annotated[int, Option(min=1, metavar="N", help="Follow multiples of N steps only.")] = 1,
    until: Annotated[
        int | None, Option(min=0, metavar="N", help="End once step N is followed.")
    ] = None,
    look_seconds: Annotated[
        float, Option(min=0.01, metavar="SECONDS", help="Time between looks at the run.")
    ] = 0.5,
    durable: Annotated[
        bool, Option("--durable", help="Follow steps only once they are on a disk or in the store.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print a JSON document per line instead of text.")
    ] = False,
    staging: Staging = None,
    workers: Workers = None,
    imports: Imports = [],  # noqa: B006  (typer copies it)
) -> None:
    """Keep the state of a run in this process, a moment behind its trainers, until Ctrl-C.

    Reads what the run leaves in staging memory, in its folder or in its store. Trainers do not
    notice. The run may not have begun yet, and may be killed and go on.
    """
    from lowdiff.recovery.follower import Follower
    from lowdiff.recovery.inspect.export import check_output, export
    from lowdiff.recovery.replay.replayer import ReplayOptions

    if out is not None:
        if not out.suffix:
            raise ConfigError(
                f"--out {out}: give FILE.pt or FILE.safetensors, which is written anew at each step; "
                "a folder for torch.distributed.checkpoint is written by `lowdiff recover`"
            )
        check_output(out, overwrite=True)
    options = ReplayOptions(num_workers=workers)
    with Follower(run, staging=staging, options=options, durable=durable) as follower:
        while until is None or follower.step < until:
            if not follower.look(every):
                time.sleep(look_seconds)
                continue
            if out is not None:
                export(follower.state, out, overwrite=True)
            told = {"step": follower.step, "incarnation": follower.incarnation}
            say(json.dumps(told) if as_json else f"step {follower.step}")
