"""The interface of a training algorithm.

An algorithm decides about buckets: what the workers post, when a node's slot is complete, and which exchange between
the nodes combines the parts. The engine asks it and never knows which one it has. How parameter shards, gossip,
elastic averaging and backup workers fit is worked out in docs/design.md, "Algorithms to come".
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fusion_rt.codecs.base import BucketCodec
from fusiond.collectives.base import Array, Exchange, Port, Reducer
from fusiond.collectives.cost import CostModel


class Signal(enum.Enum):
    """What a worker posts."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"
    DELTA = "delta"


@dataclass(slots=True)
class Work:
    """One run of a bucket on one node.

    Attributes:
        port: to the other nodes.
        reducer: op, dtype and scales.
        codec: the bucket's, with its residual if it has one.
        cost: the measured cost of messages.
        sources: of each local member, in rank order.
        outputs: the distinct arrays that the result goes to; in place where one is a source.
        parts: first element and number of elements of each tensor in it; there may be padding between them.
        sparse_route: the setting.
    """

    port: Port
    reducer: Reducer
    codec: BucketCodec
    cost: CostModel
    sources: Sequence[Array]
    outputs: Sequence[Array]
    parts: Sequence[tuple[int, int]]
    sparse_route: str = "auto"


class Algorithm(ABC):
    """How a plan's buckets are combined; holds no state of a single bucket."""

    signal: ClassVar[Signal]

    def ready(self, arrived: int, members: int) -> bool:
        """Whether a node may start its part of a bucket when `arrived` of its `members` workers have posted."""
        return arrived == members

    @abstractmethod
    def exchange(self, work: Work) -> Exchange:
        """What the nodes do with each other to combine this bucket."""
