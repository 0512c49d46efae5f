"""An operation other than all-reduce on which all ranks agree: the input of its exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusion_rt import codecs, wire
from fusion_rt.core.topology import Topology
from fusiond.collectives.base import Array, Exchange, Port, Reducer
from fusiond.core.contribution import Contribution
from fusiond.core.participants import Members


@dataclass(frozen=True, slots=True)
class Agreed:
    """An operation as one node sees it when it begins. Members of the process set are named by their index in it.

    Attributes:
        port: the way to the other nodes of members; there may be one node only.
        signature, reducer, codec, layout: the same on all nodes; `layout`: of one rank's tensor.
        members, topology: the process set, and the nodes of its ranks. Those of one node need not follow each other.
        local: contributions of the local members, in the order of `here`.
        outputs: where the local members want a result that is the same for all.
        rows: first dimension of each member's part: of its tensor if ranks may differ in it, else of its result. In a
            group, as the signature says; empty if the kind has no rows.
        splits: for alltoall, every member's splits; in a group, each contribution has its own.
    """

    port: Port
    signature: wire.Signature
    reducer: Reducer
    codec: codecs.Codec
    layout: codecs.Layout
    members: Members
    topology: Topology
    local: Sequence[Contribution]
    outputs: Sequence[Array]
    rows: Sequence[int]
    splits: Sequence[Sequence[int]]

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of each member."""
        return self.members.set.ranks

    @property
    def homes(self) -> Sequence[int]:
        """The position of each member's node, none of which is lost."""
        return [self.members.nodes.index(self.topology.node_of(rank)) for rank in self.ranks]

    @property
    def here(self) -> Sequence[int]:
        """The local members."""
        return [self.ranks.index(rank) for rank in self.members.local]

    @property
    def row_elements(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.signature.shape[1:])

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.row_elements * self.layout.dtype.itemsize


Maker: TypeAlias = Callable[[Agreed], Exchange]
