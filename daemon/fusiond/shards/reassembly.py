"""The reassembly of messages from the pieces that peers send, which may come before their plan."""

from __future__ import annotations

from collections import deque

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusiond.buckets.plans import PlanState
from fusiond.shards.checks import check_piece
from fusiond.shards.message_codecs import MessageCodecs
from fusiond.shards.messages import PartialMessage
from fusiond.shards.node import ThisNode

_MAX_EARLY = 4096  # pieces that may come before their plan
_MAX_EARLY_BYTES = 1 << 32  # of their payloads
_MAX_OPEN = 8  # messages from a rank to a home, or back, that may be incomplete


class Reassembly:
    """Pieces that have come from peers and cannot be used yet.

    Args:
        here: this node.
        codecs: know how long a message may be.
    """

    def __init__(self, here: ThisNode, codecs: MessageCodecs) -> None:
        self._here = here
        self._codecs = codecs
        self._assemblies: dict[tuple[object, ...], PartialMessage] = {}
        self._early: deque[tuple[int, wire.Piece, memoryview]] = deque()
        self._early_bytes = 0

    @property
    def incomplete(self) -> int:
        """Number of incomplete messages."""
        return len(self._assemblies)

    def keep(self, node: int, piece: wire.Piece, payload: memoryview) -> None:
        """Keeps a piece that has come before its plan. Raises `WireError` if there are too many."""
        self._early_bytes += len(payload)
        if len(self._early) >= _MAX_EARLY or self._early_bytes > _MAX_EARLY_BYTES:
            raise WireError(f"more than {_MAX_EARLY} pieces, or {_MAX_EARLY_BYTES} bytes, came before their plan")
        self._early.append((node, piece, payload))

    def kept(self) -> deque[tuple[int, wire.Piece, memoryview]]:
        """Returns all of those, with their nodes, and keeps none."""
        early, self._early, self._early_bytes = self._early, deque(), 0
        return early

    def add(self, node: int, state: PlanState, piece: wire.Piece, payload: memoryview) -> memoryview | None:
        """Takes a piece. Returns the payload of its message when that is whole.

        Raises:
            WireError: there can be no such message.
        """
        check_piece(self._here, self._codecs, node, state, piece)
        if not piece.start and len(payload) == piece.nbytes:
            return payload
        key = (node, piece.plan, piece.bucket, piece.home, piece.rank, piece.kind, piece.clock)
        assembly = self._assemblies.get(key)
        if assembly is None:
            if sum(other[:5] == key[:5] for other in self._assemblies) >= _MAX_OPEN:
                raise WireError(f"too many messages of rank {piece.rank} and bucket {piece.bucket} are incomplete")
            assembly = self._assemblies[key] = PartialMessage(piece)
        whole = assembly.add(piece, payload)
        if whole is not None:
            del self._assemblies[key]
        return whole

    def drop(self, plan: int) -> None:
        """The plan is no longer active."""
        self._assemblies = {key: assembly for key, assembly in self._assemblies.items() if key[1] != plan}

    def clear(self) -> None:
        """The job cannot go on."""
        self._assemblies.clear()
        self._early.clear()
