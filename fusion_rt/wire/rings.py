"""Messages of the mesh that fetch the rings of a node from its daemon, piece by piece, for `fusion-trace collect`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fusion_rt.wire.basics import MAX_RANKS, Count, Line

MAX_RING_PIECE = 128 * 1024  # bytes: in base64 it is shorter than MAX_TEXT


class RingFile(msgspec.Struct, frozen=True, array_like=True):
    """A ring of a node: the name of its file, and its length."""

    name: Line
    nbytes: Count


class RingsRequest(msgspec.Struct, tag="rings?", array_like=True):
    """Asks which rings of this job the receiver's node has. Answered with `Rings`."""

    serial: Count


class Rings(msgspec.Struct, tag="rings", array_like=True):
    """Answers `RingsRequest`: the rings of the sender's daemon and workers."""

    serial: Count
    files: Annotated[tuple[RingFile, ...], msgspec.Meta(max_length=MAX_RANKS)]


class RingPieceRequest(msgspec.Struct, tag="ring?", array_like=True):
    """Asks for `nbytes` bytes of a ring, from `offset` on. Answered with `RingPiece`."""

    serial: Count
    name: Line
    offset: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_RING_PIECE)]


class RingPiece(msgspec.Struct, tag="ring", array_like=True):
    """Answers `RingPieceRequest`: the bytes, or as many as there are; none, and `why_not`, if they cannot be read."""

    serial: Count
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_RING_PIECE)]
    why_not: Line = ""
