"""Writes the figures of the documents from what benches and fault campaigns left.

    python -m benches.report [--docs docs]

Text is kept by hand. Between ``<!-- figures: NAME -->`` and ``<!-- end -->`` stands what this
module makes of ``results/NAME.json``, so that text and figures never disagree.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches import effective_tables, scale_tables, tables
from benches.peers import tables as peers

ROOT = Path(__file__).parents[1]
Record = Mapping[str, Any]

_SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reported:
    """What becomes of one result.

    Attributes:
        question: What the bench answers.
        command: That makes the JSON.
        headline: One cell of the overview.
        table: All that stands in the result's own section.
    """

    question: str
    command: str
    headline: Callable[[Record], str]
    table: Callable[[Record], str]


def _of_summary(render: Callable[[Record], str]) -> Callable[[Record], str]:
    return lambda record: render(record["summary"])


def _bound(found: Record) -> str:
    median, bound = found["overhead_median"], found["overhead_upper95"]
    return f"{tables.percent(median)}, at most {tables.percent(bound)}"


#: By the name of the JSON; a test holds it against docs/results.
REPORTED: dict[str, Reported] = {
    name: Reported(question, f"python -m benches.{bench}", _of_summary(headline), table)
    for name, bench, question, headline, table in (
        (
            "overhead",
            "bench_overhead",
            "a checkpoint at every step, top-k",
            _bound,
            _of_summary(tables.of_overhead),
        ),
        (
            "lowdiff_plus",
            "bench_lowdiff_plus",
            "the same without compression",
            _bound,
            _of_summary(tables.of_lowdiff_plus),
        ),
        (
            "peers_overhead",
            "bench_peers",
            "beside what people use today",
            peers.headline,
            peers.of_peers,
        ),
        (
            "replay",
            "bench_replay",
            "replay by blocks",
            lambda found: f"{found['speedup_vs_published']:.1f} times the published procedure",
            _of_summary(tables.of_replay),
        ),
        (
            "restart",
            "bench_restart",
            "a restart",
            lambda found: f"{found['ratio_to_parts']:.2f} of its parts",
            _of_summary(tables.of_restart),
        ),
        (
            "codec",
            "bench_codec",
            "bytes and speed of an entry",
            lambda found: f"{found['bytes_per_entry_float32']:.2f} bytes",
            _of_summary(tables.of_codec),
        ),
        (
            "compress",
            "bench_compress",
            "what compressors cost",
            lambda found: f"top-k {found['topk_speedup_vs_torch']:.1f} times `torch.topk`",
            _of_summary(tables.of_compress),
        ),
        (
            "convergence",
            "bench_convergence",
            "what compressors do to learning",
            lambda found: f"text, dense: {found['text/dense_loss']:.3f}",
            _of_summary(tables.of_convergence),
        ),
        (
            "lost_tail",
            "bench_lost_tail",
            "is a predicted state worth the lost steps",
            lambda found: f"with the gate {found['gate_over_redo']:.2f} of redoing",
            _of_summary(tables.of_lost_tail),
        ),
        (
            "gpu",
            "gpu",
            "a checkpoint at every step on a GPU",
            lambda found: (
                f"log: {tables.percent(found['log_over_none'])} more"
                if "log_over_none" in found
                else "in parts"
            ),
            _of_summary(tables.of_gpu),
        ),
        (
            "gpu_first",
            "gpu",
            "the same, by the bench of commit 387ee6d",
            lambda found: f"log: {tables.percent(found['gpt2-small/lowdiff_topk_over_none'])} more",
            _of_summary(tables.of_gpu_first),
        ),
        (
            "device_ops",
            "bench_device_ops",
            "what a step does on an accelerator, counted",
            lambda found: f"log: {found['step_launches']} launches a step",
            _of_summary(tables.of_device_ops),
        ),
        (
            "recovery_growth",
            "bench_recovery_growth",
            "how recovery grows",
            lambda found: f"peak memory {found['peak_over_bound']:.2f} of its bound",
            _of_summary(scale_tables.of_growth),
        ),
        (
            "scaling",
            "bench_scaling",
            "how checkpointing grows with ranks",
            lambda found: (
                f"top-k, 8 ranks: {1e3 * found['topk_8_ranks_thread_seconds']:.1f} ms a step and rank"
            ),
            _of_summary(scale_tables.of_scaling),
        ),
        (
            "catalog",
            "bench_catalog",
            "a million differentials",
            lambda found: f"`inspect` in {found['worst_inspect_seconds']:.1f} s",
            _of_summary(scale_tables.of_catalog),
        ),
        (
            "tuner",
            "bench_tuner",
            "what the tuner's choice wastes",
            lambda found: f"{found['waste_over_best_fixed']:.4f} of the best",
            _of_summary(tables.of_tuner),
        ),
        (
            "failures",
            "bench_failures",
            "the simulator against reality",
            lambda found: f"largest error {found['largest_error']:.2f}",
            _of_summary(tables.of_failures),
        ),
        (
            "survivors",
            "bench_survivors",
            "training goes on after SIGKILL",
            lambda found: (
                f"{found['restart_seconds_survivors']:.1f} s, with `torch.save` "
                f"{found['caught_up_seconds_torch_save']:.1f} s"
            ),
            _of_summary(tables.of_survivors),
        ),
        (
            "effective_time",
            "bench_effective_time",
            "wall time that went into steps that stand",
            effective_tables.best,
            _of_summary(effective_tables.of_effective_time),
        ),
        (
            "peer_memory",
            "bench_peer_memory",
            "copies on other nodes",
            lambda found: f"{found['bytes_sent_per_step_over_gemini']:.4f} of Gemini's bytes",
            _of_summary(tables.of_peer_memory),
        ),
        (
            "sharded",
            "bench_sharded",
            "every step of a sharded model",
            lambda found: (
                f"{100 * found['overhead_median']:.1f} % of a step, two ranks on two cores"
            ),
            _of_summary(tables.of_sharded),
        ),
        (
            "publish",
            "bench_publish",
            "a version of the weights for every step",
            lambda found: (
                f"{100 * found['bytes_over_full_rl']:.2f} % of a whole file at learning rate 1e-6"
            ),
            _of_summary(tables.of_publish),
        ),
    )
}


def records_in(folder: Path) -> dict[str, Record]:
    """Results by name."""
    paths = sorted(folder.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def overview(records: Mapping[str, Record]) -> str:
    """One row per bench."""
    rows = []
    for name, reported in REPORTED.items():
        record = records.get(name)
        figure = reported.headline(record) if record else "not measured yet"
        rows.append([reported.question, f"`{reported.command}`", figure])
    return tables.table(["bench", "command", "figure"], rows)


def origin(name: str, record: Record) -> str:
    """Where and when figures were measured, with links."""
    machine, versions = record["machine"], record["versions"]
    before, after = machine["load_average_before"][0], machine["load_average_after"][0]
    return (
        f"Measured on {machine['processor']}, {machine['cores']} cores, torch "
        f"{versions['torch']}, commit {versions['commit']}, load average {before:.1f} before and "
        f"{after:.1f} after ([JSON](results/{name}.json), [picture](results/{name}.png))."
    )


def _scale(scale: float) -> str:
    return "at full size" if scale == 1 else f"at {scale:.2g} of the full size"


def soak(record: Record) -> str:
    """What the last ``make soak`` tried and lost, in a sentence."""
    return (
        f"{record['rounds']:,} rounds {_scale(record['scale'])}, "
        f"**{record['lost']} lost**, {record['seconds'] / 60:.0f} minutes on "
        f"{record['machine']['cores']} cores of {record['machine']['processor']}, torch "
        f"{record['versions']['torch']}, commit {record['versions']['commit']}: "
        "[every row](results/soak.md)."
    )


def chaos(record: Record) -> str:
    """What ckpt-chaos killed, and what came back, by strategy and process."""
    rows = [
        [
            row["strategy"],
            row["killed"],
            str(row["operations"]),
            str(row["kills"]),
            *(str(row["verdicts"].get(name, 0)) for name in ("clean", "cleanup", "other_weights")),
            _lost_work(row),
        ]
        for row in record["campaigns"]
    ]
    head = [
        "strategy",
        "killed",
        "its file operations",
        "kills",
        "clean",
        "needs cleanup",
        "other weights",
    ]
    machine, versions = record["machine"], record["versions"]
    return (
        tables.table([*head, "lost work"], rows)
        + f"\n\n{record['kills']} kills, **{record['failed']} failed**, in {record['seconds'] / 60:.0f} minutes on "
        f"{machine['cores']} cores of {machine['processor']}; {record['tool'].replace('==', ' ')}, torch "
        f"{versions['torch']}, commit {versions['commit']} ([JSON](results/chaos.json))."
    )


def _lost_work(row: Record) -> str:
    count = row["verdicts"].get("lost_work", 0)
    steps = row["most_lost"]
    return f"{count}, at most {steps} step{'s' * (steps != 1)}" if count else "0"


#: Sections that show something else than one bench.
_OTHERS: dict[str, Callable[[Mapping[str, Record]], str]] = {
    "overview": overview,
    "peers_systems": lambda _: peers.of_systems(),
    "soak": lambda records: soak(records["soak"]),
    "chaos": lambda records: chaos(records["chaos"]),
}


def section(name: str, records: Mapping[str, Record]) -> str:
    """What stands between the marks of a name.

    Raises:
        KeyError: If no figures have that name.
    """
    if name in _OTHERS:
        return _OTHERS[name](records)
    reported = REPORTED[name]
    if name not in records:
        return f"Not measured yet: `{reported.command} --out docs/results`."
    return f"{reported.table(records[name])}\n\n{origin(name, records[name])}"


def rendered(document: str, records: Mapping[str, Record]) -> str:
    """The document with every section made anew."""
    return _SECTION.sub(
        lambda found: f"{found[1]}\n{section(found[2], records)}\n\n{found[3]}", document
    )


def sections_of(document: str) -> list[str]:
    """Names of a document's sections."""
    return [found[2] for found in _SECTION.finditer(document)]


def main(argv: Sequence[str] | None = None) -> None:
    """Write every document that has such marks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    records = records_in(args.docs / "results")
    for path in sorted(args.docs.glob("*.md")):
        document = path.read_text(encoding="utf-8")
        if sections_of(document):
            path.write_text(rendered(document, records), encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
