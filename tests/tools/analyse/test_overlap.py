"""The parts of a step add up to it, and are what counting every nanosecond gives."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind, Role
from fusion_trace.analyse.overlap import PARTS, Partition, document, overview, partitions
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import JobTrace
from fusion_trace.read.span_columns import common, joined, union_of, without
from tests.diagnosis.generator import Fault, Shape, make
from tests.tools.synthetic import MS, START, US, Job, Straggler, Tape, Truth, simulate


def test_sets_of_spans_are_those_of_their_points() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        begins = [generator.integers(0, 40, generator.integers(0, 6)) for _ in range(2)]
        lists = [(begin, begin + generator.integers(-2, 12, len(begin))) for begin in begins]
        a, b = ({point for begin, end in zip(*its, strict=True) for point in range(begin, end)} for its in lists)
        one, two = (union_of(*its) for its in lists)
        both = joined(lists)
        for made, points in ((one, a), (both, a | b), (common(one, two), a & b), (without(one, two), a - b)):
            spans = list(zip(made.begin.tolist(), made.end.tolist(), strict=True))
            assert {point for begin, end in spans for point in range(begin, end)} == points
            assert made.within(np.array([-5]), np.array([60])).tolist() == [len(points)]
            assert spans == sorted(spans)
            assert all(begin < end for begin, end in spans)


def by_counting(truth: Truth, rank: int, number: int) -> dict[str, int]:
    """The parts of a step, from a boolean for each of its nanoseconds; from the tapes, not from what reads them."""
    begin, end = truth.steps[rank][number - 1], truth.steps[rank][number]

    def mark(grid: NDArray[np.bool_], since: int, until: int) -> None:
        grid[max(since, begin) - begin : max(0, min(until, end) - begin)] = True

    waits, works, flights, late = (np.zeros(end - begin, bool) for _ in range(4))
    opened: dict[tuple[int, str], int] = {}
    kinds = {
        Kind.WAIT_BEGIN: (Kind.WAIT_END, waits), Kind.FORWARD_BEGIN: (Kind.FORWARD_END, works),
        Kind.BACKWARD_BEGIN: (Kind.BACKWARD_END, works), Kind.STEP_BEGIN: (Kind.STEP_END, works),
    }  # fmt: skip
    ends = {closing: (opening, grid) for opening, (closing, grid) in kinds.items()}
    for at, _, clock, name, _, _, kind, _ in truth.tapes[Role.WORKER, rank].rows:
        if kind == Kind.WAIT_END:
            mark(late, max(opened[Kind.WAIT_BEGIN, name], truth.answered[name, clock][rank]), at)
        if kind in kinds:
            opened[kind, name] = at
        elif kind in ends:
            opening, grid = ends[Kind(kind)]
            mark(grid, opened[opening, name], at)
    for key, submitted in truth.submitted.items():
        mark(flights, max(submitted.values()), truth.answered[key][rank])
    return {
        "compute": int((works & ~waits & ~flights).sum()),
        "overlapped": int((flights & ~waits).sum()),
        "exposed": int((flights & waits).sum()),
        "waiting": int((waits & ~late & ~flights).sum()),
        "idle": int((((~works & ~waits) | late) & ~flights).sum()),
    }


def small(seed: int, straggler: Straggler | None = None) -> Truth:
    """A job with steps of less than a millisecond, so that each nanosecond can be counted."""
    generator = random.Random(seed)
    truth = simulate(
        Job(
            nodes=generator.randrange(1, 4),
            ranks_per_node=generator.randrange(1, 3),
            steps=4,
            buckets=generator.randrange(1, 4),
            bucket_nbytes=generator.randrange(1000, 60_000),
            forward=generator.randrange(20, 200) * US,
            backward=generator.randrange(20, 400) * US,
            update=20 * US,
            between=30 * US,
            latency=generator.randrange(5, 50) * US,
            jitter=0.3,
            loss=generator.random() < 0.5,
            straggler=straggler,
            seed=seed,
        )
    )
    for tape in truth.tapes.values():  # one host, one clock: whole nanoseconds come back
        tape.rows = [row for row in tape.rows if row[6] != Kind.CLOCK]
        tape.host = "a"
    return truth


def load(truth: Truth, directory: Path) -> JobTrace:
    truth.write(directory)
    return jobs.load([str(directory)], "/nowhere")


@pytest.mark.parametrize("seed", range(12))
def test_parts_are_what_counting_every_nanosecond_gives(tmp_path: Path, seed: int) -> None:
    truth = small(seed, Straggler("compute", 0, factor=3) if seed % 2 else None)
    found = partitions(load(truth, tmp_path))
    assert {(part.rank, part.number) for part in found} == {(r, n) for r in range(truth.job.ranks) for n in (1, 2, 3)}
    for part in found:
        assert sum(part.parts.values()) == part.ns == truth.steps[part.rank][part.number] - part.begin
        assert part.parts == by_counting(truth, part.rank, part.number)


def test_parts_add_up_also_where_clocks_are_wrong_and_records_are_missing(tmp_path: Path) -> None:
    generator = random.Random(4)
    truth = simulate(Job(nodes=3, steps=8, skews={1: 5 * MS, 2: -MS}, round_trip=3 * MS))
    for tape in truth.tapes.values():
        tape.rows = [row for row in tape.rows if row[6] == Kind.STEP_END or generator.random() < 0.7]
    found = partitions(load(truth, tmp_path))
    assert len(found) == 3 * 7
    for part in found:
        assert sum(part.parts.values()) == part.ns
        assert min(part.parts.values()) >= 0


def test_waiting_for_a_slow_rank_is_not_communication(tmp_path: Path) -> None:
    truth = simulate(
        Job(nodes=2, steps=4, buckets=1, loss=False, jitter=0.0, straggler=Straggler("compute", 1, factor=2))
    )
    found = partitions(load(truth, tmp_path))
    fast, slow = (overview([part for part in found if part.rank == rank]) for rank in (0, 1))
    assert fast.waiting == pytest.approx(24 * MS, rel=0.05)
    assert slow.waiting < MS
    assert abs(fast.exposed - slow.exposed) < MS


def test_hidden_is_the_share_of_communication_that_the_script_does_not_wait_for() -> None:
    parts = [Partition(0, n, 0, 100, 40, 30, 10, 10, 10) for n in range(3)]
    assert overview(parts).hidden == 0.75
    assert overview([Partition(0, 1, 0, 100, 100, 0, 0, 0, 0)]).hidden is None


def test_means_of_the_parts_add_up_and_are_told_where_an_exchange_is_rare() -> None:
    quiet = [Partition(0, n, 0, 100, 90, 0, 0, 0, 10) for n in range(99)]
    rare = Partition(0, 99, 0, 10_100, 90, 0, 10_000, 0, 10)
    found = overview([*quiet, rare])
    assert found.exposed == 0
    assert found.mean == {"compute": 90, "overlapped": 0, "exposed": 100, "waiting": 0, "idle": 10}
    assert found.differs
    assert not overview(quiet).differs


def test_only_chosen_steps_and_the_document(tmp_path: Path) -> None:
    trace = load(small(3), tmp_path)
    assert {part.number for part in partitions(trace, StepRange(2, 3))} == {2}
    told = document(trace, StepRange(2, 3))
    steps = told["steps"]
    assert isinstance(steps, list)
    for step in steps:
        assert sum(step[name] for name in PARTS) == step["end"] - step["begin"]
    assert document(trace, StepRange(50))["all"] is None


def test_a_wait_that_spans_two_steps_counts_in_both(tmp_path: Path) -> None:
    tape = Tape(Role.WORKER, 0)
    for clock in range(3):
        tape.add(Kind.STEP_END, START + clock * MS, clock=clock)
    tape.add(Kind.WAIT_BEGIN, START + 600 * US, "x")
    tape.add(Kind.WAIT_END, START + 1100 * US, "x")
    tape.write(tmp_path)
    parts = partitions(jobs.load([str(tmp_path)], "/nowhere"))
    assert [part.waiting for part in parts] == [400 * US, 100 * US]
    assert [part.idle for part in parts] == [600 * US, 900 * US]


def test_union_joins_spans_that_touch() -> None:
    found = union_of(np.array([3, 1, 7]), np.array([5, 3, 7]))
    assert (found.begin.tolist(), found.end.tolist()) == ([1], [5])


def test_a_rank_that_is_stopped_with_its_answer_there_waits_for_nobody() -> None:
    """Rank 1 stands still for 900 ms in a wait that its daemon has answered: its own time, and no other rank's."""
    when = tuple(float(step == 12) for step in range(30))
    trace = make(Shape(nodes=2, steps=30, seed=5), Fault("stop", when, frozenset({1}), more=900 * MS)).trace
    of = {part.rank: part for part in partitions(trace) if part.number == 12}
    assert of[1].idle > 850 * MS
    assert of[1].waiting < 100 * MS
    late = {part.rank: part for part in partitions(trace) if part.number == 13}
    assert max(of[0].waiting, late[0].waiting) > 850 * MS  # who waits for it does
