"""The choice of when an optimizer's updates are applied."""

from __future__ import annotations

import torch

from fusion_rt import algorithms
from fusion_rt.settings import Settings

WAYS = ("none", "forward", "stale")


def chosen_overlap(
    asked: str | None, optimizer: torch.optim.Optimizer, spec: algorithms.Algorithm, adasum: bool
) -> str:
    """Returns which of `WAYS` an optimizer has. `asked`: None for the one that FUSION_OVERLAP names.

    Raises:
        ValueError: there is no such way, or it makes no sense with the rest.
    """
    way = Settings.from_env().overlap if asked is None else asked
    if way not in WAYS:
        raise ValueError(f"overlap={way!r} is not one of {', '.join(WAYS)}")
    if way == "none":
        return way
    source = f"overlap={way!r}" + (" (of FUSION_OVERLAP)" if asked is None else "")
    if not spec.sums_gradients:
        raise ValueError(
            f"{source} cannot be used with the algorithm {spec}, whose updates come from elsewhere, at their own "
            "time; overlap is for allreduce"
        )
    if adasum:
        raise ValueError(f"{source} cannot be used with op=Adasum, which combines steps that have been taken already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{source} cannot be used with L-BFGS, which evaluates the model while it takes a step; "
                         "use overlap='none'")  # fmt: skip
    return way
