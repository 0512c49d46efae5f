"""The mesh: ZeroMQ connections between the daemons of a job.

Every node has two ROUTER sockets on which it receives, one for control messages and one for payloads (`wire.Chunk`),
and to every peer one DEALER for control and `connections` for payloads, on which it only sends. So a large payload
never delays a heartbeat, and the two directions between a pair of nodes are independent.

The control channel is always under CURVE, with a `KeyGate` for the job's keys; who sent a message is read from the
key that was admitted. Payload connections are known by their routing id, a random token that the receiver issued to
this peer over the control channel; they are under CURVE too, unless encryption is `control`.

A connection that breaks after its handshake means that the peer is lost: what was under way in it is gone, and an
operation must never be completed from a part of its data.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from fusion_rt import wire
from fusion_rt.bootstrap import DaemonConfig, Endpoint, PeerTable
from fusion_rt.errors import FusionError, WireError
from fusion_rt.settings import Settings
from fusiond import probe
from fusiond.flow import BORROW_FROM
from fusiond.loop import EventLoop
from fusiond.zap import KeyGate

_LINGER = 2000  # ms that unsent messages may take when a daemon leaves in good order
_NOW = int(zmq.NOBLOCK)  # plain integers: to combine enumeration members costs a microsecond a message
_MORE = int(zmq.SNDMORE) | _NOW
_HANDSHAKE = 10_000  # ms after which a half-open connection is dropped
_BACKLOG = 128  # connections waiting to be accepted
_BATCH = 32  # messages taken from a socket before other events get their turn
_CLOSED = "its connection was closed"
_HEADER = 4096  # bytes of a chunk's message, at most

_Socket = zmq.Socket[bytes]


@dataclass
class Peer:
    """What this node knows of another one; `last_heard` is the loop's clock in seconds."""

    node: int
    host: str
    endpoint: Endpoint
    control: _Socket
    payload: list[_Socket] = field(default_factory=list)
    connections: int = 0  # outgoing ones that have completed their handshake
    greeted: bool = False  # its PeerHello has arrived
    lost: bool = False
    last_heard: float = 0.0
    next_payload: int = 0
    sent_chunks: int = 0
    sent_bytes: int = 0
    received_chunks: int = 0
    received_bytes: int = 0


