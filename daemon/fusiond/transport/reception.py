"""Reception from peers: it admits them, and finds a message's sender and whether it is new.

A payload connection is known by its routing id, a random *token* that this node has told one peer over the control
channel, for one of its connections; it is good for one connection of TCP. With it goes a secret, from which the keys of
that connection follow (`sealing`). When it breaks, the peer gets others. A connection is ended here when a message on
it is not as the peer sent it, and the peer sends that message again on the next one. A token that comes on a second
connection, or was replaced, is refused. Connections are told apart by the descriptor that libzmq reads them from.

A token is not encrypted on its way. Somebody who cuts its connection off, or takes it over, can send frames of which no
message is made, and libzmq keeps the frames of a message until the last one has come. So a payload connection is ended
also when more has arrived on it than a peer may have under way (`Inbox.look`).
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket as sockets_of_python
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.host.pending import Pending
from fusion_rt.settings import Settings
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import Instrument
from fusiond.core.dispatch import Handlers
from fusiond.core.tracing import about
from fusiond.host.loop import EventLoop
from fusiond.transport import delivery, probe
from fusiond.transport.accepted_sockets import AcceptedSockets, Address, hung_up
from fusiond.transport.peers import AwakeClock, Peer
from fusiond.transport.sealing import Damaged, Opener, new_secret
from fusiond.transport.sockets import CONTROL_FRAME, LANE_FROM, MAX_HEADER, NOW, Socket, Sockets
from fusiond.transport.zap import KeyGate

_log = logging.getLogger("fusiond")
_REMEMBERED = 1024  # replaced tokens, which tell late messages from those of strangers
_UNNUMBERED = (wire.Heartbeat, wire.Ack, wire.GivenUp)
_WITH_PAYLOAD = (wire.Chunk, wire.Piece, wire.Probe)
_STRANGERS_OF_HOST, _STRANGERS = 16, 64  # unauthenticated connections that are left open, from one host and in all
_FRAMES = 2 + wire.MAX_MESSAGE // CONTROL_FRAME  # of a message that a stranger may send, its first one not counted
_SHORT_HEAD, _LONG_HEAD = 2, 9  # bytes of ZMTP in front of a frame of less than 256 bytes, and of a longer one
_LOOKS = 64  # connections that are looked at together: a system call for each
_UNDER_WAY = 4  # times the credit of a connection, that may have arrived on it and not been taken
_ANY_CREDIT = 128 * 1024 * 1024  # bytes, where it is not limited
_BATCH = 32  # messages taken before other events get their turn, and seconds in which they are
_SECONDS = 1e-3
Take = Callable[[bytes, zmq.Frame, list[zmq.Frame]], None]


@dataclass(slots=True)
class Unopened:
    """A payload message of which the head is open, and a lane opens the payload.

    Attributes:
        opened: the payload, once it is open; or why it cannot be.
    """

    serial: int
    body: memoryview
    message: wire.PeerMessage
    frame: zmq.Frame
    opening: Callable[[memoryview], memoryview]
    opened: memoryview | Damaged | None = None

    def open(self) -> None:
        try:
            self.opened = self.opening(self.frame.buffer)
        except Damaged as damage:
            self.opened = damage


@dataclass(slots=True)
class Holder:
    """Holder of a token: connection `number` of the peer that was admitted as `id`; `opener`: opens its messages;
    `descriptor`: where it came first, -1 until then; `arriving`: messages that lanes open, and those behind them."""

    id: int
    number: int
    token: bytes
    opener: Opener
    descriptor: int = -1
    arriving: deque[Unopened] = field(default_factory=deque)


class Tokens:
    """All tokens of this node.

    Args:
        encrypts: payloads come encrypted.

    Attributes:
        stale: messages refused because their token had been used up or replaced.
    """

    def __init__(self, encrypts: bool = True) -> None:
        self._encrypts = encrypts
        self._holders: dict[bytes, Holder] = {}
        self._current: dict[tuple[int, int], Holder] = {}
        self._old: set[bytes] = set()
        self._old_order: deque[bytes] = deque()
        self.stale = 0

    def issue(self, id: int, number: int) -> wire.Ticket:
        """Returns a new token for a peer's connection, which replaces the one that it had, and a secret."""
        before = self._current.get((id, number))
        if before is not None:
            self.end(before)
        ticket = wire.Ticket(secrets.token_bytes(16), new_secret())
        holder = Holder(id, number, ticket.token, Opener(ticket.secret, self._encrypts))
        self._holders[holder.token] = self._current[id, number] = holder
        return ticket

    def forget(self, id: int) -> None:
        """Ends all tokens of a peer."""
        for key in [key for key in self._current if key[0] == id]:
            self.end(self._current.pop(key))

    def holder(self, token: bytes, descriptor: int) -> Holder | None:
        """Returns the holder of a token that came on this descriptor (negative if unknown); None if it is nobody's,
        which is counted if stale."""
        holder = self._holders.get(token)
        if holder is not None and holder.descriptor == descriptor >= 0:
            return holder
        return self._holder_elsewhere(token, descriptor, holder)

    def _holder_elsewhere(self, token: bytes, descriptor: int, holder: Holder | None) -> Holder | None:
        """Returns the same of a token that has not come on this descriptor before."""
        if holder is None or descriptor < 0:
            self.stale += self.is_stale(token)
            return None
        if holder.descriptor == -1:
            holder.descriptor = descriptor
            return holder
        self.stale += 1
        return None

    def id_of_new(self, token: bytes) -> int | None:
        """Returns the node that a token is for; None if it is for none, or has come on a connection already."""
        holder = self._holders.get(token)
        return holder.id if holder is not None and holder.descriptor < 0 else None

    def is_stale(self, token: bytes) -> bool:
        """Returns whether it is, or was, a token of this node's."""
        return token in self._old or token in self._holders

    def end(self, holder: Holder) -> None:
        """Refuses what comes with a token from now on."""
        holder.arriving = deque()
        if self._holders.pop(holder.token, None) is not None:
            self._old.add(holder.token)
            self._old_order.append(holder.token)
            if len(self._old_order) > _REMEMBERED:
                self._old.discard(self._old_order.popleft())


