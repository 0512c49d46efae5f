"""Writes a report as one HTML file that needs nothing else: no network, no other file.

plotly.js is in it, compressed (4.8 MB would be most of the page): browsers unpack it themselves. Without it, and in
browsers that cannot, sentences and tables are still there. Nothing of a trace is code: names are escaped, and a policy
in the page forbids everything but its own parts.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from fusion_rt.tracing.reader import TraceError
from fusion_trace.report.sections import Section
from fusion_trace.report.wording import Table

_ZOOM = (
    ("in", "closer", "+"), ("out", "less close", "&minus;"), ("left", "earlier", "&larr;"),
    ("right", "later", "&rarr;"), ("all", "the whole step", "whole step"),
)  # fmt: skip
_LEVEL = 9  # of gzip: a second, for 40 kB less than at 6


def plotly_js() -> Path:
    """Returns the file of the installed plotly's script. It is not read yet: an analysis needs the memory before.

    Raises:
        TraceError: it is not installed.
    """
    try:
        import plotly
    except ImportError as error:
        raise TraceError(f"a report needs the package plotly ({error}): pip install plotly") from error
    return Path(plotly.__path__[0], "package_data", "plotly.min.js")


def render(job: str, sections: Sequence[Section], script: Path) -> str:
    """Returns the page. `script`: plotly.js."""
    charts = {f"{section.id}-{place}": chart for section in sections for place, chart in enumerate(section.charts)}
    packed = base64.b64encode(gzip.compress(script.read_bytes(), _LEVEL, mtime=0)).decode()
    template = files("fusion_trace.report").joinpath("template.html").read_text("utf-8")
    parts = {
        "TITLE": html.escape(f"fusion_rt: job {job}"),
        "CONTENTS": "".join(f'<a href="#{each.id}">{html.escape(each.title)}</a>\n' for each in sections),
        "SECTIONS": "\n".join(_section(section) for section in sections),
        "CHARTS": _json(charts),
        "PLOTLY": packed,
    }
    pieces = template.split("@@")  # text, name, text, name, ...: filled-in values are never searched again
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _json(value: object) -> str:
    """Returns JSON that may stand in a script element, whatever texts are in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(section: Section) -> str:
    lines = [f'<section id="{section.id}">', f"<h2>{html.escape(section.title)}</h2>"]
    for told in section.told:
        advice = f' <span class="advice">{html.escape(told.advice)}</span>' if told.advice else ""
        lines.append(f'<p class="{"bad" if told.bad else "good"}">{html.escape(told.what)}{advice}</p>')
    lines += [f'<p class="about">{html.escape(text)}</p>' for text in section.about]
    if section.charts:
        beside = ' class="beside"' if section.beside else ""
        lines.append(f"<div{beside}>")
        for place, chart in enumerate(section.charts):
            height = int(chart["layout"]["height"])
            if chart["layout"].get("meta", {}).get("zoom"):
                lines.append(_zoom_buttons(f"{section.id}-{place}"))
            lines.append(f'<div class="chart" id="{section.id}-{place}" style="min-height:{height}px"></div>')
        lines.append("</div>")
    lines += [_table(table) for table in section.tables]
    return "\n".join([*lines, "</section>"])


def _zoom_buttons(chart: str) -> str:
    """Returns the buttons over a chart that can be looked at more closely, for devices with neither a wheel nor
    keys."""
    buttons = (
        f'<button type="button" data-do="{do}" aria-label="{label}">{sign}</button>' for do, label, sign in _ZOOM
    )
    return f'<div class="zoom" data-chart="{chart}">{"".join(buttons)}</div>'


def _table(table: Table) -> str:
    lines = ['<div class="wide"><table>']
    if table.title:
        lines.append(f"<caption>{html.escape(table.title)}</caption>")
    if any(table.columns):
        lines.append(f"<thead>{_row('th', table.columns, table.left)}</thead>")
    lines.append("<tbody>")
    lines += [_row("td", row, table.left) for row in table.rows]
    return "\n".join([*lines, "</tbody></table></div>"])


def _row(kind: str, cells: Sequence[str], left: int) -> str:
    shown = (
        f"<{kind}{'' if place < left else ' class=n'}>{html.escape(cell)}</{kind}>" for place, cell in enumerate(cells)
    )
    return f"<tr>{''.join(shown)}</tr>"
