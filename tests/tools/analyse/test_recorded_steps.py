"""Tests of a recorded job as the model of a step has it: programs, buckets, links, work, and the steps that stand for
all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusion_rt.choice.step_model import Compute, HandOver, Wait
from fusion_rt.tracing.format import Kind, Role
from fusion_trace.analyse.recorded_steps import MOST_STEPS, NotRecorded, Recorded, representative, understand
from fusion_trace.read.choice import EVERY_STEP, StepRange
from fusion_trace.read.job import load
from tests.diagnosis.generator import Fault, Shape, make
from tests.tools.synthetic import MS, Job, Truth, simulate

BASE = Job(nodes=3, bandwidth=120e6, bucket_nbytes=1 << 20, steps=6, skews={1: 7 * MS, 2: -3 * MS})


def understood(truth: Truth, folder: Path, chosen: StepRange = EVERY_STEP) -> Recorded:
    truth.write(folder)
    return understand(load([str(folder)], str(folder)), chosen)


def test_a_program_has_what_was_done_between_hand_overs_and_waits(tmp_path: Path) -> None:
    found = understood(simulate(replace(BASE, jitter=0.0)), tmp_path)
    step = found.steps.programs[0][2]
    submitted = [found.buckets[event.bucket].name for event in step if isinstance(event, HandOver)]
    assert submitted == ["bucket 0", "bucket 1", "bucket 2", "loss"]
    first_wait = next(index for index, event in enumerate(step) if isinstance(event, Wait))
    assert not any(isinstance(event, HandOver) for event in step[first_wait:])
    computed = np.mean([
        sum(event.seconds for event in step if isinstance(event, Compute))
        for program in found.steps.programs for step in program[1:]
    ])  # fmt: skip
    assert computed + found.steps.waited == pytest.approx(found.steps.seconds, rel=1e-6)
    assert [tensor.bucket for tensor in found.tensors] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("bandwidth", [25e6, 120e6])
@pytest.mark.parametrize("nodes", [2, 4])
def test_links_are_found_from_the_chunks(tmp_path: Path, nodes: int, bandwidth: float) -> None:
    job = replace(BASE, nodes=nodes, bandwidth=bandwidth, skews={1: 7 * MS})
    network = understood(simulate(job), tmp_path).network
    assert network.nodes == nodes
    assert 1 / network.cost.seconds_per_byte == pytest.approx(bandwidth, rel=0.05)
    assert network.cost.latency < 400e-6


def test_of_a_dense_job_all_bytes_travel(tmp_path: Path) -> None:
    found = understood(simulate(BASE), tmp_path)
    for bucket in found.buckets[:3]:
        assert bucket.travels == pytest.approx(bucket.nbytes, rel=0.01)
    assert found.sent == pytest.approx(2 * 2 / 3 * sum(bucket.nbytes for bucket in found.buckets), rel=0.01)


def test_nodes_may_have_different_numbers_of_workers(tmp_path: Path) -> None:
    truth = simulate(replace(BASE, nodes=2, ranks_per_node=2))
    del truth.tapes[Role.WORKER, 3]
    assert understood(truth, tmp_path).network.ranks == 2


def test_processor_time_of_daemons_and_waits_for_processors_are_read(tmp_path: Path) -> None:
    """Daemons use 20 % of a processor; scripts use one for a fourth of the time that they have it or wait for it."""
    truth = simulate(BASE)
    for (role, _), tape in truth.tapes.items():
        begin = min(row[0] for row in tape.rows)
        kind, share = (Kind.STEP_END, 0.1) if role == Role.WORKER else (Kind.RUN_END, 0.2)
        tape.rows = [
            (row[0], round((row[0] - begin) * share) + 1, *row[2:5], round((row[0] - begin) * 0.3e-3), *row[6:])
            if row[6] == kind
            else row
            for row in tape.rows
        ]
    found = understood(truth, tmp_path)
    assert found.work.used == pytest.approx(0.2 * found.steps.seconds, rel=0.1)
    assert found.work.stretched == pytest.approx(4.0, rel=0.01)


def test_a_recording_without_processors_has_none_to_wait_for(tmp_path: Path) -> None:
    work = understood(simulate(BASE), tmp_path).work
    assert work.used is None
    assert work.stretched == 1.0


def test_hosts_of_whose_links_no_rate_is_known_are_named(tmp_path: Path) -> None:
    recorded = understood(simulate(replace(BASE, bucket_nbytes=1 << 12)), tmp_path)
    assert not recorded.rate_known
    assert recorded.problems == (
        "host0, host1, host2 sent and received nothing large: how fast links are cannot be told",
    )


def test_operations_of_a_process_group_which_have_one_name_keep_their_own_sizes(tmp_path: Path) -> None:
    truth = simulate(BASE)
    order = ["bucket 0", "bucket 1", "bucket 2", "loss"]
    for tape in truth.tapes.values():
        tape.rows = [
            (time, value, 4 * clock + order.index(name), "group", 0, *rest) if name in order else row
            for row in tape.rows
            for time, value, clock, name, _, *rest in [row]
        ]
    found = understood(truth, tmp_path)
    submitted = [
        found.buckets[event.bucket].nbytes for event in found.steps.programs[0][2] if isinstance(event, HandOver)
    ]
    assert submitted == [1 << 20, 1 << 20, 1 << 20, 4]


def test_a_plan_that_is_recorded_again_has_its_tensors_once(tmp_path: Path) -> None:
    truth = simulate(BASE)
    for tape in truth.tapes.values():
        tape.rows += [row for row in tape.rows if row[6] in (Kind.PLAN, Kind.BUCKET, Kind.MEMBER)]
    assert len(understood(truth, tmp_path).tensors) == BASE.buckets * BASE.tensors


def test_a_trace_without_steps_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="no whole training steps"):
        understood(simulate(replace(BASE, steps=1)), tmp_path)


def test_only_the_chosen_steps_count(tmp_path: Path) -> None:
    found = understood(simulate(BASE), tmp_path, StepRange(2, 4))
    assert found.steps.numbers == (2, 3)
    assert len(found.steps.programs[0]) == 2


# --- which steps stand for all ----------------------------------------------------------------------------------------

STEPS = 600
PATTERNS = {
    "drifting": tuple(step / STEPS for step in range(STEPS)),
    "every 12th": tuple(float(step % 12 == 5) for step in range(STEPS)),
    "the last third": tuple(float(step >= 400) for step in range(STEPS)),
    "a few": tuple(float(step in (100, 300, 550)) for step in range(STEPS)),
    "nothing": (0.0,) * STEPS,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_steps_that_are_walked_through_stand_for_all(pattern: str) -> None:
    """... of jobs that drift, have spikes or change midway: in mean, median and 95 %. Those in the middle do not."""
    shape = Shape(nodes=2, steps=STEPS, forward=5 * MS, backward=10 * MS, buckets=1, seed=4)
    trace = make(shape, Fault("forward", PATTERNS[pattern], frozenset({1}), more=20.0 * MS)).trace
    steps = understand(trace).steps
    assert len(steps.numbers) == MOST_STEPS
    whole = np.array(steps.every)
    first = understand(trace, StepRange(1, 2)).steps.numbers[0]
    chosen = whole[np.array(steps.numbers) - first]
    assert chosen.mean() == pytest.approx(whole.mean(), rel=0.015)
    assert np.median(chosen) == pytest.approx(np.median(whole), rel=0.01)
    assert np.quantile(chosen, 0.95) == pytest.approx(np.quantile(whole, 0.95), rel=0.05)
    if pattern in ("drifting", "the last third"):
        assert steps.numbers[-1] - steps.numbers[0] > 0.8 * STEPS
    if pattern == "the last third":
        middle = whole[STEPS // 2 - MOST_STEPS // 2 :][:MOST_STEPS]
        assert abs(middle.mean() / whole.mean() - 1) > 0.2


def test_few_steps_of_a_job_with_many_actions_are_walked_through() -> None:
    trace = make(Shape(nodes=2, steps=40, forward=5 * MS, backward=10 * MS, buckets=2, seed=7)).trace
    assert 4 <= len(understand(trace, most_actions=200).steps.numbers) < 20


@pytest.mark.parametrize("every", [7, 50, 150])
def test_rare_exchanges_stay_as_rare_as_they_are(every: int) -> None:
    """DiLoCo and the like: they are not longer than other steps, and still neither lost nor too many."""
    exchanging = [step % every == every - 1 for step in range(STEPS)]
    places = representative([1.0] * STEPS, MOST_STEPS, exchanging)
    chosen = [exchanging[place] for place in places]
    assert sum(chosen) >= 4
    assert sum(chosen) / len(chosen) == pytest.approx(1 / every, rel=0.1)
    assert list(places) == sorted(set(places))


def test_how_often_a_single_exchange_comes_is_said_to_be_unknown(tmp_path: Path) -> None:
    for kept, number in (({3}, 1), ({2, 4}, 0)):
        truth = simulate(replace(BASE, loss=False))
        for (role, _), tape in truth.tapes.items():
            if role == Role.WORKER:
                tape.rows = [row for row in tape.rows if row[6] != Kind.SUBMITTED or row[2] in kept]
        folder = tmp_path / str(number)
        folder.mkdir()
        recorded = understood(truth, folder)
        assert sum("one of these steps exchanges data" in problem for problem in recorded.problems) == number
