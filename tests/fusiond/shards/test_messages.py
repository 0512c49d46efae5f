"""Messages: cut into pieces and put together again, and the values of a bucket as bytes and back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout, open_bucket
from fusion_rt.codecs.base import Span
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import WireError
from fusiond.shards.messages import joined, pack, pieces, unpack
from fusiond.shards.reassembly import PartialMessage
from tests.for_each import for_each

MESSAGE = wire.Piece(0, 1, 2, "post", -1, 3, 4, 5, 0)
CODECS = ["dense", "fp16", "bf16", "topk(density=0.1, minimum=0)", "randomk(density=0.1, minimum=0)", "int8(minimum=0)",
          "onebit(minimum=0)", "gaussiank(density=0.1, minimum=0)", "thresholdk(density=0.1, minimum=0)"]  # fmt: skip


def of(data: bytes, start: int, end: int) -> tuple[wire.Piece, memoryview]:
    """The piece of a message of these bytes that has those from `start` to `end`."""
    return replace(MESSAGE, nbytes=len(data), start=start), memoryview(data)[start:end]


def cut(data: bytes, places: list[int]) -> list[tuple[wire.Piece, memoryview]]:
    """A message's pieces, cut at these places."""
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [of(data, a, b) for a, b in itertools.pairwise(edges)]


@given(st.binary(max_size=300), st.integers(1, 400))
def test_pieces_are_what_they_were_cut_from(data: bytes, chunk_bytes: int) -> None:
    found = list(pieces(MESSAGE, memoryview(data), chunk_bytes))
    assert b"".join(bytes(payload) for _, payload in found) == data
    assert all(len(payload) <= chunk_bytes and piece.nbytes == len(data) for piece, payload in found)
    assert found[0][0].start == 0


@settings(max_examples=200)
@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 200)), st.randoms(use_true_random=False))
def test_any_division_and_any_order_gives_the_parcel(data: bytes, places: list[int], shuffle: random.Random) -> None:
    parts = cut(data, places)
    shuffle.shuffle(parts)
    assembly = PartialMessage(parts[0][0])
    results = [assembly.add(*part) for part in parts]
    assert results[:-1] == [None] * (len(parts) - 1)
    assert results[-1] is not None
    assert bytes(joined(results[-1])) == data
    assert results[-1] == []


@settings(max_examples=200)
@given(
    st.binary(min_size=2, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.integers(1, 60)), min_size=1, max_size=12),
)
def test_a_parcel_is_whole_only_if_every_byte_came_once(data: bytes, ranges: list[tuple[int, int]]) -> None:
    assembly = PartialMessage(replace(MESSAGE, nbytes=len(data)))
    came: list[int] = []
    for start, length in ranges:
        if start >= len(data):
            continue
        piece, payload = of(data, start, start + length)
        came += range(start, start + len(payload))
        try:
            whole = assembly.add(piece, payload)
        except WireError:
            assert len(set(came)) < len(came)  # something came twice
            return
        if whole is not None:
            assert bytes(joined(whole)) == data
            assert sorted(came) == list(range(len(data)))
            return


