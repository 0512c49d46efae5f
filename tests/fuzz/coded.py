"""Targets: the payloads of codecs, which come from other hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fusion_rt import codecs
from fusion_rt.codecs import CodecError, Layout, Span
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.core.dtypes import DTYPES
from tests.fuzz.engine import Target

ELEMENTS = 3000
_TENSORS = (Span("a", 0, 1600, (40, 40)), Span("bias", 1600, 50, (50,)), Span("c", 1700, 1300, (26, 50)))
_RANGES = ((0, ELEMENTS), (0, 1024), (1024, ELEMENTS), (1590, 1720), (7, 7), (2999, 3000))
_CODECS = {
    "dense": ("dense", "float32"),
    "fp16": ("fp16", "float32"),
    "bf16 of float64": ("bf16", "float64"),
    "topk fp32 raw": ("topk(density=0.02, minimum=0, value='fp32', index='raw')", "float32"),
    "topk fp16": ("topk(density=0.02, minimum=0)", "float32"),
    "topk int8 of bfloat16": ("topk(density=0.2, minimum=0, value='int8', index='delta')", "bfloat16"),
    "topk bf16 bitmap": ("topk(density=0.5, minimum=0, value='bf16', index='bitmap', exclude='')", "float32"),
    "gaussiank": ("gaussiank(density=0.05, minimum=0)", "float32"),
    "thresholdk": ("thresholdk(minimum=0)", "float32"),
    "randomk": ("randomk(density=0.05, minimum=0, warmup=3)", "float32"),
    "int8": ("int8(minimum=0, block=64)", "float32"),
    "int8 of float16": ("int8(minimum=0, block=64)", "float16"),
    "int4": ("int4(minimum=0, block=64)", "float32"),
    "int2 of bfloat16": ("int2(minimum=0, block=64, decay=0.9)", "bfloat16"),
    "topk int4 of chunks": ("topk(density=0.1, minimum=0, value='int4', chunk=256)", "float32"),
    "topk int2": ("topk(density=0.1, minimum=0, value='int2', decay=0.9)", "float32"),
    "demo": ("demo(density=0.02, minimum=0, chunk=16)", "float32"),
    "onebit": ("onebit(minimum=0, block=32)", "float32"),
    "powersgd": ("powersgd(minimum=0, rank=2)", "float32"),
}
_NAMED = {text.partition("(")[0] for text, _ in _CODECS.values()}
_CODECS |= {
    name: (f"{name}(minimum=0)" if hasattr(codec, "minimum") else name, "float32")
    for name, codec in sorted(codecs.CODECS.items())
    if name not in _NAMED
}
_GUARD = 64  # elements before and after what is written to, which nothing may touch


def targets() -> list[Target]:
    """Each codec, of all or a part of a bucket, into guarded memory; and what an owner of a range does with it."""
    return [_target(name, text, dtype) for name, (text, dtype) in _CODECS.items()]


def _target(name: str, text: str, dtype: str) -> Target:
    @cache
    def opened() -> Any:
        return codecs.parse(text).open(Layout(DTYPES[dtype], ELEMENTS, _TENSORS))

    def run(data: bytes) -> bool:
        low, high = _RANGES[data[0] % len(_RANGES)] if data else _RANGES[0]
        storage = DTYPES[dtype].storage
        guarded = np.full(ELEMENTS + 2 * _GUARD, 7, storage)
        out = guarded[_GUARD + low : _GUARD + high]
        try:
            opened().decode(low, data[1:], out)
            if isinstance(opened(), SummingBucketCodec):
                _sum(opened(), data[1:], low, high)
        finally:
            outside = np.concatenate([guarded[: _GUARD + low], guarded[_GUARD + high :]])
            assert (outside == 7).all(), "it wrote beside its range"
        return True

    return Target(f"codec: {name}", _seeds(opened, dtype), run, (CodecError,), cost=4)


def _sum(bucket: Any, payload: bytes, low: int, high: int) -> None:
    """What an owner does with two contributions to its range, and everybody with the sum."""
    first, second = bucket.unpack(payload, low, high), bucket.unpack(payload, low, high)
    edges = [low, (low + high) // 2, high]
    if bucket.adapts:
        assert sum(bucket.counts(first, edges)) <= high - low
    total = bucket.conclude(bucket.add(first, second), 2)
    assert len(bucket.pack(total, low, high)) <= bucket.max_encoded_nbytes(high - low)
    output = np.zeros(ELEMENTS, bucket.layout.dtype.storage)
    bucket.write(total, [output], 0.5, 2)
    assert not output[:low].any()
    assert not output[high:].any()


def _seeds(opened: Callable[[], Any], dtype: str) -> list[bytes]:
    bucket = opened()
    rng = np.random.default_rng(1)
    found = []
    for number, (low, high) in enumerate(_RANGES):
        values = rng.standard_normal(ELEMENTS).astype(np.float32)
        if dtype == "bfloat16":
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            stored = values.astype(DTYPES[dtype].storage)
        if isinstance(bucket, SummingBucketCodec):
            payload = bucket.pack(bucket.contribute(stored), low, high) if low % bucket.alignment == 0 else b""
        elif (low, high) == (0, ELEMENTS) or bucket.exchange != "factors":
            payload = bucket.encode(low, stored[low:high])
        else:
            continue
        found.append(bytes([number]) + bytes(payload))
    return found
