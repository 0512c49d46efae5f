"""Receiving from peers: who may speak, whose a message is, and whether it is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import zmq

from fusion_rt import wire
from fusion_rt.errors import WireError
from fusion_rt.settings import Settings
from fusiond.host.loop import EventLoop
from fusiond.transport import delivery, probe
from fusiond.transport.inbox import Inbox, admitted_node, descriptor_of
from fusiond.transport.peers import Peer
from fusiond.transport.sockets import MAX_HEADER, Sockets
from fusiond.transport.tokens import Tokens
from fusiond.transport.zap import KeyGate

_UNNUMBERED = (wire.Heartbeat, wire.Ack, wire.GivenUp)
_WITH_PAYLOAD = (wire.Chunk, wire.Piece, wire.Probe)


class Handler(Protocol):
    """What is done with what peers say."""

    def control_message(self, peer: Peer, message: wire.PeerMessage) -> None:
        """A new control message. A `WireError` that this raises loses the peer."""

    def payload_message(self, peer: Peer, message: wire.PeerMessage, payload: memoryview, number: int) -> None:
        """A new message with a payload; `number`: among those of this peer, as `Peer.number_of` counts them."""

    def acknowledge(self, peer: Peer) -> None:
        """Enough has come from it that it should be told so."""

    def lose(self, node: int, why: str) -> None:
        """It does what a peer never does."""


class Reception:
    """The listening sockets of this node.

    Args:
        peers: by node; filled before `start`.
        nodes: how many nodes the job has.

    Attributes:
        gate: whose keys are admitted.
        tokens: of payload connections.
        ports: for control messages and for payloads.
        dropped: messages that were nobody's or made no sense.

    Raises:
        zmq.ZMQError: the address cannot be listened on.
    """

    def __init__(
        self,
        loop: EventLoop,
        sockets: Sockets,
        settings: Settings,
        peers: Mapping[int, Peer],
        nodes: int,
        handler: Handler,
    ) -> None:
        self.tokens = Tokens()
        self.gate = KeyGate(sockets.context, self.tokens.node_of_new)
        self.dropped = 0
        self._loop = loop
        self._peers = peers
        self._handler = handler
        self._started = False
        control, control_port = sockets.control_inbox()
        payload, payload_port = sockets.payload_inbox(2 * max(settings.chunk_bytes, probe.LARGE))
        most = 2 * nodes * settings.connections  # each peer's, and those that replace them
        self._control, self._payload = (
            Inbox(loop, inbox, sockets.monitor(inbox), sockets.accepted(inbox), take, most)
            for inbox, take in ((control, self._take_control), (payload, self._take_payload))
        )
        self.ports = control_port, payload_port

    def start(self) -> None:
        """Lets peers in, and takes what they say."""
        self._started = True
        self._loop.add_reader(self.gate.socket.fileno(), self.gate.answer)
        self._loop.call_soon(self.gate.answer)
        self._control.start()
        self._payload.start()

    def close(self) -> None:
        """Takes no more; the sockets are the context's to close."""
        if self._started:
            self._loop.remove(self.gate.socket.fileno())
            self._control.close()
            self._payload.close()

    def statistics(self) -> dict[str, object]:
        """Keys `admitted` and `refused`; connections `accepted`, and of these `strangers`' that ended; messages
        `dropped` because they were nobody's or made no sense, and `stale` ones whose token was used up."""
        return {
            "admitted": self.gate.admitted,
            "refused": self.gate.refused,
            "accepted": self._control.accepted + self._payload.accepted,
            "strangers": self._control.strangers + self._payload.strangers,
            "dropped": self.dropped,
            "stale": self.tokens.stale,
        }

    def _take_control(self, routing_id: bytes, frame: zmq.Frame, rest: list[zmq.Frame]) -> None:
        node = admitted_node(frame)
        peer = None if node is None else self._peers.get(node)
        if peer is None:
            self.dropped += 1
            return
        if routing_id != peer.control_from:  # a new connection
            peer.control_from = routing_id
            self._control.heard(descriptor_of(frame))
        if self._is_fenced(peer):
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
            peer.sending.go_on()
            if serial and not peer.incoming[0].accept(serial):
                return
            if not serial and not isinstance(message, _UNNUMBERED):
                raise WireError(f"its {type(message).__name__} has no number")
            due = serial and peer.owes(len(data))
            self._handler.control_message(peer, message)
        except WireError as error:
            self._handler.lose(peer.node, str(error))
            return
        if due and peer.owed:
            self._handler.acknowledge(peer)

    def _take_payload(self, routing_id: bytes, frame: zmq.Frame, rest: list[zmq.Frame]) -> None:
        descriptor = descriptor_of(frame)
        holder = self.tokens.holder(routing_id, descriptor)
        if holder is None:
            self.dropped += not self.tokens.is_stale(routing_id)
            return
        peer = self._peers[holder.node]
        if self._is_fenced(peer):
            return
        try:
            if len(rest) != 1 or len(frame.buffer) > MAX_HEADER:
                raise WireError("not a header and a payload")
            serial, body = delivery.split_payload_head(frame.buffer)
            message = wire.decode_peer_message(body)
            if isinstance(message, _WITH_PAYLOAD) != bool(serial):
                raise WireError(f"{type(message).__name__} does not come with a payload")
        except WireError:
            self.dropped += 1
            return
        if not serial:  # the first one on a connection
            self._payload.heard(descriptor)
            return
        try:
            if not peer.incoming[holder.number].accept(serial):
                return
        except WireError as error:
            self._handler.lose(peer.node, str(error))
            return
        payload = rest[0].buffer
        due = peer.owes(len(frame.buffer) + len(payload))
        self._handler.payload_message(peer, message, payload, peer.number_of(serial, holder.number))
        if due and peer.owed:
            self._handler.acknowledge(peer)

    def _is_fenced(self, peer: Peer) -> bool:
        """Whether a message of that peer is to be dropped; it is counted."""
        fenced = peer.lost and not peer.leaving  # of one that leaves, these are the last words
        peer.fenced += fenced
        return fenced
