"""``lowdiff publish``, ``pull`` and ``convert``: weights of a run for those who serve them."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import typer
from typer import Argument, Option

from lowdiff.cli.output import Imports, RunArgument, Staging, say
from lowdiff.errors import ConfigError

Json = Annotated[bool, Option("--json", help="Print a JSON document per line instead of text.")]


def publish(
    run: RunArgument,
    to: Annotated[str, Option(metavar="TARGET", help="Folder or URL, for this run alone.")],
    dtype: Annotated[
        str, Option(help="Rounds floating-point tensors; `none` leaves them as they are.")
    ] = "bfloat16",
    every: Annotated[int, Option(min=1, metavar="N", help="Publish multiples of N steps.")] = 1,
    anchor_every: Annotated[
        int, Option(min=1, metavar="N", help="Every N-th version holds all weights.")
    ] = 100,
    keep_anchors: Annotated[
        int, Option(min=1, metavar="N", help="Anchors that stay, with what follows them.")
    ] = 2,
    names: Annotated[
        str | None,
        Option(
            metavar="MODULE:FUNCTION",
            help="Gives each tensor's published name for its own, or None to leave it out.",
        ),
    ] = None,
    durable: Annotated[
        bool, Option("--durable", help="Publish steps once they are on a disk or in the store.")
    ] = False,
    until: Annotated[
        int | None, Option(min=0, metavar="N", help="End once step N is published.")
    ] = None,
    look_seconds: Annotated[
        float, Option(min=0.01, metavar="SECONDS", help="Time between looks at the run.")
    ] = 0.5,
    as_json: Json = False,
    staging: Staging = None,
    imports: Imports = [],  # noqa: B006  (typer copies it)
) -> None:
    """Publish the weights of a run, a version for each step, until Ctrl-C.

    For a run that does not publish by itself (`Checkpointer(publish=...)`). Reads what the run
    leaves; its trainers do not notice. The run may not have begun yet, and may be killed and go on.
    """
    from lowdiff.recovery.publish.publishing import Publishing
    from lowdiff.types import Publisher

    chosen = Publisher(
        to,
        dtype=None if dtype == "none" else dtype,
        every=every,
        anchor_every=anchor_every,
        keep_anchors=keep_anchors,
        names=None if names is None else _function(names),
        durable=durable,
    )
    with Publishing(run, chosen, staging=staging) as publishing:
        while until is None or publishing.step < until or publishing.error:
            made = publishing.next()
            if made is None:
                time.sleep(look_seconds)
                continue
            told = {"version": made.version, "step": made.step, "bytes": sum(made.parts)}
            told["anchor"] = made.base is None
            kind = "anchor" if made.base is None else "changes"
            text = f"version {made.version}: step {made.step}, {kind}, {sum(made.parts)} bytes"
            say(json.dumps(told) if as_json else text)


def _function(name: str) -> Callable[[str], str | None]:
    module, _, function = name.partition(":")
    try:
        return cast(Callable[[str], str | None], getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--names {name}: give MODULE:FUNCTION ({error})") from error


def pull(
    target: Annotated[str, Argument(metavar="TARGET", help="Folder or URL of published weights.")],
    out: Annotated[
        Path, Option(metavar="FILE", help="FILE.safetensors, written anew with each version.")
    ],
    follow: Annotated[
        bool, Option("--follow", help="Go on with each newer version, until Ctrl-C.")
    ] = False,
    wait_seconds: Annotated[
        float, Option(min=0, metavar="SECONDS", help="How long to wait for the first version.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Write the newest published weights as a safetensors file; needs no torch."""
    from lowdiff.persistence.versions.subscriber import Subscriber

    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: the name of the file ends in .safetensors")
    count = 0
    for version in Subscriber(target, idle_seconds=None if follow else wait_seconds):
        version.save(out)
        told = {"version": version.number, "step": version.step, "incarnation": version.incarnation}
        say(json.dumps(told) if as_json else f"{version}: {out}")
        count += 1
        if not follow:
            return
    if not count:
        say(f"lowdiff: {target} holds no version", err=True)
        raise typer.Exit(1)


def convert(
    source: Annotated[str, Argument(metavar="SOURCE", help="Folder; of lowdiff also a URL.")],
    target: Annotated[str, Argument(metavar="TARGET", help="Folder.")],
    source_layout: Annotated[
        str, Option("--from", metavar="LAYOUT", help="lowdiff, slime or trl.")
    ] = "lowdiff",
    target_layout: Annotated[
        str, Option("--to", metavar="LAYOUT", help="lowdiff, slime or trl.")
    ] = "slime",
    anchor_every: Annotated[
        int, Option(min=1, metavar="N", help="Every N-th version holds all weights.")
    ] = 100,
    follow: Annotated[
        bool, Option("--follow", help="From lowdiff: go on with each newer version, until Ctrl-C.")
    ] = False,
) -> None:
    """Copy published weights into the layout that another system reads."""
    from lowdiff.persistence.versions.layouts import convert as converted

    found = converted(
        source,
        target,
        source_layout=source_layout,
        target_layout=target_layout,
        anchor_every=anchor_every,
        follow=follow,
    )
    for step in found:
        say(f"step {step}")
