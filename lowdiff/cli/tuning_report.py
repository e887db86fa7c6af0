"""``lowdiff tune`` and ``lowdiff plan``: make a report from a run, or from options."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowdiff.cli.output import plain_console, say, show, table
from lowdiff.errors import ConfigError, LowDiffError
from lowdiff.persistence.files.durable import make_directory, unwritable, write_file
from lowdiff.persistence.files.paths import RunFolder, staging_to_read
from lowdiff.persistence.run.fences import read_fence, read_run_id
from lowdiff.persistence.run.journal import read_journal
from lowdiff.persistence.run.owner import staging_of_run
from lowdiff.persistence.staging.measurements import (
    Measurements,
    gather_measurements,
    read_all_measurements,
    read_measurements,
)
from lowdiff.persistence.store.client import is_url
from lowdiff.tuner import units
from lowdiff.tuner.choice import Limits, Setting
from lowdiff.tuner.copies import copies_facts, copies_title, planned_copies
from lowdiff.tuner.costs import Estimate
from lowdiff.tuner.failures import FailurePrior, FailureRates, estimate_rates
from lowdiff.tuner.html import html_page
from lowdiff.tuner.logged import LOGGED_HEADS
from lowdiff.tuner.lost_tail import Curves
from lowdiff.tuner.measured import (
    ASSUMED_NETWORK_BYTES_PER_SECOND,
    Measured,
    MeasuredIncarnation,
    failures_of,
    measure,
    number,
)
from lowdiff.tuner.plan import Job, planned
from lowdiff.tuner.report import (
    STRATEGY_HEADS,
    Question,
    Report,
    basis,
    facts,
    logged,
    make_report,
    published_text,
    strategy_cells,
)
from lowdiff.tuner.side_by_side import (
    COPIES_OVERHEAD_SHARE,
    REPLICA_COPIES_OVERHEAD_SHARE,
    Assumptions,
)
from lowdiff.types import Fence, Retention

#: Compressors that leave nothing out and keep no residual.
_WITHOUT_RESIDUAL = ("cast", "dense")


def limits_of(
    loss_steps: int | None, memory: str | None, per_hour: str | None, total: str | None
) -> Limits:
    """Return the limits that the options set."""

    def size(text: str | None) -> float | None:
        return None if text is None else units.num_bytes(text)

    return Limits(
        staging_bytes=size(memory),
        loss_steps=loss_steps,
        bytes_per_hour=size(per_hour),
        total_bytes=size(total),
    )


def assumptions_of(
    log_overhead: float | None,
    replica_overhead: float,
    survivors_overhead: float,
    *,
    all_at_once: float,
    snapshot_every: int,
    save_time: str | None,
    gradients_overhead: float,
    copies: int = 1,
    copies_overhead: float | None = None,
) -> Assumptions:
    """Return what the table of strategies assumes; no overhead of log if the run has measured it."""
    return Assumptions(
        log_overhead_share=log_overhead,
        replica_overhead_share=replica_overhead,
        survivors_overhead_share=survivors_overhead,
        all_at_once_share=all_at_once,
        snapshot_every=snapshot_every,
        save_seconds=None if save_time is None else units.seconds(save_time),
        copies=copies,
        copies_overhead_share=copies_overhead,
        gradients_overhead_share=gradients_overhead,
    )


def curves_of(path: Path | None) -> Curves | None:
    """Read what is known about predicting lost steps; None without a file.

    Raises:
        ConfigError: If the file cannot be read, or says nothing that curves fit.
    """
    if path is None:
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        losses, errors = (
            [(float(at), float(value)) for at, value in told[key]] for key in ("losses", "errors")
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{path} is no JSON with "losses", pairs of step and loss, and "errors", pairs of saves and error: '
            f"{error!r}"
        ) from error
    return Curves.fit(losses, errors)


def question_of_run(
    run: str,
    *,
    staging: Path | None,
    mtbf_seconds: float | None,
    node_share: float,
    world_size: int | None,
    limits: Limits,
    failure_shape: float,
    assumptions: Assumptions,
    curves: Curves | None = None,
) -> Question:
    """Make the report's input from a run's own measurements; only reads, also from a live run.

    Raises:
        NotARun: If the folder holds no run.
        ConfigError: If nothing was measured, if failures are neither observed nor stated, or if
            there is nothing to tune.
    """
    if is_url(run):
        raise ConfigError(
            f"{run} is an object store; measurements are only in the run folder, give that folder"
        )
    folder = RunFolder(Path(run))
    run_id = read_run_id(folder)
    fences = {number: path for number, _, path in folder.fences()}
    fence = read_fence(fences[max(fences)]) if fences else None  # of any rank
    if fence is not None and not fence.logs_steps:
        raise ConfigError(
            f"{run} was trained without a compressor, by strategy {fence.strategy}: batch_size has no effect there, so "
            "there is nothing to tune; snapshot_every bounds what the loss of the machine costs, at most "
            "2 * snapshot_every steps"
        )
    policy = read_journal(folder, run_id).policy
    documents = _documents(folder, run_id, staging)
    incarnations = [MeasuredIncarnation(d.incarnation, d.samples, d.facts) for d in documents]
    ranks = documents[-1].world_size if documents else 1
    hosts = _num_hosts(folder, documents, world_size)
    measured = measure(incarnations, world_size=world_size or ranks, num_hosts=hosts or 1)
    measured = _with_residual(measured, fence)
    history = failures_of(incarnations).scaled((world_size or ranks) / ranks)
    if mtbf_seconds is None and history.failures == 0:
        raise ConfigError(
            f"{run} has not failed yet, so its rate of failures is unknown; state what you expect, "
            "for example --mtbf 4h"
        )
    prior = None if mtbf_seconds is None else FailurePrior(mtbf_seconds, node_share=node_share)
    newest = documents[-1]
    used = number(newest.facts, "snapshot_every"), number(newest.facts, "batch_size")
    # If machines are unknown, each rank counts as a machine of its own, in favour of alternatives.
    job_size = measured.costs.world_size
    num_nodes = hosts or job_size
    return Question(
        title=run,
        costs=measured.costs,
        estimates=measured.estimates,
        rates=estimate_rates(history, prior),
        limits=limits.with_snapshots(None if policy is None else policy.snapshots),
        num_nodes=num_nodes,
        network_bytes_per_second=ASSUMED_NETWORK_BYTES_PER_SECOND / -(-job_size // num_nodes),
        current=Setting(round(used[0]), round(used[1])) if min(used) >= 1 else None,
        failure_shape=failure_shape,
        assumptions=assumptions,
        known_warnings=(
            *_warnings(documents, measured, world_size, hosts),
            *_network_warnings(
                num_nodes, ASSUMED_NETWORK_BYTES_PER_SECOND, "node" if hosts else "rank"
            ),
            *_retention_warnings(policy),
        ),
        decisions=[decision for document in documents for decision in document.decisions],
        elements=_elements(fence),
        curves=curves,
    )


def _elements(fence: Fence | None) -> float:
    """Return the parameters of a model that every rank has whole; 0 for any other."""
    if fence is None or any(spec.ranks for spec in fence.layout.parameters):
        return 0.0
    return float(sum(spec.numel for spec in fence.layout.parameters))


def _with_residual(measured: Measured, fence: Fence | None) -> Measured:
    """Add the residual's part of a snapshot, which other ways to save a run do not have."""
    if fence is None or fence.compressor["name"] in _WITHOUT_RESIDUAL:
        return measured
    size = float(
        sum(
            4 * p.numel if p.dtype == "float16" else p.nbytes  # as in compressors/feedback.py
            for p in fence.layout.parameters
            if not p.ranks or fence.rank in p.ranks
        )
    )
    if not size < measured.costs.snapshot_bytes:
        return measured  # no snapshot was measured yet
    return _with_cost(measured, "residual_bytes", Estimate(size, size, size, 1))


