"""The ``lowdiff`` command. Only the commands that need torch import it."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer import Option

from lowdiff import __version__
from lowdiff.cli.follow import follow
from lowdiff.cli.gc import gc
from lowdiff.cli.inspect import inspect
from lowdiff.cli.output import print_warnings, say
from lowdiff.cli.publish import convert, publish, pull
from lowdiff.cli.recover import recover
from lowdiff.cli.timeline import timeline
from lowdiff.cli.tune import plan, tune
from lowdiff.cli.verify import verify
from lowdiff.errors import ConfigError, LowDiffError

_FAILED, _BAD_USAGE = 1, 2

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may have characters that a terminal lacks
            stream.reconfigure(errors="backslashreplace")
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
    """Differential checkpoints for PyTorch: save every step, go back to any that is kept.

    A training script writes checkpoints with lowdiff.Checkpointer. These commands inspect the run
    folders, prove that they are whole, and get states out of them.
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
        int | None, Option(metavar="N", help="Seed of training and kill; default: random.")
    ] = None,
) -> None:
    """Train a small GPT, kill it, resume it, and compare every bit.

    One run is trained without interruption. Another is killed with SIGKILL at a random step and
    started again. The demo compares losses, parameters, optimizer state and random generators of
    both runs, and the time of a step with and without lowdiff. Staging lies in the output
    folder, because /dev/shm is small in many containers. Takes about a minute on two cores;
    exit code 1 if a step was lost or a bit differs.
    """
    from lowdiff.demo import report

    code = report.main(out, steps=steps, world_size=workers, seed=seed)
    raise typer.Exit(code)


app.command(
    epilog="Examples:\n\n"
    "lowdiff inspect runs/gpt\n\n"
    "lowdiff inspect runs/gpt --json | jq .recoverable.last\n\n"
    "lowdiff inspect runs/gpt --watch"
)(inspect)


app.command(
    epilog="Examples:\n\n"
    "lowdiff verify runs/gpt\n\n"
    "lowdiff verify runs/gpt --json | jq -r '.failures[].message'"
)(verify)


app.command(
    epilog="Examples:\n\n"
    "lowdiff recover runs/gpt --out newest.pt\n\n"
    "lowdiff recover runs/gpt --step 4217 --out step4217.safetensors\n\n"
    "lowdiff recover runs/gpt --step 4217 --plan\n\n"
    "lowdiff recover runs/gpt --step 4217 --as-run runs/gpt-from-4217"
)(recover)


app.command(
    epilog="Examples:\n\n"
    "lowdiff follow runs/gpt --every 100 --out newest.safetensors\n\n"
    "lowdiff follow s3://bucket/gpt --json"
)(follow)


app.command(
    epilog="Examples:\n\n"
    "lowdiff publish runs/gpt --to s3://bucket/gpt-weights\n\n"
    "lowdiff publish runs/gpt --to /shared/weights --every 10 --names my_names:to_hf"
)(publish)


app.command(
    epilog="Examples:\n\n"
    "lowdiff pull s3://bucket/gpt-weights --out model.safetensors\n\n"
    "lowdiff pull /shared/weights --out model.safetensors --follow"
)(pull)


app.command(
    epilog="Examples:\n\n"
    "lowdiff convert /shared/weights /shared/slime --to slime --follow\n\n"
    "lowdiff convert trl-repo /shared/weights --from trl --to lowdiff"
)(convert)


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
