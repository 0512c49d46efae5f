"""Encoding and decoding of messages: each channel's decoder accepts that channel's messages only."""

from __future__ import annotations

import functools
import hashlib
from typing import TypeAlias, TypeVar

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.wire.basics import MAX_MESSAGE, PROTOCOL_VERSION
from fusion_rt.wire.between_ranks import (
    MessageAccepted,
    MessageChunk,
    MessageCredit,
    MessageOver,
    MessageSent,
    MessagesTaken,
)
from fusion_rt.wire.coordinator import Mismatch, OpFailed, PlanRequest, PlanRequestAlike, PlanVerdict, Request, Verdict
from fusion_rt.wire.data import Began, CaughtUp, Chunk, Credit, Held, Piece, PieceTaken
from fusion_rt.wire.figures import Figures, FiguresRequest
from fusion_rt.wire.inquiries import Locate, Located, WaitingHere, WaitingRequest
from fusion_rt.wire.local import DaemonMessage, WorkerMessage
from fusion_rt.wire.peers import (
    Abort,
    Ack,
    Departed,
    Echo,
    GivenUp,
    Heartbeat,
    Joined,
    Leaving,
    LinkTimes,
    Measure,
    NewEpoch,
    Occupied,
    PeerHello,
    Probe,
    Reopen,
    Reopened,
    SnapshotOrder,
    SnapshotsHeld,
    Start,
    Up,
)
from fusion_rt.wire.relayed import Relayed, RelayOpened
from fusion_rt.wire.rings import RingPiece, RingPieceRequest, Rings, RingsRequest
from fusion_rt.wire.views import (
    Canvass,
    Handover,
    NewView,
    Settled,
    Support,
    Suspected,
    ViewAnswer,
    ViewProposal,
)

PeerMessage: TypeAlias = (
    PeerHello | Heartbeat | Ack | Reopen | Reopened | Leaving | GivenUp | Probe | Echo | Measure | LinkTimes | Up
    | NewEpoch | Start | Request | Verdict | PlanRequest | PlanRequestAlike | PlanVerdict | Mismatch | Locate | Located
    | WaitingRequest | WaitingHere | FiguresRequest | Figures | OpFailed | Abort | Departed | Joined | Occupied
    | SnapshotsHeld | SnapshotOrder | Began | Chunk | Credit | Held | CaughtUp | Piece | PieceTaken
    | RingsRequest | Rings | RingPieceRequest | RingPiece | RelayOpened | Relayed
    | MessageSent | MessageAccepted | MessageOver | MessagesTaken | MessageChunk | MessageCredit
    | Suspected | Canvass | Support | ViewProposal | ViewAnswer | NewView | Handover | Settled
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_daemon_decoder: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
encode = _encoder.encode
_Message = TypeVar("_Message")


def decode_worker_message(data: bytes | memoryview) -> WorkerMessage:
    """Decodes a message to the daemon from a worker, or from a tool such as `fusiond status`.

    Raises:
        WireError: the bytes are longer than MAX_MESSAGE or not such a message.
    """
    return _decode(_worker_decoder, data)


def decode_daemon_message(data: bytes | memoryview) -> DaemonMessage:
    """Decodes a message from the daemon to a worker. Raises `WireError` as `decode_worker_message` does."""
    return _decode(_daemon_decoder, data)


def decode_peer_message(data: bytes | memoryview) -> PeerMessage:
    """Decodes a message from another daemon. Raises `WireError` as `decode_worker_message` does."""
    return _decode(_peer_decoder, data)


@functools.cache
def peer_schema() -> str:
    """Returns a digest of the fields and limits of all messages between daemons. Two versions of this package whose
    digests are equal understand each other's messages."""
    return hashlib.blake2b(repr(msgspec.json.schema(PeerMessage)).encode(), digest_size=8).hexdigest()


def _decode(decoder: msgspec.msgpack.Decoder[_Message], data: bytes | memoryview) -> _Message:
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes is longer than the limit of {MAX_MESSAGE}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of this protocol (version {PROTOCOL_VERSION}): {error}") from None
