"""The faults of the soak: those that every operation has to survive, and those that end a job with a sentence."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from benchmarks.netlab import Netlab
from tests.faults import nemesis
from tests.faults.soak_job import SoakJob

# Half of the time-out of heartbeats may be too long already. TCP sends what was lost again after 0.2, 0.6 and 1.4 s, so
# that silence of 0.8 s on the network lasts for 1.4 s; and this machine may be slow, too.
SHORT_S = (0.05, 0.8)
KILLED_S = 5.0  # limit for all ranks to notice a closed connection; it takes a fraction of a second
SILENT_S = 6.0  # the limit of heartbeats, see `soak_job.TIMES`
STALLED_S = 8.0  # the limit of operations
MARGIN_S = 6.0
_GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("16030100a5010000a10303") + bytes(160),  # a TLS hello
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32),
)


# --- to be survived ---------------------------------------------------------------------------------------------------


class Target(Protocol):
    """A job that is to survive faults.

    Attributes:
        lab: where its nodes are; None: all on loopback.
    """

    lab: Netlab | None

    @property
    def nodes(self) -> int:
        """Number of its nodes."""

    def daemon(self, node: int) -> nemesis.Process:
        """Returns the daemon of a node."""

    def workers(self) -> Sequence[nemesis.Process]:
        """Returns all workers, by rank."""

    def addresses(self, node: int) -> list[tuple[str, int]]:
        """Returns where a node's daemon listens: for control, then for payloads."""

    def connection(self, node: int) -> socket.socket:
        """Opens a connection to the local socket of a node's daemon."""

    def hang_daemon(self, node: int, seconds: float) -> None:
        """Lets the daemon of a node hold its interpreter's lock."""

    def hang_worker(self, rank: int, seconds: float) -> None:
        """Lets a worker hold its interpreter's lock before its next step."""


def reset(job: Target, chooser: random.Random) -> None:
    """Resets connections from one node to another: those for control, those for payloads, or both."""
    assert job.lab is not None
    host, peer = chooser.sample(range(job.nodes), 2)
    job.lab.reset(host, peer, chooser.choice([*(port for _, port in job.addresses(peer)), None]))


def flap(job: Target, chooser: random.Random) -> None:
    """Takes the link of a host down for a while."""
    assert job.lab is not None
    with nemesis.link_down(job.lab, chooser.randrange(job.nodes)):
        time.sleep(chooser.uniform(*SHORT_S))


def silence(job: Target, chooser: random.Random) -> None:
    """Cuts a host off for a while."""
    assert job.lab is not None
    with job.lab.cut_off(chooser.randrange(job.nodes)):
        time.sleep(chooser.uniform(*SHORT_S))


def one_way_silence(job: Target, chooser: random.Random) -> None:
    """Drops packets from one host to another for a while."""
    assert job.lab is not None
    with job.lab.dropping(*chooser.sample(range(job.nodes), 2)):
        time.sleep(chooser.uniform(*SHORT_S))


def reject(job: Target, chooser: random.Random) -> None:
    """Resets the connections from one host to another, and has a router answer with ICMP errors for a while."""
    assert job.lab is not None
    pair = chooser.sample(range(job.nodes), 2)
    with job.lab.rejecting(*pair, chooser.choice(["prohibit", "unreachable"])):
        job.lab.reset(*pair)
        time.sleep(chooser.uniform(*SHORT_S))


def slow(job: Target, chooser: random.Random) -> None:
    """Slows a host's link down for a while."""
    assert job.lab is not None
    with nemesis.slow_link(job.lab, chooser.randrange(job.nodes), f"{chooser.choice([20, 50, 200])}mbit"):
        time.sleep(chooser.uniform(0.2, 1.5))


def stop_daemon(job: Target, chooser: random.Random) -> None:
    """Stops a daemon for a while."""
    with nemesis.stopped(job.daemon(chooser.randrange(job.nodes))):
        time.sleep(chooser.uniform(*SHORT_S))


def hang_daemon(job: Target, chooser: random.Random) -> None:
    """Lets a daemon hold its interpreter's lock for a while."""
    job.hang_daemon(chooser.randrange(job.nodes), chooser.uniform(*SHORT_S))


def stop_worker(job: Target, chooser: random.Random) -> None:
    """Stops a worker for a while."""
    with nemesis.stopped(chooser.choice(job.workers())):
        time.sleep(chooser.uniform(*SHORT_S))


def hang_worker(job: Target, chooser: random.Random) -> None:
    """Lets a worker hold its interpreter's lock for a while."""
    job.hang_worker(chooser.randrange(len(job.workers())), chooser.uniform(*SHORT_S))


def strangers(job: Target, chooser: random.Random) -> None:
    """Lets strangers connect to a daemon and its local socket, send garbage or nothing, and go."""
    node = chooser.randrange(job.nodes)
    with contextlib.ExitStack() as stack:
        for _ in range(chooser.randint(1, 20)):
            local = stack.enter_context(job.connection(node))
            with contextlib.suppress(ConnectionError):
                local.send(chooser.randbytes(chooser.randint(1, 2000)))
        if job.lab is None:  # the hosts of a lab cannot be reached from outside
            for _ in range(chooser.randint(1, 20)):
                sock = stack.enter_context(socket.create_connection(chooser.choice(job.addresses(node))))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(chooser.choice((*_GARBAGE, chooser.randbytes(500), b"")))


