"""Daemons of an elastic job as processes: they go from formation to formation, and their workers with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import (
    Abandon,
    Awake,
    DaemonConfig,
    Endpoint,
    EpochOver,
    Knock,
    Phase,
    Reform,
    Reformed,
    decode_line,
    encode_line,
)
from tests.fusiond.processes import JOB, NO_LIMITS, TIMEOUT_S, Daemons, kill, quiet, read_line, together

pytestmark = pytest.mark.multiprocess
SUM = wire.Signature("allreduce", "float32", (2,))
_SAID: Any = Phase | Reformed | Awake | EpochOver


class Elastic:
    """A job whose daemons the test starts, kills and reforms; it does what the launcher does, and no more.

    Attributes:
        clients: by (node, slot), which a worker keeps; its rank changes.
    """

    def __init__(self, directory: Path, nodes: int) -> None:
        # A machine that is busy enough is a far one to its peers, which get up to eight connections: descriptors count.
        self.job = Daemons(directory, [1] * nodes, **NO_LIMITS, FUSION_CONNECTIONS="1")
        self.hosts = tuple(f"host{node}" for node in range(nodes))
        self.endpoints: dict[int, Endpoint] = {}
        self.said: dict[int, list[Phase | Reformed | Awake | EpochOver]] = {}
        self.clients: dict[tuple[int, int], Client] = {}
        self.number = 0
        self.job.processes = [None] * nodes  # type: ignore[list-item]
        for node in range(nodes):
            self.start(node)

    def start(self, node: int) -> None:
        """Starts a daemon that knows of its own host only."""
        alone = Topology(self.hosts, tuple((0,) if other == node else () for other in range(len(self.hosts))))
        process = self.job.launch_as(DaemonConfig(JOB, node, alone, elastic=True))
        self.job.processes[node] = process
        answer = self.job.answer_of(process)
        assert isinstance(answer, Endpoint), answer
        self.endpoints[node] = answer
        self.said[node] = []

    def kill(self, node: int) -> None:
        """Kills a daemon; its workers end, too."""
        kill(self.job.processes[node])
        del self.endpoints[node]
        for place in [place for place in self.clients if place[0] == node]:
            self.clients.pop(place).close()

    def order(self, sizes: Sequence[int]) -> Reform:
        """Orders the next formation, with so many workers on each node, where a daemon runs."""
        self.number += 1
        starts = [sum(sizes[:node]) for node in range(len(sizes))]
        ranks = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        absent = tuple(node for node in range(len(sizes)) if node not in self.endpoints)
        peers = tuple(self.endpoints[node] for node in sorted(self.endpoints))
        reform = Reform(self.number, Topology(self.hosts, ranks), absent, peers)
        for node in self.endpoints:
            self.tell(node, reform)
        return reform

    def tell(self, node: int, order: Reform | Abandon | Knock) -> None:
        stdin = self.job.processes[node].stdin
        assert stdin is not None
        stdin.write(encode_line(order))
        stdin.flush()

    def await_word(self, node: int, wanted: type, number: int) -> Any:
        """Reads what a daemon says until there is such a word of that formation."""
        while True:
            found = decode_line(read_line(self.job.processes[node]).encode(), _SAID)
            self.said[node].append(found)
            if isinstance(found, wanted) and found.number == number:
                return found

    def form(self, sizes: Sequence[int]) -> None:
        """Goes over to a formation, with the workers that there are, over their connections, and new ones."""
        reform = self.order(sizes)
        for node in self.endpoints:
            self.await_word(node, Reformed, self.number)
        self.join(reform)

    def join(self, reform: Reform) -> None:
        """Has all workers say hello."""
        ranks = {
            (node, slot): rank for node, local in enumerate(reform.topology.ranks) for slot, rank in enumerate(local)
        }

        def hello(place: tuple[int, int], rank: int) -> Client:
            previous = self.clients.get(place)
            path = self.job.path(place[0])
            return Client(path, JOB, rank, TIMEOUT_S, previous, formation=reform.number)

        for place in [place for place in self.clients if place not in ranks]:
            self.clients.pop(place).close()
        for client in self.clients.values():
            assert client.leave()
        places = list(ranks)
        made = together({at: lambda at=at: hello(places[at], ranks[places[at]]) for at in range(len(places))})  # type: ignore[misc]
        self.clients = {places[at]: client for at, client in made.items()}

    def on_clients(self, action: Callable[[Client], Any]) -> list[Any]:
        """Runs an action with all clients at the same time; returns results and errors, by rank."""
        by_rank = {client.rank: client for client in self.clients.values()}
        done = together({rank: lambda client=client: action(client) for rank, client in by_rank.items()}, False)  # type: ignore[misc]
        return [done[rank] for rank in sorted(done)]

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.job.close()


@pytest.fixture
def elastic(short_directory: Path) -> Iterator[Callable[[int], Elastic]]:
    made: list[Elastic] = []

    def make(nodes: int) -> Elastic:
        made.append(Elastic(short_directory, nodes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def add(client: Client, name: str = "x") -> list[float]:
    """Adds (rank, 1) over all ranks."""
    operation = client.submit(name, SUM, inline=np.array([client.rank, 1], np.float32).tobytes())
    inline = client.wait(operation).inline
    assert inline is not None
    return list(np.frombuffer(inline, np.float32))


def add_large(client: Client) -> float:
    """Adds ranks in a tensor that takes many chunks, in the arena; returns what all elements are."""
    region = client.allocate(4_000_000)
    array = np.frombuffer(region.view, np.float32)[:1_000_000]
    array[:] = client.rank
    signature = wire.Signature("allreduce", "float32", (1_000_000,))
    client.wait(client.submit("large", signature, place=(region.segment, region.offset)))
    assert (array == array[0]).all()
    return float(array[0])


def descriptors(job: Daemons, node: int) -> int:
    return len(os.listdir(f"/proc/{job.processes[node].pid}/fd"))


def test_survivors_go_on_with_their_daemons_and_connections(elastic: Callable[[int], Elastic]) -> None:
    job = elastic(3)
    job.form([1, 1, 1])
    assert job.on_clients(add) == [[3, 3]] * 3
    sockets = {place: client.channel.socket.fileno() for place, client in job.clients.items()}
    pids = [process.pid for process in job.job.processes]
    for client in job.clients.values():
        if client.rank != 1:
            client.submit("never", SUM, inline=bytes(8))
    job.kill(1)
    with pytest.raises(HorovodInternalError, match=r"node 1 \(host host1\) is lost"):
        add(job.clients[0, 0])
    over = job.await_word(0, EpochOver, 1)
    assert over.lost == (1,)
    job.form([1, 0, 1])
    assert job.on_clients(add) == [[1, 2]] * 2  # ranks are dealt anew
    assert job.on_clients(add_large) == [1.0] * 2
    assert {place: client.channel.socket.fileno() for place, client in job.clients.items()} == {
        place: sockets[place] for place in ((0, 0), (2, 0))
    }
    job.start(1)
    job.form([2, 1, 1])
    assert job.on_clients(add) == [[6, 4]] * 4
    assert job.on_clients(add_large) == [6.0] * 4
    assert [job.job.processes[node].pid for node in (0, 2)] == [pids[0], pids[2]]
    for node in (0, 2):
        assert "Traceback" not in quiet(job.job.log(node))


def test_daemons_that_come_and_go_leave_no_descriptors_at_those_that_stay(elastic: Callable[[int], Elastic]) -> None:
    job = elastic(2)
    job.form([1, 1])
    job.on_clients(add)
    assert job.on_clients(add_large) == [1.0] * 2
    usual = descriptors(job.job, 0)
    for _ in range(3):
        job.kill(1)
        job.form([1, 0])
        job.start(1)
        job.form([1, 1])
        assert job.on_clients(add_large) == [1.0] * 2
    # What a closed connection still had to say has a moment.
    job.job.wait_until(lambda _: descriptors(job.job, 0) <= usual + 1)  # and the one of the question itself
    status = job.job.status(0)
    assert [peer["node"] for peer in status["mesh"]["peers"]] == [1]
    assert status["workers"]["connections"] == 2  # the worker's, and the question's


def test_an_epoch_that_is_abandoned_ends_for_who_waits_and_not_for_the_daemon(
    elastic: Callable[[int], Elastic],
) -> None:
    job = elastic(2)
    job.order([1, 1])
    job.await_word(0, Reformed, 1)
    told = together(
        {
            0: lambda: Client(job.job.path(0), JOB, 0, TIMEOUT_S, formation=1),
            1: lambda: job.tell(0, Abandon(1, "node 1 is lost")),
        },
        raising=False,
    )
    assert str(told[0]) == "node 1 is lost"
    assert job.await_word(0, EpochOver, 1) == EpochOver(1, (), "node 1 is lost")
    job.form([1, 1])
    assert job.on_clients(add) == [[1, 2]] * 2


def test_a_daemon_says_that_it_runs_in_a_formation_and_before_there_is_one(elastic: Callable[[int], Elastic]) -> None:
    job = elastic(2)

    def answer(node: int) -> None:
        job.tell(node, Knock())
        while not isinstance(decode_line(read_line(job.job.processes[node]).encode(), _SAID), Awake):
            pass

    answer(1)
    job.form([1, 1])
    answer(0)
    assert job.on_clients(add) == [[1, 2]] * 2


def test_a_worker_of_another_epoch_is_refused(elastic: Callable[[int], Elastic]) -> None:
    job = elastic(1)
    job.order([1])
    job.order([1])
    job.await_word(0, Reformed, 2)
    for formation in (0, 1):
        with pytest.raises(FusionError, match=f"place in membership epoch {formation}, and this daemon is in epoch 2"):
            Client(job.job.path(0), JOB, 0, TIMEOUT_S, formation=formation)
    client = Client(job.job.path(0), JOB, 0, TIMEOUT_S, formation=2)
    assert add(client) == [0, 1]
    client.close()
