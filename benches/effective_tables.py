"""Table of ``bench_effective_time``; see `benches.tables`."""

from __future__ import annotations

from benches.tables import Summary, percent, table, verdict

_ARMS = {
    "survivors": "survivors",
    "replica": "replica",
    "log": "log, PowerSGD of rank 4",
    "log_copies": "the same with `copies=2`",
    "torch_save": "`torch.save`, best interval",
    "dcp": "DCP `async_save`, best interval",
}
#: Steps' times between failures -> target.
_MEANS = {600: 0.94, 1800: 0.97}
_SHARES = {
    "effective_share": "effective",
    "effective_share_start_scaled": "starts scaled",
    "simulated_share": "simulator",
    "simulated_share_of_many": "of many failures",
    "slower_share": "slower steps",
    "restart_share": "restarts",
    "lost_share": "lost steps",
}


def of_effective_time(found: Summary) -> str:
    """A table for each mean time between failures, with a row for each arm, and the verdicts."""
    parts = []
    for mean, target in _MEANS.items():
        rows = [
            [text, *_cells(found, f"{arm}/{mean}")]
            for arm, text in _ARMS.items()
            if f"{arm}/{mean}/effective_share" in found
        ]
        heads = [
            f"a failure every {mean // 60} minutes", *_SHARES.values(),
            "steps made again", "new step after",
        ]  # fmt: skip
        if rows:
            parts += [
                table(heads, rows),
                _verdict(found, f"effective_share_{mean // 60}min", target),
            ]
    mean, least, most = (found[f"step_seconds{name}"] for name in ("", "_least", "_most"))
    step = f"A step without checkpoints takes {mean:.3f} s on average, in one life {least:.3f} s and in another {most:.3f} s."
    return "\n\n".join([*parts, step])


def best(found: Summary) -> str:
    """Lowdiff's best share at the longest time between failures that was measured."""
    minutes = max(mean for mean in _MEANS if f"effective_share_{mean // 60}min" in found) // 60
    share = percent(found[f"effective_share_{minutes}min"])
    return f"{share} with a failure every {minutes} minutes"


def _cells(found: Summary, key: str) -> list[str]:
    effective, *others = (percent(found[f"{key}/{name}"]) for name in _SHARES)
    error = found.get(f"{key}/effective_error")  # not with a single turn
    return [
        effective if error is None else f"{effective} ± {100 * error:.1f}",
        *others,
        f"{found[f'{key}/steps_made_again']:.0f}",
        f"{found[f'{key}/new_step_seconds']:.1f} s",
    ]


def _verdict(found: Summary, key: str, target: float) -> str:
    if key not in found:
        return "No strategy of lowdiff was measured."
    goal = verdict(found[key], target, f"{100 * target:.0f} %", at_least=True)
    scaled = percent(found[f"{key}_start_scaled"])
    return (
        f"Best of lowdiff: {percent(found[key])}, {_ARMS[found[f'{key}_arm']]} (target {goal}), "
        f"with starts scaled {scaled}."
    )
