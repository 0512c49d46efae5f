"""MuLoCo: a short run on two workers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from tests.harness import run_scripts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_two_workers_learn_by_muon_inside_and_few_bits_outside() -> None:
    options = ["--steps", "60", "--width", "32", "--layers", "1"]
    options += ["--algorithm", "diloco(steps=10, fragments=2, delay=2, outer_momentum=0.5)"]
    printed, nothing = run_scripts(ROOT, ROOT / "examples" / "muloco.py", *options)
    assert nothing == "", "only rank 0 prints"
    held_out = re.search(r"^held out: loss ([\d.]+)", printed, re.MULTILINE)
    assert held_out is not None
    assert float(held_out[1]) < 0.8 * math.log(128)
