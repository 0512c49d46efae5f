"""Texts of times, sizes, places and problems on pages, and how pages are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import rich.table
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from fusion_trace.analyse.whatif import Figure


def duration(ns: float | None) -> str:
    """Returns three digits and a unit; "" for None."""
    if ns is None:
        return ""
    for limit, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(ns) >= limit * 0.9995:
            return f"{_three(ns / limit)} {unit}"
    return f"{ns:.0f} ns"


def interval(figure: Figure) -> str:
    """Returns a figure in seconds as durations, with its range, whose unit is that of the figure if none is said."""
    value, low, high = (duration(each * 1e9) for each in (figure.value, figure.low, figure.high))
    unit = value.partition(" ")[2]
    if all(each.endswith(f" {unit}") for each in (low, high)):
        low, high = (each.removesuffix(f" {unit}") for each in (low, high))
    return f"{value} ({low} to {high})"


def size(nbytes: float) -> str:
    """Returns three digits and a unit."""
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= limit:
            return f"{_three(nbytes / limit)} {unit}"
    return f"{nbytes:.0f} B"


def _three(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def when(wall: int) -> str:
    """Returns a wall-clock time, ns since 1970, as this host's date and time."""
    return datetime.fromtimestamp(wall / 1e9).strftime("%Y-%m-%d %H:%M:%S")


def names(of: Sequence[str], most: int = 4) -> str:
    """Returns names, and how many are left out if there are too many."""
    more = f" and {len(of) - most} more" if len(of) > most else ""
    return ", ".join(of[:most]) + more


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}" if value < 0.9995 else "100%"


def numbers(values: Sequence[int], most: int = 6) -> str:
    """Returns increasing numbers as ranges, `1-4, 7`; with more than `most` of these, how many numbers are left out."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    left = sum(last - first + 1 for first, last in runs[most:])
    return ", ".join(shown[:most]) + (f" and {left} more" if left else "")


def console(width: int | None = None) -> Console:
    """Returns a console that shows texts as they are; names have [brackets] and numbers. `width`: where there is no
    terminal that has one."""
    made = Console(highlight=False, markup=False, emoji=False)
    if width is not None and not made.is_terminal:
        made.width = width
    return made


@dataclass(frozen=True)
class Table:
    """Rows of texts, of which the first `left` columns are words and the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


def print_table(on: Console, shown: Table) -> None:
    """Prints a table without its title."""
    rows = table(*shown.columns, left=shown.left)
    for row in shown.rows:
        rows.add_row(*row)
    on.print(rows)


def table(*columns: str, left: int = 1) -> rich.table.Table:
    """Returns a table without lines, of which the first `left` columns are text and the others numbers."""
    made = rich.table.Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", overflow="fold")
    return made


def problems(on: Console, found: Iterable[str]) -> None:
    """Prints sentences about gaps, below everything else."""
    told = list(found)
    if told:
        on.print()
    for problem in told:
        on.print(Text(f"! {problem}", "yellow"), soft_wrap=True)
