"""Options of ``lowdiff tune`` and ``lowdiff plan``. The work is imported only when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from lowdiff.cli.output import AsJson
from lowdiff.errors import ConfigError

#: Largest number of ranks: more than any machine has, and within the range of the cost model.
_MOST_RANKS = 10_000_000

# Options of both commands.
Html = Annotated[
    Path | None, Option(metavar="FILE", help="Write the report with charts as one HTML file.")
]
NodeShare = Annotated[
    float,
    Option(min=0, max=1, metavar="P", help="Share of failures that lose a node's memory, 0 to 1."),
]
FailureShape = Annotated[
    float,
    Option(
        min=0.1, metavar="K", help="Weibull shape of the simulated failures; below 1 they cluster."
    ),
]
MaxLoss = Annotated[
    int | None, Option(min=2, metavar="STEPS", help="Most steps the loss of a node may take.")
]
Memory = Annotated[
    str | None,
    Option(
        metavar="SIZE",
        help="Staging memory of a rank for a snapshot and two batches, e.g. 16GB; the copies of "
        "its error-feedback residual come on top.",
    ),
]
PerHour = Annotated[
    str | None, Option(metavar="SIZE", help="Most bytes all ranks write in an hour.")
]
Total = Annotated[
    str | None, Option(metavar="SIZE", help="Most bytes the run may hold, of all ranks.")
]

# What the table of strategies assumes; defaults are those of lowdiff.tuner.side_by_side.
ReplicaOverhead = Annotated[
    float,
    Option(
        min=0,
        metavar="P",
        help="What strategy replica adds to a step, as a share of it; the default was measured on "
        "CPUs, see docs/benchmarks.md; `plan` counts with more where a CPU cannot apply steps of that size in time.",
    ),
]
GradientsOverhead = Annotated[
    float,
    Option(
        min=0,
        metavar="P",
        help="What strategy gradients adds to a step, with its images; the default was measured on a CPU, see "
        "docs/benchmarks.md.",
    ),
]
SurvivorsOverhead = Annotated[
    float,
    Option(
        min=0,
        metavar="P",
        help="What strategy survivors adds to a step, without its snapshots; the default was measured "
        "on a CPU, see docs/tuning.md.",
    ),
]
AllAtOnce = Annotated[
    float,
    Option(
        min=0,
        max=1,
        metavar="P",
        help="Share of the other failures that leave no rank alive, so that strategy survivors goes "
        "back to a snapshot; the default is assumed.",
    ),
]
SnapshotEvery = Annotated[
    int,
    Option(
        min=1,
        metavar="STEPS",
        help="Between full snapshots of strategies gradients, replica and survivors; those of log are recommended.",
    ),
]
SaveTime = Annotated[
    str | None,
    Option(
        metavar="TIME",
        help="One torch.save of the whole state; default: copying it and writing it to one node's disk.",
    ),
]

LostTail = Annotated[
    Path | None,
    Option(
        metavar="FILE.json",
        help="Losses of a training and errors of a predictor: says how often to save if steps that are "
        "lost with a node were predicted, see docs/lost_tail.md.",
    ),
]


def tune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    mtbf: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="Expected time between failures of the whole job, e.g. 4h; blended with those the "
            "run has had. Needed until it has had one.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        Option(
            min=1,
            max=_MOST_RANKS,
            metavar="N",
            help="Ranks of the job in question, if not the run's; failures it has had count so "
            "many times as often.",
        ),
    ] = None,
    staging: Annotated[
        Path | None,
        Option(metavar="DIR", help="Folder passed to Checkpointer(staging=...), if any."),
    ] = None,
    node_share: NodeShare = 0.5,
    max_loss: MaxLoss = None,
    memory: Memory = None,
    per_hour: PerHour = None,
    total: Total = None,
    failure_shape: FailureShape = 1.0,
    gradients_overhead: GradientsOverhead = 0.048,
    replica_overhead: ReplicaOverhead = 0.039,
    survivors_overhead: SurvivorsOverhead = 0.006,
    all_at_once: AllAtOnce = 0.05,
    snapshot_every: SnapshotEvery = 100,
    save_time: SaveTime = None,
    lost_tail: LostTail = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Recommend how often a run should snapshot and how much to write at once, with reasons.

    Uses the run's own measurements of steps, stalls, writes, restarts and failures, and compares
    strategies. Only reads files; works while the run is training and after a crash.
    """
    from lowdiff.cli.tuning_report import (
        assumptions_of,
        curves_of,
        limits_of,
        print_report,
        question_of_run,
    )
    from lowdiff.tuner import units

    question = question_of_run(
        run,
        staging=staging,
        mtbf_seconds=None if mtbf is None else units.seconds(mtbf),
        node_share=node_share,
        world_size=world_size,
        limits=limits_of(max_loss, memory, per_hour, total),
        failure_shape=failure_shape,
        assumptions=assumptions_of(
            None,
            replica_overhead,
            survivors_overhead,
            all_at_once=all_at_once,
            snapshot_every=snapshot_every,
            save_time=save_time,
            gradients_overhead=gradients_overhead,
        ),
        curves=curves_of(lost_tail),
    )
    print_report(question, html, as_json=as_json)


