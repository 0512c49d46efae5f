"""A ZAP handler (ZeroMQ RFC 27) that admits connections of this job's daemons and of nobody else, by their CURVE keys,
or, where payloads are not encrypted, by the tokens that they were given (PLAIN).

CURVE alone accepts every key pair that knows the server's public key. The handler names the node in the reply's
User-Id, from which the mesh learns who sent a message; a routing id, which the sender chooses, proves nothing.

libzmq takes no message of a connection before it was admitted. So the token has to be asked for here: the frames of
a message without end would all stay in memory, whatever the limits (they count whole messages), and no routing id
would ever be seen.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class KeyGate:
    """Answers libzmq's question, for every connection, whether that key or token may connect.

    Args:
        node_of_token: returns the node of a token that has not been used; None if there is none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        node_of_token: Callable[[bytes], int | None] = lambda token: None,
    ) -> None:
        self._node_of_token = node_of_token
        self._nodes: dict[bytes, int] = {}
        self.admitted = 0
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.rcvhwm = self.socket.sndhwm = 0  # libzmq's I/O threads must never wait for us here
        self.socket.bind(_ADDRESS)

    def allow(self, public_key: str, node: int) -> None:
        """Admits a key (Z85) as that node's."""
        self._nodes[z85.decode(public_key)] = node

    def forbid(self, node: int) -> None:
        """Refuses that node's key from now on; connections that stand are not touched."""
        self._nodes = {key: owner for key, owner in self._nodes.items() if owner != node}

    def answer(self) -> None:
        """Answers the requests that are waiting."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._reply(request))

    def _reply(self, request: list[bytes]) -> list[bytes]:
        # version, request id, domain, address, identity, mechanism, credentials...
        serial = request[1] if len(request) > 1 else b""
        node = None
        if len(request) == 7 and request[5] == b"CURVE":
            node = self._nodes.get(request[6])
        elif len(request) == 8 and request[5] == b"PLAIN":  # a name, of no meaning, and the token
            node = self._node_of_token(request[7])
        if node is None:
            self.refused += 1
            return [_VERSION, serial, b"400", b"this key is not one of the job's", b"", b""]
        self.admitted += 1
        return [_VERSION, serial, b"200", b"OK", str(node).encode(), b""]
