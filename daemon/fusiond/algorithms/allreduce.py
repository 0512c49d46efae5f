"""Synchronous all-reduce (BSP): every rank waits for every rank, and all get the same bits."""

from __future__ import annotations

from fusiond.algorithms.base import Algorithm, Signal, Work
from fusiond.collectives.adasum import Adasum
from fusiond.collectives.base import Exchange
from fusiond.collectives.doubling import Doubling
from fusiond.collectives.one_node import OneNode
from fusiond.collectives.ring import Ring


class AllReduce(Algorithm):
    """Through shared memory within a node; between nodes by the cheaper of ring and recursive doubling."""

    signal = Signal.GRADIENT

    def exchange(self, work: Work) -> Exchange:
        nodes = work.port.nodes
        if work.reducer.op == "adasum":
            return Adasum(work.port, work.reducer, work.codec, work.sources, work.outputs, work.parts)
        if nodes == 1:
            return OneNode(work.port, work.reducer, work.sources, work.outputs)
        nbytes = len(work.sources[0]) * work.reducer.dtype.itemsize
        small = work.cost.prefers_doubling(nbytes, nodes, work.port.chunk_bytes)
        kind = Doubling if small else Ring
        return kind(work.port, work.reducer, work.codec, work.sources, work.outputs)
