"""Twenty seconds of the soak; and that it would find what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults import soak_faults
from tests.faults.jobs import Array, total
from tests.faults.soak import FLAT, FLAT_FOR_LONG, Soak, write
from tests.faults.soak_faults import Blow
from tests.faults.soak_job import RankState, SoakJob
from tests.faults.soak_worker import MODEL, count_of, reference, updated

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
TIMEOUT_S = 240.0


@pytest.mark.multiprocess
def test_ten_seconds_of_random_faults_and_every_sum_is_exact() -> None:
    paths = [str(ROOT), str(ROOT / "daemon"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "SOAK_SECONDS": str(SECONDS)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # the seed is its first line
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["mismatches"], summary["problems"]) == (0, [])
    assert sum(summary["faults"].values()) >= 1
    assert summary["operations"] >= 10
    assert summary["steps"] > 0


def finished(error: str = "", step: int = 7, model: Array | None = None) -> RankState:
    """A rank that has ended."""
    state = RankState(subprocess.Popen(["true"]), step=step, error=error, done=not error)
    state.process.wait()
    state.at = 10.5
    state.models = {step: (np.zeros(MODEL, np.int64) if model is None else model).tolist()}
    return state


def job_of(*ranks: RankState) -> SoakJob:
    """A job that is over."""
    job = SoakJob(None, Path("/tmp"), [1] * len(ranks), 0, [])
    job.ranks = dict(enumerate(ranks))
    return job


def test_a_step_that_is_left_out_done_twice_or_wrong_makes_another_model() -> None:
    start = np.zeros(MODEL, np.int64)
    right = reference(start, range(3), range(20))
    assert np.array_equal(right, reference(reference(start, range(3), range(9)), range(3), range(9, 20)))
    assert not np.array_equal(right, reference(start, range(3), range(19)))
    assert not np.array_equal(right, reference(start, range(4), range(20)))
    model, off_by_one = start, start
    for step in (*range(5), 5, *range(5, 20)):  # step 5 twice
        model = updated(model, total(range(3), step, min(count_of(step), MODEL)))
    for step in range(20):
        result = total(range(3), step, min(count_of(step), MODEL))
        result[0] += step == 2
        off_by_one = updated(off_by_one, result)
    assert not np.array_equal(right, model)
    assert not np.array_equal(right, off_by_one)


def test_a_survivor_that_names_somebody_else_or_comes_late_is_a_problem() -> None:
    blow = Blow(10.0, 1.0, {0: r"node 2 \(host", 1: r"node 2 \(host"})
    named = "node 2 (host host2) is lost: its connection was closed"
    assert soak_faults.check(job_of(finished(named), finished(named)), blow) == (0.5, [])
    _, wrong = soak_faults.check(job_of(finished(named), finished("node 1 (host host1) is lost")), blow)
    assert len(wrong) == 1
    assert "rank 1 did not name the culprit" in wrong[0]
    _, wrong = soak_faults.check(job_of(finished(named), finished(named)), Blow(5.0, 1.0, blow.sentences))
    assert wrong == ["the last survivor raised after 5.5 s, and not within 1 s"]


def test_ranks_that_differ_and_models_that_are_wrong_are_mismatches() -> None:
    right = reference(np.zeros(MODEL, np.int64), range(2), range(7))
    for models, mismatches in (((right, right), 0), ((right, right + 1), 1), ((right + 1, right + 1), 1)):
        soak = Soak(1.0, 1, None, Path("/tmp"))
        soak.take_over(job_of(*(finished(model=model) for model in models)))
        assert (soak.mismatches, len(soak.problems)) == (mismatches, mismatches)


@pytest.mark.parametrize("what", FLAT)
def test_what_rises_in_a_daemon_is_a_problem(what: str) -> None:
    for rise, problems in ((0, 0), (FLAT[what] // 8, 0), (FLAT[what], 1)):
        soak = Soak(1.0, 1, None, Path("/tmp"))
        job = job_of(finished())
        job.samples = {
            "the daemon of node 0": [dict.fromkeys(FLAT, 0.0) | {what: float(rise * sample)} for sample in range(16)]
        }
        soak.check_flat(job)
        assert len(soak.problems) == problems


@pytest.mark.parametrize("what", FLAT_FOR_LONG)
@pytest.mark.parametrize(("until", "wrong"), [(300, False), (1200, True)])
def test_what_rises_in_a_process_of_a_long_job_after_five_minutes_is_a_problem(
    what: str, until: int, wrong: bool
) -> None:
    soak = Soak(1200.0, 1, None, Path("/tmp"), long=True)
    job = job_of(finished())
    rise = 2 * FLAT_FOR_LONG[what]
    job.samples = {
        "rank 3": [
            dict.fromkeys(FLAT_FOR_LONG, 0.0) | {"at": 50.0 + at, what: float(rise * min(at / until, 1))}
            for at in range(0, 1200, 5)
        ]
    }
    soak.check_flat_for_long(job, 50.0)
    assert len(soak.problems) == wrong
    if wrong:
        assert soak.problems[0].startswith(f"{what} of rank 3 rose by ")


def test_a_long_job_that_ended_early_is_a_problem() -> None:
    soak = Soak(1200.0, 1, None, Path("/tmp"), long=True)
    job = job_of(finished())
    job.samples = {"rank 0": [dict.fromkeys(FLAT_FOR_LONG, 0.0) | {"at": float(at)} for at in range(600)]}
    soak.check_flat_for_long(job, 0.0)
    assert soak.problems == ["rank 0 was not looked at in 6 of 10 parts of the time"]


def test_a_result_with_problems_is_not_written_where_results_are(tmp_path: Path) -> None:
    soak = Soak(1.0, 1, None, Path("/tmp"))
    write(tmp_path / "soak.json", soak.summary())
    soak.problems.append("something is wrong")
    write(tmp_path / "soak.json", soak.summary())
    assert json.loads((tmp_path / "soak.json").read_text())["passed"]
    failed = json.loads((tmp_path / "soak.json.failed").read_text())
    assert (failed["passed"], failed["problems"]) == (False, ["something is wrong"])
