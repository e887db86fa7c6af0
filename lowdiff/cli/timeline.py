"""``lowdiff timeline``: measure every step, as a table, JSON and a picture."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lowdiff.cli.output import (
    AsJson,
    Imports,
    RunArgument,
    Staging,
    Workers,
    check_writable,
    count,
    progress,
    say,
    show,
    span,
)
from lowdiff.core.events import printable
from lowdiff.errors import ConfigError

if TYPE_CHECKING:
    from lowdiff.recovery.inspect.timeline import Timeline

_STEPS_SHOWN = 5


def timeline(
    run: RunArgument,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, Option(metavar="FILE.png", help="Draw a picture; needs matplotlib.")
    ] = None,
    first: Annotated[
        int | None, Option(min=1, metavar="N", help="First step; default: the earliest.")
    ] = None,
    last: Annotated[
        int | None, Option(min=1, metavar="N", help="Last step; default: the newest.")
    ] = None,
    staging: Staging = None,
    workers: Workers = None,
    imports: Imports = [],  # noqa: B006  (typer copies it)
) -> None:
    """Measure every step by replaying it, to find the step at which a run went wrong.

    Per step: L2 norms of update and gradient, density of the gradient, learning rates, stored
    bytes. To go back before a step N, use `lowdiff recover RUN --step N-1 --as-run NEW`.
    """
    from lowdiff.recovery.inspect.timeline import timeline as measure
    from lowdiff.recovery.replay.replayer import ReplayOptions

    if out is not None:
        _check_picture(out)
    options = ReplayOptions(num_workers=workers)
    with progress("Replaying") as told:
        found = measure(
            run, first=first, last=last, staging=staging, options=options, progress=told
        )
    show(found, _print, as_json=as_json)
    if out is not None:  # last, so that a full disk does not lose the numbers
        _draw(found, out)
        if not as_json:
            say(f"drawn in {out}")


def _check_picture(out: Path) -> None:
    """Refuse a picture that cannot be drawn, before the run is replayed."""
    if out.suffix != ".png":
        raise ConfigError(f"{out} does not end in .png; for numbers use --json")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give the name of a file")
    try:
        import_module("matplotlib.backends.backend_agg")
    except ModuleNotFoundError as error:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from error
    check_writable(out)


def _print(found: Timeline) -> None:
    from lowdiff.recovery.inspect.timeline import FAR_OUT, FEWEST_STEPS, first_outlier

    if not found.steps:
        say(
            f"{found.run} holds a snapshot, but no step to measure: none was made since, only snapshots "
            "lead to those that were, or none is logged (no compressor). Others may be had: --last STEP"
        )
        return
    largest = sorted(found.steps, key=lambda s: s.update_norm, reverse=True)[:_STEPS_SHOWN]
    steps = count(len(found.steps), "step")
    say(f"{steps}, {found.steps[0].step} to {found.steps[-1].step}; the largest updates:")
    say("      step   update norm  gradient norm  density  lr")
    for step in largest:
        rates = ", ".join(f"{lr:g}" for lr in dict.fromkeys(step.lr))
        say(
            f"{step.step:>10}  {step.update_norm:>12.6g}  {step.gradient_norm:>13.6g}"
            f"  {step.density:>7.2%}  {rates}"
        )
    if found.left_out:
        first, last = found.left_out[0], found.left_out[-1]
        say(
            f"{count(len(found.left_out), 'step')} left out ({span(first, last)}): something was "
            "changed outside the optimizer, so that only a snapshot leads there"
        )
    for decision in found.lost_tails:
        say(str(decision))
    far_out = first_outlier(found.steps)
    if far_out is None and len(found.steps) < FEWEST_STEPS:
        say(f"too few steps to tell whether one is far out of line: it takes {FEWEST_STEPS}")
    elif far_out is None:
        say(
            f"no step is far out of line: no norm is over {FAR_OUT:g} times the median of the steps "
            "before it"
        )
    else:
        say(
            f"the first far out of line is step {far_out.step}; before it: "
            f"lowdiff recover {found.run} --step {far_out.step - 1} --as-run NEW"
        )


def _draw(found: Timeline, out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lowdiff.persistence.files.durable import make_directory, replaced, unwritable

    numbers = [step.step for step in found.steps]
    series = {
        "update norm": [step.update_norm for step in found.steps],
        "gradient norm": [step.gradient_norm for step in found.steps],
        "density": [step.density for step in found.steps],
        "learning rate": [max(step.lr, default=0.0) for step in found.steps],
        "stored bytes": [float(step.stored_bytes) for step in found.steps],
    }
    figure = Figure(figsize=(9.0, 9.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # drawn without pyplot, which would keep global state
    panels = figure.subplots(len(series), 1, sharex=True)
    for axes, (name, values) in zip(panels, series.items(), strict=True):
        axes.plot(numbers, values, color="#1f77b4", linewidth=1.2)
        axes.set_ylabel(name)
        axes.spines[["top", "right"]].set_visible(False)
        if name.endswith("norm") and all(value > 0 for value in values):
            axes.set_yscale("log")
    panels[-1].set_xlabel("step")
    figure.suptitle(printable(str(found.run)), fontsize=11)
    try:
        make_directory(out.parent)
        with replaced(out) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise unwritable(out, error) from error
