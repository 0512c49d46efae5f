"""Messages of the mesh about connections and membership."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fusion_rt.wire.basics import Count, Name, Rank, Text

MAX_OCCUPIED = 8  # operations in an `Occupied`
MAX_SNAPSHOTS = 8  # numbers in a `SnapshotsHeld`
Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """Admits one payload connection.

    Attributes:
        token: the routing id by which the connection is known.
        secret: the keys of its messages follow from it.
    """

    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class PeerHello(msgspec.Struct, tag="peer_hello", array_like=True):
    """The first message to a peer.

    Attributes:
        version: of the protocol.
        job, node: the sender's.
        tickets: for the payload connections that the receiver opens to the sender.
        aes: the sender's processor has instructions for AES.
        schema: a digest of all messages between daemons (`peer_schema`).
        shared: the settings that both have to share (`settings.SHARED`), as text, by the names of their variables.
    """

    version: int
    job: Name
    node: Rank
    tickets: tuple[Ticket, ...]
    aes: bool = False
    schema: Annotated[str, msgspec.Meta(max_length=64)] = ""
    shared: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = {}


class Heartbeat(msgspec.Struct, tag="hb", array_like=True):
    """Shows that the sender's event loop runs. It is answered at once by another one, so that clocks can be compared.

    Attributes:
        sent: when it left, by the sender's clock (ns).
        echoed: in an answer, `sent` of the heartbeat that it answers; 0: it is to be answered.
        came: in an answer, when that heartbeat arrived, by the sender's clock (ns).
    """

    sent: Nanoseconds = 0
    echoed: Nanoseconds = 0
    came: Nanoseconds = 0


class Ack(msgspec.Struct, tag="ack", array_like=True):
    """An empty message that carries the acknowledgements which precede every control message."""


class Reopen(msgspec.Struct, tag="reopen", array_like=True):
    """Asks for a ticket, because the sender's payload connection of this number to the receiver is broken, or new."""

    number: Annotated[int, msgspec.Meta(ge=1)]


class Reopened(msgspec.Struct, tag="reopened", array_like=True):
    """Answers `Reopen` with a new ticket, and the number of messages received on that connection so far."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    ticket: Ticket
    received: Count


class Leaving(msgspec.Struct, tag="leaving", array_like=True):
    """Says that the sender's daemon ends, and that its connections will not come back."""


class GivenUp(msgspec.Struct, tag="given_up", array_like=True):
    """The last message to a peer that the sender has declared dead, and why: nothing from it is accepted any more."""

    why: Text


class Probe(msgspec.Struct, tag="probe", array_like=True):
    """Asks for an `Echo`, to measure the link. Travels like a chunk: its payload is the next frame."""

    serial: Count


class Echo(msgspec.Struct, tag="echo", array_like=True):
    """Answers `Probe`."""

    serial: Count


class Measure(msgspec.Struct, tag="measure", array_like=True):
    """From the coordinator: the receiver is to measure its links to nodes.

    Attributes:
        nodes: a single one if `rate`.
        rate: how much the link carries, too; else latencies only.
        far: the link is over a distance, so that a few round trips have to do.
        apart: seconds from the first large payload to a node to that to the next one. The answer has the half of their
            best round trips in the place of latencies. 0: payloads are small.
    """

    nodes: tuple[Rank, ...]
    rate: bool = False
    far: bool = True
    apart: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class LinkTimes(msgspec.Struct, tag="link_times", array_like=True):
    """Answers `Measure`.

    Attributes:
        latencies: seconds that a message without payload takes one way, in the order of the nodes asked about.
        seconds_per_byte: further seconds for each byte of payload; 0 where that was not asked for.
    """

    latencies: tuple[Annotated[float, msgspec.Meta(gt=0)], ...]
    seconds_per_byte: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Path(msgspec.Struct, array_like=True, frozen=True):
    """A link between two nodes, as measured when the job started.

    Attributes:
        nodes: both, the lower one first.
        latency: seconds that a message without payload takes one way.
        seconds_per_byte: further seconds for each byte of payload.
    """

    nodes: tuple[Rank, Rank]
    latency: Annotated[float, msgspec.Meta(gt=0)]
    seconds_per_byte: Annotated[float, msgspec.Meta(gt=0)]


class Up(msgspec.Struct, tag="up", array_like=True):
    """To the coordinator: this node's workers have said hello in this membership epoch, and it is connected to all."""

    epoch: Count = 0


class NewEpoch(msgspec.Struct, tag="epoch", array_like=True):
    """Begins a membership epoch on the sender's node, whose workers have all left and come back.

    Everything that the node sends after this message belongs to this epoch.
    """

    epoch: Count


class Start(msgspec.Struct, tag="start", array_like=True):
    """From the coordinator: every node is up, and all use this measured cost model from now on.

    Attributes:
        latency: seconds that a message without payload takes one way.
        seconds_per_byte: further seconds for each byte of payload.
        route_latency, route_seconds_per_byte: of the rounded model by which collectives are chosen.
        paths: all links, where some are over a distance; else none.
    """

    latency: float
    seconds_per_byte: float
    route_latency: float
    route_seconds_per_byte: float
    paths: tuple[Path, ...] = ()


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """The job cannot go on, because of an event on the sender's node."""

    error: Text


class Departed(msgspec.Struct, tag="departed", array_like=True):
    """Says that ranks have shut down in good order; operations that still need them fail."""

    ranks: tuple[Rank, ...]


class Joined(msgspec.Struct, tag="joined", array_like=True):
    """Says that a rank has joined: until all have, it contributes zeros to all-reduces and takes part in nothing else.

    Attributes:
        before: how many times all ranks had joined before; ignored where that number is another one by now.
    """

    rank: Rank
    before: Count


class Occupied(msgspec.Struct, tag="occupied", array_like=True):
    """Tells a plan's shards that a rank waits in other operations, so that they do not wait for it; or no longer does.

    Attributes:
        plan: the plan whose shards are told.
        rank: of the worker.
        clock: one more than that of its last contribution.
        operations: marks (`wire.mark`) of operations that it waits in, the first ones only; empty: it is free.
    """

    plan: Count
    rank: Rank
    clock: Count
    operations: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_OCCUPIED)] = ()


class SnapshotsHeld(msgspec.Struct, tag="snapshots", array_like=True):
    """Tells the nodes with homes of a plan which snapshots of its group the sender has on disk.

    Attributes:
        plan: its id.
        numbers: of the latest snapshots, ascending.
    """

    plan: Count
    numbers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_SNAPSHOTS)]


class SnapshotOrder(msgspec.Struct, tag="snapshot!", array_like=True):
    """Has the nodes with homes of a plan write a snapshot, or begin with one.

    Attributes:
        plan: its id.
        keep: number of the snapshot that all nodes have: to be kept meanwhile, or to begin with. 0: there is none.
        number: of the one that is to be written; 0: homes are to begin.
    """

    plan: Count
    keep: Count
    number: Count
