"""The page that `fusion-trace tensor` shows: one life, and how long the others were."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from fusion_rt.core.wording import counted
from fusion_trace.analyse.tensor import Event, TensorLives
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, duration, problems, size, table

MOST = 80  # events that are shown


def show(trace: JobTrace, found: TensorLives) -> None:
    """Prints the page."""
    out = console()
    about = f" ({size(found.nbytes)})" if found.nbytes else ""
    life = found.typical
    out.print(Text(f"job {trace.job}: {found.name}{about}", "bold"))
    if life is None:
        out.print("nothing happened to it in these steps")
    else:
        lengths = sorted(found.lives.lengths)
        out.print(f"exchanged {len(lengths)} times, which took from {duration(lengths[0])} to {duration(lengths[-1])}")
        where = f"step {life.step}, " if life.step is not None else ""
        into = f" in {life.operation} ({size(life.nbytes)})" if life.operation != found.name else ""
        out.print(f"one of median length: {where}clock {life.clock}{into}")
        out.print()
        rows = table("after", "lasts", "who", "what", left=4)
        rows.columns[0].justify = rows.columns[1].justify = "right"
        events = condensed(life.events)
        for event in events[:MOST]:
            rows.add_row(f"+{duration(event.since)}", duration(event.lasted), event.who, event.what)
        out.print(rows)
        if events[MOST:]:
            out.print(f"and {counted(len(events) - MOST, 'event')} more (--json has them all)")
    problems(out, trace.problems)


def condensed(events: Sequence[Event]) -> list[Event]:
    """Joins the events of many chunks, and of many kernels, into one each: from the first to the last of its
    kind."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        what = re.sub(r"a chunk of [0-9]+ bytes", "a chunk", event.what)
        groups.setdefault((event.who, what), []).append(event)
    shown = []
    for (who, what), group in groups.items():
        first = group[0]
        if len(group) == 1:
            shown.append(first)
            continue
        busy = sum(event.lasted or 0 for event in group)
        end = max(event.at + (event.lasted or 0) for event in group)
        told = f"{what} ({len(group)} times, {duration(busy)} together)"
        shown.append(Event(first.at, first.since, who, told, end - first.at))
    return sorted(shown, key=lambda event: event.at)
