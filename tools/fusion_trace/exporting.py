"""The commands that write traces for other tools, and those across processes and jobs: merge, convert, critical-path,
diff."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Annotated

import typer

from fusion_trace.read.choice import AsJson, ChoiceError, StepsOption, What, chosen, parse_steps
from fusion_trace.read.job import JobTrace
from fusion_trace.read.ring_reader import TraceError

_SUFFIXES = {"chrome": "json", "perfetto": "pftrace", "csv": "csv"}
Output = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="File to write; compressed if it ends in .gz.")
]


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
    as_json: AsJson = False,
) -> None:
    """Writes one file that Perfetto (ui.perfetto.dev) and chrome://tracing load: all processes on one axis of time.

    Arrows join a bucket's hand-over, its daemon and its answer, and each chunk's two ends.
    """
    from fusion_trace.export import chrome, torch_profiles
    from fusion_trace.export.picture import draw

    trace = chosen(what)
    path = output or f"{trace.job}.json.gz"
    picture = draw(trace)
    pids = {worker.rank: number for number, worker in enumerate(trace.processes, 1) if worker in trace.workers.values()}
    merged = [
        list(torch_profiles.merged(trace, profile, number, pids)) for number, profile in enumerate(profiles or [])
    ]
    number = _write(path, lambda: chrome.write(path, chain(chrome.events(picture), *merged), _about(trace)))
    _tell(trace, path, number, "events", as_json)


def convert(
    what: What = None,
    output: Output = "",
    form: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="chrome, perfetto or csv; by default, as FILE's suffix says.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Writes what was recorded as Chrome's JSON, in Perfetto's own format, or as CSV with a line for each record."""
    trace = chosen(what)
    form = form or _format_of(output)
    if form not in _SUFFIXES:
        raise ChoiceError(f"--to {form!r} is not one of {', '.join(_SUFFIXES)}")
    path = output or f"{trace.job}.{_SUFFIXES[form]}"
    if form == "csv":
        from fusion_trace.export import table_file

        _tell(trace, path, _write(path, lambda: table_file.write(path, trace)), "records", as_json)
        return
    from fusion_trace.export import chrome, perfetto_file
    from fusion_trace.export.picture import draw

    picture = draw(trace)
    if form == "perfetto":
        _tell(trace, path, _write(path, lambda: perfetto_file.write(path, picture)), "packets", as_json)
    else:
        number = _write(path, lambda: chrome.write(path, chrome.events(picture), _about(trace)))
        _tell(trace, path, number, "events", as_json)


def critical_path(
    what: What = None,
    steps: StepsOption = "",
    each: Annotated[bool, typer.Option("--each", help="Show the whole path of every step.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows what steps are made of, across ranks and nodes: the chain of activities that is as long as the step."""
    from fusion_trace.analyse import critical_path as finder

    selected, trace = parse_steps(steps), chosen(what)
    paths = finder.find(trace, selected)
    if as_json:
        typer.echo(json.dumps(finder.document(trace, paths), indent=2))
        return
    from fusion_trace.report import critical_path_page

    critical_path_page.show(trace, paths, each)


def diff(
    before: Annotated[str, typer.Argument(help="A job's id, or a directory or file with its rings.")],
    after: Annotated[str, typer.Argument(help="Another, or the same with other --after-steps.")],
    steps: StepsOption = "",
    after_steps: Annotated[
        str, typer.Option("--after-steps", metavar="A:B", help="The steps of the second one, if not --steps.")
    ] = "",
    confidence: Annotated[float, typer.Option(help="Of all intervals at once.", min=0.5, max=0.9999)] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the resampling.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Compares the steps of two jobs: what has changed, by how much, and what is only noise."""
    from fusion_trace.analyse import diff as finder

    selected = parse_steps(steps)
    selected_after = parse_steps(after_steps) if after_steps else selected
    first, second = chosen([before]), chosen([after])
    samples = finder.samples(first, selected), finder.samples(second, selected_after)
    found = finder.changes(*samples, (first.job, second.job), confidence, seed)
    if as_json:
        typer.echo(json.dumps(finder.document(first, second, found, confidence), indent=2))
        return
    from fusion_trace.report import diff_page

    diff_page.show(first, second, found, confidence)


def _format_of(path: str) -> str:
    """As its suffix says; Chrome's, which everything loads, if it says nothing."""
    stem = path.removesuffix(".gz")
    suffixes = {".csv": "csv", ".pftrace": "perfetto", ".perfetto-trace": "perfetto", ".pb": "perfetto"}
    return next((form for suffix, form in suffixes.items() if stem.endswith(suffix)), "chrome")


def _about(trace: JobTrace) -> dict[str, object]:
    return {"job": trace.job, "begin_ns": trace.span[0], "problems": list(trace.problems)}


def _write(path: str, write: Callable[[], int]) -> int:
    try:
        return write()
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from None


def _tell(trace: JobTrace, path: str, number: int, of: str, as_json: bool) -> None:
    if as_json:
        problems = list(trace.problems)
        typer.echo(json.dumps({"job": trace.job, "file": path, of: number, "problems": problems}, indent=2))
        return
    typer.echo(f"{path}: {number} {of} of {len(trace.processes)} processes of job {trace.job}")
    for problem in trace.problems:
        typer.echo(f"! {problem}")
