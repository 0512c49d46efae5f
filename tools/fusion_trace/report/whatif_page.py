"""The page that `fusion-trace whatif` shows: how long a step would take with something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from fusion_rt.core.wording import counted
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import console, problems
from fusion_trace.simulate.calibration import Answer, Estimate, Figure
from fusion_trace.simulate.changes import Change
from fusion_trace.simulate.recorded import Recorded


def as_document(trace: JobTrace, recorded: Recorded, change: Change, found: Answer) -> dict[str, Any]:
    """Returns everything as JSON types. Seconds, bytes, and bytes a second; each figure with its interval."""
    return {
        "job": trace.job,
        "nodes": recorded.nodes,
        "ranks": recorded.nodes * recorded.workers,
        "steps": len(recorded.every),
        "replayed_steps": list(recorded.numbers),
        "links": [
            {"bandwidth": link.bandwidth, "latency": link.latency, "burst": link.burst}
            for link in found.models[0].recorded.links
        ],
        "codec": recorded.codec,
        "change": {name: value for name, value in asdict(change).items() if value not in (None, "", False)},
        "recorded": asdict(found.recorded),
        "replayed": {**asdict(found.replayed), "error": found.error},
        "models": [{"what": model.what, "error": model.error} for model in found.models],
        "changed": None if found.changed is None else asdict(found.changed),
        "refused": found.refused,
        "problems": [*recorded.problems, *trace.problems],
    }


def show(trace: JobTrace, recorded: Recorded, change: Change, found: Answer) -> None:
    """Prints the prediction beside what was recorded."""
    out = console(width=120)
    sizes = counted(recorded.nodes, "node"), counted(recorded.nodes * recorded.workers, "rank")
    steps = counted(len(recorded.every), "step")
    out.print(f"{trace.job}: {', '.join((*sizes, steps))}; {_links(found)}{_encoded(recorded)}")
    table = Table()
    for column in ("", "ms a step", "kept waiting, ms", "MB sent by a node"):
        table.add_column(column, justify="left" if not column else "right")
    _row(table, "recorded", found.recorded)
    _row(table, "replayed as it was", found.replayed)
    if found.changed is not None:
        _row(table, _words(change), found.changed)
    out.print(table)
    out.print(
        f"The replay of the recording is {abs(found.error):.1%} too {'long' if found.error > 0 else 'short'}; "
        f"{_models(len(found.models))} about as well."
    )
    if found.changed is not None:
        step, was = found.changed.step, found.recorded.step.value
        low, value, high = (f"{each / was:.2f}" for each in (step.low, step.value, step.high))
        out.print(f"Changed, a step takes {value} times as long ({low} to {high}).")
    elif found.refused:
        asked = f" for {_words(change)}" if change != Change() else ""
        out.print(f"No prediction{asked}: {found.refused}.", style="yellow")
    for problem in recorded.problems:
        out.print(f"Note: {problem}.")
    problems(out, trace.problems)


def _links(found: Answer) -> str:
    """Says what the links of the best model are like."""
    links = found.models[0].recorded.links
    if len(links) < 2:
        return ""
    rates = _range([link.bandwidth * 8e-6 for link in links])
    latencies = _range([link.latency * 1e6 for link in links])
    burst = max(link.burst for link in links)
    after = f" after bursts of {burst / 1e3:.0f} kB" if burst else ""
    return f"links {rates} Mbit/s of payload, {latencies} us{after}; "


def _range(values: Sequence[float]) -> str:
    low, high = (f"{pick(values):,.0f}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _models(number: int) -> str:
    return "1 model replays it" if number == 1 else f"{number} models replay it"


def _encoded(recorded: Recorded) -> str:
    """Says what is known of the codec: its name is not recorded."""
    if recorded.codec in ("dense", "fp16"):
        return f"codec {recorded.codec}"
    return f"sent: {recorded.costs.codec(recorded.codec).ratio:.2g} of the bytes of a dense all-reduce"


def _row(table: Table, title: str, found: Estimate) -> None:
    table.add_row(title, _figure(found.step, 1e3, 2), _figure(found.exposed, 1e3, 2), _figure(found.sent, 1e-6, 3))


def _figure(figure: Figure, scale: float, digits: int) -> str:
    low, value, high = (f"{each * scale:.{digits}f}" for each in (figure.low, figure.value, figure.high))
    return value if low == high else f"{value} ({low} to {high})"


def _words(change: Change) -> str:
    """Names a change in a few words."""
    words = []
    if change.bandwidth is not None:
        words.append(f"{change.bandwidth / 1e6:g} Mbit/s")
    if change.latency is not None:
        words.append(f"latency {change.latency * 1e3:g} ms")
    if change.density is not None:
        words.append(f"density {change.density:g}")
    if change.codec:
        words.append(change.codec)
    if change.fusion_threshold is not None:
        words.append(f"buckets of {change.fusion_threshold / 2**20:g} MiB")
    if change.nodes is not None:
        words.append(f"{change.nodes} nodes")
    if change.algorithm:
        words.append(change.algorithm)
    if change.no_straggler:
        words.append("no straggler")
    return ", ".join(words)
