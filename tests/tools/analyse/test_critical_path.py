"""The critical path is as long as the step, and leads through what was slow."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_rt.tracing.format import Kind, Role
from fusion_trace.analyse import critical_path
from fusion_trace.analyse.critical_path import Path as CriticalPath
from fusion_trace.analyse.critical_path import Place
from fusion_trace.cli import app
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import StepRange
from tests.diagnosis.generator import Fault, Shape, write
from tests.tools.synthetic import MS, START, Job, S, Straggler, Tape, Truth, simulate


def found(directory: Path, made: Truth) -> tuple[CriticalPath, ...]:
    made.write(directory)
    return critical_path.find(jobs.load([str(directory)], "/nowhere"))


def check(paths: tuple[CriticalPath, ...]) -> None:
    """Their segments follow each other, from the begin of the step to its end."""
    for path in paths:
        assert path.ns == path.step.ns
        times = [path.step.begin, *(segment.end for segment in path.segments)]
        assert [segment.begin for segment in path.segments] == times[:-1]
        assert times[-1] == path.step.end
        assert all(segment.ns > 0 and segment.activity in critical_path.ACTIVITIES for segment in path.segments)


@pytest.mark.parametrize("seed", range(8))
def test_the_path_is_as_long_as_the_step(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    nodes = generator.randrange(1, 5)
    job = Job(
        nodes=nodes,
        ranks_per_node=generator.randrange(1, 3),
        steps=5,
        buckets=generator.randrange(1, 5),
        bandwidth=generator.choice([50e6, 1e9]),
        jitter=0.2,
        skews={node: generator.randrange(-S, S) for node in range(1, nodes)},
        drifts={node: generator.uniform(-20, 20) for node in range(1, nodes)},
        seed=seed,
    )
    made = simulate(job)
    paths = found(tmp_path, made)
    assert [path.step.number for path in paths] == [1, 2, 3, 4]
    check(paths)
    for path in paths:
        ends = {rank: steps[path.step.number] for rank, steps in made.steps.items()}
        assert abs(ends[path.step.rank] - max(ends.values())) < MS  # clocks are aligned to less than that
    assert not any(activity == "unrecorded" for activity, _ in critical_path.totals(paths))


def test_a_step_by_hand(tmp_path: Path) -> None:
    """Rank 1 hands over late: the path is rank 1's backward pass, the way of its part, and rank 0's wake-up."""
    slow, quick, daemon = Tape(Role.WORKER, 1), Tape(Role.WORKER, 0), Tape(Role.DAEMON, 0)
    for tape, handed in ((quick, 300), (slow, 700)):
        tape.add(Kind.STEP_END, START + 0, clock=4)
        tape.add(Kind.BACKWARD_BEGIN, START + 100, clock=5)
        tape.add(Kind.SUBMITTED, START + handed, "bucket 0", clock=5, plan=1, value=8)
        tape.add(Kind.BACKWARD_END, START + handed, clock=5)
        tape.add(Kind.WAIT_BEGIN, START + handed + 1, "bucket 0", clock=5, plan=1)
    daemon.add(Kind.READY, START + 310, "bucket 0", clock=5, plan=1, peer=0)
    daemon.add(Kind.READY, START + 720, "bucket 0", clock=5, plan=1, peer=1)
    daemon.add(Kind.RUN_BEGIN, START + 725, "bucket 0", clock=5, plan=1, value=8)
    daemon.add(Kind.REDUCE_BEGIN, START + 730, "bucket 0", clock=5, plan=1, value=8)
    daemon.add(Kind.REDUCE_END, START + 790, "bucket 0", clock=5, plan=1, value=8)
    daemon.add(Kind.RUN_END, START + 800, "bucket 0", clock=5, plan=1)
    for tape, rank, read in ((quick, 0, 900), (slow, 1, 850)):
        daemon.add(Kind.ANSWERED, START + 801 + rank, "bucket 0", clock=5, plan=1, peer=rank)
        tape.add(Kind.WAIT_END, START + read, "bucket 0", clock=5, plan=1)
        tape.add(Kind.STEP_END, START + read + 100, clock=5)
    (path,) = found(tmp_path, Truth(Job(), {(Role(t.role), t.rank): t for t in (slow, quick, daemon)}, {}, {}, {}, []))
    check((path,))
    zero, one, node = Place(rank=0), Place(rank=1), Place(node=0)
    assert [(s.ns, s.activity, s.place) for s in path.segments] == [
        (100, "other", one), (600, "backward", one), (20, "hand-over", one), (5, "daemon", node), (5, "daemon", node),
        (60, "reduce", node), (11, "daemon", node), (99, "wake-up", zero), (100, "other", zero),
    ]  # fmt: skip


def test_an_operation_that_waits_for_its_peer_to_take_what_it_has_sent_waits_for_the_link(tmp_path: Path) -> None:
    """Two chunks leave node 0 at once. The link carries one after the other; when node 1 has taken the second, and says
    so, the operation is over. Node 0's daemon has done nothing since it began."""
    worker, daemon, peer = (
        Tape(Role.WORKER, 0, nodes=2),
        Tape(Role.DAEMON, 0, nodes=2),
        Tape(Role.DAEMON, 1, node=1, nodes=2),
    )
    of = {"clock": 5, "plan": 1}
    worker.add(Kind.STEP_END, START, clock=4)
    worker.add(Kind.SUBMITTED, START + 100, "bucket 0", **of, value=8)
    worker.add(Kind.WAIT_BEGIN, START + 100, "bucket 0", **of)
    daemon.add(Kind.READY, START + 110, "bucket 0", **of, peer=0)
    daemon.add(Kind.RUN_BEGIN, START + 120, "bucket 0", **of, value=8)
    peer.add(Kind.RUN_BEGIN, START + 115, "bucket 0", **of, value=8)
    for number, came in ((1, 500), (2, 900)):
        daemon.add(Kind.SENT, START + 130, "bucket 0", **of, value=1 << 20, extra=number, peer=1)
        peer.add(Kind.RECEIVED, START + came, "bucket 0", **of, value=1 << 20, extra=number, peer=0)
        peer.add(Kind.TAKEN, START + came + 10, "bucket 0", **of, value=1 << 20, extra=number, peer=0)
    daemon.add(Kind.RUN_END, START + 950, "bucket 0", **of)
    daemon.add(Kind.ANSWERED, START + 950, "bucket 0", **of, peer=0)
    worker.add(Kind.WAIT_END, START + 970, "bucket 0", **of)
    worker.add(Kind.STEP_END, START + 1000, clock=5)
    tapes = {(Role(tape.role), tape.rank): tape for tape in (worker, daemon, peer)}
    (path,) = found(tmp_path, Truth(Job(), tapes, {}, {}, {}, []))
    check((path,))
    there, back = Place(link=(0, 1)), Place(link=(1, 0))
    rank, here, far = Place(rank=0), Place(node=0), Place(node=1)
    assert [(s.ns, s.activity, s.place) for s in path.segments] == [
        (100, "other", rank), (10, "hand-over", rank), (10, "daemon", here), (10, "daemon", here),
        (370, "queue", there), (400, "wire", there), (10, "daemon", far), (40, "wire", back), (20, "wake-up", rank),
        (30, "other", rank),
    ]  # fmt: skip


def test_two_steps_are_shown_beside_each_other(tmp_path: Path) -> None:
    """Of 30 steps one is longer by 40 ms, in the forward pass of rank 1."""
    shape = Shape(nodes=2, steps=30, seed=3)
    when = tuple(float(step == 17) for step in range(30))
    write(shape, tmp_path, Fault("forward", when, frozenset({1}), more=40 * MS))
    result = CliRunner().invoke(app, ["critical-path", str(tmp_path), "--steps", "16", "--beside", "17", "--json"])
    document = json.loads(result.stdout)
    first = document["beside"][0]
    assert (first["activity"], first["place"]) == ("forward", "rank 1")
    assert first["difference"] == pytest.approx(shape.forward + 40 * MS, rel=0.05)  # rank 0's was on the path before
    lengths = [step["ns"] for step in document["steps"]]
    assert sum(row["one"] for row in document["beside"]) == sum(lengths)
    page = CliRunner().invoke(app, ["critical-path", str(tmp_path), "--steps", "16", "--beside", "17"]).stdout
    assert "the critical path of steps 16, and of 17" in page
    page = CliRunner().invoke(app, ["critical-path", str(tmp_path), "--beside", "17"]).stdout
    assert "of 29 steps" in page
    assert (
        "no rank has one of the steps"
        in CliRunner().invoke(app, ["critical-path", str(tmp_path), "--beside", "99"]).stdout
    )


@pytest.mark.parametrize(
    ("straggler", "activities", "place"),
    [
        (Straggler("compute", 1, factor=2.0), ("backward",), Place(rank=1)),
        (Straggler("wire", (0, 1), factor=30.0), ("queue", "wire"), Place(link=(0, 1))),  # most wait for those before
        (Straggler("queue", (1, 2), delay=20 * MS), ("queue",), Place(link=(1, 2))),
    ],
)
def test_what_is_slow_is_on_the_path(
    tmp_path: Path, straggler: Straggler, activities: tuple[str, ...], place: Place
) -> None:
    job = Job(nodes=3, steps=6, straggler=straggler, skews={1: S, 2: -S}, loss=False)
    sums = critical_path.totals(found(tmp_path, simulate(job)))
    slowest = next(iter(sums))
    assert slowest[0] in activities
    assert slowest[1] == place


def test_a_coordinator_that_waits_for_a_node_is_shown_with_it(tmp_path: Path) -> None:
    job = Job(nodes=2, steps=6, straggler=Straggler("negotiation", 1, delay=50 * MS))
    sums = critical_path.totals(found(tmp_path, simulate(job)))
    assert max((ns for (activity, _), ns in sums.items() if activity == "negotiation")) > 4 * 50 * MS


@pytest.mark.parametrize("seed", range(6))
def test_what_was_not_recorded_is_said_and_the_length_stays(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    made = simulate(Job(nodes=2, ranks_per_node=2, steps=6, seed=seed))
    for tape in made.tapes.values():
        kept = [row for row in tape.rows if row[6] not in (Kind.READY, Kind.SUBMITTED)]
        tape.rows = [row for row in kept if row[6] == Kind.STEP_END or generator.random() < 0.95]
    paths = found(tmp_path, made)
    assert paths
    check(paths)
    assert any(activity == "unrecorded" for activity, _ in critical_path.totals(paths))


def test_clocks_that_are_aligned_badly_do_not_change_the_length(tmp_path: Path) -> None:
    made = simulate(Job(nodes=2, steps=6, skews={1: 3 * MS}))
    for tape in made.tapes.values():  # nothing was measured, and both hosts seem to have been up as long
        tape.rows = [row for row in tape.rows if row[6] != Kind.CLOCK]
        tape.host = "a"
    paths = found(tmp_path, made)
    assert len(paths) == 5
    check(paths)


def test_the_page_and_the_document(tmp_path: Path) -> None:
    made = simulate(dataclasses.replace(Job(), steps=5))
    paths = found(tmp_path, made)
    result = CliRunner().invoke(app, ["critical-path", str(tmp_path), "--json", "--steps", "2:4"])
    document = json.loads(result.stdout)
    assert [step["number"] for step in document["steps"]] == [2, 3]
    for step in document["steps"]:
        assert sum(segment["ns"] for segment in step["path"]) == step["ns"]
    chosen = critical_path.find(jobs.load([str(tmp_path)], "/nowhere"), StepRange(2, 4))
    assert sum(row["ns"] for row in document["totals"]) == sum(path.ns for path in chosen)
    result = CliRunner().invoke(app, ["critical-path", str(tmp_path), "--each"])
    assert result.exit_code == 0
    assert "backward" in result.stdout
    assert f"the critical path of {len(paths)} steps" in result.stdout
    made.tapes[Role.WORKER, 0].rows = made.tapes[Role.WORKER, 1].rows = []
    made.write(tmp_path)
    assert "no rank has a whole step" in CliRunner().invoke(app, ["critical-path", str(tmp_path)]).stdout
