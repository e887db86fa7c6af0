"""Table of the demo, and what to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lowdiff.demo.run import DemoResult, run_demo

_FAILURES_SHOWN = 5


def main(output: Path, steps: int = 60, world_size: int = 2, seed: int | None = None) -> int:
    """Run the demo, print the table and draw the picture.

    Returns:
        Exit code: 0 when no step was lost and every bit agrees, 1 otherwise.
    """
    result = run_demo(output, steps=steps, world_size=world_size, seed=seed)
    picture = output / "demo.png"
    try:
        from lowdiff.demo.picture import draw
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        print_report(result, Console(), picture="none without matplotlib")
    else:
        draw(result, picture)
        print_report(result, Console(), picture=str(picture))
    return 1 if result.failures else 0


def print_report(result: DemoResult, console: Console, *, picture: str) -> None:
    """Print the table, and the first differences if there are any."""
    reference, resumed, failures = result.reference, result.resumed, result.failures
    num_losses = len(result.killed.losses) + len(resumed.losses)
    full, per_step = result.full_checkpoint_bytes, result.mean_stored_bytes
    lowdiff_seconds = max(reference.lowdiff_seconds.values())
    last = max(reference.losses)
    attached, first_step = resumed.attached_after, min(resumed.times.values())
    table = Table(
        title=f"{result.num_parameters:,} parameters, {result.world_size} workers, "
        f"{result.steps} steps",
        show_header=False,
    )
    for style in ("bold", None, "dim"):
        table.add_column(style=style)
    for row in (
        ("steps lost", _verdict(str(result.steps_lost), good=not result.steps_lost),
         f"step {result.committed} was committed, resumed from {resumed.resumed_from}"),
        ("bit-identical", _verdict("NO" if failures else "yes", good=not failures),
         f"{result.num_values} values and {num_losses} losses compared"),
        ("bytes per step", size_of(per_step), "all ranks, mean"),
        ("full checkpoint", size_of(full), f"{full / per_step:.0f} times that"),
        ("time per step", f"{1000 * reference.step_seconds(1, result.steps):.0f} ms",
         f"{1000 * reference.step_seconds(result.steps + 1, last):.0f} ms after lowdiff was detached"),
        ("training thread", f"{1000 * lowdiff_seconds:.1f} ms per step", "for differentials, mean"),
        ("time to resume", f"{first_step:.1f} s",
         f"launch and attach {attached:.1f}, step {first_step - attached:.1f}"),
    ):  # fmt: skip
        table.add_row(*row)
    console.print(table)
    for failure in failures[:_FAILURES_SHOWN]:
        console.print(failure, style="bold red", markup=False)
    if len(failures) > _FAILURES_SHOWN:
        console.print(f"[red]and {len(failures) - _FAILURES_SHOWN} more[/]")
    console.print(
        f"Picture: {picture}   (seed {result.seed})\n\nTry next, on the run that was killed:"
    )
    commands = [
        (["inspect"], "what can be had?"),
        (["timeline"], "the gradient of each step: which one went wrong?"),
        (["recover", "--step", str(result.steps // 2), "--out", "earlier.pt"], "or any other step"),
    ]
    lines = [
        shlex.join(["lowdiff", name, str(result.run), *options]) for (name, *options), _ in commands
    ]
    for line, (_, what) in zip(lines, commands, strict=True):
        text = f"  {line:<{max(map(len, lines))}}  # {what}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _verdict(text: str, *, good: bool) -> str:
    return f"[bold green]{text}[/]" if good else f"[bold red]{text}[/]"


def size_of(size: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
