"""The interface of an algorithm whose buckets have no homes: all ranks combine their posts, and get the same.

It decides which exchange between the nodes combines the parts. The engine asks it and never knows which one it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_rt.codecs.base import BucketCodec
from fusiond.collectives.base import Array, Exchange, Port, Reducer
from fusiond.collectives.cost import CostModel
from fusiond.core.contribution import WorkerSelection


@dataclass(slots=True)
class Work:
    """One run of a bucket on one node.

    Attributes:
        port: to the other nodes.
        reducer: op, dtype and scales.
        codec: the bucket's, with its residual if it has one.
        cost: of messages, by which the way between nodes is chosen (`CostModel.rounded`).
        sources: elements of each local member, in rank order.
        outputs: the distinct arrays that the result goes to; in place where one is a source.
        parts: first element and number of elements of each tensor in it; there may be padding between them.
        sparse_route: the setting.
        route: of dense values, by the setting or a plan's tuning.
        selected: a local member's own selection, instead of the elements in `sources`.
        order: positions of nodes in the order in which a ring visits them; none: as they are.
        whole_nbytes: largest array that recursive doubling moves, as one message; 0: the port's chunk.
    """

    port: Port
    reducer: Reducer
    codec: BucketCodec
    cost: CostModel
    sources: Sequence[Array]
    outputs: Sequence[Array]
    parts: Sequence[tuple[int, int]]
    sparse_route: str = "auto"
    route: str = "auto"
    whole_nbytes: int = 0
    selected: WorkerSelection | None = None
    order: Sequence[int] = ()


class Algorithm(ABC):
    """An algorithm that combines a plan's buckets by exchanges."""

    @abstractmethod
    def exchange(self, work: Work) -> Exchange:
        """Makes the exchange by which the nodes combine this bucket."""

    @abstractmethod
    def scratch_nbytes(self, reducer: Reducer, codec: BucketCodec, nodes: int) -> int:
        """Returns the bytes that an exchange of a bucket between so many nodes holds at a time while it is under way,
        beside the arena and the codec's memory. Memory that a job needs only while it runs on a thread is left out."""
