"""Elastic jobs in virtual time: daemons are killed and started again, workers die, and orders come to each daemon at
its own moment, also in the middle of an order before. Whatever the schedule, in the end all that live add up together,
and no sum ever has anything of another formation in it."""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import EpochOver, Reform, Reformed
from fusion_rt.settings import Settings
from fusiond.app.formation import Formation
from tests.for_each import for_each
from tests.fusiond.network_simulation import Network, VirtualDaemon, VirtualWorker

SUM = wire.Signature("allreduce", "float32", (2,))
LARGE = wire.Signature("allreduce", "float32", (20_000,))
ENOUGH = 5  # sums of each worker in the last formation


class Launcher:
    """Starts and orders daemons, and gives workers their places. It knows who lives, as agents would tell it.

    Attributes:
        living: the daemons, by node.
        sums: of the workers of each formation, how many each has got.
    """

    def __init__(self, network: Network, nodes: int) -> None:
        self.network = network
        self.hosts = tuple(f"host{node}" for node in range(nodes))
        self.settings = Settings(heartbeat_timeout=2.0, heartbeat_interval=0.2, connections=2, chunk_bytes=16384)
        self.serials = [0] * nodes
        self.living: dict[int, VirtualDaemon] = {}
        self.number = 0
        self.sums: dict[int, dict[int, int]] = {}
        self.formations: list[weakref.ref[Formation]] = []
        self.words: list[Any] = []
        network.daemons = [None] * nodes  # type: ignore[list-item]
        for node in range(nodes):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts a daemon, with a key and an address that no other one had."""
        self.serials[node] += 1
        alone = Topology(self.hosts, tuple((0,) if other == node else () for other in range(len(self.hosts))))
        daemon = VirtualDaemon(self.network, alone, node, self.settings, elastic=True, serial=self.serials[node])
        self.living[node] = self.network.daemons[node] = daemon

    def kill(self, node: int) -> None:
        """Kills a daemon with its workers; what it has sent may still arrive."""
        self.living.pop(node).loop.stopped = True
        self.network.gone(node)
        for connection in list(self.network.connections):
            if connection.node == node:
                self.network.connections.remove(connection)

    def reform(self) -> None:
        """Orders a formation of all that live, with one or two workers each; each daemon hears of it in its own time.
        One that somebody has given up is replaced first."""
        random = self.network.random
        for node in {lost for daemon in self.living.values() for lost in daemon.mesh.lost if lost in self.living}:
            self.kill(node)
            self.start(node)
        self.number += 1
        sizes = [random.choice([1, 2]) if node in self.living else 0 for node in range(len(self.hosts))]
        ranks = tuple(tuple(range(sum(sizes[:node]), sum(sizes[: node + 1]))) for node in range(len(sizes)))
        absent = tuple(node for node in range(len(sizes)) if node not in self.living)
        peers = tuple(self.living[node].endpoint() for node in sorted(self.living))
        order = Reform(self.number, Topology(self.hosts, ranks), absent, peers)
        self.sums[order.number] = dict.fromkeys(range(sum(sizes)), 0)
        for node, daemon in self.living.items():
            self.network.at(self.network.now + 0.3 * random.random(), lambda n=node, d=daemon: self.tell(n, d, order))  # type: ignore[misc]

    def tell(self, node: int, daemon: VirtualDaemon, order: Reform) -> None:
        if daemon.loop.stopped or order.number != self.number:
            return  # the newer one, which replaces it, is on its way, or has come
        daemon.ordered(order)
        self.formations.append(weakref.ref(daemon._formation))
        for rank in order.topology.ranks[node]:
            worker = VirtualWorker(daemon, rank, 80_000)
            moment = self.network.now + 0.2 * self.network.random.random()
            self.network.at(moment, lambda worker=worker: self.join(worker, order))  # type: ignore[misc]

    def join(self, worker: VirtualWorker, order: Reform) -> None:
        if not worker.daemon.loop.stopped and worker.daemon._formation.number == order.number:
            worker.begin(self.add(worker, order))

    def add(self, worker: VirtualWorker, order: Reform) -> Iterator[Any]:
        """Adds up small and large tensors, again and again, with the number of the formation in each sum."""
        size, random = order.topology.size, self.network.random
        large = worker.memory.view("f4")
        for step in range(10_000):
            handle = next(worker.handles)
            if step % 3 == 2:
                large[:] = order.number + worker.rank
                submit = wire.Submit(handle, "large", clock(order.number, step), LARGE, wire.Place(1, 0))
            else:
                data = struct.pack("<2f", order.number, worker.rank)
                submit = wire.Submit(handle, "small", clock(order.number, step), SUM, None, data)
            worker.submit(submit)
            yield [handle]
            answer = worker.answers[handle]
            if not isinstance(answer, wire.Done):
                return
            if step % 3 == 2:
                assert (large == size * order.number + size * (size - 1) / 2).all()
            else:
                assert answer.inline is not None
                assert struct.unpack("<2f", answer.inline) == (size * order.number, size * (size - 1) / 2)
            self.sums[order.number][worker.rank] += 1
            yield 0.2 * random.random()

    def all_have_added(self) -> bool:
        """Tells whether all workers of the last formation have got sums enough."""
        return min(self.sums[self.number].values()) >= ENOUGH

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.network.now + seconds
        due: list[bool] = []
        self.network.at(until, lambda: due.append(True))
        self.network.run(lambda: bool(due), seconds + 1)


def clock(formation: int, step: int) -> int:
    """Returns the clock of an operation, of which each third one has the other name."""
    return wire.first_clock(wire.first_epoch(formation)) + (step // 3 if step % 3 == 2 else step - step // 3)


@pytest.fixture(autouse=True)
def words() -> Iterator[list[Any]]:
    """What daemons say to the launcher."""
    said: list[Any] = []
    with (
        patch("fusiond.app.daemon.tell_starter", said.append),
        patch("fusiond.membership.startup.tell_starter", said.append),
    ):
        yield said


def misfortune(launcher: Launcher) -> None:
    """Does something to the job."""
    random = launcher.network.random
    gone = [node for node in range(len(launcher.hosts)) if node not in launcher.living]
    kind = random.choice(["kill", "worker", "reform", "reform", "break"])
    if kind == "kill" and len(launcher.living) > 1:
        launcher.kill(random.choice(sorted(launcher.living)))
    elif kind == "worker":
        daemon = launcher.living[random.choice(sorted(launcher.living))]
        for rank in list(daemon._formation._links)[:1]:
            daemon._formation.worker_dispatch.worker_lost(rank, 1, "died")
    elif kind == "break":
        launcher.network.break_something()
    else:
        for node in gone:
            if random.random() < 0.7:
                launcher.start(node)
        launcher.reform()


def schedule(seed: int) -> None:
    network = Network(seed, rate=1e9, latency=1e-4)
    launcher = Launcher(network, network.random.choice([2, 3, 4]))
    launcher.reform()
    for _ in range(12):
        launcher.wait(network.random.choice([0.05, 0.3, 1.0]) * network.random.random() * 2)
        misfortune(launcher)
    launcher.wait(3.0)  # whoever is silent is noticed
    for node in range(len(launcher.hosts)):
        if node not in launcher.living:
            launcher.start(node)
    launcher.reform()
    network.run(launcher.all_have_added, 20)
    for daemon in launcher.living.values():
        assert daemon.failure == ""
        assert daemon._formation.number == launcher.number
        assert sorted(peer.node for peer in daemon.mesh._admitted.values()) == sorted(daemon.mesh._peers)
        assert len(daemon.mesh._reception.gate.ids) == len(launcher.living) - 1  # type: ignore[attr-defined]


@for_each("seed", range(8))
def test_whatever_happens_the_next_formation_of_those_that_live_is_whole(seed: int) -> None:
    schedule(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_schedules(seed: int) -> None:
    schedule(seed)


def test_nothing_of_a_formation_that_is_over_is_kept(words: list[Any]) -> None:
    network = Network(1, rate=1e9, latency=1e-4)
    launcher = Launcher(network, 3)
    for _ in range(6):
        launcher.reform()
        launcher.wait(0.8)
    network.run(launcher.all_have_added, 20)
    launcher.wait(3.0)  # until the last word of a connection, and what workers of that test would still say, is over
    gc.collect()
    alive = [found for reference in launcher.formations if (found := reference()) is not None]
    assert {formation.number for formation in alive} == {launcher.number}
    numbers = [word.number for word in words if isinstance(word, Reformed)]
    assert sorted(numbers) == sorted([number for number in range(1, 7) for _ in range(3)])
    assert not [word for word in words if isinstance(word, EpochOver)]


def test_a_survivor_that_has_given_a_daemon_up_says_that_it_needs_another(words: list[Any]) -> None:
    network = Network(2, rate=1e9, latency=1e-4)
    launcher = Launcher(network, 2)
    launcher.reform()
    network.run(launcher.all_have_added, 20)
    launcher.living[0].mesh.lose(1, "it was silent")
    launcher.wait(0.5)
    assert EpochOver(1, (1,), "node 1 (host host1) is lost: it was silent") in words
    order = Reform(2, Topology(launcher.hosts, ((0,), (1,))), (), tuple(d.endpoint() for d in launcher.living.values()))
    launcher.living[0].ordered(order)
    over = words[-1]
    assert isinstance(over, EpochOver)
    assert (over.number, over.lost) == (2, (1,))
    assert "needs another daemon" in over.reason
