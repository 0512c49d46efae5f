"""Messages about operations under way, waits between ranks, and places of workers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fusion_rt.wire.basics import MAX_FRAMES, MAX_LOCATED, MAX_WAITING, Count, Line, Rank
from fusion_rt.wire.operations import OpKey, Signature


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A call in a stack. `source`: the line, if it could be read; `inner`: how many calls inside it are left out."""

    file: Line
    line: Count
    function: Line
    source: Line = ""
    inner: Count = 0


class Stack(msgspec.Struct, frozen=True, array_like=True):
    """The Python stack of a main thread, the most recent call first; `more`: how many calls at its end are left out."""

    frames: Annotated[tuple[Frame, ...], msgspec.Meta(max_length=MAX_FRAMES)] = ()
    more: Count = 0


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """The state of a worker's process, and the stack of its main thread.

    Attributes:
        pid: 0 if there is no process.
        state: of the process, in words.
        why_not: why there is no stack; empty when there is one.
    """

    rank: Rank
    pid: Count
    state: Line
    why_not: Line = ""
    stack: Stack = Stack()


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """Traffic between a node and its peer `node` in one operation, as the former sees it.

    Attributes:
        sent, received: chunks.
        unsent: chunks that wait for the peer's credit.
        silent: seconds since a chunk came from the peer, or since the operation began here.
    """

    node: Rank
    sent: Count
    received: Count
    unsent: Count
    silent: float


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """An operation, a proposal of a plan, a contribution to a home, or a message that is under way on a node.

    Attributes:
        kind: an operation (also a planned bucket's), a proposal of a plan, a contribution to a bucket's home, or a
            rank's send or receive.
        key: its key; of a proposal, its group and clock; of a home, the plan and the bucket, and the clock is the rank
            of the home plus 1.
        what: its description, for people.
        seconds: since it began here, or last made progress.
        submitted: local ranks that have submitted it, and wait.
        awaits: ranks, of any node, without which it cannot be done; of a home, those that it lacks.
        traffic: with the peers, once data is exchanged.
        note: a further remark; of an operation, that it is over.
        signatures: of their submissions, where that was asked for.
    """

    kind: Literal["operation", "plan", "home", "message"]
    key: OpKey
    what: Line
    seconds: float
    submitted: tuple[Rank, ...] = ()
    awaits: tuple[Rank, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    note: Line = ""
    signatures: tuple[Signature, ...] = ()


class Locate(msgspec.Struct, tag="locate", array_like=True):
    """Asks where these ranks of the receiver are, and about these operations. Answered with `Located`."""

    serial: Count
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_LOCATED)]
    keys: Annotated[tuple[OpKey, ...], msgspec.Meta(max_length=MAX_WAITING)] = ()


class Located(msgspec.Struct, tag="located", array_like=True):
    """Answers `Locate`: where the ranks are, and which of the operations wait, or are over, on the sender's node."""

    serial: Count
    found: Annotated[tuple[Whereabouts, ...], msgspec.Meta(max_length=MAX_LOCATED)]
    waiting: Annotated[tuple[Waiting, ...], msgspec.Meta(max_length=MAX_WAITING)] = ()


class WaitingRequest(msgspec.Struct, tag="waiting?", array_like=True):
    """Asks for the operations under way on the receiver's node. Answered with `WaitingHere`.

    Attributes:
        key: asks for this operation only, with signatures, and also when it is over.
    """

    serial: Count
    key: OpKey | None = None


class WaitingHere(msgspec.Struct, tag="waiting", array_like=True):
    """Answers `WaitingRequest`: operations under way on the sender's node.

    Attributes:
        pid: of its daemon.
        more: number of entries that have no room in `waiting`.
    """

    serial: Count
    pid: Count
    waiting: Annotated[tuple[Waiting, ...], msgspec.Meta(max_length=MAX_WAITING)]
    more: Count = 0