class Inbox:
    """Gives each message to `take`: its routing id, its first frame, and the others, of which some are left out where
    there are more than any message has. Closes connections of strangers when there are too many.

    Args:
        socket, monitor, connections: a listening socket, the monitor of its connections, and these themselves.

    Attributes:
        accepted: connections of TCP.
        strangers: those of them that have ended without a message of a peer: scans, half-open ones, refused keys.
        on_end: called with the descriptor of a peer's connection that has ended.
    """

    def __init__(
        self, loop: EventLoop, socket: Socket, monitor: Socket, connections: AcceptedSockets, take: Take
    ) -> None:
        self.accepted = 0
        self.strangers = 0
        self.on_end: Callable[[int], None] = lambda descriptor: None
        self._loop = loop
        self._socket = socket
        self._monitor = monitor
        self._take = take
        self._peers: dict[int, Address | None] = {}  # connections from which a peer was heard, by descriptor
        self._kept: dict[int, tuple[sockets_of_python.socket, Callable[[], None]]] = {}  # of them
        self._pending: Pending[int] = Pending(_STRANGERS, _STRANGERS_OF_HOST)
        self._addresses: dict[int, Address] = {}  # of the pending ones
        self._taken: dict[int, int] = {}  # bytes of messages, by connection, where they are counted
        self._to_look_at: deque[int] = deque()  # descriptors that `look` has still to look at, before it begins anew
        self._accepted_sockets = connections
        self._started = self._closed = False
        self._look_at(monitor, self._watch)  # from now on: the port is open to strangers before it is to peers

    def start(self) -> None:
        """Begins to take messages."""
        self._look_at(self._socket, self._drain)
        self._started = True

    def close(self) -> None:
        """Takes no more; the sockets are the context's to close."""
        self._closed = True
        self._accepted_sockets.close()
        for kept, _ in self._kept.values():
            kept.close()
        self._loop.remove(self._monitor.fileno())
        if self._started:
            self._loop.remove(self._socket.fileno())

    def _look_at(self, socket: Socket, callback: Callable[[], None]) -> None:
        """Calls back on news. A ZeroMQ descriptor tells of changes only: it is looked at once now."""
        self._loop.add_reader(socket.fileno(), callback)
        self._loop.call_soon(callback)

    def expect(self, host: str) -> None:
        """Leaves room for one more connection of a peer from that IP address, whatever strangers there do."""
        self._pending.expect(host)

    def expect_no_more(self, host: str) -> None:
        """Takes back one `expect`: that connection has come, or is not to come."""
        self._shut_down(self._pending.expect_no_more(host))

    def heard(self, descriptor: int) -> None:
        """Notes that a connection is a peer's, which has spoken on it."""
        self._watch()  # it may not have been told yet that it was accepted
        self._peers[descriptor] = self._addresses.get(descriptor)
        self._forget(descriptor)

    def took(self, descriptor: int, frames: Sequence[zmq.Frame]) -> None:
        """Notes a message that came on a connection, for `look`."""
        sizes = map(len, frames)
        nbytes = sum(size + (_SHORT_HEAD if size < 256 else _LONG_HEAD) for size in sizes)
        self._taken[descriptor] = self._taken.get(descriptor, 0) + nbytes

    def call_when_hung_up(self, descriptor: int, then: Callable[[], None]) -> None:
        """Calls back when the process at the other end has closed a connection, and not the network."""
        self._close_kept(descriptor)
        kept = self._accepted_sockets.keep(descriptor)
        if kept is not None:
            self._kept[descriptor] = kept, then

    def end(self, descriptor: int) -> None:
        """Ends a connection that was admitted, if it has not ended yet."""
        self._watch()  # as in `heard`
        address = self._peers.get(descriptor) or self._addresses.get(descriptor)
        if address is not None:
            self._accepted_sockets.shut_down(descriptor, address)

    def look(self, most: int) -> None:
        """Ends the connections on which `most` bytes more have arrived than messages were taken from them. Looks at
        `_LOOKS` of them, each time the next ones, so that the cost does not grow with hosts."""
        if not self._to_look_at:
            self._to_look_at.extend((*self._peers, *self._addresses))
        for _ in range(min(_LOOKS, len(self._to_look_at))):
            descriptor = self._to_look_at.popleft()
            address = self._peers.get(descriptor) or self._addresses.get(descriptor)
            arrived = self._accepted_sockets.arrived(descriptor, address) if address is not None else 0
            if arrived - self._taken.get(descriptor, 0) > most:
                self.end(descriptor)

    def _drain(self) -> None:
        until = self._loop.clock() + _SECONDS
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                routing_id = self._socket.recv(NOW)
            except zmq.Again:
                return
            first = self._socket.recv(NOW, copy=False)
            rest: list[zmq.Frame] = []
            last = first
            while last.more:
                last = self._socket.recv(NOW, copy=False)
                if len(rest) < _FRAMES:
                    rest.append(last)
            self._take(routing_id, first, rest)
            if self._loop.clock() > until:  # chunks, each reduced as it comes: their acknowledgement is due as well
                break
        self._loop.call_soon(self._drain)

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(NOW))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.accepted += 1
                self._admit(int(event["value"]))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                descriptor = int(event["value"])
                self._forget(descriptor)
                self._taken.pop(descriptor, None)
                self._close_kept(descriptor)
                if descriptor in self._peers:
                    del self._peers[descriptor]
                    self.on_end(descriptor)
                else:
                    self.strangers += 1

    def _admit(self, descriptor: int) -> None:
        """Notes a new connection, for which an older one may be closed: libzmq accepts as many as there are."""
        address = self._accepted_sockets.address(descriptor)
        if address is None:
            return  # it has ended already
        self._addresses[descriptor] = address
        self._shut_down(self._pending.add(descriptor, address[0]))

    def _shut_down(self, one_too_many: int | None) -> None:
        if one_too_many is not None:
            self._accepted_sockets.shut_down(one_too_many, self._addresses.pop(one_too_many))

    def _close_kept(self, descriptor: int) -> None:
        if descriptor in self._kept:
            kept, then = self._kept.pop(descriptor)
            with kept:
                if hung_up(kept):
                    then()

    def _forget(self, descriptor: int) -> None:
        self._pending.remove(descriptor)
        self._addresses.pop(descriptor, None)


