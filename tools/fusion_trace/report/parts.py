"""Parts of the HTML page. All texts are plain; `html_page` escapes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_trace.report.charts import Chart
from fusion_trace.report.findings import Told
from fusion_trace.report.wording import Table


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of the element, and before the names of its charts.
        title: above it.
        told: what was found.
        about: how to read it; a paragraph each.
        charts: beside each other, if there is room.
        tables: below them.
    """

    id: str
    title: str
    told: tuple[Told, ...] = ()
    about: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


def shortened(table: Table, of: int) -> Table:
    """Adds a row to a table that says how many of all `of` rows it has not, if any."""
    missing = of - len(table.rows)
    more = (f"and {missing} more", *[""] * (len(table.columns) - 1))
    return replace(table, rows=(*table.rows, more)) if missing > 0 else table
