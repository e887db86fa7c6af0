"""Charts as inline SVG. Colours come from the page's variables and follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lowdiff.tuner.choice import Setting
from lowdiff.tuner.report import HeatMap, Report, Sensitivity
from lowdiff.tuner.simulate import Simulated

_WIDTH = 440


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">\n'
        f"{body}\n</svg>"
    )


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def marker(shape: str, x: float, y: float, size: float = 6.0) -> str:
    """Draw a setting: ``"chosen"`` as a disc, ``"current"`` a square, ``"published"`` a triangle."""
    if shape == "chosen":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" class="mark chosen"/>'
    if shape == "current":
        corner, side = (x - size * 0.9, y - size * 0.9), size * 1.8
        return (
            f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{side:.1f}" '
            f'height="{side:.1f}" class="mark current"/>'
        )
    points = f"{x:.1f},{y - size:.1f} {x - size:.1f},{y + size:.1f} {x + size:.1f},{y + size:.1f}"
    return f'<polygon points="{points}" class="mark published"/>'


def short(value: float) -> str:
    """Format a figure in few characters."""
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def heat_map(report: Report) -> str:
    """Draw wasted time over both settings; dark is bad, a cross is not allowed."""
    found = report.heat_map
    left, top, cell = 44.0, 8.0, 26.0
    width = (_WIDTH - left - 8) / len(found.intervals)
    bottom = top + cell * len(found.batches)
    low, high = _range([x for row in found.seconds_per_hour for x in row])
    parts = []
    for row, b in enumerate(found.batches):
        y = bottom - (row + 1) * cell
        parts.append(_text(left - 6, y + cell / 2 + 4, str(b), "tick", "end"))
        for column, f in enumerate(found.intervals):
            waste = found.seconds_per_hour[row][column]
            shade = 0.06 + 0.94 * _share(waste, low, high)
            x = left + column * width
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 0.6:.1f}" height="{cell - 0.6:.1f}" '
                f'class="heat" fill-opacity="{shade:.2f}"><title>f = {f:,}, b = {b}: '
                f"{waste:.1f} s per hour</title></rect>"
            )
            if not found.allowed[row][column]:
                middle = x + width / 2, y + cell / 2
                parts += [
                    _line(middle[0] - 3, middle[1] + s * 3, middle[0] + 3, middle[1] - s * 3, "no")
                    for s in (1, -1)
                ]
    last = -math.inf
    for column, f in enumerate(found.intervals):
        x = left + (column + 0.5) * width
        if x - last > 40:
            parts.append(_text(x, bottom + 14, short(f), "tick"))
            last = x
    parts.append(
        _text(left + (_WIDTH - left) / 2, bottom + 32, "f, steps between full snapshots", "axis")
    )
    centre = (top + bottom) / 2
    parts.append(
        f'<text transform="translate(11 {centre:.0f}) rotate(-90)" text-anchor="middle" '
        'class="axis">b, steps per write</text>'
    )
    shown = [("published", report.published), ("current", report.question.current)]
    for shape, setting in [*shown, ("chosen", report.choice.setting)]:
        if setting is not None:
            along, up = _place(found, setting)
            parts.append(marker(shape, left + along * width, bottom - up * cell))
    return _svg(bottom + 40, "wasted seconds per hour over f and b", parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest value, and the highest or ten times the lowest; values beyond look alike."""
    low = min(values)
    return low, max(low * 1.05, min(max(values), 10 * low))


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, math.log(max(value, low) / low) / math.log(high / low)))


def _place(found: HeatMap, setting: Setting) -> tuple[float, float]:
    """Return a setting's column and row, in cells from the left and from below."""
    first, last = math.log(found.intervals[0]), math.log(found.intervals[-1])
    along = (math.log(setting.snapshot_every) - first) / (last - first)
    column = 0.5 + along * (len(found.intervals) - 1)
    nearest = min(
        range(len(found.intervals)),
        key=lambda i: abs(math.log(found.intervals[i] / setting.snapshot_every)),
    )
    row = min(math.log2(setting.batch_size), len(found.batches) - 1) + 0.5
    # Small intervals are not evenly spaced, because intervals are whole steps.
    return (nearest + 0.5 if found.intervals[0] < 8 else column), row


