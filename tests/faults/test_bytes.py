"""Bytes between two daemons that are late, cut into slices, cut off, or changed: a correct result or an error."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.jobs import FAST, ProxiedDaemons, Workers, wait
from tests.faults.proxy import Fault

pytestmark = pytest.mark.multiprocess
MakeProxied = Callable[..., ProxiedDaemons]
LARGE = 100_000  # elements: 800 KB
ENCRYPTED = {"FUSION_ENCRYPTION": "all"}
PLAIN = {"FUSION_ENCRYPTION": "control"}
SMALL_CHUNKS = {"FUSION_CHUNK_BYTES": "64KiB"}


@pytest.mark.parametrize("encryption", [ENCRYPTED, PLAIN], ids=["encrypted", "plain"])
@pytest.mark.parametrize("fault", [Fault(delay=0.02), Fault(pieces=700)], ids=["late", "in slices"])
def test_late_bytes_and_slices_change_nothing(proxied: MakeProxied, fault: Fault, encryption: dict[str, str]) -> None:
    job = proxied(1, **encryption).start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on(2)
    job.control.fault = job.payload.fault = fault
    passed = job.payload.passed
    workers.go_on(2)
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    assert job.payload.passed > passed + 400_000
    for node in (0, 1):
        assert job.status(node)["mesh"]["dropped"] == 0


CHANGED, CUT_OFF = Fault(flip_after=0), Fault(cut_after=0)
SPOILT = {
    "control, changed": ("control", ENCRYPTED, CHANGED),
    "control, cut off": ("control", ENCRYPTED, CUT_OFF),
    "encrypted payload, changed": ("payload", ENCRYPTED, CHANGED),
    "encrypted payload, cut off": ("payload", ENCRYPTED, CUT_OFF),
    "plain payload, changed": ("payload", PLAIN, CHANGED),
    "plain payload, cut off": ("payload", PLAIN, CUT_OFF),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("which", "encryption", "fault"), SPOILT.values(), ids=SPOILT)
def test_changed_and_lost_bytes_are_made_good_or_an_error_and_never_a_wrong_sum(
    proxied: MakeProxied, which: str, encryption: dict[str, str], fault: Fault, seed: int
) -> None:
    job = proxied(seed, **FAST, **encryption, **SMALL_CHUNKS).start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on(2)
    proxy = job.control if which == "control" else job.payload
    proxy.fault = fault
    wait(lambda: proxy.flipped + proxy.cut > 0, "a fault")
    proxy.fault = Fault()
    workers.end()
    assert set(workers.errors) in (set(), {0, 1})
    for error in workers.errors.values():
        assert "node " in error
        assert "Traceback" not in error
    assert workers.wrong == []


LANES = {"FUSION_KERNEL_THREADS": "4", "FUSION_CHUNK_BYTES": "256KiB"}


@pytest.mark.parametrize(
    "encryption",
    [ENCRYPTED | SMALL_CHUNKS, PLAIN | SMALL_CHUNKS, ENCRYPTED | LANES, PLAIN | LANES],
    ids=["encrypted", "plain", "encrypted, by lanes", "plain, by lanes"],
)
def test_a_changed_payload_is_counted_and_told_and_the_job_goes_on(
    proxied: MakeProxied, encryption: dict[str, str]
) -> None:
    job = proxied(5, **encryption).start()
    workers = Workers(job.join(), LARGE, range(2))
    workers.go_on(2)
    job.payload.fault = Fault(flip_after=400)  # beyond the greeting, of the connection that stands
    wait(lambda: job.payload.flipped > 0, "a fault")
    job.payload.fault = Fault()
    workers.go_on(2)
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
    found = [job.status(node)["mesh"] for node in (0, 1)]
    assert sum(mesh["damaged"] for mesh in found) > 0
    assert any("Bytes change on the way" in job.log(node) for node in (0, 1))


def test_a_firewall_that_rejects_for_a_moment_amid_large_tensors_costs_time_and_nothing_else(
    proxied: MakeProxied,
) -> None:
    job = proxied(4, FUSION_CHUNK_BYTES="64KiB").start()
    workers = Workers(job.join(), LARGE, range(2))
    for _ in range(2):
        workers.go_on(1)
        until = time.monotonic() + 1.3
        for proxy in (job.payload, job.control):
            proxy.reject()
        wait(lambda until=until: workers.errors or time.monotonic() > until, "an error, or the end of the rejection")  # type: ignore[misc]
        for proxy in (job.payload, job.control):
            proxy.admit()
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])


def test_connections_that_are_reset_in_the_middle_of_a_chunk_come_back_and_it_counts_once(proxied: MakeProxied) -> None:
    job = proxied(3, FUSION_CHUNK_BYTES="64KiB").start()
    workers = Workers(job.join(), LARGE, range(2))
    for proxy in (job.control, job.payload) * 3:
        workers.go_on(1)
        before = proxy.connections
        wait(lambda proxy=proxy: proxy.reset() > 0, "a connection to be reset")  # type: ignore[misc]
        wait(lambda proxy=proxy, before=before: proxy.connections > before or workers.errors, "a new connection")  # type: ignore[misc]
    workers.go_on()
    workers.stop()
    assert (workers.errors, workers.wrong) == ({}, [])
