"""Some seconds of the soak, of each kind; and that it would find what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.netlab import preflight
from tests.faults import soak_faults
from tests.faults.jobs import Array, total
from tests.faults.soak import FLAT, FLAT_FOR_LONG, Soak, write
from tests.faults.soak_faults import Blow
from tests.faults.soak_job import RankState, SoakJob
from tests.faults.soak_ledger import SIZE, Ledger
from tests.faults.soak_worker import MODEL, count_of, reference, updated

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
TIMEOUT_S = 240.0
UNAVAILABLE = preflight()


def soak(*arguments: str) -> dict[str, Any]:
    """Runs the soak for some seconds; what it has counted."""
    paths = [str(ROOT), str(ROOT / "daemon"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--seconds", str(SECONDS), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # the seed is its first line
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert summary["problems"] == []
    assert sum(summary["faults"].values()) >= 1
    assert summary["steps"] > 0
    return summary


@pytest.mark.multiprocess
def test_ten_seconds_of_random_faults_and_every_sum_is_exact() -> None:
    summary = soak()
    assert summary["mismatches"] == 0
    assert summary["operations"] >= 10


@pytest.mark.multiprocess
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_an_elastic_job_lives_through_losses_for_ten_seconds_and_every_sum_is_exact() -> None:
    summary = soak("--kind", "elastic")
    assert summary["comparisons_of_parameters"] > summary["steps"]
    assert summary["samples_lost"] == 0


def test_the_soak_says_what_it_can_be_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soak", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--kind {jobs,long,elastic}" in done.stdout


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


# --- the ledger of an elastic job -------------------------------------------------------------------------------------


def note(what: str, epoch: int, step: int, **values: Any) -> dict[str, Any]:
    """Returns a note of a worker."""
    return {"what": what, "pid": 7, "place": "a.0", "epoch": epoch, "step": step, "counts": True, "wrong": "", **values}


def told(*notes: dict[str, Any]) -> Ledger:
    """A ledger of these notes."""
    ledger = Ledger()
    for each in notes:
        ledger.take(each)
    return ledger


BEGINNING = [note("synced", 1, 0, digest="0"), *(note("step", 1, n, size=SIZE, digest=str(n)) for n in (1, 2, 3))]


def the_end(size_of_last: int = SIZE, wrong: int = 0) -> list[dict[str, Any]]:
    """Returns the last notes of all workers, after three steps of all and one of `size_of_last`."""
    sums = sum(total(range(SIZE), step, 1009) for step in range(3)) + total(range(size_of_last), 3, 1009)
    return [note("ends", 3, 4, sums=(sums + wrong).tolist(), periodic=True, digest="4")] * SIZE


def test_parameters_of_ranks_that_differ_after_a_step_are_a_problem() -> None:
    assert not told(*BEGINNING, note("step", 1, 3, size=SIZE, digest="3")).problems
    (problem,) = told(*BEGINNING, note("step", 1, 3, size=SIZE, digest="another")).problems
    assert problem.endswith("parameters after step 3 are not those of other ranks")
    (problem,) = told(*BEGINNING, note("step", 1, 3, size=2, digest="3")).problems
    assert problem.endswith(f"step 3 is of 2 ranks, and others say {SIZE}")


def test_a_step_that_a_lost_rank_alone_has_taken_does_not_count_and_one_that_is_there_still_is_found() -> None:
    lost, others = note("step", 1, 4, size=SIZE, digest="lost"), note("step", 2, 4, size=5, digest="4")
    ledger = told(*BEGINNING, lost, others, others)
    assert (ledger.problems, ledger.void) == ([], 1)
    again = told(*BEGINNING, others, lost, others, note("step", 2, 5, size=5, digest="5"))
    assert (again.problems, again.void) == ([], 1)
    again.take(note("step", 2, 5, size=5, digest="lost, 5"))
    assert len(again.problems) == 1


def test_steps_after_a_return_to_a_commit_are_others() -> None:
    ledger = told(
        *BEGINNING,
        note("synced", 2, 2, digest="2"),
        note("step", 2, 3, size=4, digest="3 of 4"),
        note("step", 1, 3, size=SIZE, digest="3"),
    )
    assert (ledger.problems, ledger.rollbacks, ledger.repeated_steps, ledger.steps) == ([], 1, 1, 3)
    expected = total(range(SIZE), 0, 1009) + total(range(SIZE), 1, 1009) + total(range(4), 2, 1009)
    reference = ledger.reference(3)
    assert reference is not None
    assert np.array_equal(reference, expected)
    (problem,) = told(*BEGINNING, note("synced", 2, 2, digest="another")).problems
    assert problem.endswith("parameters after step 2 are not those of other ranks")


@pytest.mark.parametrize(("size", "wrong", "problems"), [(4, 0, 0), (5, 0, SIZE), (4, 1, SIZE)])
def test_a_model_that_is_not_of_the_ranks_there_were_is_a_problem(size: int, wrong: int, problems: int) -> None:
    ledger = told(
        *BEGINNING, note("synced", 3, 3, digest="3"), note("step", 3, 4, size=4, digest="4"), *the_end(size, wrong)
    )
    ledger.check_end()
    assert len(ledger.problems) == problems
    ledger.take(note("ends", 3, 4, sums=the_end(4)[0]["sums"], periodic=True, digest="another"))
    ledger.check_end()
    assert "models differ in the end" in ledger.problems


def test_samples_that_are_lost_and_more_that_are_repeated_than_there_are_ranks_are_a_problem() -> None:
    assert told(note("epoch", 1, 0, done=0, lost=0, repeated=SIZE - 1)).check_samples() == (0, SIZE - 1)
    for lost, repeated in ((1, 0), (0, 2 * SIZE)):
        ledger = told(note("epoch", 1, 0, done=0, lost=lost, repeated=repeated))
        ledger.check_samples()
        assert len(ledger.problems) == 1
