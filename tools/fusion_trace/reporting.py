"""The command that writes a page about a job: report."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from fusion_trace.read.choice import AsJson, StepsOption, What, chosen, parse_steps
from fusion_trace.read.ring_reader import TraceError


def report(
    what: What = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = "report.html",
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Writes one HTML page about a job, with charts: where steps go, overlap, stragglers, links, the critical path, and
    what faster or slower links would do.

    The page needs no network and no other file. It is drawn by plotly, which is in the extra `trace`.
    """
    from fusion_trace.report import html_page

    script = html_page.plotly_js()
    selected, trace = parse_steps(steps), chosen(what)
    from fusion_trace.report.figures import analyse  # the simulator imports the daemon's algorithms
    from fusion_trace.report.findings import findings
    from fusion_trace.report.sections import sections

    found = analyse(trace, selected)
    text = html_page.render(trace.job, sections(found), script)
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror or error}") from None
    told = findings(found)
    if as_json:
        document = {
            "job": trace.job,
            "file": output,
            "bytes": os.path.getsize(output),
            "findings": [{"what": each.what, "advice": each.advice, "bad": each.bad} for each in told],
            "problems": list(trace.problems),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"{output}: {os.path.getsize(output) / 1e6:.1f} MB about job {trace.job}")
    for each in told:
        typer.echo(each.what)
    for problem in trace.problems:
        typer.echo(f"! {problem}")
