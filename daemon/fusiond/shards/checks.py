"""Checks of contributions, and of the pieces of messages, before anything is done with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from fusion_rt import wire
from fusion_rt.algorithms import Signal
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusiond.buckets.plans import PlanState
from fusiond.shards.message_codecs import MessageCodecs
from fusiond.shards.node import ThisNode

_MAX_SENTENCE = 64 * 1024  # bytes of the reason for which a contribution is refused


def wrong_rates(state: PlanState, bucket: wire.Bucket, rates: Sequence[float]) -> str:
    """Returns why a home cannot take a step at these learning rates; empty if it can."""
    if state.spec.signal is not Signal.GRADIENT:
        return ""
    groups = state.groups[bucket.index]
    if len(rates) < groups:
        return f"it has {len(rates)} learning rates for at least {groups} parameter groups"
    if not all(math.isfinite(rate) for rate in rates):
        return f"its learning rates {list(rates)} are not all finite"
    return ""


def check_piece(here: ThisNode, codecs: MessageCodecs, node: int, state: PlanState, piece: wire.Piece) -> None:
    """Raises `WireError` unless this node can get such a piece from that one."""
    if not _fits(here, node, state, piece):
        raise WireError(f"no {piece.kind} of rank {piece.rank} for bucket {piece.bucket} can come from it")
    bucket = state.plan.buckets[piece.bucket]
    what = f"the {piece.kind} of rank {piece.rank} for bucket {piece.bucket}"
    limit = bucket.numel * DTYPES[bucket.dtype].itemsize
    if piece.kind in ("seed", "reseed") and piece.nbytes != limit:
        raise WireError(f"{what} has {piece.nbytes} bytes instead of {limit}")
    if piece.kind == "refused":
        limit = _MAX_SENTENCE
    elif piece.kind in ("pass", "want"):
        limit = 0
    elif piece.kind == "told":
        limit = 8 * (1 + 2 * len(state.members.set.ranks))
    elif piece.kind not in ("seed", "reseed"):
        limit = max(limit, codecs.decoder(state, bucket).max_encoded_nbytes(bucket.numel))
    if piece.nbytes > limit:
        raise WireError(f"{what} has {piece.nbytes} bytes, and {limit} is the most")
    if piece.kind == "answer" and (len(piece.notes) not in (2, 5) or piece.notes[:2] not in ((0, 0), (1, 0), (1, 1))):
        raise WireError(f"{what} has the notes {list(piece.notes)}, which say nothing")
    if piece.kind == "post" and (wrong := wrong_rates(state, bucket, piece.rates)):
        raise WireError(f"{what} cannot be taken in: {wrong}")
    if not (0 < piece.weight < math.inf):
        raise WireError(f"{what} has the weight {piece.weight}, which has to be above 0")


def _fits(here: ThisNode, node: int, state: PlanState, piece: wire.Piece) -> bool:
    """Returns whether a node sends this kind of piece, of this rank and bucket, to this node."""
    plan, ranks = state.plan, state.members.set.ranks
    fits = piece.bucket < len(plan.buckets) and piece.rank in ranks
    if fits and plan.homes:
        home = plan.homes[piece.bucket]
        if piece.kind in ("answer", "refused"):
            fits = home == node and piece.rank in state.members.local
        elif piece.kind == "told":
            fits = state.home_algorithm.tells
            fits = fits and plan.homes[0] == node and home == here.node and piece.bucket > 0
            fits = fits and piece.nbytes % 8 == 0
        else:
            fits = piece.kind in get_args(wire.PostKind) and home == here.node
            fits = fits and here.topology.node_of(piece.rank) == node
        fits = fits and piece.home == -1
    elif fits:
        fits = piece.kind in ("mix", "mean", "pass", "want") and here.topology.node_of(piece.rank) == node
        fits = fits and 0 <= piece.home < len(ranks) and ranks[piece.home] in state.members.local
    return fits
