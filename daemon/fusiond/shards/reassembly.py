"""The reassembly of messages from the pieces that peers send, which may come before their plan, and are checked before
anything is done with them."""

from __future__ import annotations

import math
from collections import deque
from typing import get_args

from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusiond.buckets.plans import PlanState
from fusiond.core.assembly import BytesInPieces
from fusiond.shards.mirrors import mirror_of
from fusiond.shards.node import ThisNode

_CODED = ("post", "ask", "answer", "mix", "mean")  # kinds of messages that a codec may have encoded
_MAX_EARLY = 4096  # pieces that may come before their plan
_MAX_EARLY_BYTES = 1 << 32  # of their payloads
_MAX_OPEN = 8  # messages from a rank to a home, or back, that may be incomplete
_MAX_SENTENCE = 64 * 1024  # bytes of the reason for which a contribution is refused
_MOST_STATE = 8  # times the bytes of its value that a shard and its optimizer's state may take, besides one a rank
_HEADER = 4096  # bytes of a tensor's entries in it, besides


class PartialMessage:
    """A message whose pieces come in any order. It is as large as the first piece says, which was checked. The pieces
    stay where they came: who takes the message in puts them together (`joined`), on a thread."""

    def __init__(self, message: wire.Piece) -> None:
        self._message = replace(message, start=0)
        self._assembly = BytesInPieces(_in_words(message), message.nbytes)
        self._payloads: dict[int, memoryview] = {}  # by their starts

    def add(self, piece: wire.Piece, payload: memoryview) -> list[memoryview] | None:
        """Takes a piece. Returns all of them, in order, when the message is whole.

        Raises:
            WireError: the piece is of another message, empty, too long, came before, or overlaps others.
        """
        if replace(piece, start=0) != self._message:
            raise WireError(f"a piece of {_in_words(piece)} does not fit the others, which say something else of it")
        is_whole = self._assembly.add(piece.start, len(payload))
        self._payloads[piece.start] = payload
        return [self._payloads[start] for start in sorted(self._payloads)] if is_whole else None


class Reassembly:
    """Pieces that have come from peers and cannot be used yet. Args: `here`: this node."""

    def __init__(self, here: ThisNode) -> None:
        self._here = here
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

    def add(self, node: int, state: PlanState, piece: wire.Piece, payload: memoryview) -> list[memoryview] | None:
        """Takes a piece. Returns the payloads of its message, in order, when that is whole.

        Raises:
            WireError: there can be no such message.
        """
        _check(self._here, node, state, piece)
        if not piece.start and len(payload) == piece.nbytes:
            return [payload]
        return self._add_part(node, state, piece, payload)

    def _add_part(self, node: int, state: PlanState, piece: wire.Piece, payload: memoryview) -> list[memoryview] | None:
        key = (node, piece.plan, piece.bucket, piece.home, piece.rank, piece.kind, piece.clock)
        assembly = self._assemblies.get(key)
        if assembly is None:
            # A shard that does not wait for its ranks may tell its mirror of an update of each at the same time.
            most = _MAX_OPEN + (len(state.members.set.ranks) if piece.kind == "update" else 0)
            if sum(other[:5] == key[:5] for other in self._assemblies) >= most:
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


def _in_words(piece: wire.Piece) -> str:
    return f"the {piece.kind} of rank {piece.rank} for bucket {piece.bucket}"


def _check(here: ThisNode, node: int, state: PlanState, piece: wire.Piece) -> None:
    """Raises `WireError` unless this node can get such a piece from that one."""
    if not _fits(here, node, state, piece):
        raise WireError(f"no {piece.kind} of rank {piece.rank} for bucket {piece.bucket} can come from it")
    bucket = state.plan.buckets[piece.bucket]
    limit = bucket.numel * DTYPES[bucket.dtype].itemsize
    if piece.kind in _CODED:
        limit = max(limit, state.buckets[piece.bucket].decoder.max_encoded_nbytes(bucket.numel))
    else:
        limit = _limit_of(state, piece, limit)
    if piece.nbytes > limit:
        raise WireError(f"{_in_words(piece)} has {piece.nbytes} bytes, and {limit} is the most")
    if piece.kind == "answer" and (piece.terms is None or (piece.terms.coded and not piece.terms.added)):
        raise WireError(f"{_in_words(piece)} has the terms {piece.terms}, by which no home answers")
    if piece.kind == "post" and (wrong := state.wrong_rates(bucket.index, piece.rates)):
        raise WireError(f"{_in_words(piece)} cannot be taken in: {wrong}")
    if not (0 < piece.weight < math.inf):
        raise WireError(f"{_in_words(piece)} has the weight {piece.weight}, which has to be above 0")


def _limit_of(state: PlanState, piece: wire.Piece, nbytes: int) -> int:
    """Returns the most bytes of a message that is no contribution, and no answer to one.

    Args:
        nbytes: of the bucket's values.

    Raises:
        WireError: it has another size than it can have; or it is an update that cannot be made.
    """
    ranks = len(state.members.set.ranks)
    if piece.kind in ("seed", "reseed", "has", "whole") or (piece.kind == "update" and piece.samples > 0):
        if piece.nbytes != nbytes:
            raise WireError(f"{_in_words(piece)} has {piece.nbytes} bytes instead of {nbytes}")
        carried = not piece.rates and state.home_algorithm.carries
        wrong = "" if piece.kind != "update" or carried else state.wrong_rates(piece.bucket, piece.rates)
        if wrong:
            raise WireError(f"{_in_words(piece)} cannot be taken in: {wrong}")
        return nbytes
    if piece.kind == "refused":
        return _MAX_SENTENCE
    if piece.kind == "image":  # an algorithm may keep something of each rank
        return (_MOST_STATE + ranks) * nbytes + _HEADER * (1 + len(state.plan.buckets[piece.bucket].tensors) + ranks)
    return 8 * (1 + 2 * ranks) if piece.kind == "told" else 0


def _fits(here: ThisNode, node: int, state: PlanState, piece: wire.Piece) -> bool:
    """Returns whether a node sends this kind of piece, of this rank and bucket, to this node."""
    if piece.bucket >= len(state.plan.buckets) or piece.rank not in state.members.set.ranks:
        return False
    if state.plan.homes:
        return piece.home == wire.SHARD and _fits_shards(here, node, state, piece)
    ranks = state.members.set.ranks
    fits = piece.kind in ("mix", "whole", "mean", "pass", "want") and piece.rank in here.context.topology.ranks[node]
    return fits and 0 <= piece.home < len(ranks) and ranks[piece.home] in state.members.local


def _fits_shards(here: ThisNode, node: int, state: PlanState, piece: wire.Piece) -> bool:
    home = state.plan.homes[piece.bucket]
    if piece.kind in get_args(wire.PostKind):
        return home == here.node and piece.rank in here.context.topology.ranks[node]
    if piece.kind in ("answer", "refused"):
        return home == node and piece.rank in state.members.local
    if piece.kind in ("image", "update"):
        return home == node and mirror_of(state, node) == here.node
    fits = piece.kind == "told" and state.home_algorithm.tells and piece.nbytes % 8 == 0
    return fits and state.plan.homes[0] == node and home == here.node and piece.bucket > 0
