"""The codecs and algorithms that `--auto` may choose with their costs, and the measured cost of any other codec."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_rt import algorithms, codecs
from fusion_rt.codecs.base import Array, Codec, Exchange, Layout


@dataclass(frozen=True)
class CodecCost:
    """The costs of a codec.

    Attributes:
        share: bytes of a message, of those that it has without a codec.
        work: seconds for each byte of gradients, on a node.
        bucket: seconds for each bucket: its messages, on the way between worker and daemon, too.
        exchange: how nodes add up its payloads, as `BucketCodec.exchange` has it.
        minimum: bytes of a tensor below which it is sent whole, as fp16.
    """

    share: float
    work: float
    bucket: float
    exchange: Exchange = "chunks"
    minimum: int = 0

    def travels(self, nbytes: int) -> float:
        """Bytes that are sent of a tensor with so many."""
        return nbytes * (0.5 if nbytes < self.minimum else self.share)


CODECS = {
    "dense": CodecCost(1.0, 0.0, 0.7e-3),
    "fp16": CodecCost(0.5, 0.5e-9, 0.7e-3),
    "int8": CodecCost(0.26, 1.5e-9, 5e-3, "owners", 1024 * 4),
    "topk(density=0.01)": CodecCost(0.01, 2.0e-9, 5e-3, "owners", 16384 * 4),
    "topk(density=0.01, value='int2', minimum=1024)": CodecCost(0.0045, 2.5e-9, 5e-3, "owners", 1024 * 4),
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

_COSTS = {**CODECS, _SPARSELOCO.codec: CodecCost(0.008, 2.0e-9, 5e-3, "owners")}


def cost_of(codec: str) -> CodecCost:
    """Returns the costs of a codec; those of none for one that is not known here."""
    return _COSTS.get(codec, CODECS["dense"])


_OF_CACHES = 64 << 20  # bytes that no cache holds


@dataclass(frozen=True)
class Encoded:
    """A codec's work on one bucket, as it was measured.

    Attributes:
        nbytes: that travel of it.
        seconds: of a node's processor.
        exchange: how nodes add up its payloads.
    """

    nbytes: float
    seconds: float
    exchange: Exchange


def measured(codec: Codec, layout: Layout, turns: int = 3) -> Encoded:
    """Encodes a bucket of values from a normal distribution, and decodes the sum of two nodes.

    The least processor time of several turns counts, since all else that the machine does can only make it longer.
    Before each, caches get something else, as in a job, in which a bucket has last been touched a step ago.

    Raises:
        CodecError: the codec cannot encode such a bucket.
    """
    opened: Any = codecs.open_bucket(codec, layout)
    values = np.random.default_rng(1).standard_normal(layout.elements).astype(np.float32)
    opened.node, opened.nodes = 0, 2
    work = _WORK[opened.exchange]
    other, found = np.ones(_OF_CACHES // 4, np.float32), []
    for _ in range(turns):
        other += 1
        found.append(_timed(work, opened, values))
    seconds = 0.0 if opened.lossless else min(seconds for _, seconds in found)
    return Encoded(found[-1][0], seconds, opened.exchange)


def _timed(work: Callable[[Any, Array], float], opened: Any, values: Array) -> tuple[float, float]:
    began = time.thread_time()
    nbytes = work(opened, values)
    return nbytes, time.thread_time() - began


def _in_chunks(codec: Any, values: Array) -> float:
    """Encodes and decodes all elements, as a ring does twice of nearly all of them."""
    for _ in range(2):
        payload = codec.encode(0, values)
        codec.decode(0, payload, np.empty_like(values))
    return len(payload)


def _by_owners(codec: Any, values: Array) -> float:
    """Sends portions to an owner of all elements, and the sum back."""
    count, outputs = len(values), [np.zeros_like(values)]
    payload = codec.pack(codec.contribute(values), 0, count)
    total = codec.add(codec.unpack(payload, 0, count), codec.unpack(payload, 0, count))
    back = codec.pack(codec.conclude(total, 2), 0, count)
    codec.write(codec.unpack(back, 0, count), outputs, 1.0, 2)
    codec.complete(outputs, 1.0, 2)
    return (len(payload) + len(back)) / 2


def _by_factors(codec: Any, values: Array) -> float:
    """Sums both factors, which are as they were if no other node takes part."""
    first = codec.start(values)
    second = codec.second(first)
    codec.finish(second, [np.empty_like(values)])
    return float(first.nbytes + second.nbytes)


_WORK: Mapping[Exchange, Callable[[Any, Array], float]] = {
    "chunks": _in_chunks,
    "owners": _by_owners,
    "factors": _by_factors,
}
