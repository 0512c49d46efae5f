"""The commands that answer a question about a job, as a page or, with `--json`, as a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, TypeVar

import typer

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.settings import Settings
from fusion_trace.cli.jobs import AsJson, StepsOption, What, app, load, load_two, show
from fusion_trace.read.choice import ChoiceError, around, parse_steps

_Value = TypeVar("_Value")


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
    show(as_json, lambda: analysis.document(found, trace), lambda: summary_page.show(trace, found))


@app.command("list")
def list_jobs(
    where: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR", help="Directories with traces; by default those of this host.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the jobs that have left traces, the newest first: their ids, begin, hosts, ranks and commands."""
    from fusion_trace.read.job import left_jobs
    from fusion_trace.report import summary_page

    root = Settings.from_env().trace_root()
    found = left_jobs(where or [], root)
    show(
        as_json,
        lambda: {"jobs": [asdict(each) for each in found]},
        lambda: summary_page.show_jobs(found, where or [root]),
    )


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
    show(as_json, lambda: analysis.document(trace, selected), lambda: overlap_page.show(trace, found, each))


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
    show(as_json, lambda: analysis.document(trace, found), lambda: stragglers_page.show(trace, found, count))


@app.command()
def buckets(what: What = None, steps: StepsOption = "", as_json: AsJson = False) -> None:
    """Shows every bucket: its size, why it was handed over, and how long each phase of its exchange takes."""
    from fusion_trace.analyse import bucket_times as analysis
    from fusion_trace.report import buckets_page

    selected = parse_steps(steps)
    trace = load(what, selected)
    found = analysis.find(trace, selected)
    show(
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
    show(as_json, lambda: analysis.document(trace, found), lambda: tensor_page.show(trace, found))


# --- for other tools, and across processes and jobs -------------------------------------------------------------------


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
    show(
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
        str, typer.Argument(help="Another job, or the same one with other --after-steps; by default the newest job.")
    ] = "",
    steps: StepsOption = "",
    after_steps: Annotated[
        str, typer.Option("--after-steps", metavar="A:B", help="The steps of the second one, if not --steps.")
    ] = "",
    confidence: Annotated[float, typer.Option(help="Confidence of all intervals at once.", min=0.5, max=0.9999)] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the resampling.", min=0)] = 0,
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
    first, second = load_two(before, after, selected, selected_after)
    before_them, after_them = analysis.samples(first, selected), analysis.samples(second, selected_after)
    found = analysis.compare(before_them, after_them, confidence, seed)
    show(
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


# --- jobs that run ----------------------------------------------------------------------------------------------------


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
        show(as_json, lambda: found, lambda: hang_page.show(found))
        return
    from fusion_trace.analyse import unfinished

    try:
        ending = unfinished.ending(load(trace or ([job] if job else [])))
    except FusionError as error:
        if trace:
            raise
        raise FusionError(f"{analysis.not_there(root, job)}, and {error}") from None
    show(as_json, lambda: [ending.document()], lambda: hang_page.print_lines(hang_page.ending_lines(ending)))


@app.command()
def whatif(
    what: What = None,
    rate: Annotated[str, typer.Option(help="Rate of every link: 100mbit, 2.5gbit.", show_default=False)] = "",
    latency: Annotated[str, typer.Option(help="Latency of every link, one way: 200us, 5ms.", show_default=False)] = "",
    density: Annotated[
        float | None, typer.Option(help="Density of topk; 1 is no compression.", show_default=False)
    ] = None,
    codec: Annotated[str, typer.Option(help="Another codec: fp16, powersgd(rank=2).", show_default=False)] = "",
    fusion_threshold: Annotated[str, typer.Option(help="Size of buckets: 4MiB.", show_default=False)] = "",
    hosts: Annotated[int | None, typer.Option(help="Number of hosts.", show_default=False)] = None,
    algorithm: Annotated[str, typer.Option(help="bsp, dpsgd, local_sgd(steps=8), ...", show_default=False)] = "",
    without_straggler: Annotated[
        bool, typer.Option("--without-straggler", help="Every rank computes as long as the median rank.")
    ] = False,
    steps: StepsOption = "",
    as_json: AsJson = False,
) -> None:
    """Predicts the time of a step with another link, codec, number of hosts or algorithm.

    Every figure has a range, and the reasons for its width are told with it (docs/tracing.md).
    """
    from fusion_rt.units import parse_seconds, parse_size
    from fusion_trace.analyse.recorded_steps import understand
    from fusion_trace.analyse.whatif import Change, answer, parse_rate
    from fusion_trace.report import whatif_page

    change = Change(
        rate=parse_rate(rate) if rate else None,
        latency=_with_unit("--latency", parse_seconds, latency) if latency else None,
        density=density,
        codec=codec,
        fusion_threshold=_with_unit("--fusion-threshold", parse_size, fusion_threshold) if fusion_threshold else None,
        hosts=hosts,
        algorithm=algorithm,
        without_straggler=without_straggler,
    )
    selected = parse_steps(steps)
    trace = load(what, selected)
    recorded = understand(trace, selected)
    found = answer(recorded, change)
    show(
        as_json,
        lambda: whatif_page.as_document(trace, recorded, change, found),
        lambda: whatif_page.show(trace, recorded, change, found),
    )


def _with_unit(flag: str, parse: Callable[[str, None], _Value], text: str) -> _Value:
    """Reads a value that has to have its unit: nobody means 5 s by `--latency 5`.

    Raises:
        ChoiceError: it has none, or is something else.
    """
    try:
        return parse(text, None)
    except SettingError as error:
        raise ChoiceError(f"{flag}: {error}") from None
