"""The elastic example, under `fusionrun`: a worker is killed, another comes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "char_gpt_elastic.py"
SAMPLES, BATCH, COMMIT_EVERY = 960, 8, 4
TIMEOUT_S = 240.0
Notes = list[dict[str, Any]]


def notes(path: Path) -> Notes:
    """What workers have written down so far."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_until(process: subprocess.Popen[str], path: Path, condition: Callable[[Notes], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(notes(path)):
        assert process.poll() is None, "it has ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def steps(found: Notes, size: int) -> Notes:
    return [note for note in found if note["what"] == "step" and note["size"] == size]


@pytest.mark.multiprocess
def test_it_goes_on_when_a_worker_is_killed_and_when_one_comes(tmp_path: Path) -> None:
    record, hosts, script = tmp_path / "record", tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    launcher = [sys.executable, "-m", "fusion_rt.runner", "-np", "2", "--min-np", "1"]
    launcher += ["--host-discovery-script", str(script), "--blacklist-cooldown-range", "2", "2"]
    command = [
        *forks.interpreter(forks.WORKER),
        str(SCRIPT),
        "--samples",
        str(SAMPLES),
        "--batch-size",
        str(BATCH),
        "--context",
        "16",
    ]
    command += ["--width", "32", "--layers", "1", "--commit-every", str(COMMIT_EVERY), "--record", str(record)]
    command += ["--pause", "0.05"]  # so that there is something left to do when the second one comes
    paths = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    process = subprocess.Popen(
        [*launcher, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(process, record, lambda found: len(steps(found, 2)) > 10)
        victim = next(note["pid"] for note in notes(record) if note["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        hosts.write_text("localhost:1\n")  # until the first one has gone on alone, however long that takes
        wait_until(process, record, lambda found: bool(steps(found, 1)))
        hosts.write_text("localhost:1\n127.0.0.1:1\n")
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    found = notes(record)
    ends = [note for note in found if note["what"] == "ends"]
    assert {note["done"] for note in ends} == {SAMPLES}
    assert len({note["held_out"] for note in ends}) == 1
    assert ends[0]["held_out"] < 4.0  # where guessing has 4.85
    before = max(note["done"] for note in found if note["pid"] == victim)
    begun = steps(found, 1)[0]["done"] - BATCH
    # The one that was killed had taken a step with the other, perhaps, which it has no note of.
    assert -2 * BATCH <= before - begun <= COMMIT_EVERY * 2 * BATCH, output
    assert "held out" in output
    pids = {note["pid"] for note in found}
    if len(ends) == 2:  # the host was used again, in time
        assert len(pids) == 3
        assert [note for note in found if note["what"] == "begins" and note["pid"] not in (victim, ends[0]["pid"])]
