"""Buckets that the ranks of a node have combined among themselves: whose arena has the node's contribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fusion_rt import wire
from fusiond.collectives.base import Array, Job, shared_jobs
from fusiond.core.contribution import Contribution
from fusiond.core.errors import RequestError


@dataclass
class NodeParts:
    """The way of a node's contribution from the arenas of its ranks, which have a part of it each, to that of the first
    one, on which the exchange works; and of the result back.

    An exchange, and a codec's residual, are of the whole bucket: so neither the payload nor the residual depends on
    how many ranks a node has, and on whether they combine gradients themselves.

    Attributes:
        nbytes: that are copied, either way.
        reads: jobs that fill the first rank's arena, before the exchange begins.
    """

    nbytes: int = 0
    reads: list[Job] = field(default_factory=list)
    _back: list[tuple[Callable[[int, int], None], int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, local: Sequence[Contribution], threads: int) -> NodeParts:
        """Args:
        local: contributions of all ranks of the node that take part, in order of local_rank.
        threads: on which the jobs may run side by side.
        """
        made, whole, there = cls(), local[0].values, []
        for position, part in enumerate(local[1:], 1):
            low, high = wire.part_of_node(len(whole), position, len(local))
            if low < high:
                there.append(_copying(part.values[low:high], whole[low:high]))
                if part.asks_for_part and part.place is not None:
                    made._back.append(_copying(whole[low:high], part.place[low:high]))
        made.nbytes = sum(length * itemsize for _, length, itemsize in there)
        made.reads = shared_jobs(there, threads)
        return made

    def writes(self, threads: int) -> list[Job]:
        """Returns jobs that copy to each rank the part of the result that it asks for."""
        return shared_jobs(self._back, threads)


def combined(local: Sequence[Contribution], count: int) -> Contribution:
    """Returns the contribution in whose place that of the node is to be: its ranks have combined it among themselves,
    prescaled.

    Args:
        local: those of the node's ranks.
        count: how many ranks it has that take part.

    Raises:
        RequestError: they do not agree about its submitter.
    """
    shares = [part.share for part in local]
    if all(share == wire.PART for share in shares) and len(shares) == count:
        if len({part.asks_for_part for part in local}) > 1:
            raise RequestError(f"of {count} ranks of a node, some ask for a part of the result, and some for all of it")
        return local[0]
    if all(share == wire.ELSEWHERE for share in shares):
        raise RequestError(
            f"none of {len(local)} ranks of a node has the parts that they could not combine among themselves"
        )
    if shares.count(wire.OF_NODE) != 1 or wire.OWN in shares or wire.PART in shares:
        raise RequestError(
            f"of {count} ranks of a node, {shares.count(wire.OWN)} submit their own contribution, "
            f"{shares.count(wire.OF_NODE)} those of all, {shares.count(wire.PART)} a part of those, and "
            f"{shares.count(wire.ELSEWHERE)} rely on another rank"
        )
    return local[shares.index(wire.OF_NODE)]


def _copying(source: Array, target: Array) -> tuple[Callable[[int, int], None], int, int]:
    return lambda low, high: np.copyto(target[low:high], source[low:high]), len(source), source.itemsize


def loss_scale(parts: Mapping[int, Contribution]) -> float:
    """Returns the loss scale of all contributions of a node, by rank. Raises `RequestError` if they have different
    ones."""
    scales = {rank: part.loss_scale for rank, part in parts.items()}
    if len(set(scales.values())) > 1:
        first = min(scales)
        other = min(rank for rank in scales if scales[rank] != scales[first])
        raise RequestError(
            f"the loss of rank {first} of the process set is scaled by {scales[first]:g}, and that of rank {other} by "
            f"{scales[other]:g}; give the GradScalers of all ranks, or loss_scale, the same value"
        )
    return next(iter(scales.values()), 1.0)
