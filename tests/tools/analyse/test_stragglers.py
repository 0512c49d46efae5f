"""Stragglers of every cause are named, and nobody is where there is none."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from fusion_trace.analyse.stragglers import CAUSES, Finding, find
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import StepRange
from tests.tools.synthetic import MS, Job, S, Straggler, simulate


def found(directory: Path, job: Job) -> tuple[Finding, ...]:
    directory.mkdir(exist_ok=True)
    simulate(job).write(directory)
    return find(jobs.load([str(directory)], "/nowhere"))


def case(seed: int) -> Job:
    """A job of random shape with one straggler; ten seeds of each cause."""
    generator = random.Random(seed)
    nodes, ranks_per_node = generator.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
    cause = CAUSES[seed % len(CAUSES)]
    source = generator.randrange(nodes)
    where: int | tuple[int, int] = (source, (source + 1) % nodes)
    if cause == "compute":
        where = generator.randrange(nodes * ranks_per_node)
    elif cause == "negotiation":
        where = source
    first = generator.randrange(1, 4)
    return Job(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        steps=10,
        buckets=generator.randrange(1, 5),
        bucket_nbytes=generator.choice([1 << 18, 1 << 20, 1 << 21]),
        bandwidth=generator.choice([125e6, 250e6, 1e9]),
        jitter=generator.uniform(0.0, 0.05),
        straggler=Straggler(
            cause,
            where,
            factor=generator.uniform(1.5, 3.0) if cause == "compute" else generator.uniform(4, 8),
            delay=generator.randrange(6 * MS, 12 * MS),
            steps=None if generator.random() < 0.5 else range(first, first + 4),
        ),
        skews={node: generator.randrange(-S, S) for node in range(1, nodes)},
        drifts={node: generator.uniform(-20, 20) for node in range(1, nodes)},
        seed=seed,
    )


def is_right(finding: Finding, straggler: Straggler) -> bool:
    place = finding.link if finding.link is not None else finding.rank if finding.rank is not None else finding.node
    return (finding.cause, place) == (straggler.cause, straggler.where)


def test_of_40_seeded_cases_at_least_38_are_named_rightly(tmp_path: Path) -> None:
    wrong = {}
    for seed in range(40):
        job = case(seed)
        assert job.straggler is not None
        findings = found(tmp_path / str(seed), job)
        if not findings or not is_right(findings[0], job.straggler):
            wrong[seed] = (job.straggler, findings[:2])
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("seed", range(8))
def test_where_nobody_is_slow_nobody_is_named(tmp_path: Path, seed: int) -> None:
    job = dataclasses.replace(case(seed), straggler=None, jitter=0.02, steps=20)
    assert found(tmp_path, job) == ()


def test_the_cost_of_a_slow_rank_is_what_the_others_waited_for_it(tmp_path: Path) -> None:
    """Rank 1 takes 12 ms more for its 24 ms of forward and backward in steps 5 to 9."""
    straggler = Straggler("compute", 1, factor=1.5, steps=range(5, 10))
    (finding,) = found(tmp_path, Job(steps=20, jitter=0.0, straggler=straggler))
    assert (finding.rank, finding.steps, finding.of) == (1, (5, 6, 7, 8, 9), 19)
    assert finding.lost == pytest.approx(5 * 12 * MS, rel=0.02)
    assert finding.typical - finding.usual == pytest.approx(12 * MS, rel=0.02)
    assert finding.detail == "forward and backward"


@pytest.mark.parametrize("seed", range(5))
def test_clocks_that_nobody_knows_well_make_no_link_slow(tmp_path: Path, seed: int) -> None:
    """Echoes that took 10 ms and more: what looks like a slow link in one direction may be none."""
    findings = found(tmp_path, Job(steps=20, round_trip=10 * MS, skews={1: 10 * S}, seed=seed))
    assert [finding for finding in findings if finding.link is not None] == []


def test_only_the_chosen_steps_count(tmp_path: Path) -> None:
    directory = tmp_path
    simulate(Job(steps=20, straggler=Straggler("compute", 0, factor=2, steps=range(10, 20)))).write(directory)
    trace = jobs.load([str(directory)], "/nowhere")
    assert find(trace, StepRange(1, 10)) == ()
    (finding,) = find(trace, StepRange(5, 15))
    assert finding.steps == (10, 11, 12, 13, 14)


def test_a_trace_without_steps_or_with_one_rank_names_nobody(tmp_path: Path) -> None:
    assert found(tmp_path / "none", Job(steps=1)) == ()
    assert found(tmp_path / "one", Job(nodes=1, steps=9)) == ()
