"""The `fusion-trace` command.

A subcommand finds something out, and shows it as a page or, with `--json`, as a document. It imports what it needs
itself, since some of that takes long (numpy, the simulator with the daemon's algorithms).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.settings import Settings
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange, around, parse_steps

if TYPE_CHECKING:
    from fusion_trace.read.job import JobTrace

_Value = TypeVar("_Value")

app = typer.Typer(
    help="Shows what a fusion_rt job does, or would do; without a command, the summary of the newest job.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

_WHAT = "A job's id, or directories or files with its rings; by default the newest job of this host."
What = Annotated[list[str] | None, typer.Argument(metavar="TRACE", help=_WHAT, show_default=False)]
StepsOption = Annotated[
    str,
    typer.Option("--steps", metavar="A:B", help="Only the steps from A up to, but without, B; either may be left out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")]
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


def main() -> None:
    """Runs the `fusion-trace` command."""
    try:
        app()
    except FusionError as error:
        typer.echo(f"fusion-trace: {error}", err=True)
        sys.exit(1)


def load(what: list[str] | None, chosen: StepRange = EVERY_STEP) -> JobTrace:
    """Reads the trace that is meant; see `job.load`. Its problems begin with who died, and what cannot be known."""
    from fusion_trace.read import job

    gc.set_threshold(1_000_000)  # millions of small objects without cycles: looking through them took half of the time
    return _with_failures(job.load(what or [], Settings.from_env().trace_root(), chosen))


def _with_failures(trace: JobTrace) -> JobTrace:
    from fusion_trace.analyse import endings, gaps

    died = endings.sentences(trace, endings.find(trace))
    return replace(trace, problems=(*died, *gaps.sentences(trace, gaps.unseen(trace)), *trace.problems))


def _load_two(before: str, after: str, chosen: StepRange, chosen_after: StepRange) -> tuple[JobTrace, JobTrace]:
    """Reads two traces: those that are named, the newest for the second one, and for the first the one before it.

    Raises:
        ChoiceError: there are no two jobs.
    """
    from fusion_trace.read import job

    gc.set_threshold(1_000_000)  # as in `load`
    root = Settings.from_env().trace_root()
    newest = [] if after else job.by_age(root)
    if not after and len(newest) < (1 if before else 2):
        raise ChoiceError(f"a comparison needs two jobs, and in {root} there are traces of {len(newest)}: name two")
    first = job.load([before or newest[1]], root, chosen)
    second = job.load([after or newest[0]], root, chosen_after)
    return _with_failures(first), _with_failures(second)


def _print(as_json: bool, document: Callable[[], object], page: Callable[[], None]) -> None:
    """Prints a document or a page."""
    if as_json:
        typer.echo(json.dumps(document(), indent=2))
    else:
        page()


# --- what a job has recorded, explained -------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def without_command(context: typer.Context) -> None:
    """Shows the newest job at a glance, where no command is given."""
    if context.invoked_subcommand is None:
        summary()


@app.command()
def summary(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows a job at a glance: its steps, its traffic, what is slow, and what is odd."""
    from fusion_trace.analyse import summary as analysis
    from fusion_trace.report import summary_page

    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analysis.find(trace, selected)
    _print(as_json, lambda: analysis.document(found, trace), lambda: summary_page.show(trace, found))


@app.command()
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
    from fusion_trace.analyse import overlap as analysis
    from fusion_trace.report import overlap_page

    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analysis.partitions(trace, selected)
    _print(as_json, lambda: analysis.document(trace, selected), lambda: overlap_page.show(trace, found, each))


