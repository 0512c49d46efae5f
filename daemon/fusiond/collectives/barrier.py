"""The barrier, which is an all-reduce of no elements, and the operations that are a barrier with an effect."""

from __future__ import annotations

from fusion_rt import wire
from fusiond.collectives.agreed import Agreed, Maker
from fusiond.collectives.base import Exchange
from fusiond.collectives.doubling import Doubling
from fusiond.collectives.one_node import OneNode


def _barrier(agreed: Agreed) -> Exchange:
    nothing = [part.values for part in agreed.local[:1]]
    if agreed.port.nodes == 1:
        return OneNode(agreed.port, agreed.reducer, nothing, agreed.outputs)
    return Doubling(agreed.port, agreed.reducer, agreed.codec.open(agreed.layout), nothing, agreed.outputs)


EXCHANGES: dict[wire.Kind, Maker] = {
    "barrier": _barrier,
    "join": _barrier,
    "add_process_set": _barrier,
    "remove_process_set": _barrier,
}
