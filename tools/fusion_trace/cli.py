"""The `fusion-trace` command: topology, hang."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from fusion_rt.errors import FusionError

app = typer.Typer(
    help="Shows what a fusion_rt job does, or would do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    from fusion_trace import topology as page  # rich and numpy are imported only where something is shown

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
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON document.")] = False,
) -> None:
    """Shows what waits for whom in a job that hangs: operations, missing ranks, and their Python stacks.

    Run it on any host of the job, as the user whose job it is. Workers need not cooperate, and go on as before.
    """
    from fusion_rt.settings import Settings
    from fusion_trace import hang as finder

    root = Settings.from_env().runtime_root()
    found = list(finder.look(root, job, everyone, timeout))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    if not found:
        _fail(finder.not_there(root, job))
    if as_json:
        return
    from fusion_trace import hang_page  # rich is imported only where a page is shown

    for number, document in enumerate(found):
        if number:
            typer.echo("")
        hang_page.show(document)


def _fail(error: FusionError) -> None:
    typer.echo(f"fusion-trace: {error}", err=True)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the `fusion-trace` command."""
    try:
        app()
    except FusionError as error:
        typer.echo(f"fusion-trace: {error}", err=True)
        sys.exit(1)
