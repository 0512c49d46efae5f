"""Whole daemons and the links between them in one thread and in virtual time: no sockets, no processes, no sleeping.

All logic is the product's: `Daemon` with its engine, membership and ending, `Mesh`, `Reception`, `Link`,
`Peer`, `Sending`, delivery and credit. Replaced are the event loop's clock, libzmq (each connection is a queue over a
link with a rate and a latency), the kernel pool, and the local sockets of workers.

An event is either *work* (something arrives, a job is done, a worker goes on) or a *timer* of a daemon. When a timer
is next and no work is left, only time can move anything: if something waits for an open connection then, that is a
stall, which `Network.stalls` records.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import numpy.typing as npt
import zmq

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig, Endpoint, PeerTable
from fusion_rt.settings import Settings
from fusion_rt.tracing.recorder import NULL
from fusiond.app.daemon import Daemon
from fusiond.host.loop import Timer
from fusiond.transport.sockets import MORE
from fusiond.workers.connections import WorkerLink, Workers

Array = npt.NDArray[Any]
Callback = Callable[[], None]


class Network:
    """Virtual time, and links that carry `rate` bytes a second out of each node and take `latency` seconds.

    Args:
        seed: of delays, and of the order of events at the same time.
        rate, latency: of the links; control messages only take the latency. `rates`: of nodes that have another one.
        jitter: seconds by which anything may be later than that.

    Attributes:
        now: seconds.
        stalls: when, which node and which peer had something to send over an idle link that nothing but a timer moved.
        messages, nbytes: sent by each daemon.
        cut: nodes to and from which everything is lost, without a word.
        paused: until when the loop of a daemon stands still, by node.
    """

    def __init__(self, seed: int, rate: float, latency: float, jitter: float = 1e-4) -> None:
        self.random = random.Random(seed)
        self.rate, self.latency, self._jitter = rate, latency, jitter
        self.rates: dict[int, float] = {}
        self.now = 0.0
        self.stalls: list[tuple[float, int, int]] = []
        self.daemons: list[VirtualDaemon] = []
        self.connections: list[Connection] = []
        self.descriptors = itertools.count(1)
        self.inboxes: dict[tuple[str, int], Inbox] = {}
        self.free = defaultdict[int, float](float)  # when a node's link has carried what it was given
        self.cut: set[int] = set()
        self.paused: dict[int, float] = {}
        self.messages = Counter[int]()
        self.nbytes = Counter[int]()
        self._serial = itertools.count()
        self._events: list[tuple[float, int, bool, Callback]] = []
        self._work = 0

    def late(self) -> float:
        """Draws the seconds by which an event is late."""
        return self.random.random() * self._jitter

    def at(self, time: float, callback: Callback, timer: bool = False) -> None:
        """Calls back at a time; `timer`: as a timer, not as work."""
        self._work += not timer
        heapq.heappush(self._events, (time, next(self._serial), timer, callback))

    def soon(self, callback: Callback) -> None:
        """Calls back now, as work."""
        self.at(self.now, callback)

    def step(self, node: int, callback: Callback) -> None:
        """Runs one callback of a daemon's event loop."""
        callback()

    def break_something(self) -> None:
        """Breaks one of the connections; messages under way on it are lost."""
        standing = [connection for connection in self.connections if connection.stands]
        if standing:
            self.random.choice(standing).break_off()

    def gone(self, node: int) -> None:
        """Closes the sockets of a node's daemon; the others notice when they have received its last messages."""
        for connection in list(self.connections):
            if connection.inbox.sockets.daemon is self.daemons[node]:
                self.at(self.now + self.latency + 2 * self._jitter, connection.break_off)

    def run(self, done: Callable[[], bool], seconds: float) -> None:
        """Runs events until `done`; fails when that takes longer than `seconds`."""
        until = self.now + seconds
        while not done():
            time, _, timer, callback = heapq.heappop(self._events)
            if timer and not self._work:
                self._look_for_stalls()
            assert time <= until, f"nothing has come of it after {seconds} s"
            self._work -= not timer
            self.now = max(self.now, time)
            callback()

    def _look_for_stalls(self) -> None:
        for daemon in self.daemons:
            for peer in daemon.mesh._peers.values():
                if len(peer.sending) and any(link.stands for link in peer.links[1:]):
                    self.stalls.append((self.now, daemon.node, peer.node))