def sensitivity(found: Sensitivity) -> str:
    """Draw the waste for a wrong assumption, with the setting kept and with the setting tuned again."""
    left, top, right, bottom = 44.0, 10.0, _WIDTH - 14.0, 130.0
    finite = [x for x in (*found.kept, *found.retuned) if math.isfinite(x)]
    high, low = max(finite), 0.0
    factors = [math.log2(x) for x in found.factors]

    def at(factor: float, value: float) -> tuple[float, float]:
        x = left + (factor - factors[0]) / (factors[-1] - factors[0]) * (right - left)
        return x, bottom - (min(value, high) - low) / (high - low) * (bottom - top)

    parts = []
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        y = at(factors[0], value)[1]
        parts += [
            _line(left, y, right, y, "grid"),
            _text(left - 6, y + 4, short(value), "tick", "end"),
        ]
    for factor, shown in zip(factors, found.factors, strict=True):
        text = f"x {shown:g}" if shown >= 1 else f"1/{1 / shown:g}"
        parts.append(_text(at(factor, 0)[0], bottom + 16, text, "tick"))
    for values, css in ((found.kept, "kept"), (found.retuned, "retuned")):
        points = (at(x, y) for x, y in zip(factors, values, strict=True))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" class="curve {css}"/>')
    return _svg(bottom + 24, f"wasted seconds per hour over {found.what}", parts)


def strategies(found: Sequence[Simulated]) -> str:
    """Draw each strategy's wasted share of time by cause; a bar that is cut off ends in an arrow."""
    left, right = 4.0, _WIDTH - 4.0
    wasted = (1 - one.effective_share for one in found if one.effective_share > 0.5)
    most = max(wasted, default=0.0) or 1.0
    parts, y = [], 4.0
    for one in found:
        css = "name ours" if one is found[0] else "name"
        parts.append(_text(left, y + 11, one.strategy.name, css, "start"))
        parts.append(_text(right, y + 11, f"{one.effective_share:.2%} useful", css, "end"))
        x = left
        for kind in ("stalls", "recovering", "lost"):
            share = max(0.0, float(getattr(one, kind)))
            width = min(share / most * (right - left), right - x)
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 16:.1f}" width="{width:.2f}" height="12" '
                f'class="bar {kind}"><title>{kind}: {share:.2%}</title></rect>'
            )
            x += width
        if 1 - one.effective_share > 1.01 * most:
            tip, middle = right - 2, y + 22
            parts.append(
                f'<polygon points="{tip:.1f},{middle:.1f} {tip - 9:.1f},{middle - 9:.1f} '
                f'{tip - 9:.1f},{middle + 9:.1f}" class="mark current"/>'
            )
        if one.strategy.detail:
            parts.append(_text(left, y + 41, one.strategy.detail, "tick", "start"))
        y += 52 if one.strategy.detail else 38
    return _svg(y, "wasted share of time by strategy", parts)


def waste_bar(report: Report) -> str:
    """Draw the waste of the recommended setting by cause."""
    waste = report.choice.waste
    names = (
        "differentials",
        "snapshots",
        "backpressure",
        "restarts",
        "loads",
        "replay",
        "lost_steps",
    )
    most = max(getattr(waste, name) for name in names) or 1.0
    parts = []
    for row, name in enumerate(names):
        value, y = getattr(waste, name), 4 + row * 22
        width = value / most * (_WIDTH - 200)
        parts += [
            _text(112, y + 12, name.replace("_", " "), "name", "end"),
            f'<rect x="120" y="{y:.0f}" width="{width:.1f}" height="16" class="bar share"/>',
            _text(126 + width, y + 12, f"{3600 * value:.2f} s", "tick", "start"),
        ]
    return _svg(4 + 22 * len(names), "wasted seconds per hour by cause", parts)
