"""Who may connect: a ZAP handler (ZeroMQ RFC 27) that admits the CURVE keys of this job's daemons and nobody else.

CURVE alone accepts every key pair that knows the server's public key. The handler names the node in the reply's
User-Id, from which the mesh learns who sent a message; a routing id, which the sender chooses, proves nothing.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class KeyGate:
    """Answers libzmq's question, for every connection to a CURVE socket, whether that key may connect."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._nodes: dict[bytes, int] = {}
        self.admitted = 0
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def allow(self, public_key: str, node: int) -> None:
        """Admits a key (Z85) as that node's."""
        self._nodes[z85.decode(public_key)] = node

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
        node = self._nodes.get(request[6]) if len(request) == 7 and request[5] == b"CURVE" else None
        if node is None:
            self.refused += 1
            return [_VERSION, serial, b"400", b"this key is not one of the job's", b"", b""]
        self.admitted += 1
        return [_VERSION, serial, b"200", b"OK", str(node).encode(), b""]
