"""Training algorithms, as a person chooses them: by class, or as text in a setting: `ssp(staleness=4)`.

The behaviour of each is in `fusiond.algorithms`, on the side of the daemon, and in `fusion_rt.torch.sync`, on that of
the worker. Here is the knowledge of both sides: the signal of a worker, where a bucket's authoritative copy (its home)
is, and the arguments. A choice is frozen, compares equal to its like, and has a canonical text, so that it can be part
of a plan, about which all ranks agree.
"""

from __future__ import annotations

from functools import lru_cache

from fusion_rt.algorithms.algorithm import Algorithm, AlgorithmError, Place, Signal
from fusion_rt.algorithms.asynchronous import ASP, DCASGD, SSP, Collaborative, Hogwild, Partial, Softsync
from fusion_rt.algorithms.averaging import EASGD, EAWild
from fusion_rt.algorithms.neighbours import ADPSGD, DPSGD, SGP, Choco, NoLoCo, OnGraph
from fusion_rt.algorithms.outer_steps import Decoupled, DiLoCo, SparseLoCo
from fusion_rt.algorithms.synchronous import BSP, AllReduce, LocalSGD
from fusion_rt.codecs import CODECS, Codec
from fusion_rt.core import spec_parser
from fusion_rt.core.plugins import Registry

__all__ = [
    "ADPSGD",
    "ALGORITHMS",
    "ASP",
    "BSP",
    "DCASGD",
    "DPSGD",
    "EASGD",
    "SGP",
    "SSP",
    "Algorithm",
    "AlgorithmError",
    "AllReduce",
    "AsynchronousDecentralized",
    "Choco",
    "Collaborative",
    "Decoupled",
    "DiLoCo",
    "EAWild",
    "Hogwild",
    "LocalSGD",
    "NoLoCo",
    "OnGraph",
    "Partial",
    "Place",
    "Signal",
    "Softsync",
    "SparseLoCo",
    "check_use",
    "packages",
    "parse",
]

AsynchronousDecentralized = ADPSGD

_ALL: tuple[type[Algorithm], ...] = (
    AllReduce, BSP, LocalSGD, DiLoCo, SparseLoCo, ASP, SSP, Softsync, DCASGD, Hogwild, Partial, Collaborative, EASGD,
    EAWild, DPSGD, ADPSGD, SGP, Choco, NoLoCo, Decoupled,
)  # fmt: skip
ALGORITHMS: Registry[Algorithm] = Registry("algorithm", "fusion_rt.algorithms", Algorithm, _ALL)


@lru_cache(maxsize=256)
def parse(text: str) -> Algorithm:
    """The algorithm that is written as `text`.

    Raises:
        AlgorithmError: there is none; the sentence has the nearest one, or says which argument is wrong.
    """
    try:
        return spec_parser.parse(text, ALGORITHMS)
    except spec_parser.SpecError as error:
        raise AlgorithmError(str(error)) from None


def packages(algorithm: Algorithm, codec: Codec) -> tuple[str, ...]:
    """Returns the packages that bring them, with versions; none for the built-in ones."""
    return tuple(sorted({ALGORITHMS.package(algorithm.name), CODECS.package(codec.name)} - {""}))


def check_use(algorithm: Algorithm, codec: Codec, op: str, ranks: int) -> None:
    """Raises `AlgorithmError`, or `MixingError`, where a combination makes no sense, with the reason.

    Args:
        codec: of the buckets.
        op: how gradients are combined.
        ranks: how many there are.
    """
    algorithm.check(ranks)
    if algorithm.sums_gradients:
        return
    if op != "average":
        raise AlgorithmError(f"{algorithm} takes means, and cannot combine by {op}; use op=Average, or allreduce")
    if codec.signs:
        raise AlgorithmError(
            f"the codec {codec} makes signs of a sum of gradients, and {algorithm} adds up {algorithm.signal.value} "
            "otherwise; use allreduce, or leave out signed"
        )
    if codec.only_all_reduced and algorithm.at_homes:
        raise AlgorithmError(
            f"the codec {codec} {codec.only_all_reduced}, which {algorithm} does not; use topk, for example"
        )
    if algorithm.selects:
        if codec.lossless:
            raise AlgorithmError(
                f"{algorithm.name} sends a codec's selection of a difference, and {codec} selects nothing; use the "
                "codec topk, or the algorithm dpsgd"
            )
        algorithm.check_codec(codec, ranks)
    elif codec.stateful and algorithm.signal in (Signal.PARAMETER, Signal.CONSENSUS):
        raise AlgorithmError(
            f"{algorithm} sends parameters, and the codec {codec} would leave out most of them; use the codec fp16 "
            "or bf16, the algorithm choco, which is made for it, or diloco, which sends changes (with outer_rate=1 "
            "and outer_momentum=0 it is local SGD)"
        )
