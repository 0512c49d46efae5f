"""Ray Train jobs on fusion_rt, by the example, as people start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers import conftest
from tests.launchers.conftest import logs, run

pytest.importorskip("ray", reason="needs Ray Train: pip install '.[ray]'")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts about ten processes, and on a busy machine that takes minutes."""
    monkeypatch.setattr(conftest, "TIMEOUT_S", 500.0)


def train(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the example on a Ray of its own, on two workers for three epochs."""
    options = ["--workers", "2", "--epochs", "3", "--storage", str(tmp_path / "storage")]
    done = run(
        sys.executable, ROOT / "examples" / "digits_ray.py", *options, *arguments, cwd=ROOT, HOME=str(tmp_path),
        RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_TMPDIR=f"{os.environ['FUSION_RUNTIME_DIR']}-ray",
    )  # fmt: skip
    assert re.search(r"accuracy 9\d\.\d+% of the test images, on 2 workers", done.stdout), done.stdout + done.stderr
    return done


def test_hvd_goes_on_from_the_last_checkpoint_when_a_worker_fails(runtime_dir: Path, tmp_path: Path) -> None:
    done = train(tmp_path, "--fail-at", "1", "--retries", "1")
    said = done.stdout + done.stderr
    assert "worker 1 fails in epoch 1, as it was told to" in said
    assert re.findall(r"result \d+: .*?'epoch': (\d).*?from rank 0", said) == ["0", "1", "2"]
    (text,) = logs(runtime_dir).values()  # of the daemon of the first attempt
    assert re.match(r".* ERROR: rank 1 \(host .*\) failed: Traceback", text)
    assert text.rstrip().endswith("RuntimeError: worker 1 fails in epoch 1, as it was told to")


def test_ddp_runs_on_the_backend(runtime_dir: Path, tmp_path: Path) -> None:
    train(tmp_path, "--ddp")
    assert logs(runtime_dir) == {}