class Mesh:
    """This node's sockets to its peers.

    Args:
        loop: watches the sockets.
        config, settings: who this node is; what is encrypted, sizes, time-outs.
        on_message: called with (node, message, payload) for every valid message of a peer.
        on_up: called once, when every peer has greeted this node and every connection to them stands.
        on_lost: called with (node, sentence) when a peer is lost.

    Raises:
        FusionError: the address cannot be listened on.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: DaemonConfig,
        settings: Settings,
        on_message: Callable[[int, wire.PeerMessage, memoryview | None], None],
        on_up: Callable[[], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._config = config
        self._settings = settings
        self._on_message = on_message
        self._on_up = on_up
        self._on_lost = on_lost
        self._up = False
        self._closed = False
        self._peers: dict[int, Peer] = {}
        self._senders: dict[bytes, int] = {}  # routing id of a known connection: its node
        self._watched: list[_Socket] = []
        self.dropped = 0  # messages refused: unknown sender, not decodable, or too long
        self._context = zmq.Context(settings.io_threads)
        self._gate = KeyGate(self._context)
        self._public, self._secret = zmq.curve_keypair()
        try:
            self._control_in, control_port = self._inbox(wire.MAX_MESSAGE, encrypted=True)
            self._payload_in, payload_port = self._inbox(
                2 * max(settings.chunk_bytes, probe.LARGE), encrypted=self._encrypts_payload(config.address)
            )
        except zmq.ZMQError as error:
            self.close()
            raise FusionError(
                f"node {config.node} cannot listen on {config.address} for its peers: {error.strerror}; choose "
                "another interface with --network-interface"
            ) from error
        self._ports = control_port, payload_port

    def endpoint(self, pid: int) -> Endpoint:
        """Where peers reach this node."""
        return Endpoint(self._config.node, pid, self._config.address, *self._ports, self._public.decode())

    def connect(self, table: PeerTable) -> None:
        """Admits the other nodes' keys and connects to each of them.

        Raises:
            FusionError: the table does not fit this job.
        """
        hosts = self._config.topology.hosts
        if [endpoint.node for endpoint in table.endpoints] != list(range(len(hosts))):
            raise FusionError(f"the table of peers does not name each of the {len(hosts)} nodes once, in order")
        now = self._loop.clock()
        for endpoint in table.endpoints:
            if endpoint.node != self._config.node:
                self._gate.allow(endpoint.public_key, endpoint.node)
                peer = Peer(endpoint.node, hosts[endpoint.node], endpoint, self._outbox(endpoint, encrypted=True))
                peer.last_heard = now
                self._peers[endpoint.node] = peer
        # Only now: a peer that was told of us before we were told of it waits, where a refusal would be for good.
        self._watch(self._gate.socket, self._gate.answer)
        self._watch(self._control_in, self._drain_control)
        self._watch(self._payload_in, self._drain_payload)
        for peer in self._peers.values():
            tokens = tuple(secrets.token_bytes(16) for _ in range(self._settings.connections))
            self._senders.update(dict.fromkeys(tokens, peer.node))
            hello = wire.PeerHello(wire.PROTOCOL_VERSION, self._config.job, self._config.node, tokens)
            self._connect(peer, peer.control, peer.endpoint.control_port, hello)
        self._loop.call_every(self._settings.heartbeat_interval, self._beat)

    def send(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a control message; one to a lost peer is dropped, since everybody has been told of the loss.

        So is one to a peer that this node has not been told of: the job has failed before it began.
        """
        peer = self._peers.get(node)
        if peer is not None and not peer.lost and not self._closed:
            try:
                peer.control.send(wire.encode(message), _NOW)
            except zmq.Again:  # not connected (any more); told later, so that the caller finishes what it is at
                self._loop.call_soon(lambda: self.lose(node, _CLOSED))

    def send_payload(
        self, node: int, message: wire.Chunk | wire.Piece | wire.Probe, payload: bytes | memoryview
    ) -> bool:
        """Sends a message with a payload. Returns whether that is borrowed until the peer grants credit for it.

        A payload below `BORROW_FROM` bytes is the mesh's own once this returns. A larger one of a `Piece`, for which
        nobody grants credit, has to stay as it is for ever; whoever sent it may forget it.
        """
        peer = self._peers[node]
        if peer.lost or self._closed:
            return False
        nbytes = len(payload)
        borrowed = nbytes >= BORROW_FROM
        socket = peer.payload[peer.next_payload]
        peer.next_payload = (peer.next_payload + 1) % len(peer.payload)
        try:
            socket.send(wire.encode(message), _MORE)
            socket.send(payload, _NOW, copy=not borrowed)
        except zmq.Again:
            self._loop.call_soon(lambda: self.lose(node, _CLOSED))
            return False
        peer.sent_chunks += 1
        peer.sent_bytes += nbytes
        return borrowed

    def close(self) -> None:
        """Closes every socket; messages already sent get a moment to leave."""
        self._closed = True
        for socket in self._watched:
            self._loop.remove(socket.fileno())
        # linger=None keeps each socket's own: what waits in the inboxes is dropped, what was sent may still leave.
        self._context.destroy(linger=None)

    def statistics(self) -> dict[str, object]:
        """Keys `admitted` and `refused`, messages `dropped`, and per peer chunks and payload bytes each way."""
        return {
            "admitted": self._gate.admitted,
            "refused": self._gate.refused,
            "dropped": self.dropped,
            "peers": [
                {
                    "node": peer.node,
                    "host": peer.host,
                    "sent_chunks": peer.sent_chunks,
                    "sent_bytes": peer.sent_bytes,
                    "received_chunks": peer.received_chunks,
                    "received_bytes": peer.received_bytes,
                    "silent_seconds": round(self._loop.clock() - peer.last_heard, 3),
                }
                for peer in self._peers.values()
            ],
        }

    # --- sockets ------------------------------------------------------------------------------------------------------

    def _encrypts_payload(self, address: str) -> bool:
        """Whether the node that listens on `address` encrypts payloads; asked by both ends, so that they agree."""
        if self._settings.encryption == "auto":
            return not ipaddress.ip_address(address).is_loopback
        return self._settings.encryption == "all"

    def _inbox(self, max_message: int, encrypted: bool) -> tuple[_Socket, int]:
        socket = self._context.socket(zmq.ROUTER)
        self._set_options(socket)
        socket.linger = 0
        socket.maxmsgsize = max_message
        socket.backlog = _BACKLOG
        socket.router_handover = 0
        if encrypted:
            socket.curve_server = 1
            socket.curve_secretkey = self._secret
            socket.zap_domain = b"fusion_rt"
        host = f"[{self._config.address}]" if ":" in self._config.address else self._config.address
        socket.ipv6 = 1 if ":" in self._config.address else 0
        socket.bind(f"tcp://{host}:*")
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _outbox(self, endpoint: Endpoint, encrypted: bool, routing_id: bytes = b"") -> _Socket:
        socket = self._context.socket(zmq.DEALER)
        self._set_options(socket)
        socket.linger = _LINGER
        socket.maxmsgsize = _HEADER  # nothing is ever received here
        socket.ipv6 = 1 if ":" in endpoint.address else 0
        if routing_id:
            socket.routing_id = routing_id
        if encrypted:
            socket.curve_serverkey = endpoint.public_key.encode()
            socket.curve_publickey = self._public
            socket.curve_secretkey = self._secret
        return socket

    def _set_options(self, socket: _Socket) -> None:
        socket.sndhwm = socket.rcvhwm = 0  # credit bounds what is under way; a full queue would block the event loop
        socket.immediate = 1  # nothing is queued for a peer that is not connected
        socket.handshake_ivl = _HANDSHAKE
        socket.reconnect_ivl = 100
        socket.heartbeat_ivl = 0  # ZMTP's heartbeats stay green while Python hangs; `_beat` is sent by the loop itself
        socket.tcp_keepalive = 1

    def _connect(self, peer: Peer, socket: _Socket, port: int, hello: wire.PeerHello | None) -> None:
        """Connects a socket; once its handshake is done, sends the greeting on it, if any."""
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

        stands = False

        def events() -> None:
            nonlocal stands
            while not self._closed and monitor.poll(0):
                if parse_monitor_message(monitor.recv_multipart(_NOW))["event"] == zmq.EVENT_DISCONNECTED:
                    if stands:
                        self.lose(peer.node, _CLOSED)
                    continue
                stands = True
                peer.connections += 1
                if hello is not None:
                    socket.send(wire.encode(hello), _NOW)
                self._check_up()

        self._watch(monitor, events)
        host = f"[{peer.endpoint.address}]" if ":" in peer.endpoint.address else peer.endpoint.address
        socket.connect(f"tcp://{host}:{port}")

    def _watch(self, socket: _Socket, callback: Callable[[], None]) -> None:
        """A ZeroMQ descriptor tells of changes only: `callback` has to take all there is, and is called once now."""
        self._watched.append(socket)
        self._loop.add_reader(socket.fileno(), callback)
        self._loop.call_soon(callback)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _drain_control(self) -> None:
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                self._control_in.recv(_NOW)  # the routing id, which the sender chose
            except zmq.Again:
                return
            frame, rest = self._rest(self._control_in)
            node = _admitted_node(frame)
            if node is None or node not in self._peers or rest:
                self.dropped += 1
                continue
            self._deliver(self._peers[node], frame, None)
        self._loop.call_soon(self._drain_control)

    def _drain_payload(self) -> None:
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                routing_id = self._payload_in.recv(_NOW)
            except zmq.Again:
                return
            frame, rest = self._rest(self._payload_in)
            node = self._senders.get(routing_id)
            if node is None or len(rest) != 1 or len(frame.buffer) > _HEADER:
                self.dropped += 1
                continue
            peer = self._peers[node]
            payload = rest[0].buffer
            peer.received_chunks += 1
            peer.received_bytes += len(payload)
            self._deliver(peer, frame, payload)
        self._loop.call_soon(self._drain_payload)

    @staticmethod
    def _rest(socket: _Socket) -> tuple[zmq.Frame, list[zmq.Frame]]:
        """The message after its routing id: its first frame, and up to one more; further ones are thrown away."""
        frame = socket.recv(_NOW, copy=False)
        rest: list[zmq.Frame] = []
        last = frame
        while last.more:
            last = socket.recv(_NOW, copy=False)
            if len(rest) < 2:
                rest.append(last)
        return frame, rest

    def _deliver(self, peer: Peer, frame: zmq.Frame, payload: memoryview | None) -> None:
        try:
            message = wire.decode_peer_message(frame.buffer)
        except WireError:
            self.dropped += 1
            return
        if isinstance(message, (wire.Chunk, wire.Piece, wire.Probe)) != (payload is not None):
            self.dropped += 1
            return
        peer.last_heard = self._loop.clock()
        if isinstance(message, wire.PeerHello):
            self._greet(peer, message)
        elif not isinstance(message, wire.Heartbeat):
            self._on_message(peer.node, message, payload)

    def _greet(self, peer: Peer, hello: wire.PeerHello) -> None:
        ours = (wire.PROTOCOL_VERSION, self._config.job, peer.node, self._settings.connections)
        theirs = (hello.version, hello.job, hello.node, len(hello.tokens))
        if theirs != ours or peer.greeted:
            self.lose(
                peer.node,
                f"it says that it is (version, job, node, connections) {theirs}, where {ours} was expected; "
                "all hosts need the same version and settings",
            )
            return
        peer.greeted = True
        for token in hello.tokens:
            socket = self._outbox(peer.endpoint, self._encrypts_payload(peer.endpoint.address), token)
            peer.payload.append(socket)
            self._connect(peer, socket, peer.endpoint.payload_port, None)

    def _check_up(self) -> None:
        wanted = 1 + self._settings.connections
        if not self._up and all(p.greeted and p.connections == wanted for p in self._peers.values()):
            self._up = True
            for peer in self._peers.values():
                peer.last_heard = self._loop.clock()
            self._on_up()

    # --- liveness -----------------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """Nodes that have not come up yet."""
        wanted = 1 + self._settings.connections
        return [p.node for p in self._peers.values() if not (p.greeted and p.connections == wanted)]

    def lose(self, node: int, why: str) -> None:
        """Gives a peer up."""
        peer = self._peers[node]
        if not peer.lost and not self._closed:
            peer.lost = True
            self._on_lost(node, why)

    def _beat(self) -> None:
        if not self._up or self._closed:
            return
        now = self._loop.clock()
        for peer in self._peers.values():
            self.send(peer.node, wire.Heartbeat())
            silent = now - peer.last_heard
            if silent > self._settings.heartbeat_timeout:
                self.lose(peer.node, f"its daemon has been silent for {silent:.1f} s")


def _admitted_node(frame: zmq.Frame) -> int | None:
    """The node whose key the connection of this message was admitted with."""
    try:
        return int(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return None
