"""Curves of processors and memory: what rings tell of a process, in figures that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusion_rt.tracing.format import Kind, Role
from fusion_trace.analyse import usage
from fusion_trace.read import job
from fusion_trace.read.span_columns import Span
from tests.tools.synthetic import MS, START, S, Tape

MIB = 1 << 20


def trace_of(folder: Path, *tapes: Tape) -> job.JobTrace:
    for tape in tapes:
        tape.write(folder)
    return job.load([str(folder)], "/nowhere")


def whole(trace: job.JobTrace) -> Span:
    return Span(*trace.span)


def test_processors_are_the_growth_of_processor_time(tmp_path: Path) -> None:
    """1.5 processors for ten seconds, then .25; the daemon a twentieth."""
    worker, daemon = Tape(Role.WORKER, 0), Tape(Role.DAEMON, 0)
    used = 7 * S
    for step in range(200):
        now = START + step * 100 * MS
        worker.add(Kind.STEP_END, now, clock=step, value=used)
        daemon.add(Kind.RUN_END, now, "bucket 0", clock=step, value=S + step * 5 * MS)
        used += 150 * MS if step < 100 else 25 * MS
    trace = trace_of(tmp_path, worker, daemon)
    rank, node = usage.find(trace, whole(trace), 16)
    begun = rank.processors.times - trace.span[0]
    np.testing.assert_allclose(rank.processors.values[begun < 9.9 * S], 1.5, rtol=1e-6)
    np.testing.assert_allclose(rank.processors.values[begun > 10.1 * S], 0.25, rtol=1e-6)
    assert rank.mean == pytest.approx((100 * 1.5 + 99 * 0.25) / 199)
    assert node.process.role == Role.DAEMON
    np.testing.assert_allclose(node.processors.values, 0.05, rtol=1e-6)


def test_many_steps_have_few_points_and_the_same_mean(tmp_path: Path) -> None:
    worker = Tape(Role.WORKER, 0)
    steps = np.random.default_rng(1).uniform(0, 2 * MS, 5000).astype(int)
    for step, used in enumerate(np.cumsum(steps).tolist()):
        worker.add(Kind.STEP_END, START + step * MS, clock=step, value=used + 1)
    trace = trace_of(tmp_path, worker)
    (rank,) = usage.find(trace, whole(trace), 16)
    assert len(rank.processors.values) == usage.MOST_POINTS
    assert rank.processors.values.mean() == pytest.approx(rank.mean)
    assert rank.mean == pytest.approx(steps[1:].sum() / (4999 * MS))


def test_a_process_that_took_the_part_of_another_begins_with_nothing(tmp_path: Path) -> None:
    """It took half a processor for a second, and its successor the same: there is no fall in between."""
    worker = Tape(Role.WORKER, 0)
    for step in range(40):
        used = (step + 100 if step < 20 else step - 20) * 50 * MS + MS
        worker.add(Kind.STEP_END, START + step * 100 * MS, clock=step, value=used)
    trace = trace_of(tmp_path, worker)
    (rank,) = usage.find(trace, whole(trace), 16)
    assert (rank.processors.values >= 0).all()
    assert rank.processors.most == pytest.approx(0.5)


def test_memory_keeps_its_peak_however_long_the_job(tmp_path: Path) -> None:
    worker = Tape(Role.WORKER, 0)
    for number in range(2000):
        held = 300 * MIB + (1000 * MIB if number == 1234 else 0)
        worker.add(Kind.MEMORY, START + number * S // 2, value=held, extra=(2 << 20) if number > 500 else 0)
    trace = trace_of(tmp_path, worker)
    (rank,) = usage.find(trace, whole(trace), 16)
    assert len(rank.memory.values) <= usage.MOST_POINTS
    assert rank.memory.most == 1300 * MIB
    assert rank.memory.times[rank.memory.values.argmax()] == trace.span[0] + 1234 * S // 2
    assert rank.on_gpus.most == 2 << 30
    assert (np.diff(rank.memory.times) > 0).all()


def test_what_was_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    """Rings of older jobs have no memory, and steps may have no processor time."""
    worker = Tape(Role.WORKER, 0)
    for step in range(10):
        worker.add(Kind.STEP_END, START + step * MS, clock=step)
    trace = trace_of(tmp_path, worker)
    (rank,) = usage.find(trace, whole(trace), 16)
    assert rank.mean is None
    assert [len(curve.values) for curve in (rank.processors, rank.memory, rank.on_gpus)] == [0, 0, 0]
    assert rank.memory.most is None


def test_only_the_chosen_time_and_ranks_count(tmp_path: Path) -> None:
    tapes = [Tape(Role.WORKER, rank, node=rank // 2, nodes=2, host=f"h{rank // 2}") for rank in range(4)]
    tapes += [Tape(Role.DAEMON, node, node=node, nodes=2, host=f"h{node}") for node in range(2)]
    for tape in tapes:
        for number in range(10):
            tape.add(Kind.MEMORY, START + number * S, value=(number + 1) * MIB)
    trace = trace_of(tmp_path, *tapes)
    begin = trace.span[0]
    found = usage.find(trace, Span(begin + 2 * S, begin + 4 * S), 2)
    assert [str(each.process) for each in found] == ["rank 0", "rank 1", "daemon of h0"]
    assert all(each.memory.values.tolist() == [3 * MIB, 4 * MIB, 5 * MIB] for each in found)
