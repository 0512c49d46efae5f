"""The page that `fusion-trace whatif` shows: how long a step would take with something else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from fusion_rt.core.wording import counted
from fusion_trace.analyse.recorded_steps import Recorded
from fusion_trace.analyse.whatif import FRAMED, Answer, Change, Estimate, Figure
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, problems


def as_document(trace: JobTrace, recorded: Recorded, change: Change, found: Answer) -> dict[str, Any]:
    """Returns everything as JSON types. Seconds, bytes, and bytes a second; each figure with its range."""
    network = recorded.network
    return {
        "job": trace.job,
        "hosts": network.nodes,
        "ranks": len(trace.workers),
        "steps": len(recorded.steps.every),
        "walked_steps": list(recorded.steps.numbers),
        "link": {"rate": 1 / network.cost.seconds_per_byte, "latency": network.cost.latency},
        "change": {name: value for name, value in asdict(change).items() if value not in (None, "", False)},
        "recorded": asdict(found.recorded),
        "error": found.error,
        "changed": asdict(found.changed),
        "doubts": [asdict(doubt) for doubt in found.doubts],
        "problems": [*recorded.problems, *trace.problems],
    }


def show(trace: JobTrace, recorded: Recorded, change: Change, found: Answer) -> None:
    """Prints the prediction beside the recorded step, and the reasons for its range."""
    out = console(width=120)
    sizes = counted(recorded.network.nodes, "host"), counted(len(trace.workers), "rank")
    steps = counted(len(recorded.steps.every), "step")
    out.print(f"{trace.job}: {', '.join((*sizes, steps))}{_link(recorded)}")
    table = Table()
    for column in ("", "ms a step", "kept waiting, ms", "MB sent by a host"):
        table.add_column(column, justify="left" if not column else "right")
    _row(table, "recorded", found.recorded)
    _row(table, _words(change) or "predicted as it was", found.changed)
    out.print(table)
    step, was = found.changed.step, found.recorded.step.value
    low, value, high = (f"{each / was:.2f}" for each in (step.low, step.value, step.high))
    out.print(f"Changed, a step takes {value} times as long ({low} to {high}). Its range comes from:")
    for doubt in found.doubts:
        out.print(f"  {doubt.reason}: {doubt.seconds * 1e3:.3g} ms")
    for problem in recorded.problems:
        out.print(f"Note: {problem}.")
    problems(out, trace.problems)


def _link(recorded: Recorded) -> str:
    """Says how fast links are."""
    if recorded.network.nodes < 2 or not recorded.rate_known:
        return ""
    cost = recorded.network.cost
    return f"; links of {8e-6 * FRAMED / cost.seconds_per_byte:,.0f} Mbit/s and {cost.latency * 1e6:,.0f} us"


def _row(table: Table, title: str, found: Estimate) -> None:
    table.add_row(title, _figure(found.step, 1e3, 2), _figure(found.exposed, 1e3, 2), _figure(found.sent, 1e-6, 3))


def _figure(figure: Figure, scale: float, digits: int) -> str:
    low, value, high = (f"{each * scale:.{digits}f}" for each in (figure.low, figure.value, figure.high))
    return value if low == high else f"{value} ({low} to {high})"


def _words(change: Change) -> str:
    """Names a change in a few words."""
    words = []
    if change.rate is not None:
        words.append(f"{change.rate / 1e6:g} Mbit/s")
    if change.latency is not None:
        words.append(f"latency {change.latency * 1e3:g} ms")
    if change.density is not None:
        words.append(f"density {change.density:g}")
    if change.codec:
        words.append(change.codec)
    if change.fusion_threshold is not None:
        words.append(f"buckets of {change.fusion_threshold / 2**20:g} MiB")
    if change.hosts is not None:
        words.append(counted(change.hosts, "host"))
    if change.algorithm:
        words.append(change.algorithm)
    if change.without_straggler:
        words.append("without a straggler")
    return ", ".join(words)
