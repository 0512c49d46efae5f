"""The page that `fusion-trace diff` shows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import rich.table
from rich.console import Console
from rich.text import Text

from fusion_rt.core.wording import counted
from fusion_trace.analyse.diff import Diff, changed_ranks, verdict
from fusion_trace.analyse.distributions import SHARE, Comparison
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, duration, problems, table

MOST_RANKS = 8  # with all their rows


def show(first: JobTrace, second: JobTrace, found: Diff, confidence: float) -> None:
    """Prints the page."""
    out = console()
    out.print(Text(f"from {first.job} to {second.job}: {verdict(found)}", "bold"), soft_wrap=True)
    _print(out, "a step", (("", row) for row in found.step))
    _print(out, "its parts, median", (("", row) for row in found.parts))
    changed = changed_ranks(found)
    if changed:
        shown = changed[:MOST_RANKS]
        rows = ((f"rank {rank}, ", row) for rank in shown for row in found.ranks[rank] if row.before or row.after)
        _print(out, "own work of", rows)
        if changed[MOST_RANKS:]:
            out.print(f"and {len(changed) - MOST_RANKS} more ranks that have changed (--json has all)")
    if same := len(found.ranks) - len(changed):
        out.print()
        out.print(f"no change in the own work of {counted(same, 'rank')}")
    out.print(
        f"intervals of the difference; those of a table hold at once with {confidence:.0%} confidence, and where none "
        "is shown there are too few steps, or spikes",
        soft_wrap=True,
    )
    problems(out, [*first.problems, *second.problems])


def _print(out: Console, title: str, rows: Iterable[tuple[str, Comparison]]) -> None:
    shown: rich.table.Table = table(title, "before", "after", "change", "interval", "")
    for whose, row in rows:
        relative = row.relative(row.difference)
        style = "" if not row.changed else "red" if (row.difference or 0) > 0 else "green"
        shown.add_row(
            whose + row.measure,
            _value(row, row.before),
            _value(row, row.after),
            "" if relative is None or row.measure == SHARE else f"{relative:+.1%}",
            _interval(row),
            Text("changed" if row.changed else "no change" if row.known else "not known", style),
        )
    if shown.row_count:
        out.print()
        out.print(shown)


def _value(row: Comparison, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.1%}" if row.measure == SHARE else duration(value)


def _interval(row: Comparison) -> str:
    ends = [_signed(row, end) if math.isfinite(end) else "?" for end in (row.low, row.high)]
    return "" if ends == ["?", "?"] else " to ".join(ends)


def _signed(row: Comparison, value: float) -> str:
    return f"{'-' if value < 0 else '+'}{_value(row, abs(value))}"
