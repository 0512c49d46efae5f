"""The page that `fusion-trace stragglers` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fusion_trace.analyse.stragglers import Finding
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import Table, console, duration, numbers, print_table, problems, share


def place(trace: JobTrace, finding: Finding) -> str:
    """Says where a finding is."""
    if finding.rank is not None:
        return f"rank {finding.rank} (host {trace.workers[finding.rank].host})"
    if finding.node is not None:
        return f"node {finding.node} (host {trace.hosts.get(finding.node, '?')})"
    assert finding.link is not None
    return f"link from node {finding.link[0]} to node {finding.link[1]}"


def sentence(trace: JobTrace, finding: Finding) -> str:
    """Says a finding in a sentence."""
    detail = f", {finding.detail}" if finding.detail else ""
    slow = "all" if len(finding.steps) == finding.of else str(len(finding.steps))
    return (
        f"{place(trace, finding)}: {finding.cause}{detail}, {duration(finding.typical)} instead of "
        f"{duration(finding.usual)} in {slow} of {finding.of} steps ({share(finding.share)} of their time)"
    )


def rows_of(trace: JobTrace, found: Sequence[Finding]) -> Table:
    """Returns a table of all findings, a row each."""
    rows = (
        (
            place(trace, each), each.cause + (f" ({each.detail})" if each.detail else ""), duration(each.lost),
            share(each.share), duration(each.typical), duration(each.usual), numbers(each.steps),
        )
        for each in found
    )  # fmt: skip
    return Table("Stragglers", ("where", "cause", "lost", "of all", "takes", "usual", "steps"), tuple(rows), left=2)


def show(trace: JobTrace, found: Sequence[Finding], steps: int) -> None:
    """Prints the page. `steps`: how many were looked at."""
    out = console()
    out.print(Text(f"job {trace.job}: who is slower than the others", "bold"))
    if not steps:
        out.print("no rank has a whole step in it")
    elif not found:
        out.print(f"nobody: in {steps} steps no rank, node or link stands out", style="green")
    else:
        print_table(out, rows_of(trace, found))
    problems(out, trace.problems)
