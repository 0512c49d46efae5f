"""The page that `fusion-trace diff` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fusion_trace.analyse.diff import Comparison, verdict
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, duration, problems, table


def show(first: JobTrace, second: JobTrace, found: Sequence[Comparison], confidence: float) -> None:
    """Prints the page."""
    out = console()
    out.print(Text(f"from {first.job} to {second.job}: {verdict(found)}", "bold"))
    rows = table("of a step", "before", "after", "change", "interval", "")
    for change in found:
        relative = change.relative(change.difference)
        interval = f"{_signed(change.low)} to {_signed(change.high)}"
        style = "" if not change.changed else "red" if change.difference > 0 else "green"
        rows.add_row(
            change.measure,
            duration(change.before),
            duration(change.after),
            "" if relative is None else f"{relative:+.1%}",
            interval,
            Text("changed" if change.changed else "no change", style),
        )
    out.print(rows)
    out.print(
        "trimmed means over steps (without the highest and the lowest tenth, but for the row that says mean) of means "
        f"over ranks; all intervals hold at once with {confidence:.0%} confidence"
    )
    problems(out, [*first.problems, *second.problems])


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"
