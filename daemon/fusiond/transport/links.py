"""An outgoing connection to a peer, which is made again when it breaks.

Each attempt is a new socket: libzmq's own reconnection would lose an unknown part of its queue. A message that was sent
and not acknowledged is sent again, from this side's own buffer (`delivery.SendWindow`).
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket as sockets_of_python
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from fusion_rt import wire
from fusion_rt.host.bootstrap import Endpoint
from fusiond.core.errors import NO_ROOM
from fusiond.host.loop import EventLoop
from fusiond.transport.delivery import SendWindow, payload_head, split_payload_head
from fusiond.transport.sealing import AES, Frames, Sealer
from fusiond.transport.sockets import CONTROL_FRAME, LANE_FROM, LINGER, MORE, NOW, Socket, Sockets, bracketed

_GREETING = payload_head(0) + wire.encode(wire.Heartbeat())
_log = logging.getLogger("fusiond")
COPY_BELOW = 512 * 1024  # bytes; libzmq gets a copy of a smaller payload, which costs less than not to copy it
_FIRST_SIGN = 2.0  # seconds in which libzmq says that it has begun with an attempt
_AGAIN = 0.05  # seconds between attempts
_REFUSED_FOR = 0.1  # seconds in which a connection is refused again and again


@dataclass(frozen=True)
class Events:
    """Callbacks about a link, each called with the link.

    Attributes:
        stands: its handshake is done, and the kept messages have been sent again.
        broke: it stood, and has broken.
        wants: it is to be opened (again); with a new ticket, if it needs one.
        refused: the connection is refused for a while (without a sentence), or this node's key is (with one).
    """

    stands: Callable[[Link], None]
    broke: Callable[[Link], None]
    wants: Callable[[Link], None]
    refused: Callable[[Link, str], None]


@dataclass(slots=True)
class Unsealed:
    """A message that a lane seals, by `sealing`; `frames`: once it has."""

    sealing: Callable[[], Frames]
    frames: Frames | None = None

    def seal(self) -> None:
        self.frames = self.frames or self.sealing()


class Link:
    """A connection for control messages (`number` 0) or payloads to the peer at `endpoint`.

    Attributes:
        out: messages sent on it.
        stands: messages leave at once.
        down_since: when it broke (s, of `clock`); None while it stands, and before it first stood.
        reconnections: how often it came back.
        resent: messages sent again.
        cipher: of payloads, from the next attempt on.
        stood: it has stood.
        trouble: address, port and error of an attempt that failed to make it again, if the last one did.
    """

    def __init__(
        self,
        loop: EventLoop,
        sockets: Sockets,
        clock: Callable[[], float],
        endpoint: Endpoint,
        number: int,
        events: Events,
    ) -> None:
        self.node = endpoint.node
        self.number = number
        self.out = SendWindow()
        self.stands = False
        self.stood = False
        self.trouble = ""
        self.down_since: float | None = None
        self.reconnections = 0
        self.resent = 0
        self._loop = loop
        self._sockets = sockets
        self._clock = clock
        self._endpoint = endpoint
        self._port = endpoint.payload_port if number else endpoint.control_port
        self.cipher = AES
        self._sealer: Sealer | None = None
        self._leaving: deque[Unsealed] = deque()  # messages that lanes seal, and those behind them, of this connection
        self._tell = events
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._question: sockets_of_python.socket | None = None
        self._refused_since: float | None = None
        self._acknowledged = -1  # serial acknowledged when it broke last
        self._stuck_since: float | None = None
        self._last_word = b""
        self._closed = False
        self._attempt_begun = False  # libzmq has said something about the attempt
        self._waits_for_room = False

    @property
    def name(self) -> str:
        """Name of the link in messages to people."""
        return f"payload connection {self.number}" if self.number else "control connection"

    def open(self, ticket: wire.Ticket | None = None) -> None:
        """Makes one attempt; `ticket`: for payloads, what the peer has given for it."""
        if self._closed or self._socket is not None:
            return
        try:
            self._socket, self._monitor = self._sockets.outbox(self._endpoint, ticket.token if ticket else b"")
        except zmq.ZMQError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._waits_for_room:
                _log.warning("no %s to node %d can be made for now: %s; tried again every %g s",
                             self.name, self.node, error.strerror, _AGAIN)  # fmt: skip
            self._waits_for_room = True
            self._loop.call_later(_AGAIN, self._want)
            return
        if ticket is not None:
            encrypts = self._sockets.encrypts_payload(self._endpoint.address)
            self._sealer = Sealer(ticket.secret, encrypts, self.cipher)
        self._waits_for_room = False
        self._attempt_begun = False
        self._loop.call_later(_FIRST_SIGN, partial(self._check_attempt, self._socket))
        # A ZeroMQ descriptor tells of changes only: all there is has to be taken, and looked for once now.
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._loop.call_soon(self._watch)
        self._socket.connect(f"tcp://{bracketed(self._endpoint.address)}:{self._port}")

    def post(self, frame: bytes, payload: bytes | memoryview | None = None, borrowed: bool = False) -> None:
        """Sends a message that has to arrive: now, or when the link stands again."""
        self.out.add(frame, payload, borrowed)
        self.send(frame, payload)

    def send(self, frame: bytes, payload: bytes | memoryview | None = None) -> None:
        """Sends a message that need not arrive, if the link stands."""
        if self._socket is None or not self.stands:
            return
        try:
            if payload is None:
                _send_in_frames(self._socket, frame)
            else:
                self._seal(frame, payload)
        except zmq.Again:  # libzmq has seen the end of it before its monitor has told us
            self.stands = False
            self._loop.call_soon(self._broke)

    def _seal(self, frame: bytes, payload: bytes | memoryview) -> None:
        """Seals a message and hands it to libzmq: at once, or in its turn once a lane has sealed it."""
        assert self._sealer is not None
        sealing, lanes = self._sealer.sealing(*split_payload_head(frame), payload), self._sockets.lanes
        is_long = lanes is not None and len(payload) >= LANE_FROM
        if not is_long and not self._leaving:
            self._hand_over(*sealing())
            return
        message = Unsealed(sealing)
        self._leaving.append(message)
        if is_long and lanes is not None:
            lanes([message.seal], partial(self._sealed, self._leaving))
        else:
            message.seal()

    def _sealed(self, leaving: deque[Unsealed], error: BaseException | None) -> None:
        """A lane has sealed a message: hands those over whose turn it is, if the connection is still that one."""
        if error is not None:
            raise error
        try:
            while leaving is self._leaving and leaving and (frames := leaving[0].frames) is not None:
                leaving.popleft()
                self._hand_over(*frames)
        except zmq.Again:
            self.stands = False
            self._loop.call_soon(self._broke)

    def _hand_over(self, head: bytes, payload: bytes | memoryview) -> None:
        if self._socket is not None and self.stands:
            self._socket.send(head, MORE)
            self._socket.send(payload, NOW, copy=len(payload) < COPY_BELOW)

    def fruitless(self, now: float) -> float:
        """Seconds in which it has broken again and again without any message getting through."""
        if self._stuck_since is None or not self.out or self.out.acknowledged != self._acknowledged:
            return 0.0
        return now - self._stuck_since

    def close(self, linger: int = 0) -> None:
        """Closes the link for good; `linger`: ms that its queued messages may still take."""
        self._closed = True
        if linger and self._leaving:  # a message sealed twice is the same twice
            for message in self._leaving:
                message.seal()
            self._sealed(self._leaving, None)
        self.stands = False
        self._drop_socket(linger)
        self._drop_question()
        self.out.forget()

    def last_word(self, frame: bytes) -> None:
        """Sends a message and closes the link; where it does not stand, once the attempt under way has succeeded."""
        if self.stands or self._socket is None:
            self.send(frame)
            self.close(LINGER)
        else:
            self._last_word = frame

    def _watch(self) -> None:
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(NOW))["event"]
            except zmq.Again:
                return
            self._attempt_begun = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._tell.refused(self, "it refuses this node's key: it has declared this node dead, or knows "
                                   "other peers")  # fmt: skip
            elif event == zmq.EVENT_DISCONNECTED:
                self._broke()
            elif event == zmq.EVENT_CLOSED:  # it was never connected
                if self.stood and not self.number:
                    self._ask_why_not()
                self._broke()

    def _check_attempt(self, outbox: Socket) -> None:
        """Ends an attempt without any sign of it: libzmq gives none where it finds no descriptor for a connection."""
        if self._socket is outbox and not self._attempt_begun:
            self._broke()

    def _connected(self) -> None:
        self.stands = True
        self.trouble = ""
        self._refused_since = None
        self._drop_question()
        if self._last_word:
            if not self.stood:  # its identity would not be understood without the messages before
                for kept in self.out.unacknowledged():
                    self.send(kept.frame)
            self.last_word(self._last_word)
            return
        if self.number:
            self.send(_GREETING, b"")
        for kept in self.out.unacknowledged():
            self.send(kept.frame, kept.payload)
            if not self.stands:
                return
            self.resent += self.stood
        self.reconnections += self.stood
        self.stood = True
        self._tell.stands(self)
        self.down_since = None

    def _broke(self) -> None:
        """Handles the end of an attempt, or of a connection."""
        if self._socket is None:
            return
        self.stands = False
        self._drop_socket(0)
        if self._last_word:
            self.close()
            return
        if self.stood and self.down_since is None:
            self.down_since = self._clock()
            self._note_progress(self.down_since)
            self._tell.broke(self)
            if self._stuck_since is None:
                self._want()
                return
        self._loop.call_later(_AGAIN, self._want)

    def _note_progress(self, now: float) -> None:
        if not self.out or self.out.acknowledged != self._acknowledged:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        self._acknowledged = self.out.acknowledged

    def _want(self) -> None:
        if not self._closed and self._socket is None:
            self._tell.wants(self)

    def _drop_socket(self, linger: int) -> None:
        if self._socket is None or self._monitor is None:
            return
        self._loop.remove(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)
        self._socket = self._monitor = None
        self._leaving = deque()

    # --- why it cannot be made ----------------------------------------------------------------------------------------

    def _ask_why_not(self) -> None:
        """Tries a TCP connection, since libzmq does not say why it could not connect: a firewall refuses,
        or a host without a listener there."""
        if self._question is not None:
            return
        version = ipaddress.ip_address(self._endpoint.address).version
        family = sockets_of_python.AF_INET6 if version == 6 else sockets_of_python.AF_INET
        try:
            question = sockets_of_python.socket(family, sockets_of_python.SOCK_STREAM | sockets_of_python.SOCK_NONBLOCK)
        except OSError as lack:
            if lack.errno not in NO_ROOM:
                raise
            return  # asked again after the next attempt
        error = question.connect_ex((self._endpoint.address, self._port))
        if error != errno.EINPROGRESS:
            question.close()
            self._answered(error)
            return
        self._question = question
        self._loop.add_writer(question.fileno(), self._question_answered)

    def _question_answered(self) -> None:
        assert self._question is not None
        error = self._question.getsockopt(sockets_of_python.SOL_SOCKET, sockets_of_python.SO_ERROR)
        self._drop_question()
        self._answered(error)

    def _answered(self, error: int) -> None:
        now = self._clock()
        where = f"{bracketed(self._endpoint.address)}:{self._port}"
        self.trouble = f"{where}: {os.strerror(error)}" if error else ""
        if error != errno.ECONNREFUSED:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since >= _REFUSED_FOR and not self._closed:
            self._tell.refused(self, "")

    def _drop_question(self) -> None:
        if self._question is not None:
            self._loop.remove(self._question.fileno())
            self._question.close()
            self._question = None


def _send_in_frames(socket: Socket, message: bytes) -> None:
    """Sends a control message, in frames as large as they may be."""
    last = max(len(message) - 1, 0) // CONTROL_FRAME * CONTROL_FRAME
    for start in range(0, last, CONTROL_FRAME):
        socket.send(message[start : start + CONTROL_FRAME], MORE)
    socket.send(message[last:], NOW)
