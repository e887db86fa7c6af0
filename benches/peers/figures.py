"""The figures of one cell, from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_DAY_SECONDS = 86_400
_OF_BLOCKS = ("pairs", "dense_blocks", "sync_seconds")
#: A round has as many blocks with checkpoints, as many without, and one that compresses nothing.
_PAIRS_PER_ROUND = 2


def figures(samples: Mapping[str, Any]) -> dict[str, Any]:
    """Named figures: seconds, bytes, ratios; ``*_low`` and ``*_high`` are least and greatest."""
    if "bytes_only" in samples:
        found = samples["bytes_only"]
        return {"bytes_per_step": found["written_bytes"] / found["num_saved"]}
    return {
        **_overhead(samples["overhead"]),
        **_restore(samples["restore"]),
        "steps_lost_with_memory": samples["overhead"]["num_steps"]
        - samples["restore_from_files"][0]["step"],
        "bit_identical_from_files": all(
            rank["bit_identical"] for rank in _compared(samples["restore_from_files"])
        ),
        **_kills(samples["kills"]),
        **{
            f"after_{steps}/{key}": value
            for steps, found in samples["recoveries"].items()
            for key, value in _restore(found["ranks"]).items()
        },
        "bit_identical": all(
            rank["bit_identical"] for ranks in _all_restores(samples) for rank in ranks
        ),
    }


def slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What rank 0 measured, every block of it as long as on the slowest rank.

    Single steps stay those of rank 0: where one rank stalls, the others wait a step later, and the
    greatest of each step would count that twice.
    """
    loops = [[sum(steps) for steps in rank["saved_seconds"]] for rank in ranks]
    return {
        **ranks[0],
        **{key: _greatest([rank[key] for rank in ranks]) for key in _OF_BLOCKS},
        "loop_seconds": _greatest(loops),
    }


def _greatest(values: Sequence[Any]) -> Any:
    """Of equally nested lists, number by number."""
    if isinstance(values[0], (list, tuple)):
        return [_greatest(each) for each in zip(*values, strict=True)]
    return max(values)


def _all_restores(samples: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    recovered = [found["ranks"] for found in samples["recoveries"].values()]
    killed = [kill["ranks"] for kill in samples["kills"]]
    return [_compared(ranks) for ranks in (samples["restore"], *recovered, *killed)]


def _compared(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A restore of an earlier step than the last was not compared, and has not its bits."""
    return [{"bit_identical": False} | rank for rank in ranks]


def _overhead(found: Mapping[str, Any]) -> dict[str, float]:
    pairs = found["pairs"]
    ratios = [saved / plain for saved, plain in pairs]
    loops = [s / plain for s, (_, plain) in zip(found["loop_seconds"], pairs, strict=True)]
    blocks = list(zip(found["saved_seconds"], found["plain_seconds"], strict=True))
    stalls = [step - statistics.median(plain) for saved, plain in blocks for step in saved]
    num_steps = sum(len(saved) for saved in found["saved_seconds"])
    paid = sum(saved for saved, _ in pairs) + sum(found["sync_seconds"])
    plain_step = statistics.median(step for plain in found["plain_seconds"] for step in plain)
    written = sum(found["written_bytes"]) / num_steps
    ratio = statistics.median(ratios)
    return {
        "ratio": ratio,
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ratio_without_drain": statistics.median(loops),
        "ratio_all_paid": paid / sum(plain for _, plain in pairs),
        **_over_dense(paid, found["dense_blocks"]),
        **_null(pairs),
        "share_saved": sum(found["num_saved"]) / num_steps,
        "step_seconds": plain_step,
        "stall_p50_seconds": float(np.percentile(stalls, 50)),
        "stall_p99_seconds": float(np.percentile(stalls, 99)),
        "call_p50_seconds": statistics.median(c for calls in found["call_seconds"] for c in calls),
        "bytes_per_step": written,
        "bytes_per_day": written * _DAY_SECONDS / (plain_step * ratio),
        "added_memory_bytes": _added_memory(found),
    }


def _null(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Blocks without checkpoints over the like that came just before: the method's own noise."""
    plain = [seconds for _, seconds in pairs]
    # In ABBA order every second one ends a round, and the next begins one.
    ratios = [later / earlier for earlier, later in zip(plain[1::2], plain[2::2], strict=False)]
    if not ratios:
        return {}
    return {
        "null_low": min(ratios),
        "null_ratio": statistics.median(ratios),
        "null_high": max(ratios),
    }


def _added_memory(found: Mapping[str, Any]) -> float:
    """The most that all processes took with the system, less the most of a block before."""
    times = found["times"]
    before = [taken for at, taken in found["memory"] if times["begun"] <= at <= times["ready"]]
    during = [taken for at, taken in found["memory"] if times["warm"] <= at <= times["done"]]
    return float(max(during, default=0) - max(before, default=0))


def _over_dense(paid: float, dense: Sequence[float]) -> dict[str, float]:
    """All that blocks with checkpoints took over a training that compresses nothing, if there is one."""
    return {"ratio_over_dense": paid / (_PAIRS_PER_ROUND * sum(dense))} if dense else {}


def _kills(kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    behind = [kill["completed"] - kill["ranks"][0]["step"] for kill in kills]
    lost = [max(0, steps) for steps in behind]
    # The step whose call was struck had been made as well.
    made = [max(0, n + kill["while_saving"]) for n, kill in zip(behind, kills, strict=True)]
    compared = [rank for kill in kills for rank in kill["ranks"] if "bit_identical" in rank]
    return {
        "kills": len(kills),
        "kills_while_saving": sum(kill["while_saving"] for kill in kills),
        "steps_lost_mean": statistics.fmean(lost),
        "steps_lost_high": max(lost),
        "made_steps_lost_mean": statistics.fmean(made),
        "made_steps_lost_high": max(made),
        # Where nothing came back, there are no bits to be others.
        "bit_identical_after_kills": all(rank["bit_identical"] for rank in compared),
    }


def _restore(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the slowest rank; bytes of all."""
    seconds = [rank["restore_seconds"] for rank in ranks]
    first = [rank["restore_seconds"] + rank["first_step_seconds"] for rank in ranks]
    compared = [rank["largest_difference"] for rank in ranks if "largest_difference" in rank]
    return {
        "restore_seconds": max(seconds),
        "first_step_seconds": max(first),
        "bytes_read": sum(rank["bytes_read"] for rank in ranks),
        "restored_step": ranks[0]["step"],
        "largest_difference": max(compared) if len(compared) == len(ranks) else None,
    }
