"""``lowdiff tune`` and ``lowdiff plan``: from a run, or from options, to the report."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from lowdiff.cli.output import plain_console, say, show
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
from lowdiff.tuner.estimates import Estimate
from lowdiff.tuner.facts import basis, facts
from lowdiff.tuner.failures import FailurePrior, FailureRates, estimate_rates
from lowdiff.tuner.html import html_page
from lowdiff.tuner.measured import (
    ASSUMED_NETWORK_BYTES_PER_SECOND,
    Measured,
    MeasuredIncarnation,
    failures_of,
    measure,
    number,
)
from lowdiff.tuner.plan import Job, planned
from lowdiff.tuner.report import Question, Report, make_report
from lowdiff.types import Fence, Retention

#: Compressors that leave nothing out, so that they keep no residual.
_WITHOUT_RESIDUAL = ("cast", "dense")


def limits_of(
    loss_steps: int | None, memory: str | None, per_hour: str | None, total: str | None
) -> Limits:
    """Limits from options."""

    def size(text: str | None) -> float | None:
        return None if text is None else units.num_bytes(text)

    return Limits(
        staging_bytes=size(memory),
        loss_steps=loss_steps,
        bytes_per_hour=size(per_hour),
        total_bytes=size(total),
    )


def question_of_run(
    run: str,
    *,
    staging: Path | None,
    mtbf_seconds: float | None,
    node_share: float,
    world_size: int | None,
    limits: Limits,
    failure_shape: float,
) -> Question:
    """What a run's own measurements ask; reads only, also while the run is being written.

    Raises:
        NotARun: If the folder holds no run.
        ConfigError: If nothing was measured, no failures are known or given, or there is nothing to
            tune.
    """
    if is_url(run):
        raise ConfigError(
            f"{run} is an object store; measurements are only in the run folder, give that folder"
        )
    folder = RunFolder(Path(run))
    run_id = read_run_id(folder)
    fences = {number: path for number, _, path in folder.fences()}
    fence = read_fence(fences[max(fences)]) if fences else None  # any rank's of the newest life
    if fence is not None and fence.compressor["name"] == "dense":
        raise ConfigError(
            f"{run} was trained without a compressor (LowDiff+): its replica makes the snapshots and "
            "batch_size has no effect, so there is nothing to tune; snapshot_every bounds what the "
            "loss of the machine costs, at most 2 * snapshot_every steps"
        )
    policy = read_journal(folder, run_id).policy
    documents = _documents(folder, run_id, staging)
    lives = [MeasuredIncarnation(d.incarnation, d.samples, d.facts) for d in documents]
    ranks = documents[-1].world_size if documents else 1
    hosts = _num_hosts(folder, documents, world_size)
    measured = measure(lives, world_size=world_size or ranks, num_hosts=hosts or 1)
    measured = _with_residual(measured, fence)
    history = failures_of(lives).scaled((world_size or ranks) / ranks)
    if mtbf_seconds is None and history.failures == 0:
        raise ConfigError(
            f"{run} has not failed yet, so nobody can tell how often it will; say what you expect, "
            "for example --mtbf 4h"
        )
    prior = None if mtbf_seconds is None else FailurePrior(mtbf_seconds, node_share=node_share)
    newest = documents[-1]
    used = number(newest.facts, "snapshot_every"), number(newest.facts, "batch_size")
    # On machines that nobody knows each rank is taken to be on its own, in favour of its peers.
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
        known_warnings=(
            *_notes(documents, measured, world_size, hosts),
            *_notes_of_network(
                num_nodes, ASSUMED_NETWORK_BYTES_PER_SECOND, "node" if hosts else "rank"
            ),
            *_notes_of_retention(policy),
        ),
        decisions=[decision for document in documents for decision in document.decisions],
    )


def _with_residual(measured: Measured, fence: Fence | None) -> Measured:
    """With what of a snapshot is error feedback, which other ways to save a run do not have."""
    if fence is None or fence.compressor["name"] in _WITHOUT_RESIDUAL:
        return measured
    size = float(
        sum(
            4 * p.numel if p.dtype == "float16" else p.nbytes  # as compressors/feedback.py keeps it
            for p in fence.layout.parameters
        )
    )
    if not size < measured.costs.snapshot_bytes:
        return measured  # a snapshot was not measured yet
    estimates = {**measured.estimates, "residual_bytes": Estimate(size, size, size, 1)}
    return Measured(replace(measured.costs, residual_bytes=size), estimates)


def _documents(folder: RunFolder, run_id: str, staging: Path | None) -> list[Measurements]:
    """Rank 0's measurements of all lives; of one that goes on, what its pages in memory say."""
    found = {life.incarnation: life for life in read_all_measurements(folder, run_id, rank=0)}
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
    """Machines that the ranks in question are on; None if not all ranks' measurements say theirs."""
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


