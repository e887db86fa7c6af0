"""The report as one HTML file: no script, no request to anywhere, light and dark, phone and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lowdiff.tuner.choice import Setting
from lowdiff.tuner.report import HeatMap, Report
from lowdiff.tuner.tables import tables

_STYLE = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 50rem; padding: 1.2rem 1rem 3rem;
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.warnings { border-left: 4px solid #c98a00; padding: .2rem 1rem .2rem 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8886;
  vertical-align: top; }
.map { table-layout: fixed; min-width: 34rem; font-size: .75rem; }
.map th, .map td { padding: .2rem 0; text-align: center; border: 0; white-space: nowrap; }
@media print { body { max-width: none; font-size: 11pt; print-color-adjust: exact; }
  section { break-inside: avoid; } }
"""


def html_page(report: Report) -> str:
    """The whole file."""
    title = escape(f"Tuning of {report.question.title}")
    body = "\n".join(
        (
            f"<h1>{title}</h1>",
            "<p>What wastes least, checkpoints and failures together.</p>",
            _list("warnings", report.warnings),
            _section("Why", _list("why", report.choice.reasons)),
            *(_section(found.title, _table(found.heads, found.rows)) for found in tables(report)),
            _section("Wasted time over both settings", _heat_map(report)),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _heat_map(report: Report) -> str:
    """Seconds per hour by interval and batch, as colours: ten times the least is equally bad."""
    found = report.heat_map
    marks = {_cell(found, report.published): "&#9650;"}
    if report.question.current is not None:
        marks[_cell(found, report.question.current)] = "&#9632;"
    marks[_cell(found, report.choice.setting)] = "&#9679;"
    low = min(x for row in found.seconds_per_hour for x in row)
    lines = []
    for row, b in reversed(list(enumerate(found.batches))):
        cells = []
        for column, f in enumerate(found.intervals):
            waste = found.seconds_per_hour[row][column]
            shade = min(1.0, math.log10(waste / low))
            mark = marks.get((row, column), "" if found.allowed[row][column] else "&times;")
            cells.append(
                f'<td style="background:rgb(200 60 50/{shade:.0%})" '
                f'title="f = {f:,}, b = {b}: {waste:.1f} s per hour">{mark}</td>'
            )
        lines.append(f"<tr><th>{b}</th>{''.join(cells)}</tr>")
    heads = "".join(
        f'<th colspan="3">{f:,}</th>' if column % 3 == 0 else ""
        for column, f in enumerate(found.intervals)
    )
    return (
        "<p>Columns: f, steps between full snapshots. Rows: b, steps per write. The stronger the "
        "colour, the more is wasted; a cross breaks a limit or is more than the writer sustains. "
        "&#9679; recommended, &#9632; current, &#9650; the published model's setting.</p>"
        f'<div class="wide"><table class="map">{"".join(lines)}<tr><th></th>{heads}</tr></table></div>'
    )


def _cell(found: HeatMap, setting: Setting) -> tuple[int, int]:
    """Row and column nearest to a setting."""

    def nearest(values: Sequence[int], value: int) -> int:
        return min(range(len(values)), key=lambda i: abs(math.log(values[i] / value)))

    return (
        nearest(found.batches, setting.batch_size),
        nearest(found.intervals, setting.snapshot_every),
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _list(css: str, texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{css}">{items}</ul>' if items else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'
