"""The page that `fusion-trace stragglers` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fusion_trace.analyse.gaps import sentences as gaps_in_words
from fusion_trace.analyse.gaps import unseen
from fusion_trace.analyse.stragglers import LIKELY, Finding
from fusion_trace.read.job import JobTrace
from fusion_trace.report.wording import Table, console, duration, numbers, print_table, problems, share


def place(trace: JobTrace, finding: Finding) -> str:
    """Says where a finding is."""
    if finding.rank is not None:
        return f"rank {finding.rank} (host {trace.workers[finding.rank].host})"
    if finding.node is not None:
        host = trace.host_of(finding.node)
        # A cause in computing or on the wire is one of all ranks of a host, or of all its links.
        return f"host {host}" if finding.cause in ("compute", "wire") else f"the daemon of {host}"
    assert finding.link is not None
    return f"the link from {trace.link_of(*finding.link)}"


def cause(finding: Finding) -> str:
    """Says why it is slow, with where in the step."""
    return finding.cause + (f" ({finding.detail})" if finding.detail else "")


def how_often(finding: Finding) -> str:
    """Says in how many steps it is slow, and how regularly."""
    if len(finding.steps) == finding.of:
        return f"all {finding.of} steps"
    if len(finding.steps) == 1:
        return f"step {finding.steps[0]} of {finding.of} steps"
    every = f", every {_ordinal(finding.every)}" if finding.every else ""
    return f"{len(finding.steps)} of {finding.of} steps{every}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def _extra(finding: Finding) -> str:
    """Says by how much it is slower, and the worst step where that is another matter."""
    worst = f" (at most +{duration(finding.most)})" if finding.most > 3 * finding.extra else ""
    return f"+{duration(finding.extra)}{worst}"


def sentence(trace: JobTrace, finding: Finding) -> str:
    """Says a finding in a sentence."""
    doubt = ", which may be chance" if finding.chance > LIKELY else ""
    return (
        f"{place(trace, finding)}: {cause(finding)}, {_extra(finding)} in {how_often(finding)}; "
        f"{duration(finding.lost)} lost, {share(finding.share)} of the time{doubt}"
    )


def rows_of(trace: JobTrace, found: Sequence[Finding]) -> Table:
    """Returns a table of all findings, a row each."""
    rows = (
        (
            place(trace, each), cause(each), duration(each.lost), share(each.share), _extra(each),
            how_often(each), "by chance?" if each.chance > LIKELY else "", numbers(each.steps),
        )
        for each in found
    )  # fmt: skip
    columns = ("where", "cause", "lost", "of all", "slower by", "in", "", "steps")
    return Table("Stragglers", columns, tuple(rows), left=2)


def none_stands_out(trace: JobTrace, steps: int) -> tuple[str, bool]:
    """Says that none is slower than the others, or that it cannot be known; and whether all is well."""
    missing = unseen(trace)
    if missing.ranks_may_be_missing:
        return "none can be named: " + "; ".join(gaps_in_words(trace, missing)), False
    if steps < 4:
        return f"none: there are {steps} whole steps of all ranks, too few to compare", False
    return f"none: in {steps} steps no rank, host or link stands out", True


def show(trace: JobTrace, found: Sequence[Finding], steps: int) -> None:
    """Prints the page. `steps`: how many were looked at."""
    out = console()
    out.print(Text(f"job {trace.job}: who is slower than the others", "bold"))
    told = ""
    if not steps:
        out.print("no rank has a whole step in it")
    elif not found:
        told, well = none_stands_out(trace, steps)
        out.print(told, style="green" if well else "yellow", soft_wrap=True)
    else:
        for each in found:
            out.print(Text(sentence(trace, each), "red"), soft_wrap=True)
        out.print()
        print_table(out, rows_of(trace, found))
        if any(numbers(each.steps) != numbers(each.steps, each.of) for each in found):
            out.print("--json has all steps")
    problems(out, (problem for problem in trace.problems if problem not in told))