OF_NETWORK = (reset, flap, silence, one_way_silence, reject, slow)
OF_PROCESSES = (stop_daemon, hang_daemon, stop_worker, hang_worker, strangers)


# --- fatal ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blow:
    """A fault that ends the job.

    Attributes:
        began: when, by the monotonic clock.
        limit: seconds in which every survivor has to have raised.
        sentences: by surviving rank: what its error has to contain, a regular expression.
    """

    began: float
    limit: float
    sentences: dict[int, str]


def _others_blame(job: SoakJob, nodes: tuple[int, ...], own: str) -> dict[int, str]:
    """Returns the sentences of a fault of nodes: other ranks name one of these nodes, their own ranks say `own`."""
    hosts = job.topology.hosts
    culprit = "|".join(rf"node {node} \(host {hosts[node]}\)" for node in nodes)
    return {rank: own if job.topology.node_of(rank) in nodes else culprit for rank in job.ranks}


@contextmanager
def kill_worker(job: SoakJob, chooser: random.Random) -> Iterator[Blow]:
    """Kills a worker by SIGKILL."""
    victim = chooser.choice(list(job.ranks))
    host = job.topology.hosts[job.topology.node_of(victim)]
    began = nemesis.kill(job.ranks[victim].process)
    told = rf"rank {victim} \(host {host}, pid {job.ranks[victim].process.pid}\)"
    yield Blow(began, KILLED_S, {rank: told for rank in job.ranks if rank != victim})


@contextmanager
def kill_daemon(job: SoakJob, chooser: random.Random) -> Iterator[Blow]:
    """Kills a daemon by SIGKILL."""
    node = chooser.randrange(len(job.topology.hosts))
    began = nemesis.kill(job.daemons.processes[node])
    yield Blow(began, KILLED_S, _others_blame(job, (node,), r"the daemon of rank \d+'s node"))


@contextmanager
def stop_daemon_for_long(job: SoakJob, chooser: random.Random) -> Iterator[Blow]:
    """Stops a daemon until the others have declared it dead, and lets it go on."""
    node = chooser.randrange(len(job.topology.hosts))
    began = time.monotonic()
    own = {rank for rank in job.ranks if job.topology.node_of(rank) == node}
    blow = Blow(began, SILENT_S + MARGIN_S, _others_blame(job, (node,), r"node \d+ \(host"))
    with nemesis.stopped(job.daemons.processes[node]):
        job.wait(
            lambda: all(state.over for rank, state in job.ranks.items() if rank not in own),
            blow.limit + MARGIN_S,
            "the ranks of other nodes to raise",
        )
    # Its own ranks count from when it is back.
    yield Blow(began, time.monotonic() - began + SILENT_S + MARGIN_S, blow.sentences)


@contextmanager
def stop_worker_for_long(job: SoakJob, chooser: random.Random) -> Iterator[Blow]:
    """Stops a worker until an operation that waits for it has failed."""
    victim = chooser.choice(list(job.ranks))
    host = job.topology.hosts[job.topology.node_of(victim)]
    with nemesis.stopped(job.ranks[victim].process):
        others = {rank: rf"rank {victim} \(host {host}" for rank in job.ranks if rank != victim}
        yield Blow(time.monotonic(), STALLED_S + MARGIN_S, others)
        nemesis.kill(job.ranks[victim].process)


@contextmanager
def partition(job: SoakJob, chooser: random.Random) -> Iterator[Blow]:
    """Cuts a host off for good."""
    assert job.lab is not None
    node = chooser.randrange(len(job.topology.hosts))
    with job.lab.cut_off(node):
        yield Blow(time.monotonic(), SILENT_S + MARGIN_S, _others_blame(job, (node,), r"node \d+ \(host"))


@contextmanager
def one_way_partition(job: SoakJob, chooser: random.Random) -> Iterator[Blow]:
    """Drops packets from one host to another for good; all ranks name one of the two."""
    assert job.lab is not None
    sender, receiver = chooser.sample(range(len(job.topology.hosts)), 2)
    with job.lab.dropping(sender, receiver):
        names = _others_blame(job, (sender, receiver), r"node \d+ \(host")
        yield Blow(time.monotonic(), 2 * SILENT_S + MARGIN_S, names)


FATAL_OF_NETWORK = (partition, one_way_partition)
FATAL_OF_PROCESSES = (kill_worker, kill_daemon, stop_daemon_for_long, stop_worker_for_long)

Fault = Callable[[Target, random.Random], None]
Fatal = Callable[[SoakJob, random.Random], contextlib.AbstractContextManager[Blow]]


def check(job: SoakJob, blow: Blow) -> tuple[float, list[str]]:
    """Waits until all survivors have raised. Returns the seconds of the last one, and errors as sentences."""
    job.wait(
        lambda: all(job.ranks[rank].over for rank in blow.sentences),
        blow.limit + MARGIN_S,
        "every survivor to raise",
    )
    wrong = []
    for rank, sentence in blow.sentences.items():
        state = job.ranks[rank]
        if not re.search(sentence, state.error):
            wrong.append(f"rank {rank} did not name the culprit ({sentence}): {state.error or 'it ended'}")
    took = max(job.ranks[rank].at for rank in blow.sentences) - blow.began
    if took > blow.limit:
        wrong.append(f"the last survivor raised after {took:.1f} s, and not within {blow.limit:g} s")
    return took, wrong
