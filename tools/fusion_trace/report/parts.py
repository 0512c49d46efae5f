"""What a page is made of. All texts are plain; `html_page` escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_trace.report.charts import Chart
from fusion_trace.report.findings import Told


@dataclass(frozen=True)
class Table:
    """Rows of texts, of which the first `left` columns are words and the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


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


def rows_of(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], of: int, left: int = 1) -> Table:
    """A table that says how many rows it has not."""
    more = [(f"and {of - len(rows)} more", *[""] * (len(columns) - 1))] if of > len(rows) else []
    return Table(title, columns, (*rows, *more), left)