def _with_cost(measured: Measured, name: str, found: Estimate) -> Measured:
    """Return the costs with another value of one of them."""
    changed: dict[str, Any] = {name: found.median}
    return Measured(replace(measured.costs, **changed), {**measured.estimates, name: found})


def _documents(folder: RunFolder, run_id: str, staging: Path | None) -> list[Measurements]:
    """Return rank 0's measurements of all incarnations; a running one's come from its pages."""
    found = {one.incarnation: one for one in read_all_measurements(folder, run_id, rank=0)}
    root = staging_to_read(staging)
    for stage in staging_of_run(root, folder, run_id):
        fence = folder.fence(stage.incarnation, 0)
        known = found.get(stage.incarnation)
        if stage.rank == 0 and fence.is_file() and not (known and known.ended):
            world_size = read_fence(fence).world_size
            found[stage.incarnation] = gather_measurements(stage, run_id, world_size, ended="")
    return [found[number] for number in sorted(found)]


def _num_hosts(
    folder: RunFolder, documents: list[Measurements], world_size: int | None
) -> int | None:
    """Return the number of machines; None if not all ranks' measurements name their host."""
    if not documents or world_size not in (None, documents[-1].world_size):
        return None
    newest = documents[-1]
    hosts = {newest.facts.get("host")}
    for rank in range(1, newest.world_size):
        try:
            found = read_measurements(folder.measurements(newest.incarnation, rank))
        except (LowDiffError, OSError):
            return None
        if found.run_id != newest.run_id:
            return None
        hosts.add(found.facts.get("host"))
    return None if None in hosts else len(hosts)