def plan(
    context: typer.Context,
    params: Annotated[str, Option(metavar="N", help="Parameters of the model, e.g. 7e9.")],
    gpus: Annotated[int, Option(min=1, max=_MOST_RANKS, metavar="N", help="GPUs, each a rank.")],
    mtbf: Annotated[
        str,
        Option(
            metavar="TIME",
            help="Time between failures of the whole job, e.g. 6h; 12h are two failures a day.",
        ),
    ],
    disk: Annotated[str, Option(metavar="RATE", help="Durable bandwidth of one node, e.g. 2GB/s.")],
    store: Annotated[
        str | None,
        Option(metavar="RATE", help="What one node uploads to an object store, if there is one."),
    ] = None,
    optimizer: Annotated[
        str, Option(metavar="NAME", help="sgd, momentum, adagrad, rmsprop, lion, adam, adamw.")
    ] = "adamw",
    density: Annotated[
        float,
        Option(
            metavar="P",
            help="Share of each gradient that TopK keeps; the residual that it needs is counted.",
        ),
    ] = 0.01,
    value_bits: Annotated[
        int | None,
        Option(metavar="BITS", help="Bits of a value that TopK keeps, 2 or 4, instead of 32."),
    ] = None,
    step_time: Annotated[
        str | None, Option(metavar="TIME", help="One training step, e.g. 5s.")
    ] = None,
    gpus_per_node: Annotated[
        int, Option(min=1, max=_MOST_RANKS, metavar="N", help="Ranks that share a node's disk.")
    ] = 8,
    nodes: Annotated[
        int | None,
        Option(
            min=1,
            max=_MOST_RANKS,
            metavar="N",
            help="Nodes that the GPUs are spread over, instead of --gpus-per-node.",
        ),
    ] = None,
    copies: Annotated[
        int,
        Option(
            min=1,
            metavar="M",
            help="Nodes in whose memory a rank's data lies, its own included: Checkpointer(copies=M).",
        ),
    ] = 1,
    copies_overhead: Annotated[
        float | None,
        Option(
            min=0,
            metavar="P",
            help="What copies on other nodes add to a step, as a share of it; the default was measured "
            "on CPUs, see docs/tuning.md.",
        ),
    ] = None,
    copy: Annotated[
        str, Option(metavar="RATE", help="From a GPU to the node's memory.")
    ] = "10GB/s",
    network: Annotated[
        str,
        Option(metavar="RATE", help="Of one node, to the other nodes, for comparison with Gemini."),
    ] = "10GB/s",
    restart: Annotated[
        str, Option(metavar="TIME", help="From a failure until loading begins.")
    ] = "2min",
    node_share: NodeShare = 0.5,
    max_loss: MaxLoss = None,
    memory: Memory = None,
    per_hour: PerHour = None,
    total: Total = None,
    failure_shape: FailureShape = 1.0,
    log_overhead: Annotated[
        float,
        Option(
            min=0,
            metavar="P",
            help="What strategy log adds to a step, as a share of it; the default, in the table of "
            "strategies alone, was measured on CPUs, see docs/benchmarks.md.",
        ),
    ] = 0.041,
    gradients_overhead: GradientsOverhead = 0.048,
    replica_overhead: ReplicaOverhead = 0.039,
    survivors_overhead: SurvivorsOverhead = 0.006,
    all_at_once: AllAtOnce = 0.05,
    snapshot_every: SnapshotEvery = 100,
    save_time: SaveTime = None,
    lost_tail: LostTail = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Recommend how often a planned job should snapshot and how much to write at once.

    Computes the costs from the sizes of model and machines, and compares strategies. The report marks
    assumed values.
    """
    from lowdiff.cli.tuning_report import (
        assumptions_of,
        curves_of,
        limits_of,
        print_report,
        question_of_plan,
    )
    from lowdiff.tuner import units
    from lowdiff.tuner.plan import ASSUMED_STEP_SECONDS, Job, spread
    from lowdiff.tuner.side_by_side import replica_overhead_share

    # Options that the user typed. Values do not tell, because a user may type a default.
    sources = {name: context.get_parameter_source(name) for name in context.params}
    # Compare by name, because the enumeration's package depends on the release of typer.
    typed = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if nodes is not None:
        if "gpus_per_node" in typed:
            raise ConfigError(
                "give --nodes or --gpus-per-node, not both: each follows from the other"
            )
        gpus_per_node = spread(gpus, nodes)
        typed.add("gpus_per_node")
    job = Job(
        params=units.count(params),
        optimizer=optimizer,
        density=density,
        value_bits=value_bits,
        gpus=gpus,
        step_seconds=ASSUMED_STEP_SECONDS if step_time is None else units.seconds(step_time),
        disk_bytes_per_second=units.bytes_per_second(disk),
        gpus_per_node=gpus_per_node,
        copy_bytes_per_second=units.bytes_per_second(copy),
        restart_seconds=units.seconds(restart),
        store_bytes_per_second=0.0 if store is None else units.bytes_per_second(store),
    )
    if "replica_overhead" not in typed:
        replica_overhead = replica_overhead_share(job.params / job.gpus, job.step_seconds)
    question = question_of_plan(
        job,
        mtbf_seconds=units.seconds(mtbf),
        node_share=node_share,
        limits=limits_of(max_loss, memory, per_hour, total),
        failure_shape=failure_shape,
        network_bytes_per_second=units.bytes_per_second(network),
        assumptions=assumptions_of(
            log_overhead,
            replica_overhead,
            survivors_overhead,
            all_at_once=all_at_once,
            snapshot_every=snapshot_every,
            save_time=save_time,
            gradients_overhead=gradients_overhead,
            copies=copies,
            copies_overhead=copies_overhead,
        ),
        typed=typed,
        curves=curves_of(lost_tail),
    )
    print_report(question, html, as_json=as_json)
