"""The example that compares algorithms: a short run of two ways on two workers, and the picture of their curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import run_scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "compare.py"


@pytest.mark.multiprocess
def test_a_job_leaves_the_curve_of_the_model_that_all_ranks_agree_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_ALGORITHM", "adpsgd")
    printed, nothing = run_scripts(ROOT, SCRIPT, "--seconds", "2", "--slow", "0.001", "--out", str(tmp_path))
    assert nothing == "", "only rank 0 prints"
    assert printed.startswith("adpsgd dense: ")
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["curve"][0]["step"] == 0
    seconds = [point["seconds"] for point in found["curve"]]
    assert seconds == sorted(seconds)
    assert found["curve"][-1]["loss"] < 0.9 * found["curve"][0]["loss"]


def test_curves_of_several_seeds_and_ways_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[bench]'")
    from examples.compare import plot

    for way in ("allreduce dense", "adpsgd dense"):
        for seed in (0, 1):
            curve = [{"step": s, "seconds": s / 50, "bytes": 1e5 * s, "loss": 2.3 / (1 + s)} for s in (0, 20, 40)]
            (tmp_path / f"{way}-{seed}.json").write_text(json.dumps({"way": way, "curve": curve}))
    assert plot(tmp_path).read_bytes().startswith(b"\x89PNG")
