"""The codecs and algorithms that `--auto` may choose, and their costs."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_rt import algorithms


@dataclass(frozen=True)
class CodecCost:
    """The costs of a codec.

    Attributes:
        share: bytes of a message, of those that it has without a codec.
        work: seconds for each byte of gradients, on a node.
        bucket: seconds for each bucket: its messages, on the way between worker and daemon, too.
        sums: owners of ranges sum up, so that a message is as long however many nodes there are.
        minimum: bytes of a tensor below which it is sent whole, as fp16.
    """

    share: float
    work: float
    bucket: float
    sums: bool = False
    minimum: int = 0

    def travels(self, nbytes: int) -> float:
        """Bytes that are sent of a tensor with so many."""
        return nbytes * (0.5 if nbytes < self.minimum else self.share)


CODECS = {
    "dense": CodecCost(1.0, 0.0, 0.7e-3),
    "fp16": CodecCost(0.5, 0.5e-9, 0.7e-3),
    "int8": CodecCost(0.26, 1.5e-9, 5e-3, True, 1024 * 4),
    "topk(density=0.01)": CodecCost(0.01, 2.0e-9, 5e-3, True, 16384 * 4),
    "topk(density=0.01, value='int2', minimum=1024)": CodecCost(0.0045, 2.5e-9, 5e-3, True, 1024 * 4),
}
"""Those that `lossy` chooses from, each changing more than the one before. (Work: measured on two cores.)"""

ALLREDUCE = str(algorithms.AllReduce())

_SPARSELOCO = algorithms.SparseLoCo()
LOCAL = {
    str(algorithms.LocalSGD()): "dense",
    str(algorithms.DiLoCo(steps=100)): "dense",
    str(_SPARSELOCO): _SPARSELOCO.codec,
}
"""Algorithms with local steps that `async` chooses from, each sending less than the one before, with their codecs.
After each exchange all ranks have the same parameters, so that a running job may take another algorithm then."""

_COSTS = {**CODECS, _SPARSELOCO.codec: CodecCost(0.008, 2.0e-9, 5e-3, True)}


def cost_of(codec: str) -> CodecCost:
    """Returns the costs of a codec; those of none for one that is not known here."""
    return _COSTS.get(codec, CODECS["dense"])
