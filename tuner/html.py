"""Render a report as one HTML file: no script, no request, light and dark, phone and print."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lowdiff.tuner import charts
from lowdiff.tuner.copies import copies_facts, copies_title
from lowdiff.tuner.logged import LOGGED_HEADS
from lowdiff.tuner.report import (
    STRATEGY_HEADS,
    Report,
    basis,
    facts,
    logged,
    published_text,
    strategy_cells,
)

_STYLE = """
:root { --page: #fdfdfc; --ink: #1c2733; --muted: #5d6b79; --line: #d9dfe5; --box: #f2f5f7;
  --hot: #b3261e; --chosen: #0b6fb8; --current: #1c2733; --published: #8a5a00; --good: #1d7f5f;
  --stall: #c98a00; --recover: #7a5bb5; --lost: #b3261e; --warn: #fff4da; --warnline: #c98a00; }
@media (prefers-color-scheme: dark) { :root { --page: #14191e; --ink: #e6ebef; --muted: #9aa8b5;
  --line: #323c46; --box: #1d242b; --hot: #ff7a6b; --chosen: #4cb1f5; --current: #ffffff;
  --published: #f0b95a; --good: #3fb68b; --stall: #e0a93a; --recover: #a48be0; --lost: #ff7a6b;
  --warn: #2b2513; --warnline: #b98a20; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 46rem; padding: 1.2rem 1rem 3rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0 .8rem; } .muted { color: var(--muted); }
.answer { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.answer div { flex: 1 1 9rem; background: var(--box); border-radius: .6rem; padding: .7rem .9rem; }
.answer b { display: block; font-size: 1.6rem; line-height: 1.2; }
.warnings { background: var(--warn); border-left: 4px solid var(--warnline); margin: 1rem 0;
  padding: .6rem 1rem .6rem 2rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; max-width: 38rem; height: auto; margin: .4rem 0; }
text { fill: var(--ink); font-size: 12px; } .tick { fill: var(--muted); font-size: 11px; }
.axis { fill: var(--muted); } .heat { fill: var(--hot); } .no { stroke: var(--ink);
  stroke-opacity: .45; } .mark { stroke: var(--page); stroke-width: 2; }
.mark.chosen { fill: var(--chosen); } .mark.current { fill: var(--current); }
.mark.published { fill: var(--published); } .grid { stroke: var(--line); }
.curve { fill: none; stroke-width: 2.2; } .curve.kept { stroke: var(--muted); stroke-dasharray: 5 4; }
.curve.retuned { stroke: var(--chosen); }
.bar.stalls { fill: var(--stall); } .bar.recovering { fill: var(--recover); }
.ours { font-weight: 600; }
.bar.lost { fill: var(--lost); } .bar.share { fill: var(--chosen); }
.key { display: inline-block; margin-right: 1.1rem; white-space: nowrap; font-size: .9rem; }
.key svg { display: inline-block; width: 1rem; height: 1rem; margin: 0 .3rem 0 0;
  vertical-align: -.15rem; }
@media print { :root { --page: #fff; --ink: #000; --muted: #444; --line: #bbb; --box: #f4f4f4;
  --hot: #b3261e; --chosen: #0b6fb8; --current: #000; --published: #8a5a00; --good: #1d7f5f;
  --stall: #c98a00; --recover: #7a5bb5; --lost: #b3261e; --warn: #fff8e8; }
  body { max-width: none; font-size: 11pt; padding: 0; print-color-adjust: exact; }
  section { break-inside: avoid; } }
"""


def html_page(report: Report) -> str:
    """Return the whole file."""
    setting = report.choice.setting
    title = escape(f"Tuning of {report.question.title}")
    parts = [
        f"<h1>{title}</h1>",
        (
            '<p class="muted">How often to take a full snapshot and how many steps to write at once, '
            "so that checkpoints and failures together waste least.</p>"
        ),
        (
            '<div class="answer">'
            f"<div><b>{setting.snapshot_every:,}</b>steps between full snapshots (f)</div>"
            f"<div><b>{setting.batch_size}</b>steps per durable write (b)</div>"
            f"<div><b>{report.effective:.2%}</b>effective training time</div></div>"
        ),
        _list("warnings", report.warnings),
        _section("Why", _list("", report.choice.reasons)),
        _section("In figures", _table((), facts(report))),
        _section(
            "Wasted time by cause",
            "<p>Seconds per hour of useful training, with the recommended setting.</p>"
            + charts.waste_bar(report),
        ),
        _heat_map(report),
        _section(
            "If an assumption is off",
            "<p>Wasted seconds per hour when one assumption is multiplied. "
            + _key("kept", "with the setting above")
            + _key("retuned", "tuned again, within the limits")
            + "</p>"
            + "".join(
                f"<h3>{escape(found.what)}</h3>{charts.sensitivity(found)}"
                for found in report.sensitivities
            ),
        ),
        _side_by_side(report),
        _logged(report),
        _copies(report),
        _strategies(report),
        _costs(report),
        _decisions(report),
    ]
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _heat_map(report: Report) -> str:
    keys = _mark("chosen", "recommended") + _mark("published", "the published model's setting")
    if report.question.current is not None:
        keys = _mark("current", "current") + keys
    text = (
        "<p>The stronger the colour, the more is wasted; a cross breaks a limit or is more than the writer sustains. "
        f"{keys}</p>"
    )
    return _section("Wasted time over both settings", text + charts.heat_map(report))


def _side_by_side(report: Report) -> str:
    found = report.side_by_side
    if found is None:
        return ""
    table = _table(STRATEGY_HEADS, [strategy_cells(row) for row in found.rows])
    return _section(
        "Strategies side by side",
        "<p>Overhead is per second of training. What a failure takes and a restart are averages; bytes are "
        f'those on local disks, of all ranks.</p><div class="wide">{table}</div>'
        f"<p>{escape(published_text(found.published))}</p>",
    )


def _logged(report: Report) -> str:
    rows = logged(report)
    if not rows:
        return ""
    return _section(
        "What the log of each compressor takes",
        "<p>Without snapshots. What a compressor does to training is in its documentation.</p>"
        + _table(LOGGED_HEADS, rows),
    )


def _copies(report: Report) -> str:
    found = report.question.copies
    if found is None:
        return ""
    return _section(copies_title(found), _table((), copies_facts(found)))


def _strategies(report: Report) -> str:
    if not report.simulated:
        return ""
    shown = {"stalls": "saving", "recovering": "recovering", "lost": "done again"}
    keys = "".join(_swatch(css, name) for css, name in shown.items())
    text = (
        "<p>Share of the time that is wasted, simulated under the same failures with the costs below; "
        f"{report.simulated[0].failures:.0f} failures in each run.</p><p>{keys}</p>"
    )
    return _section("Against what else there is", text + charts.strategies(report.simulated))


def _costs(report: Report) -> str:
    table = _table(("per rank", "median", "middle 80 %", "source"), basis(report))
    return _section("What it is based on", f'<div class="wide">{table}</div>')


def _decisions(report: Report) -> str:
    rows = [
        (
            str(decision.get("step", "")),
            f"f = {decision.get('snapshot_every')}, b = {decision.get('batch_size')}",
            "; ".join(map(str, decision.get("reasons", []))),
        )
        for decision in report.question.decisions
    ]
    if not rows:
        return ""
    table = _table(("step", "from then on", "because"), rows)
    return _section("What the run decided itself", f'<div class="wide">{table}</div>')


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _list(css: str, texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{css}">{items}</ul>' if items else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _mark(shape: str, name: str) -> str:
    drawn = charts.marker(shape, 8, 8)
    return f'<span class="key"><svg viewBox="0 0 16 16">{drawn}</svg>{escape(name)}</span>'


def _key(css: str, name: str) -> str:
    line = f'<polyline points="0,8 16,8" class="curve {css}"/>'
    return f'<span class="key"><svg viewBox="0 0 16 16">{line}</svg>{escape(name)}</span>'


def _swatch(css: str, name: str) -> str:
    box = f'<rect x="1" y="1" width="14" height="14" class="bar {css}"/>'
    return f'<span class="key"><svg viewBox="0 0 16 16">{box}</svg>{escape(name)}</span>'