@for_each(
    ("first", "second"),
    [
        (of(bytes(8), 0, 4), of(bytes(8), 0, 4)),  # twice
        (of(bytes(8), 0, 4), of(bytes(8), 2, 6)),  # overlapping, and 8 bytes altogether
        (of(bytes(8), 0, 6), of(bytes(8), 4, 8)),
        (of(bytes(8), 0, 4), of(bytes(9), 4, 8)),  # of another length
        (of(bytes(8), 0, 4), (of(bytes(8), 4, 8)[0], memoryview(bytes(5)))),  # too long
        (of(bytes(8), 0, 4), (of(bytes(8), 4, 8)[0], memoryview(b""))),  # empty
        (of(bytes(8), 0, 4), (replace(of(bytes(8), 4, 8)[0], version=6), memoryview(bytes(4)))),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    first: tuple[wire.Piece, memoryview], second: tuple[wire.Piece, memoryview]
) -> None:
    assembly = PartialMessage(first[0])
    assert assembly.add(*first) is None
    with pytest.raises(
        WireError, match=r"the post of rank 3 for bucket 2 (do|does) not fit the others|for bucket 2 overlap"
    ):
        assembly.add(*second)


def test_a_parcel_takes_no_memory_before_it_comes() -> None:
    assembly = PartialMessage(replace(MESSAGE, nbytes=1 << 30))
    assert assembly.add(replace(MESSAGE, nbytes=1 << 30, start=1 << 29), memoryview(b"abc")) is None


def bucket(dtype: str) -> Layout:
    return Layout(DTYPES[dtype], 4096, (Span("a", 0, 3000), Span("b", 3008, 1088)))


@for_each("dtype", ["float32", "float64"])
@pytest.mark.parametrize("text", CODECS)
def test_what_is_packed_is_what_the_codec_makes_of_it(text: str, dtype: str) -> None:
    layout, codec = bucket(dtype), codecs.parse(text)
    mine, own = open_bucket(codec, layout), codec.open(layout)
    for step in range(3):
        values = np.random.default_rng(step).standard_normal(4096).astype(DTYPES[dtype].storage)
        values[3000:3008] = 0
        kept = values.copy()
        payload = pack(mine, values)
        assert bytes(payload) == bytes(own.encode(0, values))
        assert len(payload) <= mine.max_encoded_nbytes(4096)
        expected = np.empty_like(values)
        own.decode(0, payload, expected)
        np.testing.assert_array_equal(unpack(mine, payload), expected)
        np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("text", CODECS)
def test_what_is_no_parcel_of_the_codec_is_refused(text: str) -> None:
    codec = open_bucket(codecs.parse(text), bucket("float32"))
    payload = bytes(pack(codec, np.ones(4096, np.float32)))
    for wrong in (b"", payload[:-1], payload + b"x"):
        with pytest.raises(CodecError):
            unpack(codec, memoryview(wrong))


def test_a_parcel_has_bytes_of_its_own() -> None:
    values = np.ones(4096, np.float32)
    payload = pack(open_bucket(codecs.parse("dense"), bucket("float32")), values)
    values[:] = 2
    assert bytes(payload) == np.ones(4096, np.float32).tobytes()


def test_a_codec_that_remembers_nothing_loses_what_it_leaves_out() -> None:
    codec = open_bucket(codecs.parse("topk(density=0.1, minimum=0, momentum=0.9)").without_memory(), bucket("float32"))
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    first = unpack(codec, pack(codec, values)).copy()
    np.testing.assert_array_equal(unpack(codec, pack(codec, values)), first)
    assert 0 < np.count_nonzero(first) <= 4096 * 0.11


def test_a_codec_that_does_not_apply_sends_everything() -> None:
    layout = Layout(DTYPES["int64"], 8)
    assert open_bucket(codecs.parse("topk"), layout).lossless


@pytest.mark.parametrize("text", [*CODECS[3:], "topk(density=0.1, minimum=0, momentum=0.9)"])
def test_a_contribution_that_is_not_finite_arrives_as_such_and_is_not_remembered(text: str) -> None:
    layout = Layout(DTYPES["float32"], 1000, (Span("w", 0, 1000),))
    codec = open_bucket(codecs.parse(text), layout)
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    pack(codec, values)
    before = codec.state_dict()
    bad = values.copy()
    bad[[3, 500]] = np.nan, np.inf
    assert np.isnan(unpack(codec, pack(codec, bad))).any()
    after = codec.state_dict()
    for key in (key for key in before if key.endswith("/w")):
        assert np.allclose(after[key], before[key], rtol=0, atol=1e-5), key
    assert np.isfinite(unpack(codec, pack(codec, values))).all()
