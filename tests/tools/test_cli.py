"""What `fusion-trace` says about a job: summary, overlap, stragglers, buckets, tensor."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import Flush, Kind, Role
from fusion_trace.analyse import bucket_times as bucket_finder
from fusion_trace.analyse import summary as summary_finder
from fusion_trace.analyse import tensor as tensor_finder
from fusion_trace.analyse.overlap import PARTS
from fusion_trace.cli import app
from fusion_trace.read import job as jobs
from fusion_trace.read.choice import EVERY_STEP, ChoiceError, StepRange, parse_steps
from fusion_trace.read.operations import operations
from fusion_trace.report.wording import duration, numbers, size
from tests.diagnosis.generator import Fault, Shape, make, write
from tests.tools.synthetic import MS, START, US, Job, S, Straggler, Truth, simulate

COMMANDS = (["summary"], ["overlap"], ["overlap", "--each"], ["stragglers"], ["buckets"], ["tensor", "layer1.0"])
JOB = Job(
    nodes=2, ranks_per_node=2, steps=8, skews={1: S}, straggler=Straggler("compute", 3, factor=2, steps=range(3, 6))
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rings")
    simulate(JOB).write(path)
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_a_page_and_a_document(command: list[str], directory: str) -> None:
    assert "job synthetic" in run(*command, directory)
    document = json.loads(run(*command, directory, "--json", "--steps", "2:6"))
    assert document["job"] == "synthetic"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_says_what_is_missing_and_shows_the_rest(command: list[str], tmp_path: Path) -> None:
    paths = simulate(JOB).write(tmp_path)
    for path in paths[:2]:
        Path(path).write_bytes(Path(path).read_bytes()[:-4000])
    Path(paths[2]).write_bytes(b"FUSTRACE")
    shown = run(*command, str(tmp_path))
    assert "is cut off: " in shown
    assert "ends within its header" in shown


EVERY = (
    ["summary"], ["overlap"], ["stragglers"], ["buckets"], ["tensor", "bucket 1"], ["critical-path"], ["whatif"],
    ["merge", "-o", "{}/m.json"], ["convert", "-o", "{}/c.csv"], ["diff", "{}"], ["hang", "--trace"],
    *([["report", "-o", "{}/r.html"]] if find_spec("plotly") else []),
)  # fmt: skip


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_says_once_who_died_and_what_cannot_be_known_without_missing_rings(
    command: list[str], tmp_path: Path
) -> None:
    """Rank 3 is killed in step 20 of 30, and the rings of host 2 were not fetched."""
    shape = Shape(nodes=3, ranks_per_node=2, steps=30, seed=3)
    killed = Fault("killed", tuple(float(step == 20) for step in range(30)), ranks=frozenset({3}))
    write(shape, tmp_path, killed)
    for name in ("rank-4.ring", "rank-5.ring", "node-2.ring"):
        (tmp_path / name).unlink()
    result = CliRunner().invoke(
        app, [*(word.format(tmp_path) for word in command), str(tmp_path)], env={"COLUMNS": "400"}
    )
    assert result.exit_code == 0, result.output
    times = 2 if command[0] == "diff" else 1  # of either job
    assert result.output.casefold().count("rank 3 (host host1) died ") == times
    assert result.output.count("there are no records of node 2") == times


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_the_newest_job_by_default_and_a_job_by_its_id(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_TRACE_DIR", str(tmp_path))
    with pytest.raises(FusionError, match="there are no traces in"):
        run(*command)
    (tmp_path / "synthetic").mkdir()
    simulate(JOB).write(tmp_path / "synthetic")
    assert run(*command) == run(*command, "synthetic")
    if command == ["summary"]:
        assert run() == run(*command)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_can_do_with_a_job_that_has_no_step_yet(command: list[str], tmp_path: Path) -> None:
    simulate(Job(steps=1)).write(tmp_path)
    assert "job synthetic" in run(*command, str(tmp_path))
    json.loads(run(*command, str(tmp_path), "--json"))


def test_a_range_of_steps_is_one_of_python() -> None:
    assert parse_steps("") == parse_steps(":") == EVERY_STEP
    assert [number for number in range(20) if number in parse_steps("3:7")] == [3, 4, 5, 6]
    assert [number for number in range(6) if number in parse_steps("3:")] == [3, 4, 5]
    assert [number for number in range(6) if number in parse_steps(":2")] == [0, 1]
    assert [number for number in range(6) if number in parse_steps("4")] == [4]
    for wrong in ("a", "1:2:3", "-1:", "5:5", "7:3", "1-2", "1 2"):
        with pytest.raises(ChoiceError, match=r"--steps: "):
            parse_steps(wrong)
    with pytest.raises(ChoiceError, match=r"--after-steps: '10-20' is not a range .*; write 10:21"):
        parse_steps("10-20", "--after-steps")


def test_the_page_of_overlap_has_bars_as_long_as_the_parts(directory: str) -> None:
    document: dict[str, Any] = json.loads(run("overlap", directory, "--json"))
    shown = run("overlap", directory)
    bar = next(line for line in shown.splitlines() if line.startswith("rank 0") and "#" in line)
    mine = [step for step in document["steps"] if step["rank"] == 0]
    whole = sum(step["end"] - step["begin"] for step in mine)
    for part, mark in (("compute", "#"), ("overlapped", "="), ("exposed", "!"), ("waiting", ".")):
        assert bar.count(mark) == pytest.approx(40 * sum(step[part] for step in mine) / whole, abs=1)
    assert all(part in shown for part in PARTS)


def test_the_page_of_stragglers_says_who_why_and_when(directory: str) -> None:
    shown = run("stragglers", directory)
    line = next(line for line in shown.splitlines() if line.startswith("rank 3 (host host1)"))
    assert line.startswith("rank 3 (host host1): compute (forward and backward), +")
    assert " in 3 of 7 steps; " in line
    assert line.endswith("% of the time")
    assert "stands out" not in shown
    assert "--json" not in shown  # all steps are there
    shown = run("stragglers", directory, "--steps", "4:")
    assert "rank 3" in shown
    assert "too few to compare" in run("stragglers", directory, "--steps", "6:")


# --- summary ----------------------------------------------------------------------------------------------------------


def summarized(truth: Truth, directory: Path) -> summary_finder.Summary:
    truth.write(directory)
    return summary_finder.find(jobs.load([str(directory)], "/nowhere"))


def test_jobs_are_listed_with_their_begin_ranks_hosts_and_command(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        truth = simulate(Job(nodes=2, ranks_per_node=2, steps=2, name=name))
        for (role, rank), tape in truth.tapes.items():
            tape.wall += number * 3600 * S + rank * S
            tape.command = f"python train.py --rank {rank}" if role == Role.WORKER else "fusiond"
        truth.write(tmp_path / name)
    (tmp_path / "new" / "node-1.ring").unlink()
    (tmp_path / "new" / "rank-2.ring").unlink()
    (tmp_path / "new" / "rank-3.ring").unlink()
    new, old = json.loads(run("list", str(tmp_path), "--json"))["jobs"]
    assert (new["job"], new["ranks"], new["hosts"], new["nodes"]) == ("new", 2, ["host0"], 2)
    assert (old["job"], old["ranks"], old["hosts"]) == ("old", 4, ["host0", "host1"])
    assert new["began"] - old["began"] == 3600 * S
    assert old["command"] == "python train.py --rank 0"
    heading, first, second = run("list", str(tmp_path)).splitlines()
    assert heading.split() == ["job", "begun", "ranks", "hosts", "command"]
    assert first.endswith("host0 (1 of 2)  python train.py --rank 0")
    assert second.startswith("old  2026-09-2")
    assert "there are no traces in" in run("list", str(tmp_path / "nothing"))

    page = run("summary", str(tmp_path / "old")).splitlines()
    assert page[1].startswith("begun 2026-09-2")
    assert page[1].endswith(" on host0, host1: python train.py --rank 0")


def test_a_long_command_of_several_lines_is_one_short_line(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=1, steps=2))
    truth.tapes[Role.WORKER, 0].command = "python -c 'import torch\n" + "print(1)\n" * 60
    truth.write(tmp_path)
    line = run("summary", str(tmp_path)).splitlines()[1]
    assert ": python -c 'import torch print(1) " in line
    assert line.endswith("print(1) …")
    assert len(line) < 260


def test_a_summary_counts_steps_bytes_and_links(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=2, ranks_per_node=2, steps=6, buckets=3, bucket_nbytes=1 << 20))
    found = summarized(truth, tmp_path)
    assert (found.nodes, [rank.rank for rank in found.ranks]) == (2, [0, 1, 2, 3])
    assert all((rank.steps, rank.first, rank.last) == (5, 1, 5) for rank in found.ranks)
    times = sorted(b - a for a, b in zip(truth.steps[0], truth.steps[0][1:], strict=False))
    assert found.ranks[0].median == pytest.approx(times[2], abs=2000)
    assert found.handed_over == 3 * (1 << 20) + 4
    # Two nodes: each sends half of a bucket twice. And one element of the loss each.
    sent = [flight for flight in truth.flights if flight[3] > 0 and flight[0] == 0]
    assert [(link.source, link.target) for link in found.links] == [(0, 1), (1, 0)]
    assert found.links[0].chunks == pytest.approx(len(sent), abs=4)
    assert found.links[0].nbytes == pytest.approx(5 * 3 * (1 << 20), rel=0.05)
    seconds = (max(ends[-1] for ends in truth.steps.values()) - min(ends[0] for ends in truth.steps.values())) / 1e9
    assert found.links[0].rate == pytest.approx(found.links[0].nbytes / seconds, rel=1e-3)
    assert found.link_rate == pytest.approx(sum(link.rate for link in found.links))
    assert found.steps_per_second == pytest.approx(5e9 / (truth.steps[0][-1] - truth.steps[0][0]), rel=1e-3)
    assert found.odd == ()


def test_a_summary_tells_what_is_odd(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=2, steps=4))
    daemon = truth.tapes[Role.DAEMON, 0]
    for kind, at in (
        (Kind.LOST, 10),
        (Kind.FOUND, 12),
        (Kind.LOST, 20),
        (Kind.BLOCKED_BEGIN, 5),
        (Kind.BLOCKED_END, 7),
    ):
        daemon.add(kind, START + at * MS, peer=1)
    daemon.add(Kind.STALL, START + 30 * MS, "loss", value=60)
    daemon.add(Kind.STALL, START + 31 * MS, "loss", value=61)
    daemon.add(Kind.PLAN, START + 40 * MS, plan=2, value=1, extra=1)
    daemon.add(Kind.FAILED, START + 50 * MS, "loss", clock=3)
    daemon.add(Kind.VIEW, START + 60 * MS, value=1)
    worker = truth.tapes[Role.WORKER, 1]
    worker.capacity = len(worker.rows) // 2
    told = "\n".join(summarized(truth, tmp_path).odd)
    for sentence in (
        "host host0: connections to host1 broke 2 times, and were made again once",
        "it could not send once, for 0.002 s together",
        "loss made no progress for 61 s",
        "2 plans came",
        "1 operations failed, the first one of loss",
        "the job went on with 1 nodes",
        "rank 1: its first ",
    ):
        assert sentence in told


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_buckets_and_their_phases_are_what_was_simulated(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=2, steps=5, buckets=3, tensors=4, bucket_nbytes=1 << 20, jitter=0.0))
    truth.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    (plan,) = bucket_finder.plans(trace)
    assert (plan.number, plan.nbytes, len(plan.buckets)) == (1, 3 << 20, 3)
    assert plan.tensors["bucket 1"] == tuple((f"layer1.{number}", 1 << 18) for number in range(4))
    assert plan.bucket_of("layer2.3") == "bucket 2"
    found = {bucket.name: bucket for bucket in bucket_finder.find(trace)}
    assert list(found) == ["bucket 0", "bucket 1", "bucket 2", "loss"]
    bucket = found["bucket 1"]
    assert (bucket.plan, bucket.nbytes, bucket.tensors, bucket.times) == (1, 1 << 20, 4, 5)
    assert bucket.flushes == {"full": 10}
    assert (found["loss"].plan, found["loss"].flushes) == (0, {"alone": 10})
    # Three of four gradients after the first one, and the copy.
    assert bucket.phases["fill"] == pytest.approx(3 * 16 * MS / 12 + 50 * US, rel=1e-3)
    assert bucket.phases["hand over"] == 2 * US
    assert bucket.phases["local"] == 25 * US
    assert bucket.phases["apply"] == pytest.approx(2 * MS / 3, rel=1e-3)
    assert "negotiate" in found["loss"].phases
    assert "negotiate" not in bucket.phases
    flights = [end - begin for *_, name, _, begin, end in truth.flights if name == "bucket 1"]
    assert bucket.phases["wire"] == pytest.approx(sorted(flights)[len(flights) // 2], abs=400 * US)  # the clocks' error


def test_clocks_that_disagree_make_no_time_negative() -> None:
    """Echoes of 40 ms and more: of chunks that take 25 us most seem to come before they were sent."""
    trace = make(Shape(nodes=3, bucket_nbytes=4096, latency=20 * US, round_trip=40 * MS, steps=40, skews={1: S})).trace
    chunks = operations(trace).chunks
    assert np.median(chunks.received - chunks.sent) < 0
    assert all(ns >= 0 for bucket in bucket_finder.find(trace) for ns in bucket.phases.values())
    life = tensor_finder.find(trace, "bucket 0").typical
    assert life is not None
    assert min(event.lasted for event in life.events if event.lasted is not None) >= 0


def test_reasons_for_handing_over_are_counted_and_steps_are_chosen(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=1, steps=6))
    worker = truth.tapes[Role.WORKER, 0]
    worker.rows = [
        (*row[:5], Flush.STEP, *row[6:]) if row[6] == Kind.SUBMITTED and row[3] == "bucket 2" and row[2] % 2 else row
        for row in worker.rows
    ]
    truth.write(tmp_path)
    trace = jobs.load([str(tmp_path)], "/nowhere")
    assert bucket_finder.find(trace)[2].flushes == {"full": 3, "step": 3}
    chosen = bucket_finder.find(trace, StepRange(1, 3))[2]
    assert (chosen.times, chosen.flushes) == (2, {"full": 1, "step": 1})


# --- tensor -----------------------------------------------------------------------------------------------------------


def test_a_parameter_is_followed_from_its_gradient_to_its_update(tmp_path: Path) -> None:
    truth = simulate(Job(nodes=2, steps=4, tensors=2, jitter=0.0))
    truth.write(tmp_path)
    found = tensor_finder.find(jobs.load([str(tmp_path)], "/nowhere"), "layer1.0")
    assert (found.name, found.nbytes) == ("layer1.0", 1 << 19)
    assert [life.step for life in found.lives] == [None, 1, 2, 3]  # the first one is in no whole step
    life = found.lives[1]
    assert (life.operation, life.plan, life.clock) == ("bucket 1", 1, 1)
    mine = [event.what for event in life.events if event.who == "rank 0"]
    assert mine == [
        "its gradient is complete",
        "it is copied into the arena",
        "the bucket is full",
        "it is handed to the daemon, because it is full",
        "the script waits for it",
        "the answer is read",
        "it is applied",
    ]
    assert [event.what for event in life.events if event.who == "the daemon of host0"][:2] == [
        "the part of rank 0 came",
        "it runs: all local parts are there",
    ]
    on_wire = [e for e in life.events if e.who == "host0 to host1" and e.what.endswith("is on the wire")]
    assert len(on_wire) == len([f for f in truth.flights if f[0] == 0 and f[2:4] == ("bucket 1", 1)])
    assert [event.at for event in life.events] == sorted(event.at for event in life.events)
    assert all(event.since == event.at - life.events[0].at for event in life.events)


def test_a_name_may_be_a_part_of_one_and_is_told_if_it_is_of_none_or_several(directory: str) -> None:
    trace = jobs.load([directory], "/nowhere")
    assert tensor_finder.find(trace, "yer2.1").name == "layer2.1"
    assert tensor_finder.find(trace, "loss").lives[0].operation == "loss"
    with pytest.raises(ChoiceError, match=r"part of several names: layer1\.0, layer1\.1"):
        tensor_finder.find(trace, "layer1")
    with pytest.raises(ChoiceError, match=r"nothing in this trace is called 'layre1\.0'; there are .*layer1\.0"):
        tensor_finder.find(trace, "layre1.0")


# --- words ------------------------------------------------------------------------------------------------------------


def test_times_sizes_and_numbers_in_words() -> None:
    times = [(0, "0 ns"), (999, "999 ns"), (1000, "1.00 us"), (12_345_678, "12.3 ms"), (999_960_000, "1.00 s")]
    assert [duration(ns) for ns, _ in times] == [words for _, words in times]
    assert [size(n) for n in (3, 2048, 5 << 20)] == ["3 B", "2.00 KiB", "5.00 MiB"]
    assert numbers([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert numbers(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10 and 14 more"
    assert numbers([1, 3, 5, 7, 9, 11, 20, 21, 22, 30]) == "1, 3, 5, 7, 9, 11 and 4 more"
