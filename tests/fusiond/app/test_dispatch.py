"""Every message that the protocol knows has a handler, and what a peer may say depends on the view and the epoch."""

from __future__ import annotations

from typing import get_args

import pytest

from fusion_rt import wire
from fusion_rt.wire import Loss, View
from tests.fusiond.network_simulation import Network, VirtualDaemon, job

OF_CONNECTIONS = {  # of peers; `transport` handles them
    wire.PeerHello,
    wire.Heartbeat,
    wire.Ack,
    wire.Reopen,
    wire.Reopened,
    wire.Leaving,
    wire.GivenUp,
}
OF_LINKS = {wire.Hello, wire.Bye}  # of workers; `workers.connections` handles them
ABOUT_RINGS = {wire.RingsRequest, wire.Rings, wire.RingPieceRequest, wire.RingPiece}
X = wire.OpKey(0, 0, "x", 0)
VERDICT = wire.Verdict(X)


@pytest.fixture
def daemons() -> list[VirtualDaemon]:
    """Three nodes with a worker each, of which node 0 coordinates."""
    network = Network(seed=0, rate=1e9, latency=1e-4)
    job(network, [1, 1, 1], 8)
    return network.daemons


def test_every_message_of_a_peer_has_a_handler(daemons: list[VirtualDaemon]) -> None:
    dispatch = daemons[1]._formation.peer_dispatch
    assert set(dispatch._table_of(0)) | OF_CONNECTIONS == set(get_args(wire.PeerMessage))
    assert not set(dispatch._table_of(0)) & OF_CONNECTIONS


def test_every_message_of_a_worker_or_tool_has_a_handler(daemons: list[VirtualDaemon]) -> None:
    assert set(daemons[0]._formation.worker_dispatch.handlers) | OF_LINKS == set(get_args(wire.WorkerMessage))


def test_what_only_the_coordinator_may_say_fails_the_job_when_another_node_says_it(
    daemons: list[VirtualDaemon],
) -> None:
    daemons[1]._formation.peer_dispatch.receive(2, VERDICT)
    assert daemons[1].failure == (
        "node 2 (host host2) sent a Verdict that makes no sense here: it comes from the coordinator only"
    )


def test_what_a_coordinator_of_a_view_before_says_is_dropped(daemons: list[VirtualDaemon]) -> None:
    one = daemons[1]
    one._formation.losses.coordinated.add(2)
    one._formation.peer_dispatch.receive(2, VERDICT)
    assert one.failure == ""


def test_a_node_that_is_not_in_the_view_is_heard_about_rings_only(daemons: list[VirtualDaemon]) -> None:
    one = daemons[1]
    one._formation.losses.views.view = View(1, (0, 1), (Loss(2, "it died"),))
    one._formation.peer_dispatch.receive(2, wire.Abort("no"))
    assert one.failure == ""
    assert one._formation.losses.statistics()["fenced"] == 1
    assert set(one._formation.peer_dispatch._table_of(2)) == ABOUT_RINGS


def test_what_is_of_another_epoch_is_dropped_but_for_payloads_which_say_their_epoch(
    daemons: list[VirtualDaemon],
) -> None:
    dispatch = daemons[1]._formation.peer_dispatch
    before = set(dispatch._table_of(2))
    dispatch.receive(2, wire.NewEpoch(1))
    dropped = before - set(dispatch._table_of(2))
    assert {wire.Request, wire.Departed, wire.Credit, wire.Joined} <= dropped
    assert not {wire.Chunk, wire.Piece, wire.Abort, wire.Up, wire.NewEpoch, wire.Handover} & dropped
    dispatch.receive(2, wire.OpFailed(X, "no"))
    assert daemons[1].failure == ""


def test_a_failed_job_takes_no_more_of_its_operations_and_answers_questions(daemons: list[VirtualDaemon]) -> None:
    one = daemons[1]
    one.fail("no more")
    one._formation.peer_dispatch.receive(0, VERDICT)
    assert wire.Verdict not in one._formation.peer_dispatch._table_of(0)
    assert {wire.WaitingRequest, wire.Locate, wire.Departed, wire.Abort} <= set(
        one._formation.peer_dispatch._table_of(0)
    )
    assert one.failure == "no more"
