"""The mesh: headers of data (chunks of operations, pieces of messages), and messages beside it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from fusion_rt.wire.basics import MAX_RANKS, Count, PostKind, Rank, Rates
from fusion_rt.wire.operations import OpKey, Signature

PieceKind: TypeAlias = (
    PostKind | Literal["answer", "refused", "mix", "whole", "mean", "pass", "want", "told", "image", "update"]
)


class Began(msgspec.Struct, tag="began", array_like=True):
    """To a node whose ranks have all joined: the sender has begun an operation, in which every node forwards data.

    `signature`: for an operation outside a plan, whose signature that node may not remember.
    """

    key: OpKey
    digest: int
    signature: Signature | None = None


class Chunk(msgspec.Struct, tag="c", array_like=True):
    """A part of an operation's data; its payload is the next frame.

    Attributes:
        key: the operation.
        digest: the signature's digest (`wire.digest`), or the plan's bucket digest.
        part: which part of the data, in the collective's own terms (a ring's segment, a sender's rank).
        start: first element within the part.
        hop: how many nodes the part has passed through.
        asks: for `CaughtUp`, when the receiver has reached the operation.
    """

    key: OpKey
    digest: int
    part: Count
    start: Count
    hop: Count
    asks: bool = False


class Credit(msgspec.Struct, tag="k", array_like=True):
    """The receiver has consumed `chunks` further chunks of an operation: the sender may send as many more."""

    key: OpKey
    chunks: Count


class Held(msgspec.Struct, tag="held", array_like=True):
    """The sender holds chunks of an operation back, and asks for `CaughtUp` when the receiver has reached it."""

    key: OpKey


class CaughtUp(msgspec.Struct, tag="caughtup", array_like=True):
    """The sender has reached an operation, about which the receiver has asked."""

    key: OpKey


class PieceTaken(msgspec.Struct, tag="ptaken", array_like=True):
    """The receiver of a message in pieces has taken it in: the sender may have as many more bytes under way. A mirror
    takes its shard's messages in one after the other, and has all up to this one.

    Attributes:
        epoch, plan, bucket, kind, clock: of the message; see `Piece`.
        nbytes: how many.
    """

    epoch: Count
    plan: Count
    bucket: Count
    kind: PieceKind
    clock: Count
    nbytes: Count


SHARD = -1
"""In the place of the rank of a home: it is the only one that its bucket has."""


class Staleness(msgspec.Struct, array_like=True, frozen=True):
    """The age of a contribution when it was taken in, in updates, clocks and milliseconds.

    Attributes:
        version_lag: updates of the home since the worker had last heard from it.
        clock_gap: clocks that the worker was ahead of the slowest.
        age_ms: how long the contribution waited to be read (ms).
    """

    version_lag: Count = 0
    clock_gap: Count = 0
    age_ms: Count = 0


class AnswerTerms(msgspec.Struct, array_like=True, frozen=True):
    """The meaning of the values in a home's answer.

    Attributes:
        added: they are to be added to the worker's own, and do not replace them.
        coded: the codec of the bucket's messages has encoded them; only where they are added.
        staleness: of the contribution that is answered; None if it is none, but a question.
    """

    added: bool = False
    coded: bool = False
    staleness: Staleness | None = None


class Piece(msgspec.Struct, tag="p", array_like=True):
    """A piece of a message to or from a bucket's home; its payload is the next frame.

    Attributes:
        epoch: the membership epoch.
        plan, bucket: which bucket.
        kind: what the message is: a worker's contribution (`post`), or its question what the home has (`ask`), what a
            home begins with (`seed`) or goes on with (`reseed`), what a worker has (`has`), a home's answer to a worker
            (`answer`, or `refused` with a sentence), or what one rank's home tells another's (`mix`; `whole`: the same,
            and no codec was applied; `mean`: the way from the receiver to the mean of both; `pass`: it has nothing to
            mix at this clock; `want`: it is at this clock and waits for the other), or the home of the first bucket
            those of the others (`told`: int64 numbers), or a shard its mirror on another node (`image`: all that it
            has, as named arrays; `update`: a gradient that it has applied, as it is).
        home: the position of the rank whose home it concerns, or `SHARD`.
        rank: the worker that posted, or is answered; between homes, the rank of the sending one.
        clock: the worker's, of the contribution; to a mirror, the number of the message, from 1 on.
        version: of the home: the one that a contribution is based on, or that an answer has; to a mirror, one more than
            the latest clock that counts in the update.
        nbytes: of the message; `start`: the first one of this piece.
        rates, samples: as in `Ready`.
        weight: push-sum weight.
        terms: of an answer.
        after: mark of the operation that was completed last on the sender's node; 0: none that matters.
    """

    epoch: Count
    plan: Count
    bucket: Count
    kind: PieceKind
    home: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_RANKS)]
    rank: Rank
    clock: Count
    version: Count
    nbytes: Count
    start: Count = 0
    rates: Rates = ()
    samples: Count = 1
    weight: float = 1.0
    terms: AnswerTerms | None = None
    after: Count = 0
