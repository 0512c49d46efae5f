"""The `fusion-trace` command.

Each subcommand imports its modules itself, since some of these take long (numpy, the simulator with the daemon's
algorithms).
"""

from __future__ import annotations

import sys

import typer

from fusion_rt.core.errors import FusionError
from fusion_trace.cli import questions as questions
from fusion_trace.cli import writing as writing
from fusion_trace.cli.jobs import app as app


def main() -> None:
    """Runs the `fusion-trace` command."""
    try:
        app()
    except FusionError as error:
        typer.echo(f"fusion-trace: {error}", err=True)
        sys.exit(1)
