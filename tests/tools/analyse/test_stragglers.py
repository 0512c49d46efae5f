"""Stragglers of every cause are named with what they have cost, and nobody is where there is none.

`tests/diagnosis` tries thousands of jobs; here are the properties that hold for each.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from fusion_trace.analyse.stragglers import Finding, find
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import StepRange
from fusion_trace.report import stragglers_page
from fusion_trace.report.wording import duration
from tests.diagnosis.generator import Fault, Shape, make
from tests.for_each import for_each
from tests.tools.synthetic import MS, Job, S, Straggler, simulate

CAUSES = ("compute", "negotiation", "queue", "wire")


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
        steps=24,
        buckets=generator.randrange(1, 5),
        bucket_nbytes=generator.choice([1 << 18, 1 << 20, 1 << 21]),
        bandwidth=generator.choice([125e6, 250e6, 1e9]),
        jitter=generator.uniform(0.0, 0.05),
        straggler=Straggler(
            cause,
            where,
            factor=generator.uniform(1.5, 3.0) if cause == "compute" else generator.uniform(4, 8),
            delay=generator.randrange(6 * MS, 12 * MS),
            steps=None if generator.random() < 0.5 else range(first, first + 9),
        ),
        skews={node: generator.randrange(-S, S) for node in range(1, nodes)},
        drifts={node: generator.uniform(-20, 20) for node in range(1, nodes)},
        seed=seed,
    )


def is_right(finding: Finding, straggler: Straggler) -> bool:
    if straggler.cause == "queue":  # chunks wait for their turn on a link
        return (finding.cause, finding.link) == ("wire", straggler.where)
    place = finding.link if finding.link is not None else finding.rank if finding.rank is not None else finding.node
    return (finding.cause, place) == (straggler.cause, straggler.where)


def test_whoever_costs_time_is_named(tmp_path: Path) -> None:
    """Of 20 seeded cases at most one is not. A negotiation that takes long behind a bucket that takes longer costs
    nothing, and need not be named."""
    wrong = {}
    for seed in range(20):
        job = case(seed)
        assert job.straggler is not None
        findings = found(tmp_path / str(seed), job)
        took, without = (simulate(each).steps[0][-1] for each in (job, dataclasses.replace(job, straggler=None)))
        whole = took - simulate(job).steps[0][0]
        if took - without < 0.04 * whole:
            continue
        if not findings or not is_right(findings[0], job.straggler):
            wrong[seed] = (job.straggler, findings[:2])
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("seed", range(4))
def test_where_nobody_is_slow_nobody_is_named(tmp_path: Path, seed: int) -> None:
    job = dataclasses.replace(case(seed), straggler=None, jitter=0.02, steps=20)
    assert found(tmp_path, job) == ()


def test_the_cost_of_a_slow_rank_is_what_the_others_waited_for_it(tmp_path: Path) -> None:
    """Rank 1 takes 12 ms more for its 24 ms of forward and backward in steps 5 to 9. Its buckets would wait for each
    other a little if they came sooner."""
    straggler = Straggler("compute", 1, factor=1.5, steps=range(5, 10))
    job = Job(steps=20, jitter=0.0, straggler=straggler)
    (finding,) = found(tmp_path, job)
    longer = simulate(job).steps[0][-1] - simulate(dataclasses.replace(job, straggler=None)).steps[0][-1]
    assert (finding.rank, finding.steps, finding.of) == (1, (5, 6, 7, 8, 9), 19)
    assert longer < 5 * 12 * MS
    assert finding.lost == pytest.approx(longer, rel=0.02)
    assert finding.typical - finding.usual == pytest.approx(12 * MS, rel=0.02)
    assert finding.detail == "forward and backward"


@pytest.mark.parametrize("seed", range(3))
def test_clocks_that_nobody_knows_well_make_no_link_slow(tmp_path: Path, seed: int) -> None:
    """Echoes that took 10 ms and more: what looks like a slow link in one direction may be none."""
    findings = found(tmp_path, Job(steps=20, round_trip=10 * MS, skews={1: 10 * S}, seed=seed))
    assert [finding for finding in findings if finding.link is not None] == []


def test_only_the_chosen_steps_count(tmp_path: Path) -> None:
    directory = tmp_path
    simulate(Job(steps=20, straggler=Straggler("compute", 0, factor=2, steps=range(10, 20)))).write(directory)
    trace = jobs.load([str(directory)], "/nowhere")
    assert find(trace, StepRange(1, 10)) == ()
    (finding,) = find(trace, StepRange(3, 17))
    assert finding.steps == tuple(range(10, 17))


def test_a_trace_without_steps_or_with_one_rank_names_nobody(tmp_path: Path) -> None:
    assert found(tmp_path / "none", Job(steps=1)) == ()
    assert found(tmp_path / "one", Job(nodes=1, steps=9)) == ()


SHAPE = Shape(nodes=2, ranks_per_node=2, steps=61, noise=0.01, seed=5)


def slow(ranks: set[int], more: float, *steps: int) -> Fault:
    when = tuple(float(not steps or step in steps) for step in range(SHAPE.steps))
    return Fault("forward", when, ranks=frozenset(ranks), more=more)


def test_rare_excess_is_said_as_what_it_adds_and_how_often() -> None:
    made = make(SHAPE, slow({2}, 300 * MS, *range(7, 61, 12)))
    (finding,) = find(made.trace)
    assert (finding.rank, finding.steps, finding.every) == (2, (7, 19, 31, 43, 55), 12)
    assert finding.extra == pytest.approx(300 * MS, rel=0.02)
    assert finding.lost == pytest.approx(made.cost, rel=0.02)


def test_a_step_far_worse_than_the_others_is_said_beside_what_is_usual(capsys: pytest.CaptureFixture[str]) -> None:
    """20 ms in each second step, of which one takes 8 s: nobody could see in 30 times 20 ms how 8.6 s were lost."""
    when = tuple(1.0 if step == 31 else 20 / 8000 * (step % 2) for step in range(SHAPE.steps))
    made = make(SHAPE, Fault("forward", when, ranks=frozenset({2}), more=8 * S))
    (finding,) = find(made.trace)
    assert finding.extra == pytest.approx(20 * MS, rel=0.05)
    assert finding.most == pytest.approx(8 * S, rel=0.01)
    assert finding.lost <= 29 * 1.05 * finding.extra + finding.most
    stragglers_page.show(made.trace, [finding], finding.of)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{duration(finding.extra)} (at most +{duration(finding.most)}) in 30 of 60 steps, every 2nd" in shown
    assert "9, 11 and 24" in shown
    assert "--json has all steps" in shown


def test_two_slow_ranks_share_what_both_have_cost() -> None:
    """Without only one of them nothing would be gained: the other one would still be waited for."""
    made = make(SHAPE, slow({0, 3}, 30 * MS))
    findings = find(made.trace)
    assert sorted(finding.rank or 0 for finding in findings) == [0, 3]
    assert sum(finding.lost for finding in findings) == pytest.approx(made.cost, rel=0.03)


def test_a_host_is_named_when_all_its_ranks_are_slow() -> None:
    made = make(SHAPE, slow({2, 3}, 30 * MS))
    (finding,) = find(made.trace)
    assert (finding.cause, finding.node, finding.rank) == ("compute", 1, None)
    assert finding.lost == pytest.approx(made.cost, rel=0.03)


def test_a_rank_that_was_stopped_while_it_waited_is_named_for_it() -> None:
    """The others' waits are its doing; its own wait ended when its answer was there."""
    when = tuple(float(step == 30) for step in range(SHAPE.steps))
    made = make(SHAPE, Fault("stop", when, ranks=frozenset({1}), more=5 * S))
    (finding,) = find(made.trace)
    assert (finding.rank, finding.of, len(finding.steps)) == (1, 60, 1)
    assert finding.detail == "standing still while its answer was there"
    assert finding.lost == pytest.approx(made.cost, rel=0.02)


