"""Python files in the directory in which a command runs, such as /tmp: no process of ours takes them for modules.

The processes run as Python 3.10 would run them, to which PYTHONSAFEPATH says nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120.0
PLANTED = (
    "fusion_rt", "fusiond", "fusion_trace", "cloudpickle", "pickle", "json", "numpy", "msgspec", "zmq", "torch",
    "asyncio", "runpy", "mmap", "typer", "numba",
)  # fmt: skip
COMMAND = """
import sys
sys.executable = {python!r}
from fusion_rt.runner.command.cli import main
sys.exit(main(sys.argv[1:]))
"""
TRAIN = """
import torch, fusion_rt.torch as hvd
hvd.init()
print(hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist(), flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["a job with a timeline", "--check-build"])
def test_no_process_takes_a_module_from_the_current_directory(way: str, tmp_path: Path) -> None:
    planted, scripts = tmp_path / "planted", tmp_path / "scripts"
    planted.mkdir()
    scripts.mkdir()
    for module in PLANTED:
        (planted / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r})\n")
    python = scripts / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONSAFEPATH\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    command, train, timeline = scripts / "command.py", scripts / "train.py", tmp_path / "timeline.json"
    command.write_text(COMMAND.format(python=str(python)))
    train.write_text(TRAIN)
    words = ["--check-build"]
    if way != "--check-build":
        words = ["-np", "1", "--timeline-filename", str(timeline), sys.executable, str(train)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(command), *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=planted,
        env={**environment, "FUSION_RUNTIME_DIR": str(tmp_path / "run")},
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    if words[0] == "-np":
        assert "[1.0, 1.0, 1.0]" in done.stdout
        assert timeline.exists()
    else:
        assert "[X] PyTorch" in done.stdout
        assert "[X] ZeroMQ with CURVE" in done.stdout
