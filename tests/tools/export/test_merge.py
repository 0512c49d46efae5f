"""What viewers load: Chrome's JSON, Perfetto's protobuf, CSV; and profiles of torch merged in.

Perfetto's own parser, `trace_processor_shell`, is a binary that is not on PyPI; where it is on the PATH, it reads the
files too. Else they are read by Perfetto's protobuf schema, and by the rules of the Trace Event Format.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
from typer.testing import CliRunner

from fusion_rt.tracing.format import Kind, Role
from fusion_rt.tracing.reader import TraceError
from fusion_trace.cli import app
from fusion_trace.export import chrome, torch_profiles
from fusion_trace.export.picture import draw
from fusion_trace.export.slices import Texts, lanes, slices
from fusion_trace.read import job as jobs
from fusion_trace.read.job import JobTrace
from tests.tools.synthetic import MS, START, WALL, Job, S, Truth, simulate

JOB = Job(nodes=2, ranks_per_node=2, steps=4, skews={1: 700 * MS}, seed=3)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    directory = tmp_path_factory.mktemp("rings")
    made = simulate(JOB)
    made.write(directory)
    return directory, made


@pytest.fixture(scope="module")
def trace(truth: tuple[Path, Truth]) -> JobTrace:
    return jobs.load([str(truth[0])], "/nowhere")


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_merged_file_is_what_the_trace_event_format_says(truth: tuple[Path, Truth], tmp_path: Path) -> None:
    path = tmp_path / "m.json.gz"
    told = run("merge", str(truth[0]), "-o", str(path))
    with gzip.open(path, "rt") as file:
        document = json.load(file)
    events = document["traceEvents"]
    assert told == {"job": "synthetic", "file": str(path), "events": len(events), "problems": []}
    assert document["otherData"]["job"] == "synthetic"
    known = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(
        [f"rank {rank} (host{rank // 2}, pid {1000 + rank})" for rank in range(4)]
        + [f"daemon of host{node} (pid {100 + node})" for node in range(2)]
    )
    assert {"to host0", "from host0", "to host1", "from host1"} <= {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        assert (event["pid"], event["tid"]) in known
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for on_track in slices.values():  # viewers need them to nest; here they even follow each other
        on_track.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(on_track))


def test_arrows_join_slices_of_the_right_processes(truth: tuple[Path, Truth], trace: JobTrace) -> None:
    picture = draw(trace)
    names = {rows.pid: rows.name.split(" (")[0] for rows in picture.processes}
    ways: dict[int, list[dict[str, Any]]] = defaultdict(list)
    begins = set()
    for event in map(json.loads, chrome.lines(picture)):
        if event["ph"] in "stf":
            ways[event["id"]].append(event)
        elif event["ph"] == "X":
            begins.add((event["pid"], event["tid"], event["ts"]))
    found: dict[str, int] = defaultdict(int)
    for way in ways.values():
        assert [event["ph"] for event in way] == ["s", *"t" * (len(way) - 2), "f"]
        assert all((event["pid"], event["tid"], event["ts"]) in begins for event in way)  # each in a slice
        found[" > ".join(names[event["pid"]].split()[0] for event in way)] += 1
    made = truth[1]
    operations = sum(len(ranks) for ranks in made.submitted.values())
    assert found == {"rank > daemon > daemon > rank": operations, "daemon > daemon": len(made.flights)}


def test_what_overlaps_is_laid_out_on_several_tracks() -> None:
    texts = Texts(np.zeros(0, np.int64), np.zeros(0, np.uint64), known=["a", "b", "c", "d", "e"])
    begin, end = np.array([[0, 10], [5, 7], [7, 9], [10, 10], [3, 3]]).T
    tracks = lanes("x", slices(texts, begin, end, np.arange(5)))
    assert [(name, [(s.begin, s.end, s.name) for s in its]) for name, its in tracks] == [
        ("x", [(0, 10, "a"), (10, 11, "d")]),
        ("x (2)", [(3, 4, "e"), (5, 7, "b"), (7, 9, "c")]),
    ]


def test_perfetto_files_follow_its_schema(truth: tuple[Path, Truth], trace: JobTrace, tmp_path: Path) -> None:
    path = tmp_path / "m.pftrace"
    told = run("convert", str(truth[0]), "-o", str(path))
    parsed = proto.Trace.FromString(path.read_bytes())
    assert told["packets"] == len(parsed.packet)
    assert parsed.packet[0].sequence_flags == proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    tracks: dict[int, Any] = {}
    depth: dict[int, int] = defaultdict(int)
    flows: dict[int, int] = defaultdict(int)
    begun, last = 0, 0
    for packet in parsed.packet:
        assert packet.trusted_packet_sequence_id == 1
        assert packet.FindInitializationErrors() == []
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert not descriptor.HasField("parent_uuid") or descriptor.parent_uuid in tracks
            tracks[descriptor.uuid] = descriptor
            continue
        event = packet.track_event
        assert event.track_uuid in tracks
        assert packet.timestamp >= last
        last = packet.timestamp
        change = {event.TYPE_SLICE_BEGIN: 1, event.TYPE_SLICE_END: -1, event.TYPE_INSTANT: 0}[event.type]
        depth[event.track_uuid] += change
        assert depth[event.track_uuid] in (0, 1)
        begun += change == 1
        for flow in event.flow_ids:
            flows[flow] += 1
    assert not any(depth.values())
    assert begun == sum(len(track.slices) for rows in draw(trace).processes for track in rows.tracks)
    assert set(flows.values()) == {2, 4}


@pytest.mark.skipif(shutil.which("trace_processor_shell") is None, reason="Perfetto's parser is not installed")
@pytest.mark.parametrize("name", ["m.json.gz", "m.pftrace"])
def test_perfettos_own_parser_reads_them(truth: tuple[Path, Truth], trace: JobTrace, tmp_path: Path, name: str) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    run("merge" if name.endswith(".gz") else "convert", str(truth[0]), "-o", str(tmp_path / name))
    config = TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with TraceProcessor(trace=str(tmp_path / name), config=config) as processor:
        slices = next(iter(processor.query("select count(*) as n from slice where dur > 0"))).n
        flows = next(iter(processor.query("select count(*) as n from flow"))).n
    assert slices == sum(len(track.slices) for rows in draw(trace).processes for track in rows.tracks)
    assert flows > 0


def test_csv_has_a_line_for_each_record(truth: tuple[Path, Truth], trace: JobTrace, tmp_path: Path) -> None:
    path = tmp_path / "r.csv.gz"
    run("convert", str(truth[0]), "-o", str(path))
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(process.records) for process in trace.processes)
    sent = [row for row in rows if row["kind"] == "SENT"]
    flights = truth[1].flights
    assert len(sent) == len(flights)
    assert {(int(row["node"]), int(row["peer"]), row["name"], int(row["clock"])) for row in sent} == {
        flight[:4] for flight in flights
    }
    assert {row["role"] for row in rows} == {"worker", "daemon"}


def profile(tmp_path: Path, pid: int, at: int, base: int | None) -> Path:
    """Of torch.profiler: an operator at a true time (ns), as a host with a clock that is right would have it."""
    wall = WALL + at - START
    document: dict[str, Any] = {"schemaVersion": 1, "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": pid, "tid": pid, "ts": (wall - (base or 0)) / 1000,
         "dur": 12.5},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": (wall - (base or 0)) / 1000, "dur": 2.0},
        {"ph": "s", "id": 5, "name": "ac2g", "pid": pid, "tid": pid, "ts": (wall - (base or 0)) / 1000},
        {"name": "process_name", "ph": "M", "ts": 0.0, "pid": pid, "tid": 0, "args": {"name": "python"}},
        {"name": "process_name", "ph": "M", "ts": 0.0, "pid": 0, "tid": 0, "args": {"name": "GPU"}},
        {"name": "thread_name", "ph": "M", "ts": 0.0, "pid": pid, "tid": pid, "args": {"name": "thread 1 (python)"}},
        {"ph": "X", "name": "cut off", "pid": pid, "tid": 0}, "nonsense",
    ]}  # fmt: skip
    if base is not None:
        document["baseTimeNanoseconds"] = base
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("base", [WALL - 3600 * S, None])
def test_a_profile_is_put_where_it_was(
    truth: tuple[Path, Truth], trace: JobTrace, tmp_path: Path, base: int | None
) -> None:
    at = truth[1].steps[1][1]
    path = profile(tmp_path, 1001, at, base)
    run("merge", str(truth[0]), "-o", str(tmp_path / "m.json"), "--torch", str(path))
    events = json.loads((tmp_path / "m.json").read_bytes())["traceEvents"]
    (mm,) = [event for event in events if event["name"] == "aten::mm"]
    assert mm["ts"] == pytest.approx((at - trace.span[0]) / 1000, abs=1.0 if base is None else 0.01)
    (name,) = [e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] == mm["pid"]]
    assert name.startswith("rank 1 ")
    assert "cut off" not in {event["name"] for event in events}
    (gpu,) = [e for e in events if e["name"] == "process_name" and e["args"]["name"] == "GPU"]
    (gemm,) = [event for event in events if event["name"] == "gemm"]
    assert gpu["pid"] == gemm["pid"] != mm["pid"]
    assert {event["id"] for event in events if event["name"] == "ac2g"} == {"p.json-0-5"}


def test_the_rank_of_a_profile_may_be_said(truth: tuple[Path, Truth], trace: JobTrace, tmp_path: Path) -> None:
    path = profile(tmp_path, 4711, START, None)
    with pytest.raises(TraceError, match="cannot be found by the ids of its processes"):
        list(torch_profiles.merged(trace, str(path), 0, {}))
    with pytest.raises(TraceError, match="no ring of rank 9"):
        list(torch_profiles.merged(trace, f"9={path}", 0, {}))
    assert list(torch_profiles.merged(trace, f"2={path}", 0, {2: 3}))


@pytest.mark.parametrize("text", ["", "{", "[1", '{"traceEvents": 3}', '"x"', "[" * 100_000, '{"a": 1}'])
def test_what_is_no_profile_is_a_sentence(trace: JobTrace, tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"p\.json is not a trace of torch\.profiler"):
        list(torch_profiles.merged(trace, str(path), 0, {}))


def test_what_cannot_be_done_is_a_sentence(truth: tuple[Path, Truth], tmp_path: Path) -> None:
    for arguments, sentence in (
        (("merge", str(truth[0]), "-o", "/no/such/file.json"), "cannot be written: No such file"),
        (("convert", str(truth[0]), "--to", "elf"), "not one of chrome, perfetto, csv"),
        (("convert", str(truth[0]), "-o", "trace.dat"), "no format has that suffix; use one of .json, .csv"),
        (("convert", str(truth[0]), "-o", "trace"), "no format has that suffix"),
        (("merge", str(truth[0]), "-o", "trace.csv"), "merge writes Chrome's JSON"),
        (("merge", str(truth[0]), "-o", "trace.elf.gz"), "no format has that suffix"),
        (("merge", "nothing-there"), "neither a file or directory"),
        (("merge", str(truth[0]), "--torch", "/no/such"), "/no/such cannot be read: No such file"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code != 0
        assert sentence in str(result.exception) + result.output


def test_a_format_that_is_named_needs_no_suffix(truth: tuple[Path, Truth], tmp_path: Path) -> None:
    path = tmp_path / "records"
    assert run("convert", str(truth[0]), "--to", "csv", "-o", str(path))["records"] > 0
    assert "kind" in path.read_text().splitlines()[0].split(",")


def test_rings_that_are_empty_or_cut_give_a_picture(tmp_path: Path) -> None:
    made = simulate(JOB)
    for tape in made.tapes.values():
        tape.rows = [row for row in tape.rows if row[6] not in (Kind.RUN_BEGIN, Kind.SUBMITTED)][:50]
    made.tapes[Role.WORKER, 0].rows = []
    made.write(tmp_path)
    picture = draw(jobs.load([str(tmp_path)], "/nowhere"))
    assert len(picture.processes) == 6
    assert list(chrome.lines(picture))
