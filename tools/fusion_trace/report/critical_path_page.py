"""The page that `fusion-trace critical-path` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from fusion_trace.analyse.critical_path import Path, totals
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, count, duration, problems, share, table

MOST_ROWS = 25
MOST_SEGMENTS = 200


def show(trace: JobTrace, paths: Sequence[Path], each: bool) -> None:
    """Prints the page; with `each`, every segment of every step too."""
    out = console()
    if not paths:
        out.print("no rank has a whole step in it")
        problems(out, trace.problems)
        return
    whole = sum(path.step.ns for path in paths)
    out.print(Text(f"job {trace.job}: the critical path of {count(len(paths), 'step')}", "bold"))
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
    out.print("the last to end: " + ", ".join(f"rank {rank} ({count(n, 'step')})" for rank, n in ends))
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
