"""The commands that explain what a job recorded: summary, overlap, stragglers, buckets, tensor; and collect."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fusion_trace.read.choice import AsJson, StepsOption, What, chosen, parse_steps


def summary(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows a job at a glance: its steps, its traffic, what is slow, and what is odd."""
    from fusion_trace.analyse import summary as finder

    selected, trace = parse_steps(steps), chosen(what)
    found = finder.find(trace, selected)
    if as_json:
        _print(finder.document(found, trace))
        return
    from fusion_trace.report import summary_page  # rich is imported only where a page is shown

    summary_page.show(trace, found)


def overlap(
    what: What = None,
    steps: StepsOption = "",
    each: Annotated[bool, typer.Option("--each", help="Show every step, not only medians.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows how much of each step computes, communicates behind computation or in the open, waits, and idles.

    The parts of a step add up to it. Exposed communication is what a faster network or better overlap would save;
    waiting is for other ranks (see stragglers).
    """
    from fusion_trace.analyse import overlap as finder

    selected, trace = parse_steps(steps), chosen(what)
    if as_json:
        _print(finder.document(trace, selected))
        return
    from fusion_trace.report import overlap_page

    overlap_page.show(trace, finder.partitions(trace, selected), each)


def stragglers(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows which rank, node or link is slower than the others, in which steps, and why.

    Causes: compute (a rank's own work), negotiation (asking the coordinator), queue (waiting although nothing is in the
    way), wire (a link).
    """
    from fusion_trace.analyse import stragglers as finder

    selected, trace = parse_steps(steps), chosen(what)
    found = finder.find(trace, selected)
    if as_json:
        _print(finder.document(trace, found))
        return
    from fusion_trace.read.operations import all_steps
    from fusion_trace.report import stragglers_page

    every = all_steps(trace).values()
    stragglers_page.show(trace, found, len({step.number for its in every for step in its if step.number in selected}))


def buckets(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows every bucket: its size, why it was handed over, and how long each phase of its exchange takes."""
    from fusion_trace.analyse import bucket_times as finder

    selected, trace = parse_steps(steps), chosen(what)
    if as_json:
        _print(finder.document(trace, selected))
        return
    from fusion_trace.report import buckets_page

    buckets_page.show(trace, finder.plans(trace), finder.find(trace, selected))


def tensor(
    name: Annotated[
        str, typer.Argument(help="A parameter, bucket or tensor; or a part of its name that is in no other.")
    ],
    what: What = None,
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Shows the life of a tensor, from its gradient to its update, on all ranks and links."""
    from fusion_trace.analyse import tensor as finder

    selected, trace = parse_steps(steps), chosen(what)
    found = finder.find(trace, name, selected)
    if as_json:
        _print(finder.document(trace, found))
        return
    from fusion_trace.report import tensor_page

    tensor_page.show(trace, found)


def collect(
    job: Annotated[
        str, typer.Option(help="Id of the job; by default the only one that has daemons on this host.")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Directory for the rings; by default JOB.rings, made here.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(help="Seconds for a daemon to answer, which itself waits up to 5 s for another.", min=0.1)
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Fetches what a running job has recorded, from all its hosts, into a directory that other commands take.

    Run it on any host of the job, as the user whose job it is. The job goes on meanwhile.
    """
    from fusion_rt.settings import Settings
    from fusion_trace.read import collect as finder
    from fusion_trace.read.ring_reader import TraceError

    daemon = finder.daemon_of(Settings.from_env().runtime_root(), job)
    directory = out or f"{daemon.job}.rings"
    fetched = []
    for each in finder.collect(daemon, directory, timeout):
        fetched.append(each)
        if not as_json:
            what = f"{each.records} records ({each.nbytes} bytes)" if not each.why_not else each.why_not
            typer.echo(f"node {each.node} (host {each.host}){f', {each.name}' if each.name else ''}: {what}")
    if as_json:
        _print({"job": daemon.job, "directory": directory, "rings": [asdict(each) for each in fetched]})
    if all(each.why_not for each in fetched):
        raise TraceError(f"nothing of job {daemon.job!r} could be fetched")
    if not as_json:
        typer.echo(f"in {directory}: fusion-trace summary {directory}")


def _print(document: dict[str, object]) -> None:
    typer.echo(json.dumps(document, indent=2))
