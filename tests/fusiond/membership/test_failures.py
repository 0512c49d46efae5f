"""What follows from a loss, on one node: what its shell is told to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import Loss, View
from fusiond.engine.engine import Engine
from fusiond.membership.epoch import Membership
from fusiond.membership.failures import Losses

THREE = Topology(("a", "b", "c"), ((0,), (1,), ()))


class FakeEngine:
    """Knows who has departed, and says that it can go on or not."""

    def __init__(self) -> None:
        self.participants = self
        self.departed: set[int] = set()
        self.why_not = ""
        self.views: list[View] = []

    def why_not_without(self, losses: Sequence[Loss]) -> str:
        return self.why_not

    def view_begins(self, view: View, coordinator: int) -> None:
        self.views.append(view)


class Shell:
    """Node 2's, or another one's."""

    def __init__(self, node: int, tolerate: bool, topology: Topology = THREE) -> None:
        self.engine = FakeEngine()
        self.membership = Membership(topology, node)
        self.membership.started = True
        self.sent: list[tuple[int, wire.PeerMessage]] = []
        self.timers: list[Callable[[], None]] = []
        self.warnings: list[str] = []
        self.failed: list[tuple[str, bool]] = []
        self.gone: list[int] = []
        self.over = False
        self.epochs = 0
        shell: Any = self  # as much of effects and of a daemon as losses use
        self.losses = Losses(topology, node, tolerate, self.membership, shell, shell)

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        self.sent.append((node, message))

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        self.timers.append(callback)
        return None

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def current_engine(self) -> Engine:
        return cast(Any, self.engine)  # type: ignore[no-any-return]

    def is_over(self) -> bool:
        return self.over

    def fail(self, error: str, tell_peers: bool) -> None:
        self.failed.append((error, tell_peers))
        self.losses.views.end()

    def peers_gone(self, nodes: Sequence[int], why: str) -> None:
        self.gone += nodes

    def begin_epoch(self) -> None:
        self.epochs += 1

    def time_passes(self) -> None:
        due, self.timers = self.timers, []
        for callback in due:
            callback()


def test_without_the_switch_a_lost_worker_ends_the_job_at_once_and_for_all() -> None:
    shell = Shell(0, tolerate=False)
    shell.losses.worker_lost(0, "rank 0 died")
    assert shell.failed == [("rank 0 died", True)]


def test_before_the_job_has_started_every_loss_ends_it() -> None:
    shell = Shell(0, tolerate=True)
    shell.membership.started = False
    shell.losses.worker_lost(0, "rank 0 died")
    assert shell.failed == [("rank 0 died", True)]
    shell = Shell(0, tolerate=True)
    shell.membership.started = False
    shell.losses.peer_lost(1, "closed")
    shell.time_passes()
    assert shell.failed == [("node 1 (host b) is lost: closed", True)]


def test_what_cannot_go_on_says_why() -> None:
    shell = Shell(0, tolerate=True)
    shell.engine.why_not = "bsp needs every rank"
    shell.losses.peer_lost(1, "closed")
    assert shell.failed == []  # other symptoms may still come
    shell.time_passes()
    sentence = "node 1 (host b) is lost: closed; the job cannot go on without it: bsp needs every rank"
    assert shell.failed == [(sentence, True)]


def test_a_node_whose_workers_have_left_is_not_missed() -> None:
    shell = Shell(0, tolerate=False)
    shell.engine.departed = {1}
    shell.losses.peer_lost(1, "closed")
    shell.time_passes()
    assert (shell.failed, shell.gone) == ([], [1])


def test_news_that_workers_have_left_may_come_after_the_end_of_the_connection() -> None:
    shell = Shell(0, tolerate=False)
    shell.losses.peer_lost(1, "closed")
    shell.engine.departed = {1}
    shell.losses.departed()
    assert shell.gone == [1]
    shell.time_passes()
    assert shell.failed == []


def test_a_coordinator_that_ends_is_not_missed_once_everybody_has_left() -> None:
    shell = Shell(2, tolerate=False)
    shell.engine.departed = {0}
    shell.losses.peer_lost(0, "closed")  # it would be needed
    assert shell.gone == []
    shell.engine.departed = {0, 1}
    shell.over = True
    shell.losses.departed()
    assert shell.gone == [0]
    shell.time_passes()
    assert shell.failed == []


def test_whoever_has_a_plan_that_cannot_go_on_ends_the_job_though_others_decided_that_it_goes_on() -> None:
    shell = Shell(0, tolerate=True)
    shell.engine.why_not = "allreduce needs every rank"
    view = View(1, (0, 2), (Loss(1, "node 1 (host b) is lost: closed"),))
    shell.losses.views.message(2, wire.NewView(view))
    error = "node 1 (host b) is lost: closed; the job cannot go on without it: allreduce needs every rank"
    assert shell.failed == [(error, True)]
    assert shell.engine.views == []


def test_a_view_reaches_the_engine_and_the_peers_that_are_not_in_it_are_let_go() -> None:
    shell = Shell(0, tolerate=True)
    view = View(1, (0, 2), (Loss(1, "node 1 (host b) is lost: closed"),))
    shell.losses.views.message(2, wire.NewView(view))
    assert (shell.engine.views, shell.gone, list(shell.membership.nodes)) == ([view], [1], [0, 2])
    assert shell.warnings == ["node 1 (host b) is lost: closed; the job goes on without it"]
    assert not shell.losses.views.admits(1, wire.Abort("I was cut off"))
    assert shell.losses.statistics()["fenced"] == 1
    assert shell.failed == []


def test_a_peer_that_was_not_missed_is_when_the_next_epoch_begins() -> None:
    shell = Shell(0, tolerate=False)
    shell.engine.departed = {0, 1}
    shell.over = True
    shell.losses.peer_lost(2, "closed")
    shell.time_passes()
    assert (shell.gone, shell.failed) == ([2], [])
    shell.over, shell.engine, shell.membership.started = False, FakeEngine(), False
    shell.losses.epoch_begins(1, shell.current_engine())
    shell.time_passes()
    assert shell.failed == [("node 2 (host c) is lost: closed", True)]


def test_an_epoch_that_waited_for_a_worker_begins_with_the_view_without_it() -> None:
    shell = Shell(0, tolerate=True, topology=Topology(("a",), ((0, 1),)))
    for rank in (0, 1):
        shell.membership.join(rank)
    shell.membership.left.add(0)
    shell.membership.join(0)  # and waits for the other one
    shell.losses.worker_lost(1, "rank 1 died")
    assert shell.epochs == 0
    shell.time_passes()
    assert (shell.epochs, shell.engine.views, shell.failed) == (1, [], [])


def test_a_node_that_ends_asks_the_others_to_go_on() -> None:
    shell = Shell(1, tolerate=True)
    shell.losses.gone_on_without("whoever started it is gone")
    loss = Loss(1, "node 1 (host b) is lost: whoever started it is gone")
    assert shell.sent == [(0, wire.Suspected(0, 1, (loss,))), (2, wire.Suspected(0, 1, (loss,)))]


def test_the_others_hear_of_an_epoch_before_its_engine_says_anything() -> None:
    shell = Shell(0, tolerate=True)
    shell.losses.views.message(2, wire.NewView(View(1, (0, 2), (Loss(1, "node 1 (host b) is lost: closed"),))))
    settled = wire.Settled(1, 1, 1, (0,))

    class NewEngine(FakeEngine):
        def view_begins(self, view: View, coordinator: int) -> None:
            shell.to_node(2, settled)  # node 2 has handed over already

    shell.sent.clear()
    shell.losses.epoch_begins(1, cast(Any, NewEngine()))
    assert [message for node, message in shell.sent if node == 2] == [wire.NewEpoch(1), settled]