@app.command()
def stragglers(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows which rank, host or link is slower than the others, in which steps, why, and what that has cost.

    Causes: compute (a rank's own work), daemon (what a node's daemon does with it), negotiation (asking the
    coordinator), wire (a link, or all of a host's).
    """
    from fusion_trace.analyse import stragglers as analysis
    from fusion_trace.analyse.overlap import by_step, partitions
    from fusion_trace.report import stragglers_page

    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analysis.find(trace, selected)
    count = len(by_step(partitions(trace, selected)))
    _print(as_json, lambda: analysis.document(trace, found), lambda: stragglers_page.show(trace, found, count))


@app.command()
def buckets(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows every bucket: its size, why it was handed over, and how long each phase of its exchange takes."""
    from fusion_trace.analyse import bucket_times as analysis
    from fusion_trace.report import buckets_page

    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analysis.find(trace, selected)
    _print(
        as_json, lambda: analysis.document(trace, found), lambda: buckets_page.show(trace, analysis.plans(trace), found)
    )


@app.command()
def tensor(
    name: Annotated[
        str, typer.Argument(help="A parameter, bucket or tensor; or a part of its name that is in no other.")
    ],
    what: What = None,
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Shows the life of a tensor, from its gradient to its update, on all ranks and links."""
    from fusion_trace.analyse import tensor as analysis
    from fusion_trace.report import tensor_page

    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analysis.find(trace, name, selected)
    _print(as_json, lambda: analysis.document(trace, found), lambda: tensor_page.show(trace, found))


# --- for other tools, and across processes and jobs -------------------------------------------------------------------


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
    """Writes what was recorded as Chrome's JSON, in Perfetto's own format, or as CSV with a line for each record."""
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
    """Writes a file and tells what is in it."""
    number = _written(path, write)
    told = f"{path}: {number} {of} of {len(trace.processes)} processes of job {trace.job}"
    _tell_file(trace, {"file": path, of: number}, [told], as_json)


def _written(path: str, write: Callable[[], int]) -> int:
    from fusion_trace.read.ring_reader import TraceError

    try:
        return write()
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from None


def _tell_file(trace: JobTrace, about: Mapping[str, Any], lines: list[str], as_json: bool) -> None:
    """Tells what was written, and what is missing in it."""
    if as_json:
        typer.echo(json.dumps({"job": trace.job, **about, "problems": list(trace.problems)}, indent=2))
        return
    for line in (*lines, *(f"! {problem}" for problem in trace.problems)):
        typer.echo(line)


@app.command()
def critical_path(
    what: What = None,
    steps: StepsOption = "",
    each: Annotated[bool, typer.Option("--each", help="Show the whole path of every step.")] = False,
    beside: Annotated[
        str, typer.Option("--beside", metavar="A:B", help="Show these steps beside those of --steps: what differs.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Shows what steps are made of, across ranks and nodes: the chain of activities that is as long as the step."""
    from fusion_trace.analyse import critical_path as analysis
    from fusion_trace.report import critical_path_page

    selected, selected_too = parse_steps(steps), parse_steps(beside, "--beside")
    trace = load(what, around(selected, selected_too) if beside else selected)
    paths = analysis.find(trace, selected)
    others = analysis.find(trace, selected_too) if beside else None
    _print(
        as_json,
        lambda: analysis.document(trace, paths, others or ()),
        lambda: critical_path_page.show(trace, paths, each, others),
    )


@app.command()
def diff(
    before: Annotated[
        str, typer.Argument(help="A job's id, or a directory or file with its rings; by default the newest but one.")
    ] = "",
    after: Annotated[
        str, typer.Argument(help="Another, or the same with other --after-steps; by default the newest job.")
    ] = "",
    steps: StepsOption = "",
    after_steps: Annotated[
        str, typer.Option("--after-steps", metavar="A:B", help="The steps of the second one, if not --steps.")
    ] = "",
    confidence: Annotated[float, typer.Option(help="Of all intervals at once.", min=0.5, max=0.9999)] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the resampling.", min=0)] = 0,
    fail_above: Annotated[
        str,
        typer.Option(
            "--fail-above",
            metavar="5%",
            help="Exit with 3 if steps are slower by more, and not by chance; with 5 if the median does not tell.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Compares the steps of two jobs, typical ones and spikes: what has changed, by how much, and what is noise."""
    from fusion_trace.analyse import diff as analysis
    from fusion_trace.report import diff_page

    limit = analysis.parse_share(fail_above) if fail_above else None
    selected = parse_steps(steps)
    selected_after = parse_steps(after_steps, "--after-steps") if after_steps else selected
    first, second = _load_two(before, after, selected, selected_after)
    before_them, after_them = analysis.samples(first, selected), analysis.samples(second, selected_after)
    found = analysis.compare(before_them, after_them, confidence, seed)
    _print(
        as_json,
        lambda: analysis.document(first, second, found, confidence),
        lambda: diff_page.show(first, second, found, confidence),
    )
    if limit is not None:
        answer = analysis.gate(found, limit)
        typer.echo(answer.what, err=True)
        if answer.slower:
            raise typer.Exit(3)
        if answer.undecided:
            raise typer.Exit(5)


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
    as_json: AsJson = False,
) -> None:
    """Writes one HTML page about a job, with charts: where steps go, overlap, stragglers, links, the critical path, a
    timeline of single steps, and what faster or slower links would do.

    The page needs no network and no other file. It is drawn by plotly, which is in the extra `trace`.
    """
    from fusion_trace.report import html_page
    from fusion_trace.report.figures import analyse
    from fusion_trace.report.findings import findings
    from fusion_trace.report.sections import sections

    script = html_page.plotly_js()
    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analyse(trace, selected, drawn=parse_steps(timeline, "--timeline") if timeline else None)
    text = html_page.render(trace.job, sections(found), script)

    def write() -> int:
        with open(output, "w", encoding="utf-8") as file:
            file.write(text)
        return os.path.getsize(output)

    nbytes = _written(output, write)
    told = findings(found)
    about = {"file": output, "bytes": nbytes, "findings": [asdict(each) for each in told]}
    lines = [f"{output}: {nbytes / 1e6:.1f} MB about job {trace.job}", *(each.what for each in told)]
    _tell_file(trace, about, lines, as_json)


# --- jobs that run ----------------------------------------------------------------------------------------------------


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
    from fusion_trace.read import collect as collecting
    from fusion_trace.read.job import COLLECTED
    from fusion_trace.read.ring_reader import TraceError

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


@app.command()
def topology(
    graph: Annotated[
        str,
        typer.Argument(
            help="ring, torus, exponential, one-peer-exponential, complete, bipartite, hypercube, random-pairs, or "
            "file:PATH with a matrix of weights, one row a rank."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")],
    clock: Annotated[
        int | None, typer.Option(help="Draw the graph of this clock only; by default the edges of all clocks.", min=0)
    ] = None,
    draw: Annotated[bool, typer.Option(help="Draw the graph.")] = True,
    as_json: AsJson = False,
) -> None:
    """Shows a mixing graph for decentralised training: how fast it averages, at what cost, and what can use it."""
    from fusion_rt.core.mixing import parse
    from fusion_trace.report import mixing_page

    mixing = parse(graph, ranks)

    def page() -> None:
        mixing_page.show(mixing)
        if draw:
            typer.echo("\n" + mixing_page.drawing(mixing, clock))

    _print(as_json, lambda: mixing_page.as_document(mixing, clock), page)


@app.command()
def hang(
    job: Annotated[str, typer.Option(help="Id of the job; by default, all jobs with daemons on this host.")] = "",
    everyone: Annotated[
        bool, typer.Option("--all", help="Show where every rank is, not only those waited for.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds for a daemon to answer, which itself waits up to 6 s for the others.", min=0.1),
    ] = 10.0,
    trace: Annotated[
        list[str] | None, typer.Option(help="Directory or file with rings of a job that has ended; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows what waits for whom in a job that hangs: operations, missing ranks, and their Python stacks.

    Run it on any host of the job, as the user whose job it is. Workers need not cooperate, and go on as before. Of a
    job whose daemons are gone it tells what was not finished when its records end (without stacks).
    """
    from fusion_trace.analyse import hang as analysis
    from fusion_trace.report import hang_page

    root = Settings.from_env().runtime_root()
    found = [] if trace else list(analysis.look(root, job, everyone, timeout))
    if found:
        _print(as_json, lambda: found, lambda: hang_page.show(found))
        return
    from fusion_trace.analyse import unfinished

    try:
        ending = unfinished.ending(load(trace or ([job] if job else [])))
    except FusionError as error:
        if trace:
            raise
        raise FusionError(f"{analysis.not_there(root, job)}, and {error}") from None
    _print(as_json, lambda: [ending.document()], lambda: hang_page.print_lines(hang_page.ending_lines(ending)))


@app.command()
def whatif(
    what: What = None,
    bandwidth: Annotated[str, typer.Option(help="Of every link: 100mbit, 2.5gbit.", show_default=False)] = "",
    latency: Annotated[str, typer.Option(help="Of every link, one way: 200us, 5ms.", show_default=False)] = "",
    density: Annotated[float | None, typer.Option(help="Of topk; 1 is no compression.", show_default=False)] = None,
    codec: Annotated[str, typer.Option(help="Another codec: fp16, powersgd(rank=2).", show_default=False)] = "",
    fusion_threshold: Annotated[str, typer.Option(help="Size of buckets: 4MiB.", show_default=False)] = "",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", show_default=False)] = None,
    algorithm: Annotated[str, typer.Option(help="bsp, dpsgd, local_sgd(steps=8), ...", show_default=False)] = "",
    no_straggler: Annotated[
        bool, typer.Option("--no-straggler", help="Every rank computes as long as the median rank.")
    ] = False,
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Predicts what a step would take with another link, codec, number of nodes or algorithm, by a simulation.

    Replays first what was recorded, by several models: every figure has the interval of what those say that replay it
    well, and none is told where they disagree; the exit status is then 4 (docs/simulation.md).
    """
    from fusion_rt.units import parse_seconds, parse_size
    from fusion_trace.report import whatif_page
    from fusion_trace.simulate.calibration import answer
    from fusion_trace.simulate.changes import Change, parse_bandwidth
    from fusion_trace.simulate.recorded import understand

    change = Change(
        bandwidth=parse_bandwidth(bandwidth) if bandwidth else None,
        latency=_with_unit("--latency", parse_seconds, latency) if latency else None,
        density=density,
        codec=codec,
        fusion_threshold=_with_unit("--fusion-threshold", parse_size, fusion_threshold) if fusion_threshold else None,
        nodes=nodes,
        algorithm=algorithm,
        no_straggler=no_straggler,
    )
    selected = parse_steps(steps)
    trace = load(what, selected)
    recorded = understand(trace, selected)
    found = answer(recorded, change)
    _print(
        as_json,
        lambda: whatif_page.as_document(trace, recorded, change, found),
        lambda: whatif_page.show(trace, recorded, change, found),
    )
    if found.refused:
        raise typer.Exit(4)


def _with_unit(flag: str, parse: Callable[[str, None], _Value], text: str) -> _Value:
    """Reads a value that has to have its unit: nobody means 5 s by `--latency 5`.

    Raises:
        ChoiceError: it has none, or is something else.
    """
    try:
        return parse(text, None)
    except SettingError as error:
        raise ChoiceError(f"{flag}: {error}") from None
