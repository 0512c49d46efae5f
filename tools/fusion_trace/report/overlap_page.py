"""The page that `fusion-trace overlap` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import rich.table
from rich.text import Text

from fusion_rt.core.wording import counted
from fusion_trace.analyse.overlap import PARTS, Overview, Partition, overview
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import Table, console, duration, print_table, problems, share, table

MOST_STEPS = 40  # rows of single steps that are shown
_BAR = 40  # characters
_STYLES = {"compute": "green", "overlapped": "cyan", "exposed": "red", "waiting": "yellow", "idle": "bright_black"}
_MARKS = {"compute": "#", "overlapped": "=", "exposed": "!", "waiting": ".", "idle": " "}


def show(trace: JobTrace, found: Sequence[Partition], each: bool) -> None:
    """Prints the page; with `each`, every step of every rank too."""
    out = console()
    out.print(Text(f"job {trace.job}: where the time of a step goes (medians; bars: means)", "bold"))
    ranks = sorted({part.rank for part in found})
    rows = table("", "steps", "step", *PARTS, "hidden")
    for rank in ranks:
        _row(rows, f"rank {rank}", overview([part for part in found if part.rank == rank]))
    if found:
        if len(ranks) > 1:
            _row(rows, "all", overview(found))
        out.print(rows)
        out.print()
        for rank in ranks[:MOST_STEPS]:
            out.print(bar(f"rank {rank}", [part for part in found if part.rank == rank]))
        legend = Text("          ")
        for name in PARTS:
            legend.append(f"{_MARKS[name]} {name}  ", _STYLES[name])
        out.print(legend)
    else:
        out.print("no rank has a whole step in it")
    if each and found:
        out.print()
        print_table(out, single_steps(found[:MOST_STEPS]))
        if found[MOST_STEPS:]:
            out.print(f"and {counted(len(found) - MOST_STEPS, 'step')} more (--json has them all)")
    problems(out, trace.problems)


def single_steps(parts: Iterable[Partition]) -> Table:
    """Returns a table of steps of ranks, a row each."""
    rows = (
        (f"rank {part.rank}", str(part.number), duration(part.ns), *(duration(ns) for ns in part.parts.values()))
        for part in parts
    )
    return Table("", ("", "step", "takes", *PARTS), tuple(rows))


def bar(name: str, parts: Sequence[Partition]) -> Text:
    """Returns a line whose sections are as long as the parts of all these steps together."""
    whole = sum(part.ns for part in parts)
    text, done, drawn = Text(f"{name:<10}"), 0, 0
    for section in PARTS:
        done += sum(getattr(part, section) for part in parts)
        until = round(_BAR * done / whole)
        text.append(_MARKS[section] * (until - drawn), _STYLES[section])
        drawn = until
    return text


def _row(rows: rich.table.Table, name: str, of: Overview) -> None:
    values = (duration(getattr(of, part)) for part in PARTS)
    rows.add_row(name, str(of.steps), duration(of.ns), *values, share(of.hidden))
