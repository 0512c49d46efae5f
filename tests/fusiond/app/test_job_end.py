"""When the job, and with it this daemon, ends: one node, with fakes around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig
from fusion_rt.settings import Settings
from fusion_rt.tracing.format import NOBODY, Kind
from fusiond.app.job_end import JobEnd
from fusiond.membership.epoch import Membership

ONE = Topology(("a",), ((0, 1),))
TWO = Topology(("a", "b"), ((0, 1), (2,)))
THREE = Topology(("a", "b", "c"), ((0,), (1,), (2,)))


class World:
    """Node 0's loop, mesh, engine, workers and `DaemonEffects` in one, as far as a `JobEnd` uses them."""

    def __init__(self, topology: Topology = ONE, attached: bool = True, tolerate: bool = False) -> None:
        self.participants = self
        self.workers = self
        self.departed: set[int] = set()
        self.lost_nodes: set[int] = set()
        self.may_return = False
        self.stops = 0
        self.told: list[tuple[int, object]] = []  # to workers
        self.told_before: list[object] = []  # when the starter heard of the failure
        self.sent: list[tuple[int, wire.PeerMessage]] = []
        self.lost: list[tuple[int, str]] = []  # that the mesh need not hear any more
        self.recorded: list[tuple[Kind, str, int, int]] = []
        self.job_failed = ""
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.links: Any = {rank: rank for rank in topology.ranks[0]}
        self.membership = Membership(topology, 0)
        self.membership.started = True
        self.membership.joined.update(topology.ranks[0])
        world: Any = self
        self.config = DaemonConfig("test", 0, topology, attached=attached)
        self.settings = Settings(tolerate_losses=tolerate)
        self.number, self.absent = 0, ()
        self.engine = self.loop = self.trace = world
        self.mesh = world if len(topology.hosts) > 1 else None
        self.epochs = 0
        self.ending = JobEnd(world, world, self.membership, world, self.links)

    def failed(self, reason: str) -> None:
        self.told_before = [*self.told, reason]

    def record(self, kind: int, name: str = "", peer: int = NOBODY, extra: int = 0) -> None:
        self.recorded.append((Kind(kind), name, peer, extra))

    def stop(self) -> None:
        self.stops += 1

    def has_stopped(self) -> bool:
        return self.stops > 0

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((seconds, callback))

    def send(self, link: int, message: object) -> None:
        self.told.append((link, message))

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        self.sent.append((node, message))

    def send_last(self, node: int, message: wire.PeerMessage) -> None:
        self.sent.append((node, message))

    def when_received(self, then: Callable[[], None]) -> None:
        self.delivered = then

    def lose(self, node: int, why: str) -> None:
        self.lost.append((node, why))

    def depart(self, ranks: tuple[int, ...]) -> None:
        self.departed.update(ranks)

    def next_epoch(self) -> None:
        self.epochs += 1

    def fail_job(self, error: str) -> None:
        self.job_failed = error

    def when_quiet(self, then: Callable[[], None]) -> None:
        then()

    def leave(self, rank: int) -> None:
        """A local worker says goodbye."""
        self.membership.left.add(rank)
        del self.links[rank]
        self.ending.worker_departed(rank)
        self.ending.check_over()


def test_the_first_reason_reaches_engine_workers_and_peers() -> None:
    world = World(TWO)
    world.ending.fail("the first")
    world.ending.fail("the second")
    assert world.ending.failure == world.job_failed == "the first"
    assert world.ending.exit_code == 1
    assert world.told == [(0, wire.JobFailed("the first")), (1, wire.JobFailed("the first"))]
    assert world.sent == [(1, wire.Abort("the first"))]


def test_the_starter_hears_of_a_failure_before_workers_do() -> None:
    """They ask it for the next epoch then, which is not to have whom this daemon has lost."""
    world = World(TWO)
    world.ending.fail("node 1 is lost")
    assert world.told_before == ["node 1 is lost"]
    assert len(world.told) == 2


@pytest.mark.parametrize("fails", [True, False])
def test_a_peer_that_another_one_does_not_hear_is_let_go_when_workers_leave_unless_that_is_for_a_failure(
    fails: bool,
) -> None:
    """In the next formation of an elastic job it may be with this daemon, and the other one not."""
    world = World(THREE)
    suspected = wire.Suspected(0, 1, (wire.Loss(2, "node 2 (host c) is lost: it is silent"),))
    world.ending.losses.handlers()[wire.Suspected](1, suspected)
    if fails:
        for _, decide in world.timers:
            decide()
        assert world.ending.failure == "node 2 (host c) is lost: it is silent"
    world.departed.update((1, 2))
    world.ending.departed()
    world.leave(0)
    assert [node for node, _ in world.lost] == ([] if fails else [2])


def test_a_failure_that_a_peer_has_told_is_not_told_again() -> None:
    world = World(TWO)
    world.ending.fail("elsewhere", tell_peers=False)
    assert not world.sent


