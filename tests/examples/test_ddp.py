"""The script for DistributedDataParallel, with and without a codec; and the list of all examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.harness import run_scripts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.multiprocess
@pytest.mark.parametrize("codec", ["", "topk(density=0.1)"])
def test_ddp_learns_to_read_and_rank_0_saves(tmp_path: Path, codec: str) -> None:
    saved = tmp_path / "model.pt"
    first, second = run_scripts(tmp_path, EXAMPLES / "ddp.py", "--codec", codec, "--checkpoint", str(saved))
    accuracies = [float(share) for share in re.findall(r"^epoch \d: ([\d.]+)% of the test", first, re.MULTILINE)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 85
    assert second == ""
    assert set(torch.load(saved)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_list_of_examples_has_all_of_them() -> None:
    linked = set(re.findall(r"\]\(([\w/.-]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    there = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert linked == there - {"README.md"}
