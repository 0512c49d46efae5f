"""The commands that write files: what a job has recorded, in other formats, as a page, or fetched from all hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion_rt.settings import Settings
from fusion_trace.cli.jobs import AsJson, StepsOption, What, app, load
from fusion_trace.read.choice import ChoiceError, parse_steps

if TYPE_CHECKING:
    from fusion_trace.read.job import JobTrace

Output = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="File to write; compressed if it ends in .gz.")
]
_SUFFIXES = {"chrome": "json", "perfetto": "pftrace", "csv": "csv"}
_FORMATS = {
    "json": "chrome",
    "csv": "csv",
    "pftrace": "perfetto",
    "perfetto-trace": "perfetto",
    "pb": "perfetto",
}


@app.command()
def merge(
    what: What = None,
    output: Output = "",
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--torch",
            metavar="[RANK=]FILE",
            help="Trace of torch.profiler (export_chrome_trace) to merge in; may be repeated. Its rank is told by "
            "the id of its process, or by RANK=.",
        ),
    ] = None,
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Writes one file that Perfetto (ui.perfetto.dev) and chrome://tracing load: all processes on one axis of time.

    Arrows join a bucket's hand-over, its daemon and its answer, and each chunk's two ends.
    """
    from fusion_trace.export import chrome, torch_profiles
    from fusion_trace.export.picture import draw

    if output and _format_of(output) != "chrome":
        raise ChoiceError(
            f"-o {output!r}: merge writes Chrome's JSON, as .json or .json.gz; convert writes other formats"
        )
    trace = load(what, parse_steps(steps))
    path = output or f"{trace.job}.json.gz"
    pids = {worker.rank: number for number, worker in enumerate(trace.processes, 1) if worker in trace.workers.values()}
    merged = [
        list(torch_profiles.merged(trace, profile, number, pids)) for number, profile in enumerate(profiles or [])
    ]
    events = chain(chrome.lines(draw(trace)), *(map(json.dumps, each) for each in merged))
    _export(trace, path, lambda: chrome.write(path, events, chrome.about(trace)), "events", as_json)


@app.command()
def convert(
    what: What = None,
    output: Output = "",
    form: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="chrome, perfetto or csv; by default, as FILE's suffix says, which has to be known.",
        ),
    ] = "",
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Writes the records as Chrome's JSON, in Perfetto's own format, or as CSV with a line for each record."""
    from fusion_trace.export import chrome, perfetto_file, table_file
    from fusion_trace.export.picture import draw

    form = form or (_format_of(output) if output else "chrome")
    if form not in _SUFFIXES:
        raise ChoiceError(f"--to {form!r} is not one of {', '.join(_SUFFIXES)}")
    trace = load(what, parse_steps(steps))
    path = output or f"{trace.job}.{_SUFFIXES[form]}"
    if form == "csv":
        _export(trace, path, lambda: table_file.write(path, trace), "records", as_json)
    elif form == "perfetto":
        _export(trace, path, lambda: perfetto_file.write(path, draw(trace)), "packets", as_json)
    else:
        _export(
            trace, path, lambda: chrome.write(path, chrome.lines(draw(trace)), chrome.about(trace)), "events", as_json
        )


def _format_of(path: str) -> str:
    """Returns the format that a file's suffix stands for.

    Raises:
        ChoiceError: it stands for none.
    """
    suffix = os.path.splitext(path.removesuffix(".gz"))[1].removeprefix(".")
    if suffix not in _FORMATS:
        known = ", ".join(f".{each}" for each in _FORMATS)
        raise ChoiceError(f"-o {path!r}: no format has that suffix; use one of {known}, or convert --to FORMAT")
    return _FORMATS[suffix]


def _export(trace: JobTrace, path: str, write: Callable[[], int], of: str, as_json: bool) -> None:
    """Writes a file and tells its contents."""
    number = _written(path, write)
    told = f"{path}: {number} {of} of {len(trace.processes)} processes of job {trace.job}"
    _tell_file(trace, {"file": path, of: number}, [told], as_json)


def _written(path: str, write: Callable[[], int]) -> int:
    from fusion_rt.tracing.reader import TraceError

    try:
        return write()
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from None


def _tell_file(trace: JobTrace, about: Mapping[str, Any], lines: list[str], as_json: bool) -> None:
    """Tells the contents of a file, and the gaps in it."""
    if as_json:
        typer.echo(json.dumps({"job": trace.job, **about, "problems": list(trace.problems)}, indent=2))
        return
    told = "\n".join(lines).casefold()
    for line in (*lines, *(f"! {problem}" for problem in trace.problems if problem.casefold() not in told)):
        typer.echo(line)


@app.command()
def report(
    what: What = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = "report.html",
    steps: StepsOption = "",
    timeline: Annotated[
        str,
        typer.Option(
            metavar="STEPS",
            help="Steps of the timeline, A:B as in Python, at most 12; by default a typical one and the slowest.",
        ),
    ] = "",
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB",
            help="Another job, by its id or directory, whose steps are shown beside this one's; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Writes one HTML page about a job, with charts: where steps go, overlap, stragglers, links, the critical path, a
    timeline of single steps, processors and memory, and what faster or slower links would do.

    The page needs no network and no other file. It is drawn by plotly, which is in the extra `trace`.
    """
    from fusion_trace.export.output_file import opened
    from fusion_trace.report import html_page
    from fusion_trace.report.figures import analyse
    from fusion_trace.report.findings import findings
    from fusion_trace.report.runs import MOST_RUNS, run_of
    from fusion_trace.report.sections import sections

    script = html_page.plotly_js()
    selected = parse_steps(steps)
    if len(beside or ()) > MOST_RUNS:
        raise ChoiceError(f"--beside: at most {MOST_RUNS} jobs are shown beside another")
    others = [run_of(load([each], selected), selected) for each in beside or ()]  # one at a time, for memory
    trace = load(what, selected)
    found = analyse(trace, selected, drawn=parse_steps(timeline, "--timeline") if timeline else None)
    text = html_page.render(trace.job, sections(found, others), script)

    def write() -> int:
        with opened(output) as file:
            file.write(text.encode())
        return os.path.getsize(output)

    nbytes = _written(output, write)
    told = findings(found)
    about = {"file": output, "bytes": nbytes, "findings": [asdict(each) for each in told]}
    lines = [f"{output}: {nbytes / 1e6:.1f} MB about job {trace.job}", *(each.what for each in told)]
    _tell_file(trace, about, lines, as_json)


@app.command()
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
    from fusion_rt.tracing.reader import TraceError
    from fusion_trace.read import collect as collecting
    from fusion_trace.read.job import COLLECTED

    daemon = collecting.daemon_of(Settings.from_env().runtime_root(), job)
    directory = out or f"{daemon.job}{COLLECTED}"
    fetched = []
    for each in collecting.collect(daemon, directory, timeout):
        fetched.append(each)
        if not as_json:
            what = f"{each.records} records ({each.nbytes} bytes)" if not each.why_not else each.why_not
            typer.echo(f"host {each.host}{f', {each.name}' if each.name else ''}: {what}")
    if as_json:
        document = {"job": daemon.job, "directory": directory, "rings": [asdict(each) for each in fetched]}
        typer.echo(json.dumps(document, indent=2))
    if all(each.why_not for each in fetched):
        raise TraceError(f"nothing of job {daemon.job!r} could be fetched")
    if not as_json:
        typer.echo(f"in {directory}: fusion-trace summary {directory}")
