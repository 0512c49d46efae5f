"""A ZAP handler (ZeroMQ RFC 27) that admits connections of this job's daemons only, by their CURVE keys,
or, where payloads are not encrypted, by the tokens that they were given (PLAIN).

CURVE alone accepts every key pair that knows the server's public key. The handler names, in the reply's User-Id, as
whom the peer was admitted, from which the mesh learns the sender of a message; a routing id, which the sender chooses,
proves nothing.

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
        id_of_token: returns the node that an unused token is for; None if it is for none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        id_of_token: Callable[[bytes], int | None] = lambda token: None,
    ) -> None:
        self._id_of_token = id_of_token
        self._ids: dict[bytes, int] = {}
        self.admitted = 0
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.rcvhwm = self.socket.sndhwm = 0  # libzmq's I/O threads must never wait for us here
        self.socket.bind(_ADDRESS)

    def allow(self, public_key: str, id: int) -> None:
        """Admits a key (Z85), as the peer of that id."""
        self._ids[z85.decode(public_key)] = id

    def forbid(self, id: int) -> None:
        """Refuses that peer's key from now on; connections that stand are not touched."""
        self._ids = {key: owner for key, owner in self._ids.items() if owner != id}

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
        id = None
        if len(request) == 7 and request[5] == b"CURVE":
            id = self._ids.get(request[6])
        elif len(request) == 8 and request[5] == b"PLAIN":  # a name, of no meaning, and the token
            id = self._id_of_token(request[7])
        if id is None:
            self.refused += 1
            return [_VERSION, serial, b"400", b"this key is not one of the job's", b"", b""]
        self.admitted += 1
        return [_VERSION, serial, b"200", b"OK", str(id).encode(), b""]
