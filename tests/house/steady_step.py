"""Counts the files, functions and lines of the product that run in a steady step of a job on two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.house.figures import lengths
from tests.test_imports import ROOT

_WATCHED = Path(__file__).with_name("watched")
_ON_THIS_MACHINE = '#!/bin/sh\nshift\nexec "$@"\n'
_LIMIT = 300.0  # s
_STEPS = 10  # that are watched: see `watched/script.py`


def steady_step(algorithm: str) -> dict[str, float]:
    """Runs a job of two workers and two daemons with a training algorithm, and counts what runs in each of its steps.

    A function counts if it was called at least once a step in one of the processes. So heartbeats do not, nor does the
    way of a message that had to wait, which a busy machine takes more often.

    Returns:
        numbers of `files`, `functions` and `lines`, from the hooks on parameters to the sockets between the daemons.
    """
    with tempfile.TemporaryDirectory(prefix="frt", dir="/tmp") as directory:
        shell = Path(directory, "shell")
        shell.write_text(_ON_THIS_MACHINE)
        shell.chmod(0o700)
        Path(directory, "flag").write_text("0")
        command = [
            sys.executable, "-m", "fusion_rt.runner", "-np", "2", "-H", "alpha:1,beta:1", "--network-interface", "lo",
            "--rsh-agent", f"{shell} {{host}}", sys.executable, str(_WATCHED / "script.py"),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_WATCHED), str(ROOT), str(ROOT / "daemon")]),
            "FUSION_TEST_WATCHED": directory,
            "FUSION_TEST_ALGORITHM": algorithm,
        }
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=environment, cwd=directory)
        assert done.returncode == 0, done.stderr
        return _counted(Path(directory))


def _counted(directory: Path) -> dict[str, float]:
    """Adds up the counts of all processes; a function that runs in several of them counts once."""
    functions: defaultdict[str, set[int]] = defaultdict(set)
    for notes in directory.glob("*.json"):
        for name, first, calls in json.loads(notes.read_text()):
            if calls >= _STEPS:
                functions[name].add(first)
    lines = 0
    for name, firsts in functions.items():
        ends = lengths(Path(name))
        firsts &= ends.keys()  # without comprehensions
        lines += len({line for first in firsts for line in range(first, ends[first] + 1)})
    return {"files": len(functions), "functions": sum(map(len, functions.values())), "lines": lines}
