"""Runs the tests that need Numba's simulator of a GPU: see `conftest`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@pytest.mark.skipif("NUMBA_ENABLE_CUDASIM" in os.environ, reason="this is the process with the simulator")
def test_everything_passes_in_the_simulator() -> None:
    files = [str(HERE / name) for name in ("test_selection.py", "test_cost.py", "test_side.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout
