"""The rings of a job on one axis of time; which job a person means."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from fusion_rt.tracing.format import Kind, Role
from fusion_rt.tracing.reader import TraceError
from fusion_trace.read import job as jobs
from tests.tools.synthetic import MS, START, US, Job, S, Tape, simulate


def test_processes_and_names_of_all_rings(tmp_path: Path) -> None:
    simulate(Job(nodes=2, ranks_per_node=2, steps=2)).write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    assert (trace.job, sorted(trace.workers), sorted(trace.daemons)) == ("synthetic", [0, 1, 2, 3], [0, 1])
    assert trace.node_of == {0: 0, 1: 0, 2: 1, 3: 1}
    assert trace.hosts == {0: "host0", 1: "host1"}
    assert [rank for rank, node in trace.node_of.items() if node == 1] == [2, 3]
    assert trace.problems == ()
    assert [str(process) for process in trace.processes][3:5] == ["rank 3", "daemon of host0"]
    gradients = {
        trace.names[number] for worker in trace.workers.values() for number in worker.of(Kind.GRADIENT)["name"]
    }
    assert gradients == {f"layer{bucket}.{number}" for bucket in range(3) for number in range(2)}


@pytest.mark.parametrize("seed", range(6))
def test_clocks_that_are_off_and_drift_come_back_within_their_error(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    skews = {node: generator.randrange(-100 * S, 100 * S) for node in range(1, 4)}
    drifts = {node: generator.uniform(-40, 40) for node in range(1, 4)}
    job = Job(nodes=4, steps=200, buckets=1, loss=False, skews=skews, drifts=drifts, seed=seed)
    truth = simulate(job)
    truth.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    for rank, ends in truth.steps.items():
        apart = trace.workers[rank].of(Kind.STEP_END)["time"] - np.array(ends)
        error = trace.offsets[rank].error
        assert error <= 2 * job.round_trip
        assert np.abs(apart).max() <= error


def test_a_node_that_only_others_have_measured_is_reached_over_them(tmp_path: Path) -> None:
    """Node 2 has measured node 1, and node 0 has; nobody else."""
    tapes = [Tape(Role.DAEMON, node, node=node, nodes=3, host=f"h{node}", skew=node * 7 * S) for node in range(3)]
    tapes[0].add(Kind.CLOCK, START, value=7 * S + 10 * US, extra=100, peer=1)
    tapes[2].add(Kind.CLOCK, START, value=-7 * S - 5 * US, extra=40, peer=1)
    tapes[2].add(Kind.STEP_END, START + S)
    for tape in tapes:
        tape.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    found = int(trace.daemons[2].of(Kind.STEP_END)["time"][0])
    assert abs(found - (START + S)) <= trace.offsets[2].error <= 75 * US
    assert "over node 1" in trace.offsets[2].how


@pytest.mark.parametrize("own", [0, 20 * MS])
def test_nodes_of_one_machine_have_one_clock_unless_a_container_has_its_own(tmp_path: Path, own: int) -> None:
    """Nodes 0, 1 and 2 are on a machine that was busy and has answered late: what was measured is wrong by 3 ms."""
    skews = [0, 0, own, 7 * S]
    tapes = [
        Tape(Role.DAEMON, node, node=node, nodes=4, host=f"h{node}", skew=skews[node], machine=[5, 5, 5, 6][node])
        for node in range(4)
    ]
    for node in range(1, 4):
        tapes[node].add(Kind.CLOCK, START, value=-skews[node] - 3 * MS, extra=6000, peer=0)
        tapes[node].add(Kind.STEP_END, START + S)
    for tape in tapes:
        tape.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    ends = {
        node: int(daemon.of(Kind.STEP_END)["time"][0]) - START - S for node, daemon in trace.daemons.items() if node
    }
    assert ends == {1: 0, 2: -3 * MS if own else 0, 3: -3 * MS}
    assert trace.offsets[1].error == 0
    assert trace.offsets[3].error > 3 * MS


def test_wall_clocks_are_believed_where_nothing_was_measured_and_that_is_said(tmp_path: Path) -> None:
    for node in range(2):
        tape = Tape(Role.DAEMON, node, node=node, nodes=2, host=f"h{node}", skew=node * 7 * S)
        tape.add(Kind.PLAN, START + MS)
        tape.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    assert trace.daemons[1].records["time"].tolist() == [START + MS]
    assert trace.offsets[1].error == -1
    assert any("clock of host h1 was not measured" in problem for problem in trace.problems)


def test_the_newest_job_or_the_one_that_is_named_or_a_directory_or_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    written = {}
    for number, name in enumerate(["old", "new"]):
        directory = root / name
        directory.mkdir(parents=True)
        tape = Tape(Role.WORKER, 0, job=name)
        tape.add(Kind.STEP_END, START)
        path = Path(tape.write(directory))
        data = bytearray(path.read_bytes())
        data[32:40] = (int.from_bytes(data[32:40], "little") + number * S).to_bytes(8, "little")  # made a second later
        path.write_bytes(data)
        written[name] = str(path)
    assert jobs.load([], str(root)).job == "new"
    assert jobs.load(["old"], str(root)).job == "old"
    assert jobs.load([str(root / "old")], "/nowhere").job == "old"
    assert jobs.load([str(root)], "/nowhere").job == "new"
    assert jobs.load([written["old"]], "/nowhere").job == "old"
    with pytest.raises(TraceError, match="several jobs"):
        jobs.load(list(written.values()), "/nowhere")
    with pytest.raises(TraceError, match="neither a file"):
        jobs.load(["older"], str(root))
    with pytest.raises(TraceError, match="there are no traces in"):
        jobs.load([], str(tmp_path / "none"))


def test_a_job_with_garbage_in_its_directory_is_read_without_it(tmp_path: Path) -> None:
    simulate(Job(steps=2)).write(tmp_path)
    (tmp_path / "notes.txt").write_text("not a ring")
    (tmp_path / "rank-9.ring").write_bytes(b"FUSTRACE")
    (tmp_path / "node-1.ring").unlink()
    trace = jobs.load([str(tmp_path)], "/nowhere")
    assert sorted(trace.workers) == [0, 1]
    assert any("no ring of the daemons of host1" in problem for problem in trace.problems)


def test_a_rank_whose_process_was_replaced_has_the_records_of_both(tmp_path: Path) -> None:
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        tape = Tape(Role.WORKER, 0, pid=10 + number)
        tape.add(Kind.GRADIENT, START + number * S, f"w{number}")
        tape.write(directory)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    worker = trace.workers[0]
    assert [trace.names[number] for number in worker.records["name"]] == ["w0", "w1"]
    assert len(worker.paths) == 2


def test_rings_that_were_collected_into_this_directory_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host's rings lie where the job left them; `fusion-trace collect` has fetched both hosts'."""
    root, here = tmp_path / "root", tmp_path / "here"
    (root / "synthetic").mkdir(parents=True)
    (here / "synthetic.rings").mkdir(parents=True)
    monkeypatch.chdir(here)
    simulate(Job(nodes=2, steps=3)).write(here / "synthetic.rings")
    for name in ("rank-0.ring", "node-0.ring"):
        (root / "synthetic" / name).write_bytes((here / "synthetic.rings" / name).read_bytes())
    assert jobs.by_age(str(root)) == ["synthetic"]
    for meant in ([], ["synthetic"]):
        trace = jobs.load(meant, str(root))
        assert sorted(trace.workers) == sorted(trace.daemons) == [0, 1]
        assert trace.problems == ()


def test_a_node_has_the_name_of_its_host_and_its_number_only_where_two_are_called_the_same(tmp_path: Path) -> None:
    for node, host in enumerate(("a", "b", "b")):
        tape = Tape(Role.DAEMON, node, node=node, nodes=4, host=host)
        tape.add(Kind.PLAN, START + MS)
        tape.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    assert [trace.host_of(node) for node in range(4)] == ["a", "b (node 1)", "b (node 2)", "node 3"]
    assert trace.link_of(0, 3) == "a to node 3"
