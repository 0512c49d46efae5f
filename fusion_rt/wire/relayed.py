"""Messages of the mesh that relay connections of TCP between loopback ports of two nodes."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fusion_rt.wire.basics import Count

MAX_RELAYED = 32 * 1024  # bytes in a `Relayed`
PortNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=65536)]


class RelayOpened(msgspec.Struct, tag="relay", array_like=True):
    """Says that a connection has come for a port that a worker of the receiver's node serves.

    `serial`: its number among those that the sender has opened to the receiver.
    """

    serial: Count
    port: PortNumber


class Relayed(msgspec.Struct, tag="relayed", array_like=True):
    """Brings bytes that have come on a connection.

    Attributes:
        serial: as in `RelayOpened`.
        is_senders: the sender of this message has opened it.
        data: bytes, in order.
        taken: bytes that the sender's end has taken since it said so last: so many more may follow.
        is_over: the connection has ended at the sender's end.
    """

    serial: Count
    is_senders: bool
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_RELAYED)] = b""
    taken: Count = 0
    is_over: bool = False