class VirtualLoop:
    """An `EventLoop` on the network's clock."""

    def __init__(self, network: Network, node: int) -> None:
        self.network, self.node = network, node
        self.readers: dict[int, Callback] = {}
        self.stopped = False
        self.ended: Callback = lambda: None

    def clock(self) -> float:
        return self.network.now

    def add_reader(self, fd: int, callback: Callback) -> None:
        self.readers[fd] = callback

    def remove(self, fd: int) -> None:
        self.readers.pop(fd, None)

    def call_soon(self, callback: Callback) -> None:
        self.network.soon(lambda: self._run(callback))

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(callback)
        self.network.at(self.network.now + seconds, lambda: self._due(timer), timer=True)
        return timer

    def call_every(self, seconds: float, callback: Callback) -> None:
        def again() -> None:
            self.call_later(seconds, again)
            callback()

        # Daemons are not started in the same moment.
        self.call_later(seconds * self.network.random.random(), again)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.network.soon(self.ended)

    def readable(self, fd: int) -> None:
        """Calls the reader of a descriptor, on which something has come."""
        self.network.soon(lambda: self._run(self.readers.get(fd)))

    def _due(self, timer: Timer) -> None:
        self._run(timer.callback)

    def _run(self, callback: Callback | None) -> None:
        network, until = self.network, self.network.paused.get(self.node, 0.0)
        if until > network.now:
            network.at(until, lambda: self._run(callback))
        elif callback is not None and not self.stopped:
            network.step(self.node, callback)


# --- libzmq -----------------------------------------------------------------------------------------------------------


class Frame:
    """A frame of a received message."""

    def __init__(self, data: bytes, more: bool, admitted_as: int, descriptor: int) -> None:
        self.buffer = memoryview(data)
        self.more = more
        self._admitted_as, self._descriptor = admitted_as, descriptor

    def __len__(self) -> int:
        return len(self.buffer)

    def get(self, option: Any) -> str | int:
        return str(self._admitted_as) if option == "User-Id" else self._descriptor


class Gate:
    """A node's `KeyGate`, as far as it decides about keys."""

    def __init__(self, context: Any, id_of_token: Any) -> None:
        self.ids: dict[str, int] = {}
        self.admitted = self.refused = 0
        self.socket = MagicMock()

    def allow(self, public_key: str, id: int) -> None:
        self.ids[public_key] = id

    def forbid(self, id: int) -> None:
        self.ids = {key: owner for key, owner in self.ids.items() if owner != id}

    def answer(self) -> None:
        pass


class Inbox:
    """A listening socket."""

    def __init__(self, network: Network, sockets: VirtualSockets) -> None:
        self.sockets = sockets
        self._fd = next(network.descriptors)
        self._parts: deque[bytes | Frame] = deque()

    def fileno(self) -> int:
        return self._fd

    def take(self, token: bytes, parts: Sequence[bytes], admitted_as: int, descriptor: int) -> None:
        """Takes a message that has come on a connection."""
        frames = [Frame(part, index + 1 < len(parts), admitted_as, descriptor) for index, part in enumerate(parts)]
        self._parts += [token, *frames]
        self.sockets.daemon.loop.readable(self._fd)

    def recv(self, flags: int, copy: bool = True) -> bytes | Frame:
        if not self._parts:
            raise zmq.Again
        return self._parts.popleft()


class Monitor:
    """A socket's monitor, which reports events of its connections."""

    def __init__(self, network: Network, node: int) -> None:
        self._network, self._node = network, node
        self._fd = next(network.descriptors)
        self._events: deque[list[bytes]] = deque()

    def fileno(self) -> int:
        return self._fd

    def tell(self, event: int) -> None:
        self._events.append([struct.pack("=hi", event, 0), b""])
        self._network.daemons[self._node].loop.readable(self._fd)

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._events:
            raise zmq.Again
        return self._events.popleft()

    def close(self, linger: int = 0) -> None:
        self._events.clear()


