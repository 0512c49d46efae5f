"""The mesh: ZeroMQ connections between the daemons of a job.

Every node has two ROUTER sockets on which it receives, one for control messages and one for payloads (`wire.Chunk`),
and to every peer one DEALER for control and `connections` for payloads, on which it only sends. So a large payload
never delays a heartbeat, and the two directions between a pair of nodes are independent.

The control channel is always under CURVE, with a `KeyGate` for the job's keys; the sender of a message is read from the
key that was admitted. Payload connections are known by their routing id, a random token that the receiver issued to
this peer over the control channel for one connection (`Tokens`), with a secret by which its messages are sealed
(`sealing`).

A connection that breaks is made again, and every message still arrives exactly once and in order (`delivery`). The
sender of a broken payload connection asks with `Reopen`, and is told a new ticket and what has come. A peer is lost
when its process has closed its connection and its port has no listener any more, when its event loop has been silent
for too long while this node watches it (`suspicion`, `neighbours`), when a connection cannot be made again in that
time, or when it does not take its messages. A refusal alone says nothing about a process: it may be a firewall's, and
is waited for as any other cut is. What a lost peer sends from then on is fenced: dropped and counted; it cannot connect
again, and is told so if it can be told.

In an elastic job peers come and go (`reform`). Each daemon that is admitted has an id of its own, so that what comes
late of one is not taken for that of another one on the same node. A newcomer may be refused by a peer that has not been
told of it yet, and tries again.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Protocol

import zmq

from fusion_rt import wire
from fusion_rt.core.clocks import measure
from fusion_rt.core.cost import CostModel
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host.bootstrap import DaemonConfig, Endpoint, PeerTable
from fusion_rt.settings import SHARED, Settings
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import NULL, Instrument
from fusiond.core.dispatch import Handlers
from fusiond.core.tracing import About, about
from fusiond.host.loop import EventLoop
from fusiond.transport import delivery, distance
from fusiond.transport.delivery import AT_ONCE, PayloadLink, ReceiveWindow, Sending
from fusiond.transport.flow_control import BORROW_FROM
from fusiond.transport.links import Events, Link
from fusiond.transport.peers import AwakeClock, Peer, Suspicion
from fusiond.transport.reception import Reception
from fusiond.transport.sealing import AES, CHACHA, has_aes_here
from fusiond.transport.sockets import LINGER, RunJobs, Sockets

_CLOSED = "its connection was closed"
_NOT_WANTED = "this node's daemon is not in the membership epoch that begins"
_ELASTIC_NODES = 1024  # of an elastic job at a time: libzmq wants to know beforehand
_LONGEST_VALUE = 200  # characters of a setting's value in the first message to a peer
_DISTANCES = 4  # in either direction, at which a node watches others
_AT_ONCE = 64  # connections that are begun in one step of the loop
_LOOK = 0.25  # seconds between looks for silent peers, at most


class MeshEvents(Protocol):
    """The daemon, as its mesh sees it."""

    def mesh_up(self) -> None:
        """Every peer has greeted this node, and every connection to them stands: once, and after each `reform`."""

    def peer_lost(self, node: int, why: str) -> None:
        """A peer is lost, for this reason."""


class Mesh:
    """This node's sockets to its peers.

    Args:
        loop: watches the sockets.
        config, settings: this node's place; encryption, sizes, time-outs.
        owner: hears of peers that come up and are lost.
        trace: records payloads, links and clocks.
        clock: nanoseconds, those of the recorder.

    Raises:
        FusionError: the address cannot be listened on.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: DaemonConfig,
        settings: Settings,
        owner: MeshEvents,
        trace: Instrument = NULL,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._loop = loop
        self._config = config
        self._settings = settings
        self._owner = owner
        self._trace = trace
        self._clock = clock
        self._up = False
        self._coming: set[int] = set()  # nodes that have not greeted, or not all connections to which have stood
        self._closed = False
        self._said: wire.PeerMessage | None = None  # the last message, which may go to many peers
        self._encoded = b""
        self._peers: dict[int, Peer] = {}  # by node
        self._admitted: dict[int, Peer] = {}  # the same, by id
        self._neighbours: frozenset[int] = frozenset()  # nodes that this one watches always
        self._watched: dict[int, Peer] = {}  # by node: those, and peers that owe it something
        self._ids = itertools.count()
        self._connects = False  # it has begun to
        self._aes = has_aes_here()
        self._look_every = min(_LOOK, settings.heartbeat_interval)
        self._awake = AwakeClock(loop.clock, self._look_every)
        self._at_first = settings.connections or 1
        self._most = settings.connections or distance.MOST_CONNECTIONS
        self._events = Events(self._link_stands, self._link_broke, self._link_wants, self._link_refused)
        nodes = _ELASTIC_NODES if config.elastic else len(config.topology.hosts)
        self._sockets = Sockets(settings, config.address, nodes)
        try:
            self._reception = Reception(
                loop,
                self._sockets,
                settings,
                self._admitted,
                self._handlers(),
                self.lose,
                self._awake,
                trace,
            )
        except FusionError as error:
            self._sockets.context.destroy(linger=0)
            raise FusionError(f"node {config.node} cannot listen on {config.address} for its peers: {error}") from None
        except zmq.ZMQError as error:
            self._sockets.context.destroy(linger=0)
            raise FusionError(
                f"node {config.node} cannot listen on {config.address} for its peers: {error.strerror}; choose "
                "another interface with --network-interface"
            ) from error

    def take_with(self, on_message: Callable[..., None]) -> None:
        """Sets the callback for the node, the message, and its payload if it has one, for every valid message of a
        peer that is not about its connections."""
        self._reception.on_message = on_message

    def work_on(self, lanes: RunJobs) -> None:
        """Has long payloads be sealed and opened by threads."""
        self._sockets.lanes = lanes

    def endpoint(self, pid: int) -> Endpoint:
        """Returns the endpoint at which peers reach this node."""
        public = self._sockets.public.decode()
        return Endpoint(self._config.node, pid, self._config.address, *self._reception.ports, public)

    def connect(self, table: PeerTable) -> None:
        """Admits the other nodes' keys and connects to each of them.

        Raises:
            FusionError: the table does not fit this job.
        """
        hosts = self._config.topology.hosts
        if [endpoint.node for endpoint in table.endpoints] != list(range(len(hosts))):
            raise FusionError(f"the table of peers does not name each of the {len(hosts)} nodes once, in order")
        self.reform(hosts, table.endpoints)

    def reform(self, hosts: Sequence[str], endpoints: Sequence[Endpoint]) -> tuple[list[int], list[int]]:
        """Goes over to other peers: drops those that are not named, connects to those that are new, and leaves the
        connections to all others as they are. Messages that wait to be sent to these are dropped.

        Args:
            hosts: names, by node.
            endpoints: of the nodes that take part; this one's does not matter.

        Returns: the nodes whose daemons have been dropped; and those that were declared lost before, and have to have a
        new daemon: connections that were given up do not come back.
        """
        named = {endpoint.node: endpoint for endpoint in endpoints if endpoint.node != self._config.node}
        left = [
            peer
            for node, peer in self._peers.items()
            if node not in named or named[node].public_key != peer.endpoint.public_key
        ]
        for peer in left:
            self._drop(peer)
        for peer in self._peers.values():
            peer.sending.forget()
        new = [self._admit(named[node], hosts[node]) for node in sorted(named.keys() - self._peers.keys())]
        # Only now: a peer that was told of us before we were told of it waits, where a refusal would be for good.
        self._reception.start()
        for peer in new:
            numbers = range(1, len(peer.incoming))
            tickets = tuple(self._reception.issue(peer, number) for number in numbers)
            self.send(peer.node, self._hello(tickets))
        self._open(deque(new))
        if not self._connects:
            self._connects = True
            self._loop.call_every(self._settings.heartbeat_interval, self._beat)
            self._loop.call_every(self._look_every, self._look)
        self._up = False
        self._coming = {node for node, peer in self._peers.items() if not peer.connected}
        self._loop.call_soon(self._check_up)
        return [peer.node for peer in left], self.lost

    def _open(self, peers: deque[Peer]) -> None:
        """Connects to new peers, some in each step of the loop, since two sockets and a monitor take their time."""
        for _ in range(min(len(peers), _AT_ONCE)):
            peer = peers.popleft()
            if not self._closed and self._peers.get(peer.node) is peer:
                peer.control.open()
        if peers:
            self._loop.call_soon(partial(self._open, peers))

    def _admit(self, endpoint: Endpoint, host: str) -> Peer:
        incoming = [ReceiveWindow() for _ in range(1 + self._at_first)]
        sending = Sending(self._settings.link_credit)
        peer = Peer(endpoint.node, host, next(self._ids), endpoint, self._suspicion(), incoming, sending)
        peer.limit(self._settings.link_credit, delivery.ACK_BYTES)
        peer.stride = self._most
        sending.posted = partial(self._posted, peer)
        self._peers[peer.node] = self._admitted[peer.id] = peer
        self._reception.admit(peer)
        self._add_link(peer, 0)
        return peer

    def _drop(self, peer: Peer) -> None:
        """Parts with a peer, of which nothing is left then but its last word on the way."""
        if not peer.lost:
            peer.give_up(_NOT_WANTED)
        self._reception.forget(peer)
        del self._peers[peer.node], self._admitted[peer.id]
        self._watched.pop(peer.node, None)
        self._loop.call_later(LINGER / 1000, peer.control.close)

    def limit(self, credit: int, acknowledged: int) -> None:
        """Limits, from now on, the bytes under way on each payload connection (`credit`; 0: any number), and those that
        are received before they are acknowledged (`acknowledged`)."""
        for peer in self._peers.values():
            peer.limit(credit, acknowledged)
            peer.sending.go_on()
            if peer.owes_much:
                peer.mention(wire.Ack())

    def stretch(self, node: int, link: CostModel) -> None:
        """Gives a far peer as many connections as its link asks for, if that is left to the mesh, and lets as much be
        under way on them as arrives. Both nodes do, each for what it sends."""
        peer = self._peers[node]
        if peer.lost or not distance.is_far(link):
            return
        wanted = self._settings.connections or distance.connections(link)
        for number in range(len(peer.links), 1 + wanted):
            self._link_wants(self._add_link(peer, number))
        if most := self._settings.link_credit:
            peer.pipe = distance.Pipe(link, wanted, link.link_credit(most), most)
            peer.limit(peer.pipe.credit, link.acknowledged_bytes())

    def send(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a control message; one to a lost peer is dropped, since everybody has been told of the loss.

        So is one to a peer that this node has not been told of: the job has failed before it began.
        """
        peer = self._peers.get(node)
        if peer is None or peer.lost or self._closed:
            return
        if message is not self._said:
            self._said, self._encoded = message, wire.encode(message)
        peer.send(self._encoded)
        if not peer.watched:
            self._watch(peer)

    def send_last(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a control message once the peer has received all payloads that were sent to it before."""
        if node in self._peers:
            self._peers[node].sending.when_received(lambda: self.send(node, message))

    def when_received(self, then: Callable[[], None]) -> None:
        """Calls back once all peers, but those that are lost, have received all payloads that were sent so far."""
        waiting = {peer.node for peer in self._peers.values() if not peer.lost}

        def received(node: int) -> None:
            waiting.discard(node)
            if not waiting:
                then()

        if not waiting:
            then()
        for node in tuple(waiting):
            self._peers[node].sending.when_received(partial(received, node))

    def hurry(self) -> None:
        """Sends messages that wait for payloads without waiting any longer."""
        for peer in self._peers.values():
            peer.sending.hurry()

    def send_payload(
        self,
        node: int,
        message: wire.Chunk | wire.Piece | wire.Probe,
        payload: bytes | memoryview,
        urgency: int = AT_ONCE,
    ) -> bool:
        """Sends a message with a payload, the sooner the less its `urgency` is (`sending`). Returns whether the payload
        is borrowed until the peer grants credit for it.

        A payload below `BORROW_FROM` bytes is the mesh's own once this returns. A larger one of a `Piece`, for which
        nobody grants credit, has to stay as it is for ever; whoever sent it may forget it.
        """
        peer = self._peers[node]
        if peer.lost or self._closed:
            return False
        nbytes, what = len(payload), about(message)
        borrowed = nbytes >= BORROW_FROM
        kept = payload if borrowed else bytes(payload)
        if not peer.sending.send(urgency, wire.encode(message), kept, borrowed, (what, nbytes)):
            self._trace.record(Kind.QUEUED, what.name, nbytes, what.clock, what.plan, 1, node)
        peer.sent_chunks += 1
        peer.sent_bytes += nbytes
        peer.probed_bytes += nbytes if isinstance(message, wire.Probe) else 0
        if not peer.watched:
            self._watch(peer)
        return borrowed

    def _posted(self, peer: Peer, sent: tuple[About, int], link: PayloadLink) -> None:
        """Records that a message with a payload was handed to a connection."""
        what, nbytes = sent
        number = peer.number_of(link.out.serial, link.number)
        self._trace.record(Kind.SENT, what.name, nbytes, what.clock, what.plan, number, peer.node)

    def close(self) -> None:
        """Closes every socket; messages already sent get a moment to leave."""
        if self._closed:
            return
        for peer in self._peers.values():
            peer.sending.flush()
            self.send(peer.node, wire.Leaving())
        self._closed = True
        self._reception.close()
        for peer in self._peers.values():
            for link in peer.links:
                link.close(LINGER)
        # linger=None keeps each socket's own: messages in the inboxes are dropped, sent ones may still leave.
        self._sockets.context.destroy(linger=None)

    def statistics(self) -> dict[str, object]:
        """Returns those of reception and of each peer, and the seconds in which this loop stood still."""
        now = self._awake()
        return {
            **self._reception.statistics(),
            "paused_seconds": round(self._awake.paused, 3),
            "peers": [peer.statistics(now) for peer in self._peers.values()],
        }

    def traffic(self) -> tuple[int, int]:
        """Returns the bytes of payload that were sent to peers, and received; without probes that measure links."""
        peers = self._peers.values()
        sent = sum(peer.sent_bytes - peer.probed_bytes for peer in peers)
        return sent, sum(peer.received_bytes for peer in peers)

    def figures(self) -> tuple[wire.LinkFigures, ...]:
        """Returns the figures of the links to all peers."""
        return tuple(peer.figures() for peer in self._peers.values())

    # --- connections --------------------------------------------------------------------------------------------------

    def _suspicion(self) -> Suspicion:
        return Suspicion(self._settings.heartbeat_interval, self._settings.heartbeat_timeout, self._awake())

    def _add_link(self, peer: Peer, number: int) -> Link:
        link = Link(self._loop, self._sockets, self._awake, peer.endpoint, number, self._events)
        link.cipher = peer.cipher
        peer.add_link(link, self._settings.heartbeat_interval, self._awake())
        return link

    def _peer_of(self, link: Link) -> Peer | None:
        """Returns whose connection that is; None where it was that of a peer that was dropped."""
        peer = self._peers.get(link.node)
        return peer if peer is not None and link in peer.links else None

    def _link_stands(self, link: Link) -> None:
        peer = self._peer_of(link)
        if peer is None:
            return
        if link.number:
            peer.sending.go_on()
        elif link.down_since is not None:  # acknowledgements may have been lost with the connection
            peer.mention(wire.Ack())
        if link.down_since is not None:
            self._trace.record(Kind.FOUND, link.name, peer=peer.node)
            peer.came_back(link, self._awake() - link.down_since)
        if peer.node in self._coming and peer.connected:
            self._coming.remove(peer.node)
            self._check_up()

    def _check_up(self) -> None:
        if self._up or self._closed or self._coming:
            return
        self._up = True
        self._choose_neighbours()
        for peer in self._peers.values():  # most owe an acknowledgement of the first messages
            self._watch(peer)
        self._owner.mesh_up()

    def _link_broke(self, link: Link) -> None:
        peer = self._peer_of(link)
        if peer is None:
            return
        if not peer.leaving:
            self._trace.record(Kind.LOST, link.name, peer=peer.node)
            peer.broke(link, self._awake())
            self._watch(peer)
        elif not link.number:
            self.lose(peer.node, _CLOSED)

    def _link_wants(self, link: Link) -> None:
        peer = self._peer_of(link)
        if peer is None or peer.lost or self._closed:
            return
        if link.number:
            self.send(peer.node, wire.Reopen(link.number))
        else:
            link.open()

    def _link_refused(self, link: Link, why: str) -> None:
        peer = self._peer_of(link)
        if peer is None or (why and self._config.elastic and not link.stood):  # it has not been told of us, and will be
            return
        if why or peer.hung_up or peer.leaving:
            self.lose(link.node, why or _CLOSED)

    def missing(self) -> list[int]:
        """Returns the nodes that have not come up yet."""
        return sorted(self._coming)

    @property
    def lost(self) -> list[int]:
        """The nodes that were declared lost."""
        return [peer.node for peer in self._peers.values() if peer.lost]

    def lose(self, node: int, why: str) -> None:
        """Declares a peer lost."""
        peer = self._peers.get(node)
        if peer is None or peer.lost or self._closed:
            return
        self._reception.refuse(peer)
        peer.give_up(why)
        self._watched.pop(node, None)
        if node in self._neighbours:
            self._choose_neighbours()
        self._owner.peer_lost(node, why)

    # --- peers' messages about connections ----------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return {
            wire.PeerHello: self._greet,
            wire.Heartbeat: self._beaten,
            wire.Ack: lambda peer, ack: None,  # its acknowledgement stands before every message
            wire.Reopen: self._reopen,
            wire.Reopened: self._reopened,
            wire.Leaving: self._leaving,
            wire.GivenUp: lambda peer, word: self.lose(peer.node, f"it has declared this node dead ({word.why})"),
        }

    def _reopen(self, peer: Peer, asked: wire.Reopen) -> None:
        if asked.number > self._most:
            raise WireError(f"it has no connection {asked.number}")
        while len(peer.incoming) <= asked.number:
            peer.incoming.append(ReceiveWindow())
        ticket = self._reception.issue(peer, asked.number)
        self.send(peer.node, wire.Reopened(asked.number, ticket, peer.incoming[asked.number].received))

    def _reopened(self, peer: Peer, answer: wire.Reopened) -> None:
        if answer.number >= len(peer.links):
            raise WireError(f"it was not asked for connection {answer.number}")
        link = peer.links[answer.number]
        link.out.acknowledge(answer.received)
        peer.sending.go_on()
        link.open(answer.ticket)

    def _leaving(self, peer: Peer, message: wire.Leaving) -> None:
        peer.leaving = True
        if not peer.control.stands:
            self.lose(peer.node, _CLOSED)

    @cached_property
    def _shared(self) -> dict[str, str]:
        return {knob.variable: shortened(str(getattr(self._settings, knob.name))) for knob in SHARED}

    def _hello(self, tickets: tuple[wire.Ticket, ...]) -> wire.PeerHello:
        hello = (wire.PROTOCOL_VERSION, self._config.job, self._config.node, tickets, self._aes)
        return wire.PeerHello(*hello, wire.peer_schema(), self._shared)

    def _greet(self, peer: Peer, hello: wire.PeerHello) -> None:
        mine = self._hello(())
        if hello.schema != mine.schema:
            raise WireError(
                f"it runs another version of fusion_rt than this host: the digest of its messages is {hello.schema!r}, "
                f"and that of those here {mine.schema!r}; install the same version on all hosts"
            )
        if differing := sorted(name for name in mine.shared if hello.shared.get(name) != mine.shared[name]):
            named = ", ".join(f"{name}={hello.shared.get(name)} (here {mine.shared[name]})" for name in differing)
            raise WireError(f"it was started with other settings than this host: {named}; give all hosts the same")
        ours = (wire.PROTOCOL_VERSION, self._config.job, peer.node, self._at_first)
        theirs = (hello.version, hello.job, hello.node, len(hello.tickets))
        if theirs != ours or peer.greeted:
            raise WireError(
                f"it says that it is (version, job, node, connections) {theirs}, where {ours} was expected; "
                "all hosts need the same version and settings"
            )
        peer.greeted = True
        peer.cipher = AES if self._aes and hello.aes else CHACHA
        for number, ticket in enumerate(hello.tickets, 1):
            self._add_link(peer, number).open(ticket)

    # --- liveness -----------------------------------------------------------------------------------------------------

    def _choose_neighbours(self) -> None:
        nodes = sorted([self._config.node, *(node for node, peer in self._peers.items() if not peer.lost)])
        self._neighbours = frozenset(neighbours(nodes, self._config.node))
        for node in self._neighbours:
            self._watch(self._peers[node])

    def _watch(self, peer: Peer) -> None:
        """Watches a peer, from which nothing need have come for long: a neighbour always, any other one until it owes
        nothing any more. (Before the connections to all stand, the time-out of the start counts.)"""
        if self._up and not peer.watched and not peer.lost:
            peer.watch(self._awake())
            self._watched[peer.node] = peer

    def _beat(self) -> None:
        for peer in (self._watched if self._up else self._peers).values():
            if not peer.lost and not self._closed:
                peer.asked_at = self._clock()
                peer.mention(wire.Heartbeat(peer.asked_at))

    def _beaten(self, peer: Peer, heartbeat: wire.Heartbeat) -> None:
        """Takes in a heartbeat of a peer, or its answer to one of ours."""
        came = self._clock()
        if not heartbeat.echoed:
            peer.suspicion.beat(self._awake())
            peer.mention(wire.Heartbeat(self._clock(), heartbeat.sent, came))
            return
        measured = measure(heartbeat.echoed, heartbeat.came, heartbeat.sent, came)
        if measured is None or heartbeat.echoed != peer.asked_at:
            return  # it is late by a whole interval, which says nothing, or makes no sense
        most = 2**32 - 1
        trip = min(-(-measured.round_trip // 1000), most)
        self._trace.record(Kind.CLOCK, "", measured.offset, 0, 0, trip, peer.node)

    def _look(self) -> None:
        """Looks for peers that are silent, for slow ones, and for connections that have been taken over."""
        now = self._awake()
        if self._closed:
            return
        self._reception.look()
        for node, peer in list(self._watched.items()):
            if peer.lost:  # with another one
                continue
            peer.look_for_slowness(now)
            if why := peer.overdue(now, self._settings.heartbeat_timeout):
                self.lose(node, why)
            elif node not in self._neighbours and not peer.owes:
                peer.watched = False
                del self._watched[node]


def neighbours(nodes: Sequence[int], node: int) -> list[int]:
    """Returns the nodes that a node watches, and that watch it: those at four distances in either direction, of which
    each is about the fourth root of N times the one before; all of up to nine. Nodes side by side may be in one rack,
    and fail together.

    Args:
        nodes: all N, ascending.
    """
    count, place = len(nodes), nodes.index(node)
    if count <= 2 * _DISTANCES + 1:
        return [other for other in nodes if other != node]
    distances = [0]
    for power in range(_DISTANCES):
        most = (count - 1) // 2 - (_DISTANCES - 1 - power)
        distances.append(max(distances[-1] + 1, min(round(count ** (power / _DISTANCES)), most)))
    return [nodes[(place + step) % count] for distance in distances[1:] for step in (distance, -distance)]


def shortened(value: str) -> str:
    """Returns a setting's value as daemons compare it: a long list of hosts by its beginning and a digest."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}... ({zlib.crc32(value.encode()):08x})"
