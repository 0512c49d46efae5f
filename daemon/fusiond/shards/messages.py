"""Messages to and from homes: all values of a bucket as bytes and back, by its codecs, and cut into pieces.

Unlike the chunks of a collective, a message is there as a whole before anything is done with it, and needs no credit: a
worker posts again only when it has been answered, so what is under way is bounded by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.codecs import BucketCodec, layout_of
from fusion_rt.codecs.base import Array
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.core import scratch
from fusiond.buckets.plans import PlanState


def pack(codec: BucketCodec, values: Array) -> memoryview:
    """Returns all values of a bucket as bytes of their own; changes the state of a codec that remembers."""
    payload = codec.encode(0, values)
    return copied(values) if np.may_share_memory(np.frombuffer(payload, np.uint8), values) else payload


def copied(values: Array) -> memoryview:
    """Returns the bytes of a contiguous array in memory of their own. While numpy copies, the event loop goes on; while
    `bytes` and `tobytes` do, no other thread of Python does."""
    return scratch.copied(values.view(np.uint8)).data


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


def joined(payloads: list[memoryview]) -> memoryview:
    """Returns the bytes of a message that has come in these pieces, and drops each as soon as it is copied: the list is
    empty then. To be called by a thread, since memory that is written first takes long on a busy machine."""
    if len(payloads) == 1:
        return payloads.pop()
    whole = scratch.empty(sum(map(len, payloads)), np.uint8)
    end = len(whole)
    while payloads:
        last = payloads.pop()
        whole[end - len(last) : end] = np.frombuffer(last, np.uint8)
        end -= len(last)
    return whole.data


def open_codec(state: PlanState, bucket: wire.Bucket, draws: int, remembers: bool = True) -> BucketCodec:
    """Opens the codec of a bucket's messages, for one stream. To be called by a thread: it has memory of each element.

    A codec that remembers something, if only how many steps it has taken, belongs to one stream: what one worker sends
    to a home, or a home to one worker. It lives as long as that, and is never opened for a single message: at random it
    would draw the same each time.

    Args:
        draws: a number of the stream: streams of different numbers round by draws of their own.
        remembers: adds what it has not sent to what it sends next; else that is lost.
    """
    codec = codecs.parse(state.plan.reduction.codec)
    opened = codecs.open_bucket(codec if remembers else codec.without_memory(), layout_of(bucket))
    if isinstance(opened, SummingBucketCodec):
        opened.node = draws
    return opened
