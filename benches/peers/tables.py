"""Tables for docs/benchmarks.md of lowdiff beside other systems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benches.peers.environments import REQUIREMENTS
from benches.peers.systems import SYSTEMS, System
from benches.tables import milliseconds, percent, table


def of_systems() -> str:
    """How each system is driven, and what it promises to have on the disk."""
    return table(
        ["system", "version", "driven", "fsync"],
        [[s.label, _version(s), s.setting, s.fsync] for s in SYSTEMS.values()],
    )


def _version(system: System) -> str:
    pinned = REQUIREMENTS.get(system.environment, ("that of the checkout",))
    return pinned[0].split("==")[-1]


def of_peers(record: Mapping[str, Any]) -> str:
    """All groups of cells: costs, recovery, and what cannot run here."""
    labels = {name: s["label"] for name, s in record["settings"]["systems"].items()}
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for cell in record["samples"].values():
        groups.setdefault((cell["plan"]["model"], cell["plan"]["num_ranks"]), []).append(cell)
    return "\n\n".join(
        _group(model, num_ranks, cells, labels) for (model, num_ranks), cells in groups.items()
    )


def _group(
    model: str, num_ranks: int, cells: list[Mapping[str, Any]], labels: Mapping[str, str]
) -> str:
    def label(cell: Mapping[str, Any]) -> str:
        return labels[cell["plan"]["system"]]

    parts = [f"**{model} parameters, {num_ranks} rank{'s' if num_ranks > 1 else ''}**"]
    measured = [cell for cell in cells if "ratio" in cell["summary"]]
    if measured:
        parts += [
            table(
                [
                    "a checkpoint at every step", "training time, drained", "least to greatest",
                    "stall p50", "stall p99", "MB a step", "GB a day", "MB of memory added",
                    "steps lost at SIGKILL, mean (most)",
                ],
                [[label(cell), *_costs(cell["summary"])] for cell in measured],
            ),
            _recoveries(measured, label),
        ]  # fmt: skip
    bytes_only = [c for c in cells if c["summary"] and "ratio" not in c["summary"]]
    if bytes_only:
        rows = [[label(c), f"{c['summary']['bytes_per_step'] / 1e6:.2f}"] for c in bytes_only]
        parts.append(table(["bytes only", "MB a step"], rows))
    parts += [
        f"{label(cell)}: cannot run here: `{cell['cannot_run']}`"
        for cell in cells
        if "cannot_run" in cell
    ]
    return "\n\n".join(parts)


def _costs(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{100 * (found['ratio'] - 1):+.1f} %",
        f"{100 * (found['ratio_low'] - 1):+.1f} to {100 * (found['ratio_high'] - 1):+.1f} %",
        milliseconds(found["stall_p50_seconds"]),
        milliseconds(found["stall_p99_seconds"]),
        f"{found['bytes_per_step'] / 1e6:.2f}",
        f"{found['bytes_per_day'] / 1e9:,.0f}",
        f"{found['added_memory_bytes'] / 1e6:.0f}",
        f"{found['steps_lost_mean']:.1f} ({found['steps_lost_high']})",
    ]


def _recoveries(cells: list[Mapping[str, Any]], label: Any) -> str:
    counts = sorted({int(n) for cell in cells for n in cell["samples"]["recoveries"]})
    head = [f"after {n}: first step done, MB read, largest difference" for n in counts]
    return table(
        ["recovery", *head],
        [[label(cell), *(_recovery(cell["summary"], n) for n in counts)] for cell in cells],
    )


def _recovery(found: Mapping[str, Any], steps: int) -> str:
    if f"after_{steps}/first_step_seconds" not in found:
        return "not measured"
    name = f"after_{steps}"
    step, difference = found[f"{name}/restored_step"], found[f"{name}/largest_difference"]
    exact = f"step {step} instead" if difference is None else f"{difference:.3g}"
    seconds, read = found[f"{name}/first_step_seconds"], found[f"{name}/bytes_read"]
    return f"{seconds:.2f} s, {read / 1e6:.1f}, {exact}"


def headline(found: Mapping[str, Any]) -> str:
    """The extra training time of every system in the first group of cells."""
    ratios = {key: value for key, value in found.items() if key.endswith("/ratio")}
    group = next(iter(ratios), "/").split("/")[0]
    return ", ".join(
        f"{key.split('/')[1]} {percent(value - 1)}"
        for key, value in ratios.items()
        if key.startswith(f"{group}/")
    )
