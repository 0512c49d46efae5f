"""Horovod's timeline of real jobs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.tracing.format import Kind
from fusion_trace.analyse import critical_path
from fusion_trace.export import torch_profiles
from fusion_trace.read.job import load
from fusion_trace.read.span_columns import phase_columns
from tests.harness import Job
from tests.torch.conftest import START

pytestmark = pytest.mark.multiprocess


def records(directory: str) -> None:
    """As Horovod's own test of timelines, then with a plan, twice."""
    hvd.start_timeline(os.path.join(directory, "first.json"), mark_cycles=True)
    hvd.barrier()  # the others have not waited for it
    hvd.allreduce(torch.tensor([1, 2, 3], dtype=torch.float32), name="test_allreduce")
    hvd.allgather(torch.zeros(hvd.rank() + 1, 2), name='rows "\\\n')
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step == 2 and hvd.rank() == 0:
            with torch.profiler.profile() as profiler, torch.profiler.record_function("marked"):
                model(torch.ones(1, 3)).sum().backward()
            profiler.export_chrome_trace(os.path.join(directory, "profile.json"))
        else:
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.barrier()
    hvd.start_timeline(os.path.join(directory, "second.json"))
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hvd.stop_timeline()
    hvd.stop_timeline()


def lines_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By tensor."""
    lines = json.loads(path.read_bytes())
    names = {line["pid"]: line["args"]["name"] for line in lines if "name" in line.get("args", {})}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for line in lines:
        if line["ph"] in "BXE" and "pid" in line:
            found[names[line["pid"]]].append(line)
    found["marks"] = [line for line in lines if line["ph"] == "i"]
    return found


def named(lines: list[dict[str, Any]]) -> list[str]:
    return [line["name"] for line in lines if line["ph"] != "E"]


def test_a_timeline_of_all_operations(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with Job((2, 1), {**START, "HOROVOD_TIMELINE": "DYNAMIC", "FUSION_TRACE_DIR": str(rings)}) as job:
        job.run(records, str(tmp_path))
    names = ["first.json", "profile.json", "rings", "second.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    first = lines_of(tmp_path / "first.json")
    one = first["allreduce.test_allreduce"]
    assert {"NEGOTIATE_ALLREDUCE", "0", "1", "ALLREDUCE", "QUEUE", "SHM_ALLREDUCE", "ZMQ_ALLREDUCE"} <= {*named(one)}
    assert one[-1]["args"] == {"dtype": "float32", "shape": "[3]"}
    assert "ALLGATHER" in named(first['allgather.rows "\\\n'])
    assert named(first["allreduce.weight"]).count("ALLREDUCE") >= 2  # a step of the three makes the plan
    assert first["allreduce.weight"][-1]["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    assert {mark["name"] for mark in first["marks"]} == {"CYCLE_START"}
    for name, lines in first.items():
        times = [line["ts"] for line in lines]
        assert times == sorted(times)
        under_way = sum(line["ph"] == "B" for line in lines) - sum(line["ph"] == "E" for line in lines)
        assert under_way in ((0, 1) if name == "barrier.noname" else (0,))  # the others may be at the next one
    second = lines_of(tmp_path / "second.json")
    assert named(second["allreduce.weight"]).count("ALLREDUCE") == 1
    assert second["marks"] == []
    check_records(rings, tmp_path / "profile.json")


def check_records(rings: Path, profile: Path) -> None:
    """What was recorded beside the timeline: the critical path is the step, and a profile is where the step was."""
    trace = load([str(rings)], "/nowhere")
    paths = critical_path.find(trace)
    assert [path.step.number for path in paths] == [1, 2, 3]
    for path in paths:
        assert path.ns == path.step.ns
    unrecorded = []
    for path in paths[:2]:  # in the third the script has asked for timelines, too
        sums = critical_path.totals([path])
        lost = sum(ns for (activity, _), ns in sums.items() if activity == "unrecorded")
        unrecorded.append(lost / sum(sums.values()))
    assert min(unrecorded) < 0.1, "both: a busy machine may have taken the processor away in one of them"
    events = list(torch_profiles.merged(trace, str(profile), 0, {rank: rank for rank in trace.workers}))
    (marked,) = [event for event in events if event["name"] == "marked" and event["ph"] == "X"]
    assert marked["pid"] == 0
    begin = trace.span[0] + marked["ts"] * 1000
    end = begin + marked["dur"] * 1000
    began, ended = (its[2] for its in phase_columns(trace.workers[0], Kind.BACKWARD_BEGIN, Kind.BACKWARD_END))
    assert begin - 2e7 < began < ended < end + 2e7  # ns


def reduces_for_ever(name: str) -> None:
    while True:
        hvd.allreduce(torch.ones(64), name=name)


def test_a_daemon_that_is_killed_leaves_an_array(tmp_path: Path) -> None:
    environment = {**START, "HOROVOD_TIMELINE": str(tmp_path / "t.json"), "FUSION_TIMELINE_ALL_RANKS": "1"}
    paths = [tmp_path / "t.0.json", tmp_path / "t.1.json"]
    generator = np.random.default_rng(8)
    with Job((2,), environment) as job:
        job.start(reduces_for_ever, "x")
        wait_for(lambda: all(path.exists() and path.stat().st_size > 20_000 for path in paths))
        time.sleep(float(generator.uniform(0, 0.1)))  # at any moment
        job.daemons[0].send_signal(signal.SIGKILL)
        job.workers[1].send_signal(signal.SIGKILL)
        job.daemons[0].wait()
        sizes = [path.stat().st_size for path in paths]
    for rank, path in enumerate(paths):
        lines = lines_of(path)
        assert named(lines["allreduce.x"])[:2] == ["NEGOTIATE_ALLREDUCE", str(rank)]
        assert path.stat().st_size >= sizes[rank]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
