"""Encoding and decoding of buckets by the codecs without a state, and payloads that are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CODECS, BucketCodec, CodecError, Layout, open_bucket, parse
from fusion_rt.codecs.dense import Dense, DenseBucket
from fusion_rt.core.dtypes import DTYPES, DType
from tests.for_each import for_each

Array = npt.NDArray[Any]

NAMES = sorted(name for name, codec in CODECS.items() if not codec().stateful)
ALL = list(DTYPES.values())
WIDE = [DTYPES["float32"], DTYPES["float64"]]
TORCH_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def opened(name: str, dtype: DType, elements: int = 1000) -> BucketCodec:
    return open_bucket(parse(name), Layout(dtype, elements))


def elements(dtype: DType, n: int, seed: int) -> Array:
    values: Array = np.frombuffer(np.random.default_rng(seed).bytes(n * dtype.itemsize), dtype.storage).copy()
    return values


def decoded(codec: BucketCodec, payload: memoryview | bytes, n: int, start: int = 0) -> Array:
    out = np.empty(n, codec.layout.dtype.storage)
    codec.decode(start, payload, out)
    return out


@settings(deadline=None)  # the first example may have to compile a kernel
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(ALL),
    n=st.integers(0, 200),
    start=st.integers(0, 800),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_encoded_is_decoded(name: str, dtype: DType, n: int, start: int, seed: int) -> None:
    sender, receiver = opened(name, dtype), opened(name, dtype)
    values = elements(dtype, n, seed)
    before = values.tobytes()
    payload = sender.encode(start, values)
    assert values.tobytes() == before
    assert len(payload) == payload.nbytes <= sender.max_encoded_nbytes(n)
    received = b"x" + bytes(payload)  # a frame may begin at any address
    once = decoded(receiver, memoryview(received)[1:], n, start)
    assert decoded(sender, payload, n, start).tobytes() == once.tobytes(), "the sender has to get the same bits"
    again = decoded(receiver, bytes(sender.encode(start, once)), n, start)
    assert again.tobytes() == once.tobytes(), "decoded values that are passed on stay as they are"
    if sender.lossless:
        assert once.tobytes() == before
    again = bytes(sender.encode(start, once))
    assert again == bytes(payload), "what has been rounded once stays as it is"


@for_each("dtype", ALL)
def test_dense_sends_the_memory_itself(dtype: DType) -> None:
    values = elements(dtype, 10, 0)
    payload = opened("dense", dtype).encode(0, values)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), values)
    assert payload.nbytes == values.nbytes


@for_each("name", ["fp16", "bf16"])
@for_each("dtype", ALL)
def test_half_codecs_apply_to_wide_floats_and_let_the_rest_go_dense(name: str, dtype: DType) -> None:
    applies = dtype in WIDE
    codec = opened(name, dtype)
    assert parse(name).applies_to(dtype) == applies
    assert codec.lossless == (not applies)
    assert codec.max_encoded_nbytes(10) == (20 if applies else 10 * dtype.itemsize)


@for_each("name", ["fp16", "bf16"])
@for_each("dtype", WIDE)
def test_half_codecs_round_as_torch_does(name: str, dtype: DType) -> None:
    rng = np.random.default_rng(5)
    values = np.concatenate(
        [
            rng.standard_normal(5000) * np.exp(rng.uniform(-40, 40, 5000)),
            [
                0.0,
                -0.0,
                np.inf,
                -np.inf,
                65504,
                65519.9,
                65520,
                -65520,
                2**-14,
                2**-24,
                2**-25,
                1.1 * 2**-25,
                1e-40,
                3.4e38,
            ],
        ]
    ).astype(np.float32)
    codec = opened(name, dtype)
    stored = values.astype(dtype.storage)
    actual = decoded(codec, codec.encode(0, stored), len(stored))
    expected = torch.from_numpy(values).to(TORCH_HALF[name]).to(getattr(torch, dtype.name)).numpy()
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_what_is_too_large_for_fp16_becomes_infinite_and_not_for_bf16(dtype: DType) -> None:
    values = np.array([65519, 65520, -1e30, np.nan, -np.nan], dtype.storage)
    fp16, bf16 = (opened(name, dtype) for name in ("fp16", "bf16"))
    assert decoded(fp16, fp16.encode(0, values), 5)[:3].tolist() == [65504, np.inf, -np.inf]
    assert np.isfinite(decoded(bf16, bf16.encode(0, values), 5)[:3]).all()
    for codec in (fp16, bf16):
        assert np.isnan(decoded(codec, codec.encode(0, values), 5)[3:]).all()


@for_each("name", NAMES)
@for_each("dtype", ALL)
@for_each("n", [0, 1, 100])
def test_a_payload_of_another_length_is_refused_and_writes_nothing(name: str, dtype: DType, n: int) -> None:
    codec = opened(name, dtype)
    right = codec.max_encoded_nbytes(n)
    for length in {0, 1, right - 1, right + 1, right * 2, 1 << 20} - {right, -1}:
        out = np.full(n, 7, dtype.storage)
        with pytest.raises(CodecError, match=rf"take {right} bytes.*a peer sent {length};"):
            codec.decode(0, bytes(length), out)
        assert (out == 7).all()


@pytest.mark.parametrize("name", NAMES)
@given(payload=st.binary(max_size=64), n=st.integers(0, 16))
def test_any_payload_is_decoded_or_a_codec_error(name: str, payload: bytes, n: int) -> None:
    codec = opened(name, DTYPES["float32"])
    guarded = np.full(n + 2, 7, np.float32)
    try:
        codec.decode(0, payload, guarded[1:-1])
    except CodecError:
        assert (guarded == 7).all()
    assert guarded[0] == guarded[-1] == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_stateless_codec_has_no_state_and_takes_none(name: str) -> None:
    assert not parse(name).stateful
    codec = opened(name, DTYPES["float32"])
    assert codec.state_dict() == {}
    codec.load_state_dict({})
    with pytest.raises(CodecError, match=f"has residual, which the codec {name} does not have"):
        codec.load_state_dict({"residual": np.zeros(3)})


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_lossless_when_its_buckets_are(name: str) -> None:
    codec = parse(name)
    assert codec.lossless == all(open_bucket(codec, Layout(dtype, 1)).lossless for dtype in ALL)
    assert not codec.selecting


def test_a_codec_whose_chunks_may_be_longer_than_their_elements_is_refused() -> None:
    class Growing(DenseBucket):
        def max_encoded_nbytes(self, n: int) -> int:
            return 4 * n + 8

    @dataclass(frozen=True)
    class Grown(Dense):
        bucket = Growing

    with pytest.raises(CodecError, match="makes up to 408 bytes of elements that take 400"):
        open_bucket(Grown(), Layout(DTYPES["float32"], 100))