def _warnings(
    documents: list[Measurements], measured: Measured, world_size: int | None, hosts: int | None
) -> list[str]:
    """Return warnings that readers of the figures need."""
    newest, warnings = documents[-1], []
    machines = {(d.facts.get("processor"), d.facts.get("cores")) for d in documents}
    if len(machines) > 1:
        warnings.append(
            f"the incarnations were measured on {len(machines)} kinds of machines; costs of steps "
            "and writes are those of the newest, costs of restarts are those of all"
        )
    # os.cpu_count would also count cores that this process may not use.
    here = float(len(os.sched_getaffinity(0)))
    if newest.facts.get("host") not in (None, os.uname().nodename):
        warnings.append(
            f"measured on {newest.facts.get('host')} ({number(newest.facts, 'cores'):.0f} cores), "
            f"not on this machine ({here:.0f} cores): figures hold for a run there"
        )
    if not newest.ended:
        warnings.append(
            "the run is still training, or its machine was lost; figures are its latest"
        )
    if world_size is not None and world_size != newest.world_size:
        warnings.append(
            f"measured with {newest.world_size} ranks and applied to {world_size}: costs per rank "
            "are unchanged, failures are scaled with the number of ranks"
        )
    if hosts is None and measured.estimates["load_seconds"].source == "assumed":
        warnings.append(
            "loading was never measured; on several machines it takes as many times longer as there "
            "are machines"
        )
    return warnings


def _network_warnings(num_nodes: int, bytes_per_second: float, whose: str) -> list[str]:
    """Warn that the network's bandwidth is assumed, if a compared strategy uses the network."""
    if num_nodes == 1:
        return []
    rate = units.readable_bytes(bytes_per_second)
    return [f"the network is assumed to take {rate}/s of each {whose}, for Gemini's copies"]


def _retention_warnings(policy: Retention | None) -> list[str]:
    """Warn if the run holds more than its newest snapshots and the steps after them."""
    if policy is None:
        return ["this run's retention keeps every step: it will hold more than this report says"]
    more = []
    if policy.snapshots is None:
        more.append("snapshots without limit of their number")
    if policy.every_steps is not None:
        more.append(f"each step that is a multiple of {policy.every_steps:,}")
    if policy.age_hours is not None:
        more.append(f"all snapshots of the last {policy.age_hours:g} hours")
    if not more:
        return []
    return [f"this run's retention also keeps {' and '.join(more)}: add that to what is stored"]


