"""What the notes of workers under faults say: pauses, dropped steps, newcomers, and parameters that differ."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import recovery
from benchmarks.common import results
from benchmarks.faulted import notes
from benchmarks.faulted.notes import Fault, Note

STEP = 0.1


def worker(pid: int, place: str, begins: float, times: Sequence[float], first: int = 1, drift: int = 0) -> list[Note]:
    """The notes of a worker whose steps all count, and end at these times."""
    found = [Note("begins", begins, pid, place)]
    return found + [
        Note("step", at, pid, place, first + index, 2, True, (first + index) * 7 + drift)
        for index, at in enumerate(times)
    ]


def steps(since: float, until: float) -> list[float]:
    return [since + STEP * (index + 1) for index in range(round((until - since) / STEP))]


def judged(found: dict[int, notes.Worker], kind: str = "worker killed") -> Fault:
    fault = Fault(kind, 5.02, [2])
    notes.judge(fault, 20.0, found, STEP)
    return fault


def test_a_survivors_pause_is_what_its_longest_step_after_the_fault_took_too_long() -> None:
    survivor = worker(1, "a.0", 0.0, [*steps(0, 5), *steps(5.6, 10)])
    victim = worker(2, "b.0", 0.0, steps(0, 5))
    fault = judged(notes.workers([*survivor, *victim]))
    assert fault.pause == pytest.approx(0.6)
    assert (fault.dropped, fault.returned, fault.join_pause) == (0, None, None)


def test_a_newcomer_is_back_with_its_first_step_that_counts_and_the_others_wait_for_it() -> None:
    survivor = worker(1, "a.0", 0.0, [*steps(0, 8), *steps(8.3, 15)])
    victim = worker(2, "b.0", 0.0, steps(0, 5))
    newcomer = worker(3, "b.0", 7.9, steps(8.3, 15))
    fault = judged(notes.workers([*survivor, *victim, *newcomer]))
    assert fault.pause == pytest.approx(0.0)
    assert fault.returned == pytest.approx(8.4 - 5.02)
    assert fault.join_pause == pytest.approx(0.3)


def test_a_worker_that_was_cut_off_comes_back_as_itself() -> None:
    survivor = worker(1, "a.0", 0.0, [*steps(0, 5), *steps(8, 20)])
    victim = worker(2, "b.0", 0.0, [*steps(0, 5), *steps(13, 20)])
    fault = judged(notes.workers([*survivor, *victim]), "host cut off")
    assert fault.pause == pytest.approx(3.0)
    assert fault.returned == pytest.approx(13.2 - 5.02)


def test_steps_that_change_nothing_and_steps_that_are_repeated_are_dropped() -> None:
    survivor = worker(1, "a.0", 0.0, steps(0, 5))
    survivor.append(Note("step", 5.1, 1, "a.0", 51, 2, False, 350))  # dropped
    survivor += worker(1, "a.0", 0.0, steps(5.2, 6), first=50)[1:]  # from the commit after step 49
    victim = worker(2, "b.0", 0.0, steps(0, 5))
    assert judged(notes.workers([*survivor, *victim])).dropped == 1 + 2


def test_parameters_that_differ_after_a_step_are_counted_once_a_step() -> None:
    alike = [*worker(1, "a.0", 0.0, steps(0, 5)), *worker(2, "b.0", 0.0, steps(0, 5))]
    assert notes.differing(notes.workers(alike).values()) == 0
    other = worker(2, "b.0", 0.0, steps(0, 0.5), drift=1)
    assert notes.differing(notes.workers([*alike[:51], *other]).values()) == 5


def test_the_share_that_was_kept_is_of_the_time_between_a_workers_first_and_last_step() -> None:
    found = notes.workers(worker(1, "a.0", 0.0, [*steps(0, 4), *steps(5, 10)]))
    assert notes.throughput(list(found.values()), [], STEP) == pytest.approx(89 / 99)
    assert notes.step_seconds(found.values()) == pytest.approx(STEP)


def test_a_step_without_a_fault_takes_as_long_as_those_with_and_without_commits_in_the_mean() -> None:
    calm = [0.1 * step + 0.02 * (step // 5) for step in range(1, 40)]  # each fifth one takes a fifth longer
    late = [10 + at for at in calm]
    survivor = worker(1, "a.0", 0.0, [*calm, 4.5, *(6 + 0.3 * step for step in range(12)), *late])
    newcomer = worker(3, "b.0", 8.0, [9.0, *late])
    found = notes.workers([*survivor, *worker(2, "b.0", 0.0, calm), *newcomer])
    fault = Fault("worker killed", 4.2, [2], returned=9.0 - 4.2)
    begun = [at for at in calm if at >= calm[0] + 1.0]
    expected = [after - before for times in (begun, begun, late, late) for before, after in pairwise(times)]
    assert notes.calm_seconds(found.values(), [fault], 20.0) == pytest.approx(fmean(expected))
    fault.returned = None
    expected = [after - before for before, after in pairwise(begun)]
    assert notes.calm_seconds(found.values(), [fault], 20.0) == pytest.approx(fmean(expected))


def test_a_worker_that_is_cut_off_could_take_no_steps_and_the_others_could() -> None:
    survivor = worker(1, "a.0", 0.0, [*steps(0, 5), *steps(6, 20)])
    victim = worker(2, "b.0", 0.0, [*steps(0, 5), *steps(13, 20)])
    found = notes.workers([*survivor, *victim])
    fault = judged(found, "host cut off")
    span = fault.at, 20.0
    took, could = (140 + 69) * STEP, (20 - 5.02) + (20 - 13.1)
    assert notes.throughput(list(found.values()), [fault], STEP, *span) == pytest.approx(took / could)
    assert notes.throughput(list(found.values()), [fault], STEP, 0.0, 5.0) == pytest.approx(1.0)


def test_a_result_is_kept_also_if_nobody_has_come_back_after_a_kind_of_fault(tmp_path: Path) -> None:
    lost = Fault("host killed", 5.0, [2], pause=0.3, dropped=1, kept=0.9)
    back = Fault("worker killed", 9.0, [3], pause=0.2, returned=3.0, join_pause=0.1, kept=0.95)
    found = {"fusion_rt": {"step": STEP, "calm": STEP, "differing": 0, "faults": [vars(lost), vars(back)]}}
    options = Namespace(faults=["host killed", "worker killed"], every=20.0, compute=0.05, timeout=3.0)
    made = recovery.record(found, 4, options, results.begin())
    results.keep(tmp_path / "recovery.json", recovery.NAME, made)
    kept = {measure.name for measure in made.measures}
    assert {"host killed: pause", "worker killed: back", "host killed: kept"} <= kept
    assert "host killed: back" not in kept
    assert "never" in recovery.table(made).markdown()


def takes(epoch: int, step: int, rank: int, size: int, *samples: int) -> Note:
    return Note("takes", 0.0, rank, f"{rank}", step, size, epoch=epoch, rank=rank, samples=samples)


def counts(epoch: int, step: int, given: int) -> Note:
    return Note("step", 0.0, 0, "0", step, counted=True, epoch=epoch, given=given)


def test_samples_of_steps_that_are_left_out_or_undone_count_when_they_are_given_again() -> None:
    told = [
        *(takes(1, 0, 0, 2, 0, 1), takes(1, 0, 1, 2, 2, 3), counts(1, 1, 1)),
        *(takes(1, 1, 0, 2, 4), takes(1, 1, 1, 2, 5)),  # rank 1 is lost, and the step left out
        *(takes(2, 1, 0, 1, 4), counts(2, 2, 2), takes(2, 2, 0, 1, 5), counts(2, 3, 2)),
        *(takes(3, 2, 0, 1, 5), counts(3, 3, 3)),  # again, after a return to the commit of step 2
        *(takes(3, 3, 0, 1, 6), counts(4, 4, 3)),  # healed: taken in a later epoch than that in which it was given
        Note("ends", 1.0, 0, "0", 4),
    ]
    taken = notes.samples_taken(told)
    assert taken.counted == dict.fromkeys(range(7), 1)
    assert (taken.in_vain, taken.steps, taken.missing) == (3, 4, [])


def test_a_step_of_which_a_rank_has_not_told_what_it_gave_is_missing() -> None:
    told = [takes(1, 0, 0, 2, 0), counts(1, 1, 1), counts(1, 2, 1), Note("ends", 1.0, 0, "0", 2)]
    assert notes.samples_taken(told).missing == [1, 2]
