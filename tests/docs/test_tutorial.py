"""The script of docs/start/from-pytorch.md runs before and after the change that the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import forks

PAGE = Path(__file__).parents[2] / "docs" / "start" / "from-pytorch.md"


def script(signs: str) -> str:
    """The lines of the page's diff that begin with one of these signs, without it."""
    diff = re.search(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert diff is not None
    return "".join(f"{line[1:]}\n" for line in diff[1].splitlines() if not line or line[0] in signs)


def run(command: list[str], folder: Path) -> list[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return re.findall(r"epoch \d: [\d.]+", done.stdout)


def test_the_script_before_the_change_trains_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(" -"), encoding="utf-8")
    assert len(run([sys.executable, "train.py"], tmp_path)) == 2


@pytest.mark.multiprocess
def test_the_script_after_it_trains_on_two_workers_and_rank_0_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(" +"), encoding="utf-8")
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", *forks.interpreter(forks.WORKER), "train.py"]
    assert len(run(command, tmp_path)) == 2
    assert set(torch.load(tmp_path / "checkpoint.pt")) == {"model", "optimizer"}
