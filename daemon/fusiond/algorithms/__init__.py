"""Training algorithms, one small class each: pairs of ranks that exchange, when a result is due, and how it is
combined.

A person chooses one of `fusion_rt.algorithms`; its behaviour is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusion_rt import algorithms as chosen
from fusiond.algorithms import decoupled, elastic, gossip, pairwise, partial, shards
from fusiond.algorithms.allreduce import AllReduce
from fusiond.algorithms.exchange import Algorithm
from fusiond.algorithms.home import HomeAlgorithm

__all__ = ["Algorithm", "AllReduce", "HomeAlgorithm", "make"]

_AT_HOMES: dict[type[chosen.Algorithm], Callable[[Any, int], HomeAlgorithm[Any]]] = {
    chosen.BSP: shards.BSP,
    chosen.ASP: shards.ASP,
    chosen.SSP: shards.SSP,
    chosen.Softsync: shards.Softsync,
    chosen.Collaborative: shards.Collaborative,
    chosen.DCASGD: shards.DCASGD,
    chosen.Hogwild: shards.Hogwild,
    chosen.Partial: partial.Partial,
    chosen.EASGD: elastic.easgd,
    chosen.EAWild: elastic.EAWild,
    chosen.DPSGD: gossip.dpsgd,
    chosen.SGP: gossip.PushSum,
    chosen.Choco: gossip.Choco,
    chosen.ADPSGD: pairwise.ADPSGD,
    chosen.NoLoCo: gossip.Averaging,
    chosen.Decoupled: decoupled.Decoupled,
}


def make(text: str, ranks: int) -> Algorithm | HomeAlgorithm[Any]:
    """Makes the algorithm written as `text`, for so many ranks.

    Raises:
        AlgorithmError: there is none (the sentence has the nearest one), or what its package has for daemons cannot be
            used.
    """
    spec = chosen.parse(text)
    if spec.place is chosen.Place.NOWHERE:
        return AllReduce()
    built_in = _AT_HOMES.get(type(spec))
    if built_in is not None:
        return built_in(spec, ranks)
    try:
        made = spec.implementation()(spec, ranks)
    except Exception as error:
        package = chosen.ALGORITHMS.package(spec.name)
        raise chosen.AlgorithmError(
            f"the algorithm {spec.name} of the package {package} does not work in a daemon: {type(error).__name__}: "
            f"{error}"
        ) from error
    if not isinstance(made, HomeAlgorithm):
        raise chosen.AlgorithmError(f"what the algorithm {spec.name} does in a daemon is no HomeAlgorithm")
    return made
