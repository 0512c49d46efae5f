"""Messages to and from homes: all values of a bucket as bytes and back, by its codecs, cut into pieces, and sent by
`ThisNode`, which all parts of this package share.

Unlike the chunks of a collective, a message is there as a whole before anything is done with it, and needs no credit: a
worker posts again only when it has been answered, so what is under way is bounded by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.codecs import BucketCodec, layout_of
from fusion_rt.codecs.base import Array
from fusion_rt.codecs.dense import Dense
from fusion_rt.core.topology import Topology
from fusion_rt.settings import Settings
from fusion_rt.tracing.recorder import NULL, Instrument
from fusiond.buckets.plans import PlanState
from fusiond.core.effects import Effects
from fusiond.operations.thread_work import Act, ThreadWork

Address: TypeAlias = tuple[int, int, int]  # plan, bucket, and a home's rank (-1: shard) or a worker's rank


def pack(codec: BucketCodec, values: Array) -> memoryview:
    """Returns all values of a bucket as bytes of their own; changes the state of a codec that remembers."""
    return memoryview(bytes(codec.encode(0, values)))


def unpack(codec: BucketCodec, payload: memoryview) -> Array:
    """Returns the values in a message; possibly a read-only view of it.

    Raises:
        CodecError: this is no message of this bucket.
    """
    return codec.decoded(0, payload, codec.layout.elements)


def pieces(message: wire.Piece, payload: memoryview, chunk_bytes: int) -> Iterator[tuple[wire.Piece, memoryview]]:
    """Yields the pieces of a message, at least one, with their payloads."""
    message = replace(message, nbytes=len(payload))
    for start in range(0, max(len(payload), 1), chunk_bytes):
        yield replace(message, start=start), payload[start : start + chunk_bytes]


class MessageCodecs:
    """Opens the codecs of messages, and keeps those that all share."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], BucketCodec] = {}  # by plan and bucket
        self._plain: dict[tuple[int, int], BucketCodec] = {}

    def open(self, state: PlanState, bucket: wire.Bucket, remembers: bool = True) -> BucketCodec:
        """Opens a bucket's codec, for one user.

        Args:
            remembers: adds what it has not sent to what it sends next; else that is lost.
        """
        codec = _codec(state)
        return codecs.open_bucket(codec if remembers else codec.without_memory(), layout_of(bucket))

    def decoder(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Returns the codec that decodes messages of a bucket. Several threads may use it at the same time."""
        key = state.plan.id, bucket.index
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = self.open(state, bucket, remembers=False)
        return decoder

    def plain(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Returns the codec of messages that have a bucket's values as they are. Several threads may use it."""
        key = state.plan.id, bucket.index
        plain = self._plain.get(key)
        if plain is None:
            plain = self._plain[key] = Dense().open(layout_of(bucket))
        return plain

    def encoder(self, state: PlanState, bucket: wire.Bucket) -> BucketCodec:
        """Returns a codec that encodes one message of a home. One that selects has scratch memory of its own even
        if what it leaves out is lost."""
        if _codec(state).stateful:
            return self.open(state, bucket, remembers=False)
        return self.decoder(state, bucket)

    def drop(self, plan: int) -> None:
        """The plan is no longer active."""
        self._decoders = {key: decoder for key, decoder in self._decoders.items() if key[0] != plan}
        self._plain = {key: plain for key, plain in self._plain.items() if key[0] != plan}


def _codec(state: PlanState) -> codecs.Codec:
    return codecs.parse(state.plan.reduction.codec)


@dataclass(slots=True)
class ThisNode:
    """This node, in one membership epoch.

    Attributes:
        topology, node: who is where, and which node this is.
        settings: sizes and time-outs.
        outside: acts for it.
        epoch: the membership epoch.
        work: the threads.
        failed: called with an exception when something cannot be gone on with.
        trace: what is done is recorded there.
        after: the mark of the operation that was completed last here, which goes with all that is sent.
        failure: why the job cannot go on, and so nothing is sent and nothing is begun; empty if it can.
    """

    topology: Topology
    node: int
    settings: Settings
    outside: Effects
    epoch: int
    work: ThreadWork
    failed: Callable[[BaseException], None]
    trace: Instrument = NULL
    after: int = 0
    failure: str = ""

    def do(self, plan: int, work: Act, nbytes: float, then: Act) -> None:
        """Runs `work` for a plan, on a thread if it works on much, and `then` in the event loop, unless the job cannot
        go on."""

        def done(error: BaseException | None) -> None:
            if self.failure:
                return
            if error is None:
                then()
            else:
                self.failed(error)

        self.work.do(plan, [work], nbytes, done)

    def send(self, node: int, message: wire.Piece, payload: memoryview) -> None:
        """Sends a message, whose payload nobody will change, to another node."""
        if not self.failure:
            for piece, data in pieces(replace(message, after=self.after), payload, self.settings.chunk_bytes):
                self.outside.send_piece(node, piece, data)
