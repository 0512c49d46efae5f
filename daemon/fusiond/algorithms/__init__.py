"""Training algorithms: who talks to whom, when a result is due, and how it is combined. One small class each."""

from __future__ import annotations

import difflib

from fusion_rt.errors import FusionError
from fusiond.algorithms.allreduce import AllReduce
from fusiond.algorithms.base import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {"allreduce": AllReduce}


def make(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        FusionError: there is none; the text names the nearest one.
    """
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, 1, 0)
        raise FusionError(f"there is no algorithm {name!r}; did you mean {near[0]!r}?")
    return ALGORITHMS[name]()