class Connection:
    """A DEALER. Control messages take the latency; payloads go one after the other over the node's link.

    A payload that was not copied is read when it arrives, the latest moment at which libzmq might.
    """

    def __init__(self, network: Network, node: int, key: str, token: bytes) -> None:
        self.network, self.node, self.token = network, node, token
        self._key, self._admitted_as = key, -1
        self.stands = self.closed = self._lingers = False
        self.monitor = Monitor(network, node)
        self.carries_payload = bool(token)
        self._descriptor = next(network.descriptors)
        self._parts: list[Any] = []
        self._arrived = 0.0  # when the last message arrives

    def connect(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self.inbox = self.network.inboxes[host, int(port)]
        self.network.connections.append(self)

        def connected() -> None:
            there = self.inbox.sockets.daemon
            if self.closed or there.loop.stopped:
                return
            admitted_as = there.mesh._reception.gate.ids.get(self._key)  # type: ignore[attr-defined]
            if admitted_as is None:
                self.monitor.tell(int(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
                self.monitor.tell(int(zmq.EVENT_DISCONNECTED))
                return
            self._admitted_as = admitted_as
            self.stands = True
            self.monitor.tell(int(zmq.EVENT_HANDSHAKE_SUCCEEDED))

        self.network.at(self.network.now + 2 * self.network.latency + self.network.late(), connected)

    def send(self, data: Any, flags: int, copy: bool = True) -> None:
        if not self.stands:
            raise zmq.Again
        self._parts.append(bytes(data) if copy else data)
        if flags == MORE:
            return
        parts, self._parts = self._parts, []
        network = self.network
        network.messages[self.node] += 1
        network.nbytes[self.node] += sum(map(len, parts))
        leaves = network.now
        if self.carries_payload:
            rate = network.rates.get(self.node, network.rate)
            leaves = max(leaves, network.free[self.node]) + sum(map(len, parts)) / rate
            network.free[self.node] = leaves
        self._arrived = max(self._arrived, leaves + network.latency + network.late())

        def arrives() -> None:
            lost = network.cut and not network.cut.isdisjoint((self.node, self.inbox.sockets.daemon.node))
            if (self.stands or self._lingers) and not lost:
                self.inbox.take(self.token, [bytes(part) for part in parts], self._admitted_as, self._descriptor)

        network.at(self._arrived, arrives)

    def break_off(self) -> None:
        """Breaks the connection: messages under way are lost, and the sender is told."""
        if not self.stands:
            return
        self.stands = False
        self.monitor.tell(int(zmq.EVENT_DISCONNECTED))

    def disable_monitor(self) -> None:
        pass

    def close(self, linger: int) -> None:
        """Closes the connection; with time to linger, sent messages still arrive."""
        self._lingers = self.stands and bool(linger)
        self.stands, self.closed = False, True
        if self in self.network.connections:
            self.network.connections.remove(self)


class VirtualSockets:
    """A node's `Sockets`."""

    def __init__(self, network: Network, daemon: VirtualDaemon, serial: int, address: str) -> None:
        self.daemon = daemon
        self.public = b"%040d" % (1000 * serial + daemon.node)
        self.encrypts = True
        self.lanes = None
        self.context = MagicMock()
        self._network, self._node, self._address = network, daemon.node, address

    def encrypts_payload(self, address: str) -> bool:
        return True

    def control_inbox(self) -> tuple[Inbox, int]:
        return self._inbox(1)

    def payload_inbox(self, most: int) -> tuple[Inbox, int]:
        return self._inbox(2)

    def outbox(self, endpoint: Endpoint, token: bytes = b"") -> tuple[Connection, Monitor]:
        connection = Connection(self._network, self._node, self.public.decode(), token)
        return connection, connection.monitor

    def monitor(self, socket: Connection | Inbox) -> Monitor:
        return socket.monitor if isinstance(socket, Connection) else Monitor(self._network, self._node)

    def accepted(self, inbox: Inbox) -> Any:
        return MagicMock()  # nobody is a stranger

    def _inbox(self, port: int) -> tuple[Inbox, int]:
        inbox = self._network.inboxes[self._address, port] = Inbox(self._network, self)
        return inbox, port


# --- daemons and workers ----------------------------------------------------------------------------------------------


class VirtualDaemon(Daemon):
    """A daemon without a starter, up to `run`.

    Attributes:
        heard: the payloads and departures that have come, in order: the node, and the message.
    """

    def __init__(
        self,
        network: Network,
        topology: Topology,
        node: int,
        settings: Settings,
        elastic: bool = False,
        serial: int = 1,
    ) -> None:
        self.network, self.node, self.loop = network, node, VirtualLoop(network, node)
        self.may_return = False
        self.heard: list[tuple[int, type]] = []
        address = f"10.{serial}.{node // 250}.{node % 250 + 1}"
        sockets = VirtualSockets(network, self, serial, address)
        with (
            patch("fusiond.app.daemon.EventLoop", lambda: self.loop),
            patch("fusiond.app.daemon.Trace", lambda *_: NULL),
            patch("fusiond.app.daemon.listen", MagicMock()),
            patch("fusiond.app.daemon.Directory", MagicMock()),
            patch("fusiond.app.daemon.StackReader", MagicMock()),
            patch("fusiond.app.daemon.TimelineController", MagicMock()),
            patch("fusiond.transport.mesh.Sockets", lambda *_: sockets),
            patch("fusiond.transport.reception.KeyGate", Gate),
        ):
            config = DaemonConfig("job", node, topology, address, attached=elastic, elastic=elastic, serial=serial)
            super().__init__(config, settings)
        assert self._mesh is not None
        self.mesh = self._mesh
        self.mesh._clock = lambda: int(network.now * 1e9)
        self._parts.workers = self._parts.pool = self  # type: ignore[assignment]
        self._formation.begin()
        self.mesh.take_with(self._hear)
        self.loop.call_every(1.0, self._tick)
        self.loop.ended = self._end
        if not elastic:
            self._formation.starting.begin()

    @property
    def failure(self) -> str:
        """The reason for which the job has failed here."""
        return self._formation.ending.failure

    def join(self, worker: VirtualWorker) -> None:
        formation = self._formation.number
        hello = wire.Hello(wire.PROTOCOL_VERSION, "job", worker.rank, worker.rank, formation=formation)
        worker.link.events = events = self._formation.worker_dispatch
        self.network.step(self.node, lambda: events.worker_joined(worker.link, hello))

    def tell(self, worker: VirtualWorker, message: wire.WorkerMessage) -> None:
        """Delivers a message of a worker."""
        decoded = wire.decode_worker_message(wire.encode(message))
        events = worker.link.events
        assert events is not None
        if isinstance(decoded, wire.Bye):
            self.network.step(self.node, lambda: events.worker_left(worker.rank, decoded))
        else:
            self.network.step(self.node, lambda: events.handlers[type(decoded)](worker.link, decoded))

    def _hear(self, node: int, message: wire.PeerMessage, *payload: memoryview) -> None:
        if payload or isinstance(message, wire.Departed):
            self.heard.append((node, type(message)))
        self._formation.peer_dispatch.receive(node, message, *payload)

    def _end(self) -> None:
        """Ends the daemon, as at the end of `run`."""
        self.mesh.close()
        self.network.gone(self.node)

    # --- `Workers` and `KernelPool` ---

    events: Any = None  # of `Workers`; each worker here remembers its own

    answer = Workers.answer

    def send(self, link: WorkerLink, message: wire.DaemonMessage, fd: int = -1) -> None:
        worker: VirtualWorker = link.sock  # type: ignore[assignment]
        self.network.soon(lambda: worker.hear(wire.decode_daemon_message(wire.encode(message))))

    def run(self, jobs: Any = (), then: Any = None) -> int:
        def work() -> None:
            error = None
            for job in jobs:
                try:
                    job()
                except Exception as failure:  # the daemon reports it
                    error = failure
            self.network.step(self.node, lambda: then(error))

        self.network.at(self.network.now + self.network.late(), work)
        return 0


class VirtualWorker:
    """A worker whose script is a generator: it yields messages with handles to wait for, or seconds to compute for.

    Attributes:
        answers: of the daemon, by handle.
        memory: its arena, one segment.
        failures: the sentences among them.
        seconds: what its steps took.
        over: the script has ended, and the worker has said goodbye.
    """

    def __init__(self, daemon: VirtualDaemon, rank: int, nbytes: int) -> None:
        self.daemon, self.rank = daemon, rank
        self.link = WorkerLink(self, rank)  # type: ignore[arg-type]
        self.memory = self.link.memory[1] = np.zeros(nbytes, np.uint8)
        self.answers: dict[int, wire.DaemonMessage] = {}
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self.started = self.over = False
        self.handles = itertools.count(1)
        self._script: Iterator[Any] = iter(())
        self._awaited: set[int] = set()

    def begin(self, script: Iterator[Any]) -> None:
        """Joins, and runs a script once the worker is welcome."""
        self._script = script
        self.daemon.join(self)

    def submit(self, message: wire.Submit | wire.Ready | wire.Propose) -> int:
        self.daemon.tell(self, message)
        return message.handle

    def hear(self, message: wire.DaemonMessage) -> None:
        if isinstance(message, wire.Welcome):
            self.started = True
            self._go_on()
            return
        if isinstance(message, (wire.Failed, wire.JobFailed)):
            self.failures.append(message.message)
        handle = getattr(message, "handle", 0)
        self.answers[handle] = message
        if handle in self._awaited:
            self._awaited.remove(handle)
            if not self._awaited:
                self._go_on()

    def _go_on(self) -> None:
        network = self.daemon.network
        for wanted in self._script:
            if isinstance(wanted, float):
                network.at(network.now + wanted, self._go_on)
                return
            self._awaited = {handle for handle in wanted if handle not in self.answers}
            if self._awaited:
                return
        self.over = True
        self.daemon.tell(self, wire.Bye())


def job(network: Network, local_sizes: Sequence[int], nbytes: int, **settings: Any) -> list[VirtualWorker]:
    """Makes daemons whose connections are about to be made, and workers that have not come yet, in order of rank."""
    starts = [sum(local_sizes[:node]) for node in range(len(local_sizes))]
    ranks = tuple(tuple(range(start, start + size)) for start, size in zip(starts, local_sizes, strict=True))
    topology = Topology(tuple(f"host{node}" for node in range(len(local_sizes))), ranks)
    made = Settings(**settings)
    network.daemons = [VirtualDaemon(network, topology, node, made) for node in range(len(local_sizes))]
    table = PeerTable(tuple(daemon.endpoint() for daemon in network.daemons))
    for daemon in network.daemons:
        daemon.mesh.connect(table)
    return [VirtualWorker(network.daemons[node], rank, nbytes) for node, local in enumerate(ranks) for rank in local]
