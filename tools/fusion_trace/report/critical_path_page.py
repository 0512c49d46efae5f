"""The page that `fusion-trace critical-path` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fusion_rt.core.wording import counted
from fusion_trace.analyse.critical_path import Path, beside, totals
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, duration, numbers, problems, share, table

MOST_ROWS = 25
MOST_SEGMENTS = 200


def show(trace: JobTrace, paths: Sequence[Path], each: bool, others: Sequence[Path] | None = None) -> None:
    """Prints the page; with `each`, every segment of every step too; with `others`, these steps beside the first."""
    out = console()
    if not paths or others == ():
        out.print("no rank has a whole step in it" if not paths else "no rank has one of the steps of --beside")
        problems(out, trace.problems)
        return
    if others:
        _beside(out, trace, paths, others)
        problems(out, trace.problems)
        return
    whole = sum(path.step.ns for path in paths)
    out.print(Text(f"job {trace.job}: the critical path of {counted(len(paths), 'step')}", "bold"))
    rows = table("activity", "where", "of a step", "share", left=2)
    sums = totals(paths)
    for (activity, place), ns in list(sums.items())[:MOST_ROWS]:
        rows.add_row(activity, place.named(trace), duration(ns / len(paths)), share(ns / whole))
    if len(sums) > MOST_ROWS:
        rest = sum(list(sums.values())[MOST_ROWS:])
        rows.add_row(f"{len(sums) - MOST_ROWS} more", "", duration(rest / len(paths)), share(rest / whole))
    rows.add_row("all of it", "", duration(whole / len(paths)), share(1.0))
    out.print(rows)
    ends = Counter(path.step.rank for path in paths).most_common(3)
    out.print("the last to end: " + ", ".join(f"rank {rank} ({counted(n, 'step')})" for rank, n in ends))
    if each:
        for path in paths:
            out.print()
            out.print(Text(f"step {path.step.number} of rank {path.step.rank}: {duration(path.step.ns)}", "bold"))
            shown = table("at", "lasts", "activity", "where", "what", left=0)
            for segment in path.segments[:MOST_SEGMENTS]:
                at = duration(segment.begin - path.step.begin)
                shown.add_row(at, duration(segment.ns), segment.activity, segment.place.named(trace), segment.what)
            out.print(shown)
    problems(out, trace.problems)


def _beside(out: Console, trace: JobTrace, one: Sequence[Path], other: Sequence[Path]) -> None:
    """Prints the differences between some steps and others."""
    heads = [numbers([path.step.number for path in paths]) for paths in (one, other)]
    out.print(Text(f"job {trace.job}: the critical path of steps {heads[0]}, and of {heads[1]}", "bold"))
    rows = table("activity", "where", *(_of(paths) for paths in (one, other)), "difference", left=2)
    found = beside(one, other)
    for row in found[:MOST_ROWS]:
        rows.add_row(
            row.activity, row.place.named(trace), duration(row.one), duration(row.other), _signed(row.difference)
        )
    if rest := found[MOST_ROWS:]:
        one_of_rest, other_of_rest = sum(row.one for row in rest), sum(row.other for row in rest)
        rows.add_row(
            f"{len(rest)} more",
            "",
            duration(one_of_rest),
            duration(other_of_rest),
            _signed(other_of_rest - one_of_rest),
        )
    whole = [sum(path.step.ns for path in paths) / len(paths) for paths in (one, other)]
    rows.add_row("all of it", "", *map(duration, whole), _signed(whole[1] - whole[0]))
    out.print(rows)


def _of(paths: Sequence[Path]) -> str:
    return f"step {paths[0].step.number}" if len(paths) == 1 else f"of {len(paths)} steps"


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"
