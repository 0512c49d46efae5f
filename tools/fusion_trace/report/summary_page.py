"""The pages that `fusion-trace summary` and `list` show."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from fusion_rt.core.wording import counted
from fusion_trace.analyse.overlap import PARTS
from fusion_trace.analyse.summary import Rank, Summary, alone
from fusion_trace.read.job import JobTrace, LeftJob
from fusion_trace.report import stragglers_page
from fusion_trace.report.wording import (
    Table,
    console,
    duration,
    names,
    print_table,
    problems,
    share,
    size,
    table,
    when,
)

MOST = 64  # ranks or links that are shown
_MOST_SLOW = 3
_LONGEST_COMMAND = 200  # characters


def step_times(trace: JobTrace, ranks: Iterable[Rank]) -> Table:
    """Returns a table of how long steps of each rank take."""
    rows = (
        (
            f"rank {rank.rank}", trace.host_of(rank.node), str(rank.pid), f"{rank.first}-{rank.last}",
            duration(rank.median), duration(rank.p5), duration(rank.p95),
        )
        for rank in ranks
    )  # fmt: skip
    return Table("Step times", ("", "host", "pid", "steps", "median", "5 %", "95 %"), tuple(rows), left=2)


def unhurt(ranks: Sequence[Rank]) -> tuple[str, bool] | None:
    """Says which ranks are slow without having cost the others anything, as `nobody` does; None: there are none."""
    slow = alone(ranks)
    if not slow:
        return None
    usual = statistics.median(rank.median for rank in ranks)
    which = ", ".join(f"rank {rank.rank} takes {duration(rank.median)} a step" for rank in slow[:_MOST_SLOW])
    more = f", {counted(len(slow) - _MOST_SLOW, 'more rank')} as well" if slow[_MOST_SLOW:] else ""
    return f"{which}{more}, where most take {duration(usual)}; but no rank waited for that", False


def _rates(ranks: Sequence[Rank]) -> str:
    """Says how many steps ranks take, and which ones if they differ."""
    least, most = min(ranks, key=lambda rank: rank.per_second), max(ranks, key=lambda rank: rank.per_second)
    if most.per_second < 1.1 * least.per_second:
        return f"{most.per_second:.2f} steps"
    return f"{least.per_second:.2f} (rank {least.rank}) to {most.per_second:.2f} (rank {most.rank}) steps"


def begun(trace: JobTrace) -> str:
    """Says when and where a job began."""
    hosts = names(list(dict.fromkeys(trace.hosts[node] for node in sorted(trace.hosts))))
    return f"{when(trace.began)} on {hosts}"


def show_jobs(found: Sequence[LeftJob], where: Sequence[str]) -> None:
    """Prints the jobs that have left traces in some directories."""
    out = console()
    if not found:
        out.print(f"there are no traces in {', '.join(where)}")
        return
    rows = table("job", "begun", "ranks", "hosts", "command", left=5)
    for each in found:
        missing = f" ({len(each.hosts)} of {each.nodes})" if len(each.hosts) < each.nodes else ""
        rows.add_row(
            each.job, when(each.began), str(each.ranks), Text(names(each.hosts) + missing), Text(_line(each.command))
        )
    out.print(rows)


def _line(command: str) -> str:
    return textwrap.shorten(command, _LONGEST_COMMAND, placeholder=" …")


def _parts(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(ns)}" for name, ns in times.items())


def show(trace: JobTrace, found: Summary) -> None:
    """Prints the page."""
    out = console()
    there = len(trace.hosts)
    nodes = counted(there, "node") if there >= trace.nodes else f"{there} of {trace.nodes} nodes"
    who = f"{counted(len(trace.workers), 'rank')} on {nodes}"
    out.print(Text(f"job {found.job}: {who}, {found.seconds:.1f} s, {found.records} records", "bold"))
    out.print(Text(f"begun {begun(trace)}{f': {_line(trace.command)}' if trace.command else ''}"), soft_wrap=True)
    for sentence in found.ended:
        out.print(Text(sentence, "red"), soft_wrap=True)
    if found.ranks:
        out.print(
            f"{_rates(found.ranks)} a second; {size(found.handed_over)} handed over in each by a rank", soft_wrap=True
        )
        print_table(out, step_times(trace, found.ranks[:MOST]))
        if found.ranks[MOST:]:
            out.print(f"and {len(found.ranks) - MOST} more (--json has them all)")
    if found.overlap is not None:
        out.print()
        hidden = "" if found.overlap.hidden is None else f"; {share(found.overlap.hidden)} of communication is hidden"
        of = "a step (medians of all ranks, which differ: fusion-trace overlap)"
        of = of if alone(found.ranks) else "a step (medians)"
        out.print(f"{of}: {_parts({name: getattr(found.overlap, name) for name in PARTS})}{hidden}", soft_wrap=True)
        if found.overlap.differs:
            mean = found.overlap.mean
            out.print(
                f"on average {duration(sum(mean.values()))}, with all that is rare: {_parts(mean)}", soft_wrap=True
            )
    if found.links:
        out.print()
        together = ", all links together" if len(found.links) > 1 else ""
        out.print(f"between hosts: {size(found.link_rate)} a second{together}")
        rows = table("from", "to", "bytes", "a second", "chunks", left=2)
        for link in found.links[:MOST]:
            ends = trace.host_of(link.source), trace.host_of(link.target)
            rows.add_row(*ends, size(link.nbytes), size(link.rate), str(link.chunks))
        out.print(rows)
    told = ""
    if found.ranks:
        out.print()
        for each in found.stragglers[:_MOST_SLOW]:
            out.print(Text(f"slow: {stragglers_page.sentence(trace, each)}", "red"), soft_wrap=True)
        if len(found.stragglers) > _MOST_SLOW:
            out.print(f"and {len(found.stragglers) - _MOST_SLOW} more: fusion-trace stragglers")
        if not found.stragglers:
            steps = max(rank.steps for rank in found.ranks)
            told, well = unhurt(found.ranks) or stragglers_page.none_stands_out(trace, steps)
            out.print(f"slow: {told}", style="green" if well else "yellow", soft_wrap=True)
    problems(out, (odd for odd in found.odd if odd not in told))
