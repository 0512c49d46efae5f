"""Who died, and what cannot be known without rings, is said by every tool."""

from __future__ import annotations

import dataclasses

import numpy as np

from fusion_rt.tracing.format import Kind
from fusion_trace.analyse import endings, gaps, summary, unfinished
from fusion_trace.read.job import JobTrace
from fusion_trace.report.hang_page import ending_lines
from tests.diagnosis.generator import Fault, Shape, make

SHAPE = Shape(nodes=3, ranks_per_node=2, steps=30, seed=3)
AT = tuple(float(step == 20) for step in range(SHAPE.steps))


def killed(ranks: tuple[int, ...] = (), nodes: tuple[int, ...] = ()) -> JobTrace:
    return make(SHAPE, Fault("killed", AT, ranks=frozenset(ranks), nodes=frozenset(nodes))).trace


def page(trace: JobTrace) -> str:
    return "\n".join(line for line, _ in ending_lines(unfinished.ending(trace)))


def test_a_dead_worker_is_named_with_when_and_who_says_so() -> None:
    trace = killed(ranks=(3,))
    (dead,) = endings.find(trace).dead
    assert (dead.what, dead.number, dead.host, dead.by) == ("rank", 3, "host1", 1)
    assert 0 <= dead.at - (dead.last or 0) <= 50_000_000
    (sentence,) = summary.find(trace).ended
    assert sentence.startswith("rank 3 (host host1) died ")
    assert sentence in page(trace)


def test_a_death_is_told_once_though_the_daemon_names_who_died_too() -> None:
    trace = killed(ranks=(3,))
    why = "rank 3 (host host1, pid 4711) died (killed, or crashed) without leaving the job"
    dead = dataclasses.replace(endings.find(trace).dead[0], why=why)
    begin = trace.span[0]
    assert [*endings.sentences(trace, endings.Endings((dead,), why, 1))] == [
        f"rank 3 (host host1) died {(dead.time - begin) / 1e9:.1f} s after the first record (killed, or crashed) "
        "without leaving the job (says the daemon of host1)",
        "the job failed because rank 3 (host host1) died",
    ]
    other = dataclasses.replace(dead, why="its records end")
    first, second = endings.sentences(trace, endings.Endings((other,), why, 1))
    assert first.endswith(" s after the first record: its records end (says the daemon of host1)")
    assert second == f"the job failed: {why}"


def test_a_dead_daemon_is_named_by_the_others_and_not_those_that_had_submitted() -> None:
    trace = killed(nodes=(2,))
    (dead,) = endings.find(trace).dead
    assert (dead.what, dead.number) == ("node", 2)
    assert "the daemon of host2 died" in page(trace).splitlines()[1]


def test_those_who_are_ended_because_the_job_has_failed_are_not_told_to_have_died() -> None:
    trace = killed(ranks=(3,))
    daemon = trace.daemons[0]
    later = daemon.records[-2:].copy()
    later["kind"] = Kind.GONE
    later["extra"], later["peer"] = (2, 0), (0xFFFF, 0)
    later["time"] = daemon.records["time"][-1] + [1, 10**9]
    records = np.concatenate([daemon.records, later])
    others = tuple(process for process in trace.processes if process is not daemon)
    trace = dataclasses.replace(trace, processes=(*others, dataclasses.replace(daemon, records=records)))
    assert [(each.what, each.number) for each in endings.find(trace).dead] == [("rank", 3)]


def test_an_epoch_that_has_failed_is_no_failure_of_a_job_that_goes_on() -> None:
    trace = killed(ranks=(3,))
    daemon = trace.daemons[0]
    (over,) = daemon.records[:1].copy()
    over["kind"], over["extra"], over["peer"] = Kind.GONE, 2, 0xFFFF
    records = np.concatenate([daemon.records[:1], [over], daemon.records[1:]])
    others = tuple(process for process in trace.processes if process is not daemon)
    trace = dataclasses.replace(trace, processes=(*others, dataclasses.replace(daemon, records=records)))
    found = endings.find(trace)
    assert found.failure == ""
    assert [(each.what, each.number) for each in found.dead] == [("rank", 3)]


def test_a_job_that_ended_well_has_no_dead() -> None:
    found = endings.find(make(SHAPE).trace)
    assert (found.dead, found.failure, found.failed) == ((), "", 0)


def test_what_cannot_be_known_without_the_rings_of_a_host_is_said() -> None:
    trace = make(SHAPE, hidden=frozenset({0, 2})).trace
    missing = gaps.unseen(trace)
    assert (missing.hosts, missing.daemons, missing.ranks) == ((0, 2), (), ())
    (sentence,) = gaps.sentences(trace, missing)
    assert sentence.startswith("there are no records of node 0, node 2, so the cause of waits is unknown")
    assert sentence in summary.find(trace).odd


def test_a_rank_without_a_ring_is_known_from_its_daemon() -> None:
    trace = make(SHAPE).trace
    kept = tuple(process for process in trace.processes if str(process) != "rank 4")
    missing = gaps.unseen(dataclasses.replace(trace, processes=kept))
    assert (missing.hosts, missing.daemons, missing.ranks) == ((), (), (4,))
