"""The launcher's command line."""

from __future__ import annotations

import sys

from fusion_rt.runner.command.cli import main


def run_commandline() -> None:
    """Runs `fusionrun`, as `horovodrun` does its launcher."""
    sys.exit(main())