def test_all_nodes_hear_of_a_worker_that_leaves() -> None:
    world = World(TWO)
    world.leave(1)
    assert world.sent == [(1, wire.Departed((1,)))]
    assert world.departed == {1}


def test_an_unattended_daemon_ends_with_the_last_worker() -> None:
    world = World(attached=False)
    world.leave(0)
    assert not world.has_stopped()
    world.leave(1)
    assert world.has_stopped()
    assert world.ending.exit_code == 0


def test_a_daemon_that_is_told_to_stop_delivers_first_when_its_workers_are_done() -> None:
    world = World(TWO)
    world.leave(0)
    world.leave(1)
    world.ending.signalled("SIGTERM")
    assert not world.has_stopped()
    world.delivered()
    assert world.has_stopped()
    assert not world.ending.failure


def test_an_unattended_daemon_stays_as_long_as_workers_may_return() -> None:
    world = World(attached=False)
    world.may_return = True
    world.leave(0)
    world.leave(1)
    assert not world.has_stopped()
    world.may_return = False  # their connections have ended
    world.ending.check_over()
    assert world.has_stopped()


def test_an_attended_daemon_outlives_its_workers() -> None:
    world = World()
    world.leave(0)
    world.leave(1)
    assert not world.has_stopped()


def test_workers_of_a_failed_job_have_time_to_read_why_when_nobody_attends() -> None:
    world = World(attached=False)
    world.ending.fail("no more")
    assert not world.has_stopped()
    for _, callback in sorted(world.timers, key=lambda timer: timer[0]):
        callback()
    assert world.has_stopped()


def test_a_worker_that_is_lost_ends_the_job() -> None:
    world = World()
    world.ending.worker_lost(1, "rank 1 died")
    assert world.ending.failure == "rank 1 died"


def test_the_ring_says_who_died_and_why_the_job_failed() -> None:
    world = World(TWO)
    world.ending.worker_lost(1, "rank 1 died")
    assert world.recorded == [(Kind.GONE, "rank 1 died", 1, 0), (Kind.GONE, "rank 1 died", NOBODY, 2)]
    world = World(TWO)
    world.ending.peer_lost(1, "node 1 is silent")
    assert world.recorded[0] == (Kind.GONE, "node 1 is silent", 1, 1)


def test_the_ring_says_nothing_of_a_peer_whose_workers_had_left() -> None:
    world = World(TWO)
    world.departed.add(2)
    world.ending.peer_lost(1, "it has closed its connections")
    assert Kind.GONE not in [kind for kind, *_ in world.recorded]


def test_when_the_starter_is_gone_the_daemon_goes_and_says_why_if_it_still_had_workers() -> None:
    world = World()
    world.ending.starter_gone()
    assert world.has_stopped()
    assert world.ending.failure == "the process that started the daemon of host a is gone"


def test_when_the_starter_is_gone_after_the_workers_that_is_no_failure() -> None:
    world = World()
    world.leave(0)
    world.leave(1)
    world.ending.starter_gone()
    assert world.has_stopped()
    assert not world.ending.failure


def test_a_signal_is_a_failure_only_while_there_is_something_to_do() -> None:
    busy, done = World(), World()
    busy.ending.signalled("SIGTERM")
    assert busy.has_stopped()
    assert busy.ending.failure == "the daemon of host a was told to stop (SIGTERM)"
    done.leave(0)
    done.leave(1)
    done.ending.signalled("SIGTERM")
    assert done.has_stopped()
    assert not done.ending.failure


def test_a_job_that_is_stopped_says_on_whose_behalf_and_waits_for_its_workers() -> None:
    world = World()
    world.ending.stop("enough")
    assert world.ending.failure == "the job was stopped on host a: enough"
    assert not world.has_stopped()
    world.links.clear()
    world.ending.check_over()
    assert world.has_stopped()


def test_peers_that_have_ended_are_not_asked_and_not_heard() -> None:
    world = World(TWO)
    world.ending.peers_gone([1], "its workers have left")
    assert world.ending.gone() == {1}
    assert world.lost == [(1, "its workers have left")]
    assert world.departed == {2}
    assert not world.ending.failure


def test_a_peer_that_goes_after_the_job_has_failed_is_not_another_failure() -> None:
    world = World(TWO)
    world.ending.fail("the first")
    world.ending.peer_lost(1, "silent")
    assert world.ending.failure == "the first"
    assert world.sent == [(1, wire.Abort("the first"))]


def test_nothing_is_left_to_do_when_all_here_have_left_unless_losses_are_tolerated() -> None:
    strict, tolerant = World(TWO), World(TWO, tolerate=True)
    for world in (strict, tolerant):
        assert not world.ending.is_over()
        world.leave(0)
        world.leave(1)
    assert strict.ending.is_over()
    assert not tolerant.ending.is_over()
    tolerant.departed.add(2)
    assert tolerant.ending.is_over()
