"""Messages to and from homes: all values of a bucket as bytes and back, and cut into pieces.

Unlike the chunks of a collective, a message is there as a whole before anything is done with it, and needs no credit: a
worker posts again only when it has been answered, so what is under way is bounded by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.codecs.base import Array, BucketCodec
from fusion_rt.core.errors import WireError


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


class PartialMessage:
    """A message whose pieces come in any order. It is as large as the first piece says, which was checked, and takes
    memory for what has come."""

    def __init__(self, message: wire.Piece) -> None:
        self.message = replace(message, start=0)
        self._buffer = np.empty(message.nbytes, np.uint8)  # whose pages are there once they are written
        self._missing = message.nbytes
        self._ends: dict[int, int] = {}  # of each piece, by its start

    def add(self, piece: wire.Piece, payload: memoryview) -> memoryview | None:
        """Takes a piece. Returns the message when it is whole.

        Raises:
            WireError: the piece is of another message, empty, too long, came before, or overlaps others.
        """
        start, end = piece.start, piece.start + len(payload)
        if replace(piece, start=0) != self.message or start in self._ends or not start < end <= piece.nbytes:
            raise WireError(f"a piece of a {piece.kind} of bucket {piece.bucket} does not fit the others")
        self._ends[start] = end
        self._buffer[start:end] = np.frombuffer(payload, np.uint8)
        self._missing -= len(payload)
        if self._missing < 0 or (not self._missing and not self._whole()):
            raise WireError(f"pieces of a {piece.kind} of bucket {piece.bucket} overlap")
        return None if self._missing else self._buffer.data

    def _whole(self) -> bool:
        """Returns whether each piece begins where another one ends."""
        end = 0
        while end in self._ends:
            end = self._ends[end]
        return end == self.message.nbytes
