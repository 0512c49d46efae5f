"""Measures what codecs cost on this machine, in a few seconds on one thread.

The best of several turns counts: what else the machine does can only make them longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusion_rt import codecs
from fusion_rt.codecs.base import BucketCodec
from fusion_trace.simulate.ghost_codecs import real_layout
from fusion_trace.simulate.model import Bucket, CodecCosts
from fusiond.collectives.base import Array

TURNS = 5


def best(work: Callable[[], object], repeats: int = 1) -> float:
    """Returns the seconds that `work` takes, in the best of several turns of so many repetitions."""
    work()
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        times.append((time.perf_counter() - began) / repeats)
    return min(times)


def codec_costs(text: str, elements: int = 1 << 20) -> CodecCosts:
    """Measures one codec, on values from a normal distribution.

    Raises:
        CodecError: there is no such codec.
    """
    side = int(elements**0.5)
    bucket = Bucket(4 * side * side, ((side, side),))
    codec = codecs.parse(text).open(real_layout(bucket))
    values: Array = np.random.default_rng(1).standard_normal(bucket.elements).astype(np.float32)
    return _MEASURED[codec.exchange](codec, values)


def _chunks(codec: BucketCodec, values: Array) -> CodecCosts:
    payload = codec.encode(0, values)
    nbytes = len(payload)
    out = np.empty_like(values)
    pack = best(lambda: codec.encode(0, values)) / nbytes
    unpack = best(lambda: codec.decode(0, payload, out)) / nbytes
    lossless = codec.lossless
    return CodecCosts(nbytes / values.nbytes, pack=0.0 if lossless else pack, unpack=0.0 if lossless else unpack)


def _summing(codec: Any, values: Array) -> CodecCosts:
    n, dense = len(values), values.nbytes
    codec.node, codec.nodes = 0, 2
    contribute = min(_once(lambda: codec.contribute(values)) for _ in range(TURNS))
    portion = codec.contribute(values)
    payload = codec.pack(portion, 0, n)
    nbytes = len(payload)
    pack = best(lambda: codec.pack(portion, 0, n))
    unpack = best(lambda: codec.unpack(payload, 0, n))
    parts = [codec.unpack(payload, 0, n) for _ in range(TURNS + 1)]
    add = min(_once(lambda part=part: codec.add(part, portion)) for part in parts)  # type: ignore[misc]
    totals = [codec.add(codec.unpack(payload, 0, n), portion) for _ in range(3)]
    conclude = min(_once(lambda t=t: codec.conclude(t, 2)) for t in totals)  # type: ignore[misc]
    out = np.zeros_like(values)
    write = best(lambda: (codec.write(portion, [out], 1.0, 2), codec.complete([out], 1.0, 2)))
    summed = 2 * nbytes if codec.adapts else nbytes  # sums of selections are longer than each
    return CodecCosts(
        nbytes / dense, contribute / dense, pack / nbytes, unpack / nbytes, add / summed, conclude / summed,
        write / nbytes,
    )  # fmt: skip


def _factors(codec: Any, values: Array) -> CodecCosts:
    dense = values.nbytes
    rows = []
    for _ in range(TURNS):
        out = np.empty_like(values)
        began = time.perf_counter()
        first = codec.start(values)
        one = time.perf_counter()
        second = codec.second(first)
        two = time.perf_counter()
        codec.finish(second, [out])
        rows.append((one - began, two - one, time.perf_counter() - two))
    start, middle, finish = (min(column) / dense for column in zip(*rows, strict=True))
    ratio = 4 * (codec.first_elements + codec.second_elements) / dense
    return CodecCosts(ratio, contribute=start, add=middle, write=finish)


_MEASURED: Mapping[str, Callable[[Any, Array], CodecCosts]] = {
    "chunks": _chunks,
    "owners": _summing,
    "factors": _factors,
}
"""By how nodes add up what a codec encodes (`BucketCodec.exchange`)."""


def _once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
