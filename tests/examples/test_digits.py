"""The demo is the proof: training on several ranks is the same as training on one with their batches put together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.netlab import Netlab, preflight
from tests import forks
from tests.examples import digits_job
from tests.harness import Job

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("digits_job.py")
UNAVAILABLE = preflight()
TIMEOUT_S = 300
RANKS = 4
BATCH, LR = 16, 0.01  # of each of the four ranks
EPOCHS, STEPS = 3, 50  # 66 steps, of which the first 50 are compared

pytestmark = pytest.mark.multiprocess


@dataclass(frozen=True)
class Run:
    """What the ranks of a job found.

    Attributes:
        losses: (ranks, steps), float64: each rank's own loss before each step.
        digests: by rank: a digest of its parameters after each step.
        accuracy: by rank: share of the test images that are read correctly.
    """

    losses: np.ndarray
    digests: list[list[str]]
    accuracy: list[float]


def fusionrun(ranks: int, *arguments: str | Path) -> dict[int, str]:
    """What each rank printed to stdout; `arguments` are flags of fusionrun, and then the script and its own."""
    process = subprocess.run(
        [sys.executable, "-m", "fusion_rt.runner", "-np", str(ranks), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr
    lines = re.findall(r"^\[(\d+)\]<stdout>:(.*)$", process.stdout, re.MULTILINE)
    return {rank: "\n".join(line for of, line in lines if int(of) == rank) for rank in range(ranks)}


def options_of(batch_size: int, lr: float) -> list[str]:
    return ["--epochs", str(EPOCHS), "--batch-size", str(batch_size), "--lr", str(lr)]


def train(ranks: int, batch_size: int, lr: float) -> Run:
    """Trains on workers of one node."""
    with Job((ranks,), {"HOROVOD_START_TIMEOUT": "120"}) as job:
        return run_of(job.run(digits_job.trained, options_of(batch_size, lr)))


def run_of(found: list[dict[str, Any]]) -> Run:
    """What the ranks told."""
    return Run(
        np.array([each["losses"] for each in found]),
        [each["digests"] for each in found],
        [each["accuracy"] for each in found],
    )


@pytest.fixture(scope="module")
def alone() -> Run:
    """One process with the four ranks' batches put together. Four ranks multiply the learning rate by their number, so
    it has to be multiplied here, too."""
    return train(1, RANKS * BATCH, RANKS * LR)


def assert_same_training(run: Run, alone: Run) -> None:
    steps = run.losses.shape[1]
    assert steps >= STEPS
    losses = run.losses.mean(axis=0)[:STEPS]
    np.testing.assert_allclose(losses, alone.losses[0, :STEPS], rtol=1e-5)
    assert losses[-1] < losses[0] / 4  # they have learned something by then, and so had a chance to drift apart
    # Each rank saw other images: equal losses would mean that all ranks trained on the same ones.
    assert len({losses.tobytes() for losses in run.losses}) == RANKS
    assert all(digests == run.digests[0] for digests in run.digests)
    assert len(set(run.digests[0])) == steps
    assert run.accuracy == [run.accuracy[0]] * RANKS


def test_the_demo_reaches_97_percent_and_says_what_it_cost() -> None:
    printed = fusionrun(2, *forks.interpreter(forks.WORKER), ROOT / "examples" / "digits.py")
    assert printed[1] == ""
    lines = [line for line in printed[0].splitlines() if line]
    bars, (accuracy, speed, communication) = lines[:-3], lines[-3:]
    assert len(bars) == 20
    assert re.fullmatch(r"epoch 20 of 20 ━+ loss \d\.\d+ \d+:\d\d:\d\d *", bars[-1])
    found = re.fullmatch(r"accuracy +([\d.]+)% of the test images", accuracy)
    assert found is not None
    assert float(found[1]) >= 97
    assert re.fullmatch(r"speed +[\d,]+ samples/s on 2 ranks", speed)
    assert re.fullmatch(
        r"communication +[\d.]+ ms of each step of [\d.]+ ms \([\d.]+%\): 153 kB of gradients, 1 message", communication
    )


def test_four_ranks_train_as_one_process_does_with_their_batches_put_together(alone: Run) -> None:
    assert_same_training(train(RANKS, BATCH, LR), alone)


@pytest.mark.root
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_four_hosts_train_as_one_process_does_with_their_batches_put_together(alone: Run) -> None:
    with Netlab(hosts=RANKS) as lab:
        hosts = ",".join(f"{host.name}:1" for host in lab.hosts)
        flags = ["-H", hosts, "--rsh-agent", lab.agent]
        printed = fusionrun(RANKS, *flags, *forks.interpreter(forks.WORKER), JOB, *options_of(BATCH, LR))
    found = [json.loads(printed[rank].rpartition("RESULT ")[2]) for rank in range(RANKS)]
    assert_same_training(run_of(found), alone)