def question_of_plan(
    job: Job,
    *,
    mtbf_seconds: float,
    node_share: float,
    limits: Limits,
    failure_shape: float,
    assumptions: Assumptions,
    network_bytes_per_second: float,
    typed: Collection[str],
    curves: Curves | None = None,
) -> Question:
    """Make the report's input for a planned job; ``typed`` are the options that the user typed.

    Raises:
        ConfigError: If there are fewer nodes than copies.
    """
    copies = planned_copies(job, assumptions.copies) if assumptions.copies > 1 else None
    measured = planned(job, typed)
    if "log_overhead" in typed and assumptions.log_overhead_share is not None:
        seconds = assumptions.log_overhead_share * job.step_seconds
        measured = _with_cost(measured, "differential_seconds", Estimate.stated(seconds))
    warnings = []
    if "step_time" not in typed:
        warnings.append(
            f"a step is assumed to take {job.step_seconds:.0f} s; give --step-time, much depends "
            "on it"
        )
    if "log_overhead" not in typed and assumptions.log_overhead_share is not None:
        warnings.append(
            f"the table of strategies takes {assumptions.log_overhead_share:.1%} of a step for strategy "
            "log, as measured on CPUs; all other figures count its copies to memory alone; give "
            "--log-overhead for both"
        )
    if "network" not in typed:
        found = _network_warnings(job.num_nodes, network_bytes_per_second, "node")
        warnings += [f"{text}; give --network" for text in found]
    if copies is not None and "copies_overhead" not in typed:
        warnings.append(
            f"the table of strategies takes {COPIES_OVERHEAD_SHARE:.1%} of a step for copies, and "
            f"{REPLICA_COPIES_OVERHEAD_SHARE:.1%} with strategy replica, as measured on two ranks that "
            "share two cores; give --copies-overhead"
        )
    known = FailureRates.known(mtbf_seconds, node_share=node_share)
    bits = "" if job.value_bits is None else f", value_bits={job.value_bits}"
    return Question(
        title=(
            f"{job.params:.3g} parameters, {job.optimizer}, TopK({job.density:g}{bits}), on "
            f"{job.gpus:,} {'GPU' if job.gpus == 1 else 'GPUs'}"
        ),
        costs=measured.costs,
        estimates=measured.estimates,
        rates=known,
        limits=limits,
        num_nodes=job.num_nodes,
        network_bytes_per_second=network_bytes_per_second / job.ranks_per_node,
        failure_shape=failure_shape,
        assumptions=assumptions,
        copies=copies,
        known_warnings=tuple(warnings),
        assumed_because="not given",
        elements=job.params,
        curves=curves,
    )


def print_report(question: Question, html: Path | None, *, as_json: bool) -> None:
    """Print the report as text or JSON, and write it as HTML if a file is named.

    Raises:
        ConfigError: If the file's path is a folder.
        StorageError: If the file cannot be written.
    """
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html} is a folder; give the name of a file")
    report = make_report(question)
    show(report, _print, as_json=as_json)
    if html is None:
        return
    try:
        make_directory(html.parent)
        write_file(html, html_page(report).encode())
    except OSError as error:
        raise unwritable(html, error) from error
    if not as_json:
        say(f"Report with charts: {html}")


def _print(report: Report) -> None:
    console = plain_console()
    console.print(table((), facts(report), title=report.question.title))
    for reason in report.choice.reasons:
        console.print(f"  {reason}", highlight=False)
    costs = table(
        ("", "median", "middle 80 %", "source"), basis(report), title="Based on, per rank"
    )
    console.print(costs)
    if report.side_by_side is not None:
        rows = [strategy_cells(strategy) for strategy in report.side_by_side.rows]
        strategies = table(STRATEGY_HEADS, rows, title="Strategies")
        console.print(strategies)
        console.print(f"  {published_text(report.side_by_side.published)}", highlight=False)
    if log := logged(report):
        console.print(table(LOGGED_HEADS, log, title="Compressors"))
    if report.question.copies is not None:
        found = report.question.copies
        console.print(table((), copies_facts(found), title=copies_title(found)))
    if report.simulated:
        heads = ("strategy", "effective", "saving", "recovering", "done again", "")
        rows = []
        for one in report.simulated:
            shares = (one.effective_share, one.stalls, one.recovering, one.lost)
            percents = (f"{share:.2%}" for share in shares)
            rows.append((one.strategy.name, *percents, one.strategy.detail))
        console.print(table(heads, rows, title="Simulated"))
    for warning in report.warnings:
        console.print(f"Note: {warning}", style="yellow", highlight=False)
