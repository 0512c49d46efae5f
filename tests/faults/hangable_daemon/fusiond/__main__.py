"""Comes before the real `fusiond` on PYTHONPATH, and has a fork run that, hangable (`tests/forked.py`)."""

import os
import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3]

if address := os.environ.get("FUSION_TEST_DAEMONS"):
    sys.argv[1:1] = [address, "-m", "tests.faults.hangable"]
    runpy.run_path(str(TESTS / "forked.py"))
else:
    del sys.modules["fusiond"]
    sys.path.remove(str(TESTS / "faults" / "hangable_daemon"))
    runpy.run_module("tests.faults.hangable", run_name="__main__", alter_sys=True)