class Reception:
    """The listening sockets of this node.

    Args:
        peers: by the `id` as which each is admitted.
        handlers: of messages about connections, each called with the peer and the message. A `WireError` that one of
            them raises loses the peer.
        lose: called with a node, and a sentence, when it breaks the protocol.
        awake: the clock of suspicion.
        trace: payloads are recorded there.

    Attributes:
        on_message: called with the node, the message, and its payload if it has one, for every other message.
        gate: admits keys and tokens.
        tokens: of payload connections.
        ports: for control messages and for payloads.
        dropped: messages without a known sender, or that made no sense.
        damaged: payload messages that were not as a peer had sent them.

    Raises:
        zmq.ZMQError: the address cannot be listened on.
    """

    def __init__(
        self,
        loop: EventLoop,
        sockets: Sockets,
        settings: Settings,
        peers: Mapping[int, Peer],
        handlers: Handlers,
        lose: Callable[[int, str], None],
        awake: AwakeClock,
        trace: Instrument,
    ) -> None:
        self.on_message: Callable[..., None] = lambda node, message, *payload: None
        self.tokens = Tokens(sockets.encrypts)
        self.gate = KeyGate(sockets.context, self.tokens.id_of_new)
        self.dropped = self.damaged = 0
        self._loop = loop
        self._sockets = sockets
        self._peers = peers
        self._handlers = handlers
        self._lose = lose
        self._awake = awake
        self._trace = trace
        self._started = False
        self._controls: dict[int, Peer] = {}  # by the descriptor of the peer's last control connection to this node
        self._credit = settings.link_credit or _ANY_CREDIT
        self._expected: dict[tuple[int, int], str] = {}  # connections that are to come: their peer, number and address
        control, control_port = sockets.control_inbox()
        payload, payload_port = sockets.payload_inbox(2 * max(settings.chunk_bytes, probe.LARGE))
        self._control, self._payload = (
            Inbox(loop, inbox, sockets.monitor(inbox), sockets.accepted(inbox), take)
            for inbox, take in ((control, self._take_control), (payload, self._take_payload))
        )
        self.ports = control_port, payload_port

    def start(self) -> None:
        """Begins to answer peers, and to take their messages. A second call changes nothing."""
        if self._started:
            return
        self._started = True
        self._loop.add_reader(self.gate.socket.fileno(), self.gate.answer)
        self._loop.call_soon(self.gate.answer)
        self._control.on_end = self._expect_again
        self._control.start()
        self._payload.start()

    def admit(self, peer: Peer) -> None:
        """Admits a peer's key from now on, on connections from the address of its endpoint or any other."""
        self.gate.allow(peer.endpoint.public_key, peer.id)
        self._expect(peer, 0)

    def issue(self, peer: Peer, number: int) -> wire.Ticket:
        """Returns a new ticket for a peer's payload connection, and expects that."""
        self._expect(peer, number)
        return self.tokens.issue(peer.id, number)

    def refuse(self, peer: Peer) -> None:
        """Admits a peer's key no more; its connections to this node stand."""
        self.gate.forbid(peer.id)
        self._expect_no_more(peer, 0)

    def forget(self, peer: Peer) -> None:
        """Admits a peer no more, and ends its connections to this node."""
        self.refuse(peer)
        self.tokens.forget(peer.id)
        for number in [number for id, number in self._expected if id == peer.id]:
            self._expect_no_more(peer, number)
        for number, descriptor in peer.heard_on.items():
            self._inbox(number).end(descriptor)

    def close(self) -> None:
        """Takes no more; the sockets are the context's to close."""
        if self._started:
            self._loop.remove(self.gate.socket.fileno())
        self._control.close()
        self._payload.close()

    def look(self) -> None:
        """Ends payload connections on which more arrives than a peer sends; to be called several times a second."""
        self._payload.look(_UNDER_WAY * self._credit)

    def _inbox(self, number: int) -> Inbox:
        return self._payload if number else self._control

    def _expect(self, peer: Peer, number: int) -> None:
        if (peer.id, number) not in self._expected:
            self._expected[peer.id, number] = host = ipaddress.ip_address(peer.endpoint.address).compressed
            self._inbox(number).expect(host)

    def _expect_no_more(self, peer: Peer, number: int) -> None:
        host = self._expected.pop((peer.id, number), None)
        if host is not None:
            self._inbox(number).expect_no_more(host)

    def _expect_again(self, descriptor: int) -> None:
        """Expects a peer's control connection to be made again. (For another one of its payloads it gets a token.)"""
        peer = self._controls.pop(descriptor, None)
        if peer is None or peer.lost or self._peers.get(peer.id) is not peer:
            return
        if peer.heard_on.get(0) == descriptor:
            self._expect(peer, 0)

    def _heard(self, peer: Peer, number: int, descriptor: int) -> None:
        peer.heard_on[number] = descriptor
        if not number:
            self._controls[descriptor] = peer
        self._inbox(number).heard(descriptor)
        self._expect_no_more(peer, number)

    def statistics(self) -> dict[str, object]:
        """Returns keys `admitted` and `refused`; connections `accepted`, and of these `strangers`' that ended; messages
        `dropped` because they had no known sender or made no sense, `damaged` ones that were not as they had been sent,
        and `stale` ones whose token was used up."""
        return {
            "admitted": self.gate.admitted,
            "refused": self.gate.refused,
            "accepted": self._control.accepted + self._payload.accepted,
            "strangers": self._control.strangers + self._payload.strangers,
            "dropped": self.dropped,
            "damaged": self.damaged,
            "stale": self.tokens.stale,
        }

    def _take_control(self, routing_id: bytes, frame: zmq.Frame, rest: list[zmq.Frame]) -> None:
        id = admitted_as(frame)
        peer = None if id is None else self._peers.get(id)
        if peer is None:
            self.dropped += 1
            return
        if routing_id != peer.control_from:  # a new connection
            peer.control_from = routing_id
            peer.hung_up = False
            self._heard(peer, 0, descriptor_of(frame))
            self._control.call_when_hung_up(peer.heard_on[0], partial(self._hung_up, peer, routing_id))
        if peer.lost and self._is_fenced(peer):
            return
        try:
            data = memoryview(b"".join([frame.buffer, *(each.buffer for each in rest)])) if rest else frame.buffer
            serial, received, body = delivery.split_control(data)
            message = wire.decode_peer_message(body)
            if isinstance(message, _WITH_PAYLOAD):
                raise WireError(f"{type(message).__name__} has no payload")
        except WireError:
            self.dropped += 1
            return
        try:
            for link, upto in zip(peer.links, received, strict=False):
                link.out.acknowledge(upto)
            if not serial and not isinstance(message, _UNNUMBERED):
                raise WireError(f"its {type(message).__name__} has no number")
        except WireError as error:
            self._lose(peer.node, str(error))
            return
        if peer.pipe is not None:
            peer.follow(self._awake())
        peer.sending.go_on()
        self._hand_on(peer, 0, serial, len(data), message)

    def _take_payload(self, routing_id: bytes, frame: zmq.Frame, rest: list[zmq.Frame]) -> None:
        descriptor = descriptor_of(frame)
        self._payload.took(descriptor, (frame, *rest))
        holder = self.tokens.holder(routing_id, descriptor)
        if holder is None:
            self.dropped += not self.tokens.is_stale(routing_id)
            return
        peer = self._peers[holder.id]
        if peer.lost and self._is_fenced(peer):
            return
        try:
            if len(rest) != 1 or len(frame.buffer) > MAX_HEADER:
                raise Damaged("not a head and a payload")
            serial, body, opening = holder.opener.opening(frame.buffer)
            message = wire.decode_peer_message(body)
            if isinstance(message, _WITH_PAYLOAD) != bool(serial):
                raise WireError(f"{type(message).__name__} does not come with a payload")
        except Damaged as damage:
            self._end_damaged(peer, holder, descriptor, damage)
            return
        except WireError:
            self.dropped += 1
            return
        arrival = Unopened(serial, body, message, rest[0], opening)
        lanes, arriving = self._sockets.lanes, holder.arriving
        arriving.append(arrival)
        if lanes is not None and len(rest[0]) >= LANE_FROM:
            lanes([arrival.open], partial(self._opened, peer, holder, descriptor, arriving))
            return
        arrival.open()
        self._opened(peer, holder, descriptor, arriving, None)

    def _opened(
        self, peer: Peer, holder: Holder, descriptor: int, arriving: deque[Unopened], error: BaseException | None
    ) -> None:
        """A payload of a connection has been opened: hands those on whose turn it is, unless the connection ended, and
        its messages come again on the next one."""
        if error is not None:
            raise error
        while arriving is holder.arriving and arriving and (payload := arriving[0].opened) is not None:
            arrival = arriving.popleft()
            if peer.lost and self._is_fenced(peer):
                continue
            if isinstance(payload, Damaged):
                self._end_damaged(peer, holder, descriptor, payload)
            elif not arrival.serial:  # the first one on a connection
                self._heard(peer, holder.number, descriptor)
            else:
                nbytes = delivery.payload_nbytes(arrival.body, payload)
                self._hand_on(peer, holder.number, arrival.serial, nbytes, arrival.message, payload)

    def _end_damaged(self, peer: Peer, holder: Holder, descriptor: int, damage: Damaged) -> None:
        """Ends a connection on which bytes came that its peer has not sent: the peer makes another one."""
        self.damaged += 1
        self.tokens.end(holder)
        self._payload.end(descriptor)
        _log.warning(
            "payload connection %d from node %d (host %s) was ended, to be made again: %s. Bytes change on the way "
            "between the hosts: hardware is faulty, or the network is hostile",
            holder.number, peer.node, peer.host, damage,
        )  # fmt: skip

    def _hand_on(
        self, peer: Peer, number: int, serial: int, nbytes: int, message: wire.PeerMessage, *payload: memoryview
    ) -> None:
        """Hands a message that has not come before on; tells the peer that it has come, if no other message does."""
        try:
            if serial:
                if not peer.incoming[number].accept(serial):
                    return
                peer.owed += 1
                peer.owed_bytes += nbytes
            if isinstance(message, _WITH_PAYLOAD):
                name, clock, plan = about(message)
                size = len(payload[0])
                self._trace.record(Kind.RECEIVED, name, size, clock, plan, peer.number_of(serial, number), peer.node)
                peer.received_chunks += 1
                peer.received_bytes += size
            if peer.watched:
                peer.suspicion.heard(self._awake())
            if about_connection := self._handlers.get(type(message)):
                about_connection(peer, message)
            else:
                self.on_message(peer.node, message, *payload)
        except WireError as error:
            self._lose(peer.node, str(error))
            return
        if serial and peer.owes_much:
            peer.mention(wire.Ack())

    def _hung_up(self, peer: Peer, routing_id: bytes) -> None:
        """Notes that a peer has closed a control connection to this node, if it has made no other one since."""
        peer.hung_up = peer.control_from == routing_id

    def _is_fenced(self, peer: Peer) -> bool:
        """Returns whether a message of a lost peer is to be dropped; it is counted."""
        peer.fenced += not peer.leaving
        return not peer.leaving  # of one that leaves, these are the last words


def descriptor_of(frame: zmq.Frame) -> int:
    """Returns the descriptor from which libzmq has read a message; -1 where it speaks a ZMTP without properties, as no
    peer does: any bytes that do not look like a greeting of today are taken for ZMTP 1.0."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def admitted_as(frame: zmq.Frame) -> int | None:
    """Returns as whom this message's connection was admitted, by its key or token; None if unknown."""
    try:
        return int(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return None
