"""Tables for terminals and documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.common.sampling import Estimate


@dataclass
class Table:
    """Rows of text. The first `left` columns are words, the others numbers."""

    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    title: str = ""
    left: int = 1

    def add(self, *cells: str) -> None:
        """Adds a row, with a cell for each column.

        Raises:
            ValueError: there are more or fewer cells.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(self.columns)} columns: {cells}")
        self.rows.append(list(cells))

    def show(self, console: Console | None = None) -> None:
        """Prints the table."""
        table = RichTable(title=self.title or None)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        (console or Console(width=160)).print(table)

    def markdown(self) -> str:
        """Returns the table in Markdown, without its title."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def goals(found: Iterable[tuple[str, str, bool]], title: str = "goals") -> Table:
    """Makes a table of goals, each with what was measured, and whether it holds."""
    table = Table(["goal", "measured", "holds"], title=title, left=3)
    for goal, measured, holds in found:
        table.add(goal, measured, "yes" if holds else "no")
    return table


def ratio(found: Estimate) -> str:
    """Formats an estimate with its interval."""
    return f"{number(found.value)} ({number(found.low)}–{number(found.high)})"


def number(value: float, digits: int = 3) -> str:
    """Formats a number with at least `digits` significant digits, and no more decimals than these need."""
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def nbytes(count: int) -> str:
    """Formats bytes in the unit that makes them short: 4 B, 64 KiB, 25.6 MB."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % factor == 0 and 1 <= count // factor < 1024:
            return f"{count // factor} {unit}"
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (1000, "kB")):
        if count >= factor:
            return f"{count / factor:g} {unit}"
    return f"{count} B"


def ms(seconds: float) -> str:
    """Formats seconds in milliseconds."""
    return number(seconds * 1e3)
