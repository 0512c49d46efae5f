"""Synchronous all-reduce (BSP): every rank waits for every rank, and all get the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import cast

from fusion_rt.codecs.base import BucketCodec
from fusion_rt.codecs.factoring import FactoringBucketCodec
from fusion_rt.codecs.summing import SummingBucketCodec
from fusiond.algorithms.exchange import Algorithm, Work
from fusiond.collectives.adasum import Adasum
from fusiond.collectives.base import Exchange, Reducer, of_partials
from fusiond.collectives.cost import CostModel
from fusiond.collectives.doubling import Doubling
from fusiond.collectives.halving import Halving
from fusiond.collectives.low_rank import LowRank
from fusiond.collectives.one_node import OneNode
from fusiond.collectives.owned import Gathered, Owned
from fusiond.collectives.ring import Ring

_SELECTED_NBYTES = 4  # about the size of a selected value with its index


class AllReduce(Algorithm):
    """Nodes reduce through shared memory, and between them by the cheapest of three ways for dense values, or in the
    way that suits a codec with error feedback."""

    def exchange(self, work: Work) -> Exchange:
        if work.reducer.op == "adasum":
            return Adasum(work.port, work.reducer, work.codec, work.sources, work.outputs, work.parts)
        if work.port.nodes == 1:
            return OneNode(work.port, work.reducer, work.sources, work.outputs)
        return _EXCHANGES[work.codec.exchange](work)

    def scratch_nbytes(self, reducer: Reducer, codec: BucketCodec, nodes: int) -> int:
        elements = codec.layout.elements
        if nodes == 1:
            return 0
        if reducer.op == "adasum":
            return 2 * elements * reducer.dtype.itemsize  # a partner's data, as it comes and as elements
        widened = elements * reducer.partial.itemsize if reducer.widens else 0
        return widened + of_partials(reducer, codec).scratch_nbytes(nodes)


def _chunks(work: Work) -> Exchange:
    """The cheapest of ring, halving and recursive doubling, or the wanted one. The size of chunks has no say in it, so
    that tuning that changes no order in which elements are added up."""
    nbytes, most = len(work.sources[0]) * work.reducer.partial.itemsize, work.whole_nbytes or work.port.chunk_bytes
    route = _cheapest(work.cost, nbytes, work.port.nodes, most) if work.route == "auto" else work.route
    if route == "halving":
        return Halving(work.port, work.reducer, work.codec, work.sources, work.outputs)
    if route == "doubling" and nbytes <= most:
        return Doubling(work.port, work.reducer, work.codec, work.sources, work.outputs)
    return Ring(work.port, work.reducer, work.codec, work.sources, work.outputs, work.order)


@lru_cache(maxsize=1024)
def _cheapest(cost: CostModel, nbytes: int, nodes: int, most: int) -> str:
    """See `CostModel.route`; the same in each step."""
    return cost.route(nbytes, nodes, most)


def _owners(work: Work) -> Exchange:
    codec = cast(SummingBucketCodec, work.codec)
    gather = work.sparse_route == "gather" or (
        work.sparse_route == "auto"
        and codec.adapts
        and work.cost.prefers_gathering(codec.wanted() * _SELECTED_NBYTES, work.port.nodes)
    )
    kind = Gathered if gather else Owned
    return kind(work.port, work.reducer, codec, work.sources, work.outputs, work.selected)


def _factors(work: Work) -> Exchange:
    return LowRank(
        work.port, work.reducer, cast(FactoringBucketCodec, work.codec), work.sources, work.outputs,
        lambda port, reducer, dense, factors: _chunks(
            replace(work, port=port, reducer=reducer, codec=dense, sources=[factors], outputs=[factors])
        ),
    )  # fmt: skip


_EXCHANGES = {"chunks": _chunks, "owners": _owners, "factors": _factors}
"""By how nodes add up what a codec encodes (`BucketCodec.exchange`)."""
