"""Comes before the real `fusiond` on PYTHONPATH, and has a fork run that (`tests/forked.py`)."""

import os
import runpy
import sys
from pathlib import Path

sys.argv[1:1] = [os.environ["FUSION_TEST_DAEMONS"], "-m", "fusiond"]
runpy.run_path(str(Path(__file__).resolve().parents[3] / "forked.py"))
