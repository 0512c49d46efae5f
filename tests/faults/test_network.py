"""Networks that fail between hosts: silence in both directions or one, lost links, slow ones."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest

from benchmarks.netlab import Netlab, preflight
from tests.faults import nemesis
from tests.faults.jobs import FAST, LabDaemons, Workers
from tests.fusiond.processes import Daemons

UNAVAILABLE = preflight()
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]
OnHosts = Callable[..., LabDaemons]
LARGE = 500_000  # elements: 4 MB
SOON_S = 30.0  # generous: what is measured is in docs/faults.md


def test_a_host_that_is_cut_off_without_a_word_is_named_by_the_others_and_gives_up_too(
    lab: Netlab, on_hosts: OnHosts
) -> None:
    job = on_hosts(1, 1, 1, **FAST).start()
    workers = Workers(job.join(), LARGE, range(3))
    workers.go_on()
    with lab.cut_off(2):
        began = time.monotonic()
        workers.join()
    assert max(workers.raised.values()) - began < SOON_S
    assert workers.errors[0] == workers.errors[1]
    assert workers.errors[0].startswith("node 2 (host host2) is lost: ")
    assert re.match(r"node [012] \(host host[012]\) (is lost|is cut off|was given up)", workers.errors[2]), (
        workers.errors[2]
    )
    assert workers.wrong == []


@pytest.mark.parametrize("sender", [0, 1])
def test_both_sides_of_a_one_way_partition_give_up_and_nothing_is_mixed_when_it_heals(
    lab: Netlab, on_hosts: OnHosts, sender: int
) -> None:
    job = on_hosts(1, 1, 1, **FAST).start()
    workers = Workers(job.join(), LARGE, range(3))
    workers.go_on()
    with lab.dropping(sender, 1 - sender):
        job.wait_until(lambda status: status["state"] == "failed", 1 - sender)
    # Now it is healed: what was sent in vain arrives, and nobody may take it for a part of anything.
    workers.join()
    assert set(workers.errors) == {0, 1, 2}
    assert max(workers.steps.values()) - min(workers.steps.values()) <= 1
    assert workers.wrong == []
    for node in range(3):
        assert job.status(node)["state"] == "failed"


def test_silence_shorter_than_the_limit_costs_time_and_nothing_else(lab: Netlab, on_hosts: OnHosts) -> None:
    job = on_hosts(1, 1, FUSION_HEARTBEAT_INTERVAL="50ms").start()  # the limit is 10 s
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    with lab.cut_off(1):
        job.wait_until(lambda status: status["mesh"]["peers"][0]["silent_seconds"] > 0.4)
    workers.go_on()
    with lab.dropping(0, 1):
        job.wait_until(lambda status: status["mesh"]["peers"][0]["silent_seconds"] > 0.4, 1)
    workers.go_on()
    with nemesis.link_down(lab, 0):
        job.wait_until(lambda status: status["mesh"]["peers"][0]["silent_seconds"] > 0.4, 1)
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


@pytest.mark.parametrize("reason", ["prohibit", "unreachable"])
def test_icmp_errors_for_less_than_the_limit_cost_time_and_nothing_else(
    lab: Netlab, on_hosts: OnHosts, reason: str
) -> None:
    job = on_hosts(1, 1, FUSION_HEARTBEAT_INTERVAL="50ms").start()  # the limit is 10 s
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    with lab.rejecting(0, 1, reason):
        assert lab.reset(0, 1) > 0  # so that connections have to be made again, which is refused
        job.wait_until(lambda status: status["mesh"]["peers"][0]["silent_seconds"] > 1, 1)
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


def test_icmp_errors_for_longer_are_named_with_the_address_that_they_are_about(lab: Netlab, on_hosts: OnHosts) -> None:
    job = on_hosts(1, 1, FUSION_HEARTBEAT_INTERVAL="50ms", FUSION_HEARTBEAT_TIMEOUT="6s").start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on()
    with lab.rejecting(0, 1), lab.rejecting(1, 0):
        lab.reset(0, 1)
        lab.reset(1, 0)
        workers.join()
    for rank, error in workers.errors.items():
        peer = lab.hosts[1 - rank].address
        assert re.match(rf"node {1 - rank} \(host host{1 - rank}\) is lost: .*; connections to it fail: "
                        rf"{re.escape(peer)}:\d+: No route to host", error), error  # fmt: skip
    assert set(workers.errors) == {0, 1}
    assert workers.wrong == []


def test_connections_that_are_reset_come_back_and_every_chunk_counts_once(lab: Netlab, on_hosts: OnHosts) -> None:
    seed = 5
    chooser = random.Random(seed)
    job = on_hosts(1, 1, 1, FUSION_CHUNK_BYTES="64KiB").start()  # many chunks, so that some are under way
    workers = Workers(job.join(), LARGE, range(3))
    workers.go_on(1)
    resets = 0
    for _ in range(10):
        host, peer = chooser.sample(range(3), 2)
        ports = job.endpoints[peer].control_port, job.endpoints[peer].payload_port
        resets += lab.reset(host, peer, chooser.choice(ports))
        workers.go_on(1)
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, []), f"seed {seed}"
    assert resets >= 5  # some fell into the moment in which there was no connection


def test_a_link_that_flaps_costs_time_and_nothing_else(lab: Netlab, on_hosts: OnHosts) -> None:
    job = on_hosts(1, 1, FUSION_CHUNK_BYTES="64KiB").start()
    workers = Workers(job.join(), LARGE, range(2))
    for flap in range(5):
        with nemesis.link_down(lab, flap % 2):
            time.sleep(0.05)  # how long it is down, and not a wait for anything
        workers.go_on(1)
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


def test_a_slow_link_takes_bounded_memory_and_heartbeats_get_through(lab: Netlab, on_hosts: OnHosts) -> None:
    # 12 MB take 10 s at 10 Mbit/s; with a window of 1 MiB, no more than that may wait anywhere.
    window = {"FUSION_WINDOW_BYTES": "1MiB", "FUSION_CHUNK_BYTES": "128KiB"}
    job = on_hosts(1, 1, **FAST, **window).start()
    workers = Workers(job.join(), 1_500_000, range(2))
    workers.go_on()
    before = [nemesis.resources(process.pid)["memory"] for process in job.processes]
    with nemesis.slow_link(lab, 1, "10mbit"):
        most = watch_memory(job, seconds=3)
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    for used, peak in zip(before, most, strict=True):
        assert peak - used < 8 << 20


def watch_memory(job: Daemons, seconds: float) -> list[int]:
    """The most memory that each daemon takes in that time."""
    most = [0] * len(job.processes)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for node, process in enumerate(job.processes):
            most[node] = max(most[node], nemesis.resources(process.pid)["memory"])
        time.sleep(0.05)
    return most
