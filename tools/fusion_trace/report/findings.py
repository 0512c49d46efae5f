"""Findings of a report, in sentences, with remedies."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from fusion_trace.analyse.stragglers import Finding
from fusion_trace.report import stragglers_page, summary_page
from fusion_trace.report.figures import Report
from fusion_trace.report.wording import duration, interval, share

EXPOSED = IDLE = 0.1  # of a step, from which on it is told
_MOST = 3  # stragglers; the section about them has all

_OF_CAUSE = {
    "compute": "Its own work is slow: compare it with the work of the others, and check whether its host is busy "
    "with something else; an algorithm without waits would hide it (documentation: Training algorithms).",
    "negotiation": "Tensors outside of the plan are asked for one by one: reduce them less often, or together.",
    "daemon": "Something is ready and does not go on: the daemon's host is busy with something else (fusiond top).",
    "wire": "It is slower than other links: look at the network there, or send less over it (documentation: "
    "Compression).",
}


@dataclass(frozen=True)
class Told:
    """A sentence on a finding, and one on its remedy. `bad`: it costs time."""

    what: str
    advice: str
    bad: bool


def findings(report: Report) -> tuple[Told, ...]:
    """Returns the findings, the most expensive first; at least one."""
    found: list[tuple[float, Told]] = []
    if not report.ranks:
        return (
            Told("No rank has a whole training step in this trace, so that there is nothing to explain.", "", True),
        )
    for ended in report.summary.ended:
        found.append((2.0, Told(ended[0].upper() + ended[1:] + ".", "", True)))
    for straggler in report.summary.stragglers[:_MOST]:
        found.append((straggler.share, Told(_straggler(report, straggler), _OF_CAUSE[straggler.cause], True)))
    step = fmean(rank.ns for rank in report.ranks)
    exposed = fmean(rank.mean["exposed"] for rank in report.ranks)
    idle = fmean(rank.mean["idle"] for rank in report.ranks)
    if exposed >= EXPOSED * step:
        what = (
            f"Communication is exposed for {duration(exposed)} of a step of {duration(step)} ({share(exposed / step)},"
            " the mean over ranks): scripts wait while data is under way."
        )
        advice = (
            "Send less, hide more, or send less often (documentation: Compression; Overlap; Training algorithms)."
            + _faster_links(report)
        )
        found.append((exposed / step, Told(what, advice, True)))
    if idle >= IDLE * step:
        what = (
            f"Scripts are outside of forward, backward and step() for {duration(idle)} of a step of {duration(step)} "
            f"({share(idle / step)}, the mean over ranks)."
        )
        found.append((idle / step, Told(what, "Most often that is the loading of data, or evaluation.", True)))
    if not found:
        unknown, well = summary_page.unhurt(report.summary.ranks) or stragglers_page.none_stands_out(
            report.trace, report.ranks[0].steps
        )
        if not well:
            return (Told(unknown[0].upper() + unknown[1:] + ".", "", True),)
        what = (
            f"Nothing stands out: no rank, node or link is slower than the others, and {share(exposed / step)} of a "
            "step is communication that is not hidden."
        )
        return (Told(what, "", False),)
    return tuple(told for _, told in sorted(found, key=lambda each: -each[0]))


def _straggler(report: Report, straggler: Finding) -> str:
    """Says the findings of `fusion-trace stragglers`, with the culprit in front."""
    what, _, rest = stragglers_page.sentence(report.trace, straggler).partition(": ")
    who = what[0].upper() + what[1:]
    return f"{who} keeps the others waiting: {rest}." if straggler.cause == "compute" else f"{who} is slow: {rest}."


def _faster_links(report: Report) -> str:
    """Says the prediction for links with about ten times the rate, if there is one."""
    curves = report.curves
    if curves.told is None or not curves.faster:
        return ""
    return f" With links of {curves.faster / 1e9:g} Gbit/s a step is predicted to take {interval(curves.told)}."
