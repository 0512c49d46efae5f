"""Steps and operations are put together from what all processes have recorded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fusion_rt.tracing.format import Flush, Kind, Role
from fusion_trace.read import job as jobs
from fusion_trace.read.job import JobTrace
from fusion_trace.read.operations import Key, all_steps, operations, steps_of
from fusion_trace.read.span_columns import phase_columns
from tests.tools.synthetic import MS, START, US, Job, S, Tape, simulate


def load(directory: Path, *tapes: Tape) -> JobTrace:
    for tape in tapes:
        tape.write(directory)
    return jobs.load([str(directory)], "/nowhere")


def test_a_step_lasts_from_one_end_of_step_to_the_next_and_partial_ones_are_dropped(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=2, steps=6))
    truth.write(tmp_path)
    steps = all_steps(load(tmp_path))
    assert [step.number for step in steps[0]] == [1, 2, 3, 4, 5]
    assert [(step.begin, step.end) for step in steps[0]] == list(pairwise(truth.steps[0]))


def test_a_gap_in_the_records_is_no_long_step(tmp_path: Path) -> None:
    tape = Tape(Role.WORKER, 0)
    for clock in (3, 4, 7, 8, 0, 1):
        tape.add(Kind.STEP_END, START + len(tape.rows) * MS, clock=clock)
    assert [step.number for step in steps_of(load(tmp_path, tape).workers[0])] == [4, 8, 1]


def test_modules_within_modules_are_one_phase_and_what_has_not_ended_is_none(tmp_path: Path) -> None:
    tape = Tape(Role.WORKER, 0)
    for kind in (Kind.FORWARD_END, Kind.FORWARD_BEGIN, Kind.FORWARD_BEGIN, Kind.FORWARD_END, Kind.FORWARD_BEGIN):
        tape.add(kind, START + len(tape.rows) * MS)
    worker = load(tmp_path, tape).workers[0]
    begin, end = phase_columns(worker, Kind.FORWARD_BEGIN, Kind.FORWARD_END)
    assert (begin.tolist(), end.tolist()) == ([START + MS], [START + 3 * MS])


@pytest.mark.parametrize("seed", range(3))
def test_all_parts_of_all_operations(tmp_path: Path, seed: int) -> None:
    """With hosts whose clocks are the same, what was simulated comes back to the nanosecond."""
    job = Job(nodes=3, ranks_per_node=2, steps=3, bucket_nbytes=3 << 19, chunk_nbytes=100_000, seed=seed)
    truth = simulate(job)
    for tape in truth.tapes.values():
        tape.rows = [row for row in tape.rows if row[6] != Kind.CLOCK]
        tape.host = "a"
    truth.write(tmp_path)
    found = operations(load(tmp_path))
    assert {(key.name, key.clock) for key in found} == set(truth.submitted)
    flights = []
    for key, operation in found.items():
        where = key.name, key.clock
        assert {rank: part.submitted for rank, part in operation.workers.items()} == truth.submitted[where]
        answered = {rank: at for part in operation.daemons.values() for rank, at in part.answered.items()}
        assert answered == truth.answered[where]
        assert key.plan == (key.name != "loss")
        for chunk in operation.chunks:
            assert chunk.sent is not None
            assert chunk.received is not None
            flights.append((chunk.source, chunk.target, key.name, key.clock, chunk.sent, chunk.received))
        assert sum(chunk.nbytes for chunk in operation.chunks) == 4 * operation.nbytes or key.name == "loss"
    assert sorted(flights) == sorted(truth.flights)
    first = found[Key("bucket 0", 1, 0)]
    assert first.workers[0].flush == Flush.FULL
    assert len(first.workers[0].waits) == len(first.workers[0].copies) == len(first.workers[0].applies) == 1
    assert found[Key("loss", 0, 0)].workers[0].flush == Flush.ALONE
    assert all(part.negotiations for part in found[Key("loss", 0, 0)].daemons.values())
    assert not first.asynchronous


def test_chunks_without_numbers_are_matched_in_their_order(tmp_path: Path) -> None:
    """The second need not wait and has no QUEUED; the third has not arrived yet."""
    a, b = (Tape(Role.DAEMON, node, node=node, nodes=2) for node in range(2))
    a.add(Kind.QUEUED, START + 1 * US, "x", peer=1, value=10)
    a.add(Kind.SENT, START + 2 * US, "x", peer=1, value=10)
    a.add(Kind.SENT, START + 3 * US, "x", peer=1, value=20)
    a.add(Kind.SENT, START + 4 * US, "x", peer=1, value=30)
    b.add(Kind.RECEIVED, START + 5 * US, "x", peer=0, value=10)
    b.add(Kind.RECEIVED, START + 6 * US, "x", peer=0, value=20)
    b.add(Kind.TAKEN, START + 7 * US, "x", peer=0, value=10)
    chunks = operations(load(tmp_path, a, b))[Key("x", 0, 0)].chunks
    times = [(c.nbytes, *(t and (t - START) // US for t in (c.queued, c.sent, c.received, c.taken))) for c in chunks]
    assert times == [(10, 1, 2, 5, 7), (20, None, 3, 6, None), (30, None, 4, None, None)]


def test_a_chunk_that_waits_for_credit_and_then_for_its_turn_waits_since_the_former(tmp_path: Path) -> None:
    """Chunks 1 and 2 wait for credit; 1 gets some and waits for its turn, 2 gets some and is sent at once; 3 waits for
    its turn only, and still does."""
    a, b = (Tape(Role.DAEMON, node, node=node, nodes=2) for node in range(2))
    events = [
        (Kind.QUEUED, 1, 0), (Kind.QUEUED, 2, 0), (Kind.QUEUED, 3, 1), (Kind.SENT, 4, 1), (Kind.SENT, 5, 2),
        (Kind.QUEUED, 6, 1),
    ]  # fmt: skip
    for kind, at, extra in events:
        a.add(kind, START + at * US, "x", peer=1, extra=extra)
    b.add(Kind.PLAN, START)
    chunks = operations(load(tmp_path, a, b))[Key("x", 0, 0)].chunks
    times = [(c.number, *(t and (t - START) // US for t in (c.queued, c.sent))) for c in chunks]
    assert times == [(1, 1, 4), (2, 2, 5), (0, 6, None)]


def test_numbered_chunks_are_matched_by_number_also_if_one_end_has_lost_some(tmp_path: Path) -> None:
    a, b = (Tape(Role.DAEMON, node, node=node, nodes=2) for node in range(2))
    for number in (2, 3):
        a.add(Kind.SENT, START + number * US, "x", peer=1, extra=number)
    for number in (1, 2, 3):
        b.add(Kind.RECEIVED, START + (10 + number) * US, "x", peer=0, extra=number)
    chunks = operations(load(tmp_path, a, b))[Key("x", 0, 0)].chunks
    times = {c.number: tuple(t and (t - START) // US for t in (c.sent, c.received)) for c in chunks}
    assert times == {1: (None, 11), 2: (2, 12), 3: (3, 13)}


def test_a_job_without_daemons_rings_still_has_operations(tmp_path: Path) -> None:
    truth = simulate(Job(steps=2))
    for (role, _), tape in truth.tapes.items():
        if role == Role.WORKER:
            tape.write(tmp_path)
    found = operations(load(tmp_path))
    assert all(operation.workers and not operation.daemons and not operation.chunks for operation in found.values())


def test_contributions_to_homes_are_asynchronous(tmp_path: Path) -> None:
    tape = Tape(Role.DAEMON, 0)
    tape.add(Kind.APPLIED, START + S, "bucket 0", plan=1, clock=5, peer=1, value=3)
    (operation,) = operations(load(tmp_path, tape)).values()
    assert operation.asynchronous
    assert operation.daemons[0].applied == {1: (START + S, 3)}
