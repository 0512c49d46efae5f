"""The `fusion-trace` command."""

from __future__ import annotations

import json
import sys
from typing import Annotated, NoReturn

import typer

from fusion_rt.errors import FusionError
from fusion_trace import explaining, exporting, reporting

app = typer.Typer(
    help="Shows what a fusion_rt job does, or would do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (
    explaining.summary,
    explaining.overlap,
    explaining.stragglers,
    explaining.buckets,
    explaining.tensor,
    exporting.merge,
    exporting.convert,
    exporting.critical_path,
    exporting.diff,
    reporting.report,
    explaining.collect,
):
    app.command()(_command)


@app.command()
def topology(
    graph: Annotated[
        str,
        typer.Argument(
            help="ring, torus, exponential, one-peer-exponential, complete, bipartite, hypercube, or file:PATH with a "
            "matrix of weights, one row a rank.",
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")],
    clock: Annotated[
        int | None,
        typer.Option(help="Draw the graph of this clock only; by default the edges of all clocks.", min=0),
    ] = None,
    draw: Annotated[bool, typer.Option(help="Draw the graph.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")] = False,
) -> None:
    """Shows a mixing graph for decentralised training: how fast it averages, at what cost, and what can use it."""
    from fusion_trace.report import mixing_page as page  # rich and numpy are imported only where something is shown

    try:
        mixing = page.parse(graph, ranks)
        if as_json:
            typer.echo(json.dumps(page.as_document(mixing, clock), indent=2))
            return
        page.show(mixing)
    except FusionError as error:
        _fail(error)
    if draw:
        typer.echo("\n" + page.drawing(mixing, clock))


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
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")] = False,
) -> None:
    """Shows what waits for whom in a job that hangs: operations, missing ranks, and their Python stacks.

    Run it on any host of the job, as the user whose job it is. Workers need not cooperate, and go on as before. Of a
    job whose daemons are gone it tells what was not finished when its records end (without stacks).
    """
    from fusion_rt.settings import Settings
    from fusion_trace.analyse import hang as finder

    root = Settings.from_env().runtime_root()
    found = [] if trace else list(finder.look(root, job, everyone, timeout))
    if not found:
        _show_ending(finder.not_there(root, job), job, trace, as_json)
        return
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from fusion_trace.report import hang_page  # rich is imported only where a page is shown

    for number, document in enumerate(found):
        if number:
            typer.echo("")
        hang_page.show(document)


def _show_ending(not_there: FusionError, job: str, trace: list[str] | None, as_json: bool) -> None:
    """What a job that is gone has left in its records; `not_there`: why there is nobody to ask."""
    from fusion_rt.settings import Settings
    from fusion_trace.analyse import unfinished
    from fusion_trace.read.job import load
    from fusion_trace.report import hang_page

    try:
        found = unfinished.ending(load(trace or ([job] if job else []), Settings.from_env().trace_root()))
    except FusionError as error:
        _fail(error if trace else FusionError(f"{not_there}, and {error}"))
    if as_json:
        typer.echo(json.dumps([found.document()], indent=2))
    else:
        hang_page.print_lines(hang_page.ending_lines(found))


@app.command()
def whatif(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB]...",
            help="A job's id, or directories or files with its rings; by default the newest job of this host.",
            show_default=False,
        ),
    ] = None,
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
    steps: Annotated[str, typer.Option(metavar="A:B", help="Replay only the steps from A up to, but without, B.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")] = False,
) -> None:
    """Predicts what a step would take with another link, codec, number of nodes or algorithm, by a simulation.

    Replays first what was recorded: by how much that is off says what the prediction is worth (docs/simulation.md).
    """
    from fusion_trace.report import whatif_page as page  # the simulator imports the daemon's algorithms, and rich

    try:
        page.run(
            what or [],
            steps,
            page.change(bandwidth, latency, density, codec, fusion_threshold, nodes, algorithm, no_straggler),
            as_json,
        )
    except FusionError as error:
        _fail(error)


def _fail(error: FusionError) -> NoReturn:
    typer.echo(f"fusion-trace: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the `fusion-trace` command."""
    try:
        app()
    except FusionError as error:
        typer.echo(f"fusion-trace: {error}", err=True)
        sys.exit(1)
