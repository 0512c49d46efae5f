"""The mesh: connections, and who is there."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fusion_rt.wire.basics import Count, Name, Rank, Text

MAX_OCCUPIED = 8  # operations in an `Occupied`
Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PeerHello(msgspec.Struct, tag="peer_hello", array_like=True):
    """First message to a peer. `tokens`: routing ids under which the peer may open payload connections to us."""

    version: int
    job: Name
    node: Rank
    tokens: tuple[Annotated[bytes, msgspec.Meta(max_length=64)], ...]


class Heartbeat(msgspec.Struct, tag="hb", array_like=True):
    """The sender's event loop turns. It is answered at once by another one, so that clocks can be compared.

    Attributes:
        sent: when it left, by the sender's clock (ns).
        echoed: of an answer: `sent` of what it answers; 0: it is to be answered.
        came: of an answer: when that came, by the sender's clock (ns).
    """

    sent: Nanoseconds = 0
    echoed: Nanoseconds = 0
    came: Nanoseconds = 0


class Ack(msgspec.Struct, tag="ack", array_like=True):
    """Nothing else was there to carry the acknowledgements that stand before every control message."""


class Reopen(msgspec.Struct, tag="reopen", array_like=True):
    """The sender's payload connection of this number to you is broken, and it asks for a new token."""

    number: Annotated[int, msgspec.Meta(ge=1)]


class Reopened(msgspec.Struct, tag="reopened", array_like=True):
    """Answers `Reopen`: a new token, and how many messages have come on that connection so far."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    token: Annotated[bytes, msgspec.Meta(max_length=64)]
    received: Count


class Leaving(msgspec.Struct, tag="leaving", array_like=True):
    """The sender's daemon ends: its connections will not come back."""


class GivenUp(msgspec.Struct, tag="given_up", array_like=True):
    """The last word to a peer that the sender has given up, and why: nothing that it sends is taken any more."""

    why: Text


class Probe(msgspec.Struct, tag="probe", array_like=True):
    """Asks for an `Echo`, to measure the link. Travels like a chunk: its payload is the next frame."""

    serial: Count


class Echo(msgspec.Struct, tag="echo", array_like=True):
    serial: Count


class Up(msgspec.Struct, tag="up", array_like=True):
    """To the coordinator: this node's workers have said hello, in this membership epoch, and its connections stand."""

    epoch: Count = 0


class NewEpoch(msgspec.Struct, tag="epoch", array_like=True):
    """All workers of the sender's node have left and come back: what it sends from here on is about this epoch."""

    epoch: Count


class Start(msgspec.Struct, tag="start", array_like=True):
    """From the coordinator: every node is up; the measured cost model that all nodes use from now on.

    Attributes:
        latency: seconds that a message without payload takes one way.
        seconds_per_byte: further seconds for each byte of payload.
        route_latency, route_seconds_per_byte: of the model by which ways between nodes are chosen.
    """

    latency: float
    seconds_per_byte: float
    route_latency: float
    route_seconds_per_byte: float


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """The job cannot go on, because of what happened on the sender's node."""

    error: Text


class Departed(msgspec.Struct, tag="departed", array_like=True):
    """Ranks have shut down in good order; operations that still need them fail."""

    ranks: tuple[Rank, ...]


class Joined(msgspec.Struct, tag="joined", array_like=True):
    """A rank has joined: until all have, it contributes nothing to all-reduces and takes part in nothing else.

    Attributes:
        before: how many times all ranks had joined before. What comes when they have done so again comes too late.
    """

    rank: Rank
    before: Count


class Occupied(msgspec.Struct, tag="occupied", array_like=True):
    """A rank waits in other operations than those at a plan's shards, which do not wait for it meanwhile; or not any
    more.

    Attributes:
        plan: whose shards are told.
        rank: of the worker.
        clock: one more than that of its last contribution.
        operations: marks (`wire.mark`) of operations that it waits in, not all if these are many; none: it is free.
    """

    plan: Count
    rank: Rank
    clock: Count
    operations: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_OCCUPIED)] = ()
