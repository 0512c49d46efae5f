"""Spans in columns are those that are found one by one, for any records."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np

from fusion_rt.tracing.format import Kind, Role
from fusion_rt.tracing.reader import RECORD_DTYPE
from fusion_trace.analyse.overlap import PARTS, partitions
from fusion_trace.analyse.summary import traffic
from fusion_trace.read.job import JobTrace, Process
from fusion_trace.read.operations import Operation, all_steps, operations
from fusion_trace.read.span_columns import (
    Span,
    SpanSet,
    common,
    distinct,
    joined,
    pair_columns,
    phase_columns,
    run,
    union_of,
    without,
)
from tests.diagnosis.generator import MS, Shape, make
from tests.for_each import for_each
from tests.tools import plain_spans
from tests.tools.plain_spans import pairs, phases, script, within


def listed(found: SpanSet) -> tuple[Span, ...]:
    return tuple(Span(*each) for each in zip(found.begin.tolist(), found.end.tolist(), strict=True))


@for_each("seed", range(30))
def test_sets_of_spans_are_joined_cut_and_measured_alike(seed: int) -> None:
    generator = np.random.default_rng(seed)
    begins = [generator.integers(0, 60, generator.integers(0, 20)) for _ in range(2)]
    lists = [(begin, begin + generator.integers(-2, 9, len(begin))) for begin in begins]
    one, other = (plain_spans.union(zip(*(side.tolist() for side in each), strict=True)) for each in lists)
    first, second = (union_of(*each) for each in lists)
    assert (listed(first), listed(second)) == (one, other)
    assert listed(joined(lists)) == plain_spans.union([*one, *other])
    assert listed(common(first, second)) == plain_spans.intersection(one, other)
    assert listed(without(first, second)) == plain_spans.difference(one, other)
    edges = np.sort(generator.integers(-5, 70, 9))
    measured = [plain_spans.total(plain_spans.intersection(one, (Span(a, b),))) for a, b in pairwise(edges)]
    assert first.within(edges[:-1], edges[1:]).tolist() == measured


def scrambled(process: Process, generator: np.random.Generator) -> Process:
    """Returns a process that has lost records, and has some of another kind or operation than they were."""
    records = process.records[generator.random(len(process.records)) > 0.15].copy()
    odd = generator.random(len(records)) < 0.05
    records["kind"][odd] = generator.permutation(records["kind"][odd])
    records["clock"][generator.random(len(records)) < 0.02] += 1
    return replace(process, records=records)


@for_each("seed", range(20))
def test_begins_and_ends_are_paired_alike(seed: int) -> None:
    generator = np.random.default_rng(seed)
    records = np.zeros(200, RECORD_DTYPE)
    records["time"] = np.sort(generator.integers(0, 500, len(records)))
    records["kind"] = generator.integers(1, 5, len(records))
    for name, most in (("name", 3), ("plan", 2), ("clock", 3)):
        records[name] = generator.integers(0, most, len(records))
    process = Process(Role.WORKER, 0, 0, "a", 1, records, len(records), 0, ())
    kinds = Kind.FORWARD_BEGIN, Kind.FORWARD_END
    for columns, one_by_one in ((pair_columns, pairs), (phase_columns, phases)):
        assert sorted(zip(*(each.tolist() for each in columns(process, *kinds)), strict=True)) == list(
            one_by_one(process, *kinds)
        )


def answered(operation: Operation, rank: int, node: int) -> int | None:
    mine, daemon = operation.workers[rank], operation.daemons.get(node)
    ends = [daemon.answered.get(rank), daemon.run_end] if daemon is not None else []
    return next((time for time in [*ends, mine.done] if time is not None), None)


def late(operation: Operation, rank: int, node: int) -> list[Span]:
    """When the script was in a wait for it that its daemon had answered."""
    if rank not in operation.workers or (end := answered(operation, rank, node)) is None:
        return []
    return [Span(max(wait.begin, end), wait.end) for wait in operation.workers[rank].waits if wait.end > end]


def flight(operation: Operation, rank: int, node: int) -> Span | None:
    mine = operation.workers.get(rank)
    if mine is None or mine.submitted is None:
        return None
    begin = mine.submitted
    if not operation.asynchronous:
        begin = max(part.submitted for part in operation.workers.values() if part.submitted is not None)
    end = answered(operation, rank, node)
    return Span(begin, end) if end is not None and end > begin else None


def one_by_one(trace: JobTrace) -> list[tuple[int, ...]]:
    """Returns the parts of every step, from the operations themselves."""
    found = []
    every = list(operations(trace).values())
    for rank, steps in all_steps(trace).items():
        worker = trace.workers[rank]
        flights = plain_spans.union(each for op in every if (each := flight(op, rank, trace.node_of[rank])) is not None)
        over = [span for op in every for span in late(op, rank, trace.node_of[rank])]
        waits = plain_spans.union(pairs(worker, Kind.WAIT_BEGIN, Kind.WAIT_END))
        working = plain_spans.union(
            [
                *chain(*script(worker).values()),
                *pairs(worker, Kind.COPY_BEGIN, Kind.COPY_END),
                *pairs(worker, Kind.APPLY_BEGIN, Kind.APPLY_END),
            ]
        )
        sets = (
            plain_spans.difference(plain_spans.difference(working, waits), flights),
            plain_spans.difference(flights, waits),
            plain_spans.intersection(waits, flights),
            plain_spans.difference(plain_spans.difference(waits, plain_spans.union(over)), flights),
        )
        columns = zip(*(within(steps, each) for each in sets), strict=True)
        found += [(rank, step.number, *parts, step.ns - sum(parts)) for step, parts in zip(steps, columns, strict=True)]
    return found


@for_each("seed", range(6))
def test_steps_and_traffic_of_seeded_jobs_are_those_of_their_operations_also_where_records_are_lost(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = Shape(nodes=1 + seed % 3, ranks_per_node=1 + seed % 2, steps=12, loss=bool(seed % 2), skews={1: 3 * MS})
    trace = make(shape).trace
    for job in (trace, replace(trace, processes=tuple(scrambled(each, generator) for each in trace.processes))):
        found = [(part.rank, part.number, *(part.parts[name] for name in PARTS)) for part in partitions(job)]
        assert found == one_by_one(job)
        sent: dict[tuple[int, int], list[int]] = {}
        for operation in operations(job).values():
            for chunk in operation.chunks:
                at = chunk.sent if chunk.sent is not None else chunk.received
                if at is not None and job.span[0] <= at <= job.span[1]:
                    sent.setdefault((chunk.source, chunk.target), []).append(chunk.nbytes)
        links = {(each.source, each.target): (each.nbytes, each.chunks) for each in traffic(operations(job), *job.span)}
        assert links == {link: (sum(sizes), len(sizes)) for link, sizes in sent.items()}


@for_each("seed", range(20))
def test_what_is_kept_by_its_run_is_what_is_kept_by_a_mask(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 9, random.integers(0, 9))
    kept = values > random.integers(0, 9)
    assert values[run(kept)].tolist() == values[kept].tolist()


def test_places_that_follow_each_other_are_a_slice() -> None:
    assert run(np.array([False, True, True, False])) == slice(1, 3)
    assert isinstance(run(np.array([True, False, True])), np.ndarray)


@for_each(("values", "expected"), [([], True), ([3], True), ([1, 2, 5], True), ([5, 1, 2], True), ([1, 2, 1], False)])
def test_values_are_distinct_in_any_order(values: list[int], expected: bool) -> None:
    assert distinct(np.array(values, np.int64)) is expected
