"""The ZeroMQ sockets of a daemon, with every option that matters set on purpose.

| option | value | why |
| --- | --- | --- |
| LINGER | 0; 2 s for outgoing sockets when the daemon ends or a peer is lost | what a broken connection had is sent
  again from our own buffer; last words may leave |
| SNDHWM | 0 (none) | data under way is bounded by credit and by what may be unacknowledged; a full queue would block
  the event loop, or drop |
| RCVHWM | 4096 control, 256 payload; monitors 0 | a peer that disregards credit is stopped by TCP, not by our memory; a
  monitor that is full would block libzmq's I/O thread |
| IMMEDIATE | 1 | nothing is queued for a connection that does not stand: a send fails, and we keep the message |
| RECONNECT_IVL | -1 (never) | a connection that libzmq makes again has lost an unknown part of its queue, and would use
  its token twice; each attempt is a new socket |
| ROUTER_HANDOVER | 0 | no peer takes over a routing id that is in use |
| HANDSHAKE_IVL | 10 s | a half-open connection costs a descriptor that long |
| MAXMSGSIZE | control inbox: 64 KiB, and longer messages come in several frames; payload inbox: the longest valid
  payload; all others 4 KiB | it is unlimited by default; a longer frame ends the connection before memory is allocated,
  and it holds for the frames of a handshake, before a peer has shown a key |
| ZAP_ENFORCE_DOMAIN | 1 | without it, libzmq admits everybody while no ZAP handler is there |
| BACKLOG | 128 | connections that wait to be accepted |
| CONNECT_TIMEOUT | 1 s | the kernel's own takes minutes, in which a link may have come back |
| TCP_MAXRT | heartbeat time-out | data without an acknowledgement for that long ends the connection |
| TCP_KEEPALIVE | idle 1 s, then 1 s, 5 times | the peer's end of an idle connection may be gone, with what it had |
| HEARTBEAT_IVL | 0 | ZMTP's heartbeats stay green while Python hangs; the loop sends its own |
| MAX_SOCKETS | by the number of nodes | the default of 1023 is for about 170 of them; a monitor is two sockets |
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.host.cores import cores, io_threads
from fusion_rt.host.ports import listen_in
from fusion_rt.settings import Settings
from fusiond.transport.accepted_sockets import AcceptedSockets
from fusiond.transport.distance import MOST_CONNECTIONS

LINGER = 2000  # ms that last words may take
NOW = int(zmq.NOBLOCK)  # plain integers: to combine enumeration members costs a microsecond a message
MORE = int(zmq.SNDMORE) | NOW
MAX_UNKNOWN = 64 * 1024  # bytes of a frame that are taken from whoever has not shown a key, on the control inbox
CONTROL_FRAME = MAX_UNKNOWN - 256  # bytes of a control message in one frame; CURVE adds 33
MAX_HEADER = 4096  # bytes of a payload's header, at most
_HANDSHAKE = 10_000  # ms
_BACKLOG = 128
_CONNECT = 1000  # ms
_CONTROL_QUEUE, _PAYLOAD_QUEUE = 4096, 256  # messages
_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_MONITORED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED

Socket = zmq.Socket[bytes]
RunJobs: TypeAlias = Callable[[Sequence[Callable[[], None]], Callable[[BaseException | None], None]], None]
LANE_FROM = 128 * 1024
"""Bytes of payload from which on threads seal and open it: their hand-over costs more than that of shorter ones."""


class Sockets:
    """Makes the ZeroMQ sockets.

    Args:
        settings: I/O threads, time-outs, encryption.
        address: where this node listens.
        nodes: how many there are.

    Attributes:
        encrypts: payloads to this node come encrypted.
        lanes: seal and open long payloads, and then call back in the event loop; None: that does it itself.
    """

    def __init__(self, settings: Settings, address: str, nodes: int) -> None:
        self.context: zmq.Context[Socket] = zmq.Context(settings.io_threads or io_threads(cores()))
        # Of each connection a socket, its monitor's two ends, and the same again while it is replaced.
        self.context.set(zmq.MAX_SOCKETS, 64 + 6 * nodes * (1 + (settings.connections or MOST_CONNECTIONS)))
        self.public, self._secret = zmq.curve_keypair()
        self._settings = settings
        self._address = address
        self._serial = itertools.count()
        self.lanes: RunJobs | None = None
        self.encrypts = self.encrypts_payload(address)

    def encrypts_payload(self, address: str) -> bool:
        """Returns whether the node that listens on `address` encrypts payloads; both ends ask, so that they agree."""
        if self._settings.encryption == "auto":
            return not ipaddress.ip_address(address).is_loopback
        return self._settings.encryption == "all"

    def control_inbox(self) -> tuple[Socket, int]:
        """Returns a listening socket for control messages, and its port.

        Raises:
            zmq.ZMQError: it cannot listen.
            FusionError: all ports that it may listen on are taken.
        """
        return self._inbox(MAX_UNKNOWN, _CONTROL_QUEUE, curve=True)

    def payload_inbox(self, max_message: int) -> tuple[Socket, int]:
        """Returns a listening socket for messages with payloads of at most `max_message` bytes, and its port.

        Raises: as `control_inbox`.
        """
        return self._inbox(max_message + MAX_HEADER, _PAYLOAD_QUEUE, curve=False)

    def outbox(self, endpoint: Endpoint, token: bytes = b"") -> tuple[Socket, Socket]:
        """Returns a socket to be connected to a peer, and its monitor; `token`: of payloads, its routing id there.

        Raises:
            zmq.ZMQError: there are no descriptors or memory for them.
        """
        socket = self.context.socket(zmq.DEALER)
        self._set_options(socket)
        socket.rcvhwm = 1
        socket.maxmsgsize = MAX_HEADER  # nothing is ever received here
        socket.ipv6 = 1 if ":" in endpoint.address else 0
        if not token:
            socket.curve_serverkey = endpoint.public_key.encode()
            socket.curve_publickey = self.public
            socket.curve_secretkey = self._secret
        else:  # messages are sealed before libzmq gets them (`sealing`)
            socket.routing_id = token
            socket.plain_username = b"fusion_rt"
            socket.plain_password = token
        try:
            return socket, self.monitor(socket)
        except zmq.ZMQError:
            socket.close(0)
            raise

    def monitor(self, socket: Socket) -> Socket:
        """Returns a socket that tells of another one's connections, from now on."""
        address = f"inproc://monitor.{next(self._serial)}"
        socket.monitor(address, _MONITORED)
        monitor = self.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0
        monitor.connect(address)
        return monitor

    def accepted(self, inbox: Socket) -> AcceptedSockets:
        """Returns the connections of a listening socket."""
        return AcceptedSockets(inbox)

    def _inbox(self, max_frame: int, queue: int, curve: bool) -> tuple[Socket, int]:
        socket = self.context.socket(zmq.ROUTER)
        self._set_options(socket)
        socket.rcvhwm = queue
        socket.maxmsgsize = max_frame
        socket.backlog = _BACKLOG
        socket.router_handover = 0
        if curve:
            socket.curve_server = 1
            socket.curve_secretkey = self._secret
        else:  # so that nothing of a connection is taken before its token was looked at
            socket.plain_server = 1
        socket.zap_domain = b"fusion_rt"
        socket.zap_enforce_domain = 1
        socket.ipv6 = 1 if ":" in self._address else 0
        try:
            listen_in(self._settings.ports, lambda port: socket.bind(f"tcp://{bracketed(self._address)}:{port or '*'}"))
        except BaseException:
            socket.close(0)
            raise
        return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _set_options(self, socket: Socket) -> None:
        socket.linger = 0
        socket.sndhwm = 0
        socket.immediate = 1
        socket.handshake_ivl = _HANDSHAKE
        socket.connect_timeout = _CONNECT
        socket.reconnect_ivl = -1
        socket.heartbeat_ivl = 0
        socket.tcp_maxrt = max(1000, round(1000 * self._settings.heartbeat_timeout))
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 1
        socket.tcp_keepalive_intvl = 1
        socket.tcp_keepalive_cnt = 5


def bracketed(address: str) -> str:
    """Returns an IP address in the form before a port."""
    return f"[{address}]" if ":" in address else address
