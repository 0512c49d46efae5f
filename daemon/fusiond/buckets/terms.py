"""The terms on which a worker contributes to a bucket, as far as they can be checked."""

from __future__ import annotations

import math

from fusion_rt import wire
from fusiond.core.errors import RequestError


def check_terms(rank: int, ready: wire.Ready, tensors: int, own_only: bool) -> None:
    """Raises `RequestError` where the terms of a contribution make no sense for its bucket.

    Args:
        rank: the worker's.
        tensors: how many the bucket has.
        own_only: each rank has to submit its own contribution.
    """
    factors, what = ready.rescale, f"bucket {ready.bucket} of plan {ready.plan}"
    if factors and not (len(factors) == tensors and all(0 < factor < math.inf for factor in factors)):
        raise RequestError(
            f"rank {rank} rescales the residual of {what}, which has {tensors} tensors, by {list(factors)}"
        )
    if not 0 < ready.loss_scale < math.inf:
        raise RequestError(
            f"rank {rank} gives {what} the loss scale {ready.loss_scale:g}, which has to be above 0 and finite"
        )
    if own_only and ready.share != wire.OWN:
        raise RequestError(f"rank {rank} shares a contribution with its node in {what}, which needs each rank's own")
