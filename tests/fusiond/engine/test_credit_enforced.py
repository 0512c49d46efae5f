"""A peer that sends more than it was granted is dropped before its messages take memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fusion_rt import wire
from fusiond.engine import exchanges
from tests.fusiond.network_simulation import Network, job

CHUNK = 4096
WINDOW = 16  # chunks


def attacked(messages: int, operations: int) -> Network:
    """Two nodes that have started. The second sends messages of operations that nobody has submitted."""
    network = Network(0, 1e8, 1e-4)

    def wait() -> Iterator[Any]:
        yield 1000.0

    workers = job(network, [1, 1], 4096, chunk_bytes=CHUNK, window_bytes=WINDOW * CHUNK)
    for worker in workers:
        worker.begin(wait())
    network.run(lambda: all(worker.started for worker in workers), 30.0)
    victim, attacker = network.daemons
    before = len(victim.heard)
    for number in range(messages):
        key = wire.OpKey(0, 0, f"x{number % operations}", 0)
        attacker.mesh.send_payload(0, wire.Chunk(key, 7, 0, number, 0), bytes(CHUNK))
    end = network.now + 5
    network.at(end, lambda: None)
    network.run(lambda: network.now >= end, 10.0)
    del victim.heard[:before]
    return network


def test_what_was_granted_is_kept() -> None:
    victim = attacked(10 * WINDOW, 10).daemons[0]
    assert victim.failure == ""
    assert len(victim.heard) == 10 * WINDOW


def test_a_peer_that_sends_more_of_an_operation_is_dropped() -> None:
    victim = attacked(1000, 1).daemons[0]
    assert victim.failure == (
        "node 1 (host host1) is lost: it sent more than the 16 messages of tensor 'x0' that it was granted"
    )
    assert len(victim.heard) == WINDOW + 1
    statistics: Any = victim.mesh.statistics()
    assert statistics["peers"][0]["fenced"] > 0


def test_a_peer_that_sends_of_too_many_operations_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "EARLY_BYTES", 48 * CHUNK)  # and one for each node; twice that is kept
    victim = attacked(1000, 500).daemons[0]
    assert "node 1 (host host1) is lost: 413696 bytes of operations wait" in victim.failure
    assert len(victim.heard) == 101
