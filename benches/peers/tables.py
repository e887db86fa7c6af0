"""Tables for docs/benchmarks.md of lowdiff beside other systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benches.peers.environments import REQUIREMENTS
from benches.peers.systems import SYSTEMS, System
from benches.tables import excess, milliseconds, percent, table

Cell = Mapping[str, Any]
Label = Callable[[Cell], str]
Row = Callable[[Cell], list[str]]


def of_systems() -> str:
    """How each system is driven, and what it promises to have on the disk."""
    return table(
        ["system", "version", "driven", "fsync"],
        [[s.label, _version(s), s.setting, s.fsync] for s in SYSTEMS.values()],
    )


def _version(system: System) -> str:
    pinned = REQUIREMENTS.get(system.environment)
    return pinned[0].split("==")[-1] if pinned else system.origin


def of_peers(record: Mapping[str, Any]) -> str:
    """All groups of cells: costs, storage, recovery, and what cannot run here."""
    labels = {name: s["label"] for name, s in record["settings"]["systems"].items()}
    # However the cells were run, readers find a system at the same place of every table.
    places = {name: place for place, name in enumerate(SYSTEMS)}
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in sorted(record["samples"].values(), key=lambda c: places[c["plan"]["system"]]):
        plan, processor = cell["plan"], cell["machine"]["processor"]
        groups.setdefault((plan["model"], plan["num_ranks"], processor), []).append(cell)
    return "\n\n".join(
        _group(f"{model} parameters, {n} rank{'s' if n > 1 else ''}, {processor}", cells, labels)
        for (model, n, processor), cells in sorted(groups.items(), key=lambda item: item[0])
    )


def _group(title: str, cells: list[Cell], labels: Mapping[str, str]) -> str:
    def label(cell: Cell) -> str:
        return labels[cell["plan"]["system"]]

    parts = [f"**{title}**"]
    measured = [cell for cell in cells if "ratio" in cell["summary"]]
    if measured:
        parts += [
            _times(measured, label),
            _losses(measured, label),
            _storage(measured, label),
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
    return "\n\n".join([*parts, _when(cells)])


def _when(cells: list[Cell]) -> str:
    """By which code, and on how busy a machine."""
    commits = sorted({cell["commit"] for cell in cells})
    loads = [cell["machine"]["load_average_before"][0] for cell in cells]
    at = "commit" if len(commits) == 1 else "commits"
    return f"At {at} {', '.join(commits)}; load average before a cell {min(loads):.1f} to {max(loads):.1f}."


def _table(cells: list[Cell], label: Label, head: list[str], row: Row) -> str:
    return table(head, [[label(cell), *row(cell)] for cell in cells])


def _times(cells: list[Cell], label: Label) -> str:
    head = [
        "a checkpoint at every step", "a step without", "drained", "least to greatest",
        "blocks without, likewise", "not drained", "with snapshots, on the disk",
        "over training without compression",
    ]  # fmt: skip

    def row(cell: Cell) -> list[str]:
        found = cell["summary"]
        return [
            f"{found['step_seconds']:.3f} s",
            excess(found["ratio"]),
            _span(found, "ratio"),
            _span(found, "null"),
            excess(found["ratio_without_drain"]),
            excess(found["ratio_all_paid"]),
            excess(found.get("ratio_over_dense", found["ratio_all_paid"])),
        ]

    return _table(cells, label, head, row)


def _losses(cells: list[Cell], label: Label) -> str:
    head = [
        "stalls and losses", "stall p50", "stall p99", "kills (while saving)",
        "saved steps lost, mean (most)", "steps made lost, likewise",
        "steps lost if memory is lost after a drain",
    ]  # fmt: skip

    def row(cell: Cell) -> list[str]:
        found = cell["summary"]
        return [
            milliseconds(found["stall_p50_seconds"]),
            milliseconds(found["stall_p99_seconds"]),
            f"{found['kills']} ({found['kills_while_saving']})",
            _lost(found),
            f"{found['made_steps_lost_mean']:.1f} ({found['made_steps_lost_high']})",
            _from_files(cell),
        ]

    return _table(cells, label, head, row)


def _lost(found: Mapping[str, Any]) -> str:
    lost = f"{found['steps_lost_mean']:.1f} ({found['steps_lost_high']})"
    return lost if found["bit_identical_after_kills"] else f"{lost}, then other bits"


def _from_files(cell: Cell) -> str:
    found = cell["summary"]
    lost = found["steps_lost_with_memory"]
    if lost == cell["samples"]["overhead"]["num_steps"]:
        return "all"
    return f"{lost}" if found["bit_identical_from_files"] else f"{lost}, without error feedback"


def _storage(cells: list[Cell], label: Label) -> str:
    head = ["storage", "MB a step", "GB a day", "MB of memory added", "steps that were saved"]

    def row(cell: Cell) -> list[str]:
        found = cell["summary"]
        share = found["share_saved"]
        return [
            f"{found['bytes_per_step'] / 1e6:.2f}",
            f"{found['bytes_per_day'] / 1e9:,.0f}",
            f"{found['added_memory_bytes'] / 1e6:.0f}",
            "all" if share == 1 else f"{100 * share:.0f} %",
        ]

    return _table(cells, label, head, row)


def _span(found: Mapping[str, Any], name: str) -> str:
    if f"{name}_low" not in found:
        return "a single round"
    low, high = (excess(found[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{low.removesuffix(' %')} to {high}"


def _recoveries(cells: list[Cell], label: Label) -> str:
    counts = sorted({int(n) for cell in cells for n in cell["samples"]["recoveries"]})
    head = [f"after {n}: first step done, MB read, largest difference" for n in counts]

    def row(cell: Cell) -> list[str]:
        return [_recovery(cell["summary"], n) for n in counts]

    return _table(cells, label, ["recovery", *head], row)


def _recovery(found: Mapping[str, Any], steps: int) -> str:
    if f"after_{steps}/first_step_seconds" not in found:
        return "not measured"
    name = f"after_{steps}"
    step, difference = found[f"{name}/restored_step"], found[f"{name}/largest_difference"]
    exact = f"step {step} instead" if difference is None else f"{difference:.3g}"
    seconds, read = found[f"{name}/first_step_seconds"], found[f"{name}/bytes_read"]
    return f"{seconds:.2f} s, {read / 1e6:.1f}, {exact}"


def headline(found: Mapping[str, Any]) -> str:
    """All the extra training time of every system in the first group of cells."""
    suffix = "/ratio_all_paid"
    names = [key.removesuffix(suffix) for key in found if key.endswith(suffix)]
    group = next(iter(names), "/").split("/")[0]
    return ", ".join(
        f"{name.split('/')[1]} {percent(found[name + suffix] - 1)}{_with_compression(found, name)}"
        for name in names
        if name.startswith(f"{group}/")
    )


def _with_compression(found: Mapping[str, Any], name: str) -> str:
    ratio = found.get(f"{name}/ratio_over_dense")
    return "" if ratio is None else f" (with its compression {percent(ratio - 1)})"