@pytest.mark.parametrize("small", [{}, {"loss": True, "direct": True}], ids=["buckets", "and small messages"])
def test_a_slow_host_of_a_ring_is_named_and_not_its_links(small: dict[str, bool]) -> None:
    """Links that carry small messages only take much longer for a byte than a slow one that carries buckets."""
    shape = dataclasses.replace(SHAPE, nodes=4, bucket_nbytes=1 << 22, **small)
    fault = Fault("link", (1.0,) * shape.steps, links=frozenset({(1, 2), (2, 3)}), factor=10.0)
    made = make(shape, fault)
    (finding,) = find(made.trace)
    assert (finding.cause, finding.node, finding.link) == ("wire", 2, None)
    assert finding.lost == pytest.approx(made.cost, rel=0.05)


@pytest.mark.parametrize("hidden", [{0}, {1}])
def test_with_rings_of_one_host_only_nobody_is_blamed(hidden: set[int]) -> None:
    """The slow rank may be on the host that nobody has rings of, whichever that is."""
    assert find(make(SHAPE, slow({0}, 50 * MS), frozenset(hidden)).trace) == ()


def test_costs_never_add_up_to_more_than_the_time_that_was_lost() -> None:
    for seed in range(6):
        shape = dataclasses.replace(SHAPE, noise=0.3, hiccups=0.2, hiccup=40 * MS, seed=seed)
        made = make(shape, slow({seed % 4}, 20 * MS))
        assert sum(finding.lost for finding in find(made.trace)) < made.took


@for_each(("processors", "named"), [(0, [1]), (2, []), (16, [1])])
def test_which_daemon_waits_for_a_processor_of_a_full_machine_is_nobodys_fault(
    processors: int, named: list[int]
) -> None:
    """Three workers and three daemons share two processors, or 16, or each node has its own."""
    shape = dataclasses.replace(SHAPE, nodes=3, ranks_per_node=1, processors=processors)
    made = make(shape, Fault("daemon", (1.0,) * shape.steps, nodes=frozenset({1}), more=2 * MS))
    assert [finding.node for finding in find(made.trace)] == named


def test_a_slow_daemon_is_named_where_others_have_as_many_ranks() -> None:
    shape = dataclasses.replace(SHAPE, nodes=4, per_node=(1, 2, 2, 2))
    made = make(shape, Fault("daemon", (1.0,) * shape.steps, nodes=frozenset({2}), more=2 * MS))
    (finding,) = find(made.trace)
    assert (finding.cause, finding.node) == ("daemon", 2)
    assert finding.lost == pytest.approx(made.cost, rel=0.05)
