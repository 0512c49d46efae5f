"""What daemons record: of operations, of connections, and of the others' clocks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.netlab import Netlab, preflight
from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.tracing import reader
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Ring
from tests.fusiond.processes import COMMAND, JOB, TIMEOUT_S, Daemons

UNAVAILABLE = preflight() or (None if shutil.which("unshare") else "there is no unshare")


def ring_of(directory: Path, name: str) -> Ring:
    return reader.read(f"{directory}-traces/{JOB}/{name}.ring")


def kinds_of(ring: Ring, name: str) -> list[Kind]:
    return [Kind(r["kind"]) for r in ring.records if ring.names[r["name"]] == name]


def reduce_on(clients: dict[int, Client], name: str, elements: int) -> None:
    """An all-reduce of ones of all clients."""
    signature = wire.Signature("allreduce", "float32", (elements,))
    under_way = []
    for client in clients.values():
        region = client.allocate(4 * elements)
        np.frombuffer(region.view, np.float32)[:elements] = 1
        place = (region.segment, region.offset)
        under_way.append((client, region, client.submit(name, signature, place=place)))
    for client, region, operation in under_way:
        client.wait(operation)
        assert np.frombuffer(region.view, np.float32)[elements - 1] == len(clients)


@pytest.mark.multiprocess
def test_an_operation_is_seen_from_the_part_of_a_worker_to_its_answer(
    runtime_dir: Path, daemons: Callable[..., Daemons]
) -> None:
    job = daemons(1, 1).start()
    clients = job.join()
    reduce_on(clients, "tensor", 100_000)
    reduce_on(clients, "tensor", 100_000)
    both = [ring_of(runtime_dir, f"node-{node}") for node in (0, 1)]
    for ring in both:
        kinds = kinds_of(ring, "tensor")
        first = [Kind.READY, Kind.NEGOTIATE_BEGIN, Kind.NEGOTIATE_END, Kind.RUN_BEGIN]
        assert [kind for kind in kinds if kind in first][:4] == first
        assert kinds.count(Kind.NEGOTIATE_BEGIN) == 1  # the second time it has been approved
        for kind in (Kind.READY, Kind.RUN_BEGIN, Kind.RUN_END, Kind.ANSWERED):
            assert kinds.count(kind) == 2
        assert kinds.count(Kind.RECEIVED) == kinds.count(Kind.TAKEN) > 0
    for sender, receiver in ((0, 1), (1, 0)):
        sent = [r for r in both[sender].records if r["kind"] == Kind.SENT and r["peer"] == receiver]
        received = [r for r in both[receiver].records if r["kind"] == Kind.RECEIVED and r["peer"] == sender]
        told = [[(int(r["extra"]), int(r["value"]), int(r["clock"])) for r in records] for records in (sent, received)]
        assert told[0] == told[1]
        assert len(set(told[0])) == len(told[0])


@pytest.mark.multiprocess
def test_after_a_sigkill_in_the_middle_of_an_operation_the_ring_says_so(
    runtime_dir: Path, daemons: Callable[..., Daemons]
) -> None:
    job = daemons(2).start()
    clients = job.join()
    reduce_on(clients, "before", 100_000)
    signature = wire.Signature("allreduce", "float32", (2,))
    clients[0].submit("halfway", signature, inline=bytes(8))
    path = f"{runtime_dir}-traces/{JOB}/node-0.ring"
    deadline = time.monotonic() + TIMEOUT_S
    while kinds_of(reader.read(path), "halfway") != [Kind.READY]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.processes[0].kill()
    job.processes[0].wait()
    ring = reader.read(path)
    assert not ring.problems
    assert kinds_of(ring, "halfway") == [Kind.READY]
    assert kinds_of(ring, "before")[-1] == Kind.ANSWERED


@pytest.mark.multiprocess
def test_a_job_is_worth_more_than_its_records(runtime_dir: Path, daemons: Callable[..., Daemons]) -> None:
    Path(f"{runtime_dir}-traces").write_text("")  # where the directory would be
    try:
        job = daemons(1).start()
        reduce_on(job.join(), "tensor", 10)
        assert "--no-trace" in job.log(0)
    finally:
        os.unlink(f"{runtime_dir}-traces")


@pytest.mark.root
@pytest.mark.multiprocess
@pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
def test_skewed_clocks_of_four_hosts_are_found_within_half_a_round_trip(runtime_dir: Path) -> None:
    skews = (0, 3_600, -1_000, 86_400) if _uptime() > 1_100 else (0, 3_600, 7_200, 86_400)  # s
    with Netlab(hosts=4) as lab:
        job = Daemons(runtime_dir, [1, 1, 1, 1], FUSION_HEARTBEAT_INTERVAL="100ms", FUSION_HEARTBEAT_TIMEOUT="20s")
        for node, (host, skew) in enumerate(zip(lab.hosts, skews, strict=True)):
            job.addresses[node] = host.address
            skewed = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", str(skew)]
            job.commands[node] = ["ip", "netns", "exec", host.name, *skewed, *COMMAND]
        try:
            job.start()
            deadline = time.monotonic() + TIMEOUT_S
            paths = [f"{runtime_dir}-traces/{JOB}/node-{node}.ring" for node in range(4)]
            while min(np.sum(reader.read(path).records["kind"] == Kind.CLOCK) for path in paths) < 8:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            for node, path in enumerate(paths):
                records = reader.read(path).records
                for peer in {0, 1, 2, 3} - {node}:
                    mine = records[(records["kind"] == Kind.CLOCK) & (records["peer"] == peer)]
                    best = mine[np.argmin(mine["extra"])]
                    truth = (skews[peer] - skews[node]) * 10**9  # one clock ticks for all
                    assert abs(int(best["value"]) - truth) <= int(best["extra"]) * 1000 / 2
                    assert best["extra"] < 1_000_000  # us: it is a measurement, and not a heartbeat that was missed
        finally:
            job.close()


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