def _notes(
    documents: list[Measurements], measured: Measured, world_size: int | None, hosts: int | None
) -> list[str]:
    """What a reader of the figures must know."""
    newest, notes = documents[-1], []
    machines = {(d.facts.get("processor"), d.facts.get("cores")) for d in documents}
    if len(machines) > 1:
        notes.append(
            f"lives of this run were measured on {len(machines)} kinds of machines; costs of steps "
            "and writes are the newest life's, those of restarts are of all"
        )
    # os.cpu_count would count cores that this process may not use.
    here = float(len(os.sched_getaffinity(0)))
    if newest.facts.get("host") not in (None, os.uname().nodename):
        notes.append(
            f"measured on {newest.facts.get('host')} ({number(newest.facts, 'cores'):.0f} cores), "
            f"not on this machine ({here:.0f} cores): it holds for a run there"
        )
    if not newest.ended:
        notes.append("the run is still going on, or its machine was lost; figures are its latest")
    if world_size is not None and world_size != newest.world_size:
        notes.append(
            f"measured with {newest.world_size} ranks and applied to {world_size}: costs of a rank "
            "are taken as they are, failures as so many times as frequent"
        )
    if hosts is None and measured.estimates["load_seconds"].source == "assumed":
        notes.append(
            "loading was never measured; on several machines it takes as many times longer as there "
            "are machines"
        )
    return notes


def _notes_of_network(num_nodes: int, bytes_per_second: float, whose: str) -> list[str]:
    """Where it is assumed, and something is compared that goes over it."""
    if num_nodes == 1:
        return []
    rate = units.readable_bytes(bytes_per_second)
    return [f"the network is assumed to take {rate}/s of each {whose}, for Gemini's copies"]


def _notes_of_retention(policy: Retention | None) -> list[str]:
    """Where the run holds more than its newest snapshots and what follows them."""
    if policy is None:
        return ["this run's retention keeps every step: it comes to hold more than is said here"]
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
    network_bytes_per_second: float,
    given: Collection[str],
) -> Question:
    """What a job that does not exist yet asks; ``given`` are the options that somebody typed."""
    measured = planned(job, given)
    notes = []
    if "step_time" not in given:
        notes.append(
            f"a step is assumed to take {job.step_seconds:.0f} s; give --step-time, much depends "
            "on it"
        )
    if "network" not in given:
        found = _notes_of_network(job.num_nodes, network_bytes_per_second, "node")
        notes += [f"{text}; give --network" for text in found]
    known = FailureRates.known(mtbf_seconds, node_share=node_share)
    return Question(
        title=(
            f"{job.params:.3g} parameters, {job.optimizer}, TopK({job.density:g}), on "
            f"{job.gpus:,} GPUs"
        ),
        costs=measured.costs,
        estimates=measured.estimates,
        rates=known,
        limits=limits,
        num_nodes=job.num_nodes,
        network_bytes_per_second=network_bytes_per_second / job.ranks_per_node,
        failure_shape=failure_shape,
        known_warnings=tuple(notes),
        assumed_because="not given",
    )


def print_report(question: Question, html: Path | None, *, as_json: bool) -> None:
    """Answer on the terminal or as JSON, and then into a file if one is named.

    Raises:
        ConfigError: If that is a folder.
        StorageError: If it cannot be written.
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
    from rich import box
    from rich.table import Table

    console = plain_console()
    answer = Table(title=report.question.title, title_justify="left", show_header=False)
    answer.box = box.SIMPLE
    answer.add_column(style="bold")
    answer.add_column(overflow="fold")
    for name, value in facts(report):
        answer.add_row(name, value)
    console.print(answer)
    for reason in report.choice.reasons:
        console.print(f"  {reason}", highlight=False)
    costs = Table(title="Based on, per rank", title_justify="left", box=box.SIMPLE)
    for head in ("", "median", "middle 80 %", "source"):
        costs.add_column(head)
    for row in basis(report):
        costs.add_row(*row)
    console.print(costs)
    if report.simulated:
        others = Table(title="Simulated", title_justify="left", box=box.SIMPLE)
        for head in ("strategy", "effective", "saving", "recovering", "done again", ""):
            others.add_column(head, overflow="fold")
        for one in report.simulated:
            shares = (one.effective_share, one.stalls, one.recovering, one.lost)
            others.add_row(
                one.strategy.name, *(f"{share:.2%}" for share in shares), one.strategy.detail
            )
        console.print(others)
    for warning in report.warnings:
        console.print(f"Note: {warning}", style="yellow", highlight=False)
