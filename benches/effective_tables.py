"""Table of ``bench_effective_time``; see `benches.tables`."""

from __future__ import annotations

from benches.tables import Summary, percent, table, verdict

_ARMS = {
    "log": "log, PowerSGD of rank 4",
    "log_copies": "the same with `copies=2`",
    "replica": "replica",
    "survivors": "survivors",
    "torch_save": "`torch.save`, best interval",
    "dcp": "DCP `async_save`, best interval",
}
#: Steps' times between failures -> target.
_MEANS = {600: 0.94, 1800: 0.97}


def of_effective_time(found: Summary) -> str:
    """A row for each arm, with the shares at both mean times between failures, and the verdicts."""
    rows = []
    for arm, text in _ARMS.items():
        cells = [cell for mean in _MEANS for cell in _cells(found, f"{arm}/{mean}")]
        if any(cells):
            rows.append([text, *cells])
    heads = [
        head
        for mean in _MEANS
        for head in (
            f"every {mean // 60} min: effective", "starts scaled", "simulator", "of many failures",
            "made again", "new step after",
        )
    ]  # fmt: skip
    return "\n\n".join([table(["", *heads], rows), _verdicts(found)])


def _cells(found: Summary, key: str) -> list[str]:
    if f"{key}/effective_share" not in found:
        return [""] * 6
    names = (
        "effective_share", "effective_share_start_scaled", "simulated_share",
        "simulated_share_of_many",
    )  # fmt: skip
    return [
        *(percent(found[f"{key}/{name}"]) for name in names),
        f"{found[f'{key}/steps_made_again']:.0f} steps",
        f"{found[f'{key}/new_step_seconds']:.1f} s",
    ]


def _verdicts(found: Summary) -> str:
    lines = []
    for mean, target in _MEANS.items():
        key = f"effective_share_{mean // 60}min"
        if key in found:
            arm = _ARMS[found[f"{key}_arm"]]
            goal = verdict(found[key], target, f"{100 * target:.0f} %", at_least=True)
            scaled = percent(found[f"{key}_start_scaled"])
            lines.append(
                f"Best of lowdiff at {mean // 60} minutes: {percent(found[key])} ({arm}; target {goal}), "
                f"with starts scaled {scaled}."
            )
    return " ".join([*lines, f"A step without checkpoints takes {found['step_seconds']:.3f} s."])
