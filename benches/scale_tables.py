"""Tables of the benches that say how something grows; see `benches.tables`."""

from __future__ import annotations

import re

from benches.tables import Summary, milliseconds, percent, table, verdict

_OF_CATALOG = re.compile(r"(\w+)_(\d+)_seconds")


def of_growth(found: Summary) -> str:
    """Table of ``bench_recovery_growth``."""
    rows = []
    for axis in ("differentials", "parameters", "workers"):
        residual, peak = found[f"{axis}_worst_residual"], found[f"{axis}_peak_over_bound"]
        off = "no other point" if residual is None else f"{percent(residual)} off"
        rows.append([axis, off, verdict(peak, 1.0, f"{peak:.2f}")])
    head = ["growing", "the model at points it was not fitted on", "peak memory over its bound"]
    return table(head, rows)


def of_scaling(found: Summary) -> str:
    """Table of ``bench_scaling``."""
    arms = dict.fromkeys(
        key.rpartition("_ranks_")[0].rpartition("_")[0] for key in found if "_ranks_" in key
    )
    rows = []
    for arm in arms:
        ranks = [n for n in (1, 2, 4, 8) if f"{arm}_{n}_ranks_thread_seconds" in found]
        for n in ranks:
            own = {
                key: found[f"{arm}_{n}_ranks_{key}"]
                for key in ("thread_seconds", "disk_bytes", "staged_bytes", "snapshot_bytes")
            }
            rows.append(
                [
                    arm.replace("_", " "),
                    str(n),
                    milliseconds(own["thread_seconds"]),
                    *(f"{own[key] / 1e3:.1f}" for key in list(own)[1:]),
                ]
            )
    head = ["", "ranks", "training thread", "segments, kB", "staged, kB", "snapshot, kB"]
    return table(head, rows)


def of_catalog(found: Summary) -> str:
    """Table of ``bench_catalog``."""
    worst = found["worst_inspect_seconds"]
    rows = [["worst `inspect`", "", verdict(worst, 2.0, f"{worst:.2f} s, target 2 s"), "", ""]]
    for key, seconds in found.items():
        named = _OF_CATALOG.fullmatch(key)
        if named is not None and "cpu" not in key:
            what, size = named.groups()
            cpu, peak = (found[f"{what}_{size}_{unit}"] for unit in ("cpu_seconds", "peak_bytes"))
            words = [what.replace("_", " "), size]
            rows.append([*words, f"{seconds:.2f} s", f"{cpu:.2f} s", f"{peak / 2**20:.0f} MiB"])
    return table(["", "a segment", "wall", "processor", "peak memory"], rows)
