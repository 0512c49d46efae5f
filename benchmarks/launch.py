"""How a benchmark starts its own worker on this host, and hears from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MARK = "RESULT "  # in front of the JSON that rank 0 prints


def environment() -> dict[str, str]:
    """Variables for workers that also use torch.distributed: where to meet, and one thread each."""
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}


def fusionrun(ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs Python with these arguments on `ranks` workers; returns what rank 0 has printed behind `MARK`.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", str(ranks), sys.executable, *arguments]
    run = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if MARK in line)
    found: dict[str, Any] = json.loads(line.split(MARK, 1)[1])
    return found


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
