"""Selections as bytes, bytes that are none, and sums of selections."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CodecError
from fusion_rt.codecs.packing import HEADER, INDEX_CODINGS, Packer, Selection, Spans, merged, strongest
from fusion_rt.codecs.values import FORMATS, format_of_whole
from fusion_rt.kernels import coding, selection
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

VALUES = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 65520], np.float32)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    selection.prepare()
    coding.prepare()
    FORMATS["fp16"].prepare()
    FORMATS["bf16"].prepare()


def drawn(n: int, density: float, value: str, seed: int) -> tuple[Spans, Spans, Selection]:
    """A bucket of n elements, in places for tensors that are selected from, always sent, and padding; a selection."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, n + 1, 4)).tolist()
    sparse = Spans([(0, cuts[0]), (cuts[1], cuts[2]), (cuts[3], n)])
    dense = Spans([(cuts[0], cuts[1])])
    places = sparse.all_indices(0, n)
    indices = places[rng.random(len(places)) < density]
    values = rng.standard_normal(len(indices) + dense.size, dtype=np.float32)
    special = rng.random(len(values)) < 0.3
    values[special] = rng.choice(VALUES, int(special.sum()))
    kept = FORMATS[value].rounded(values[: len(indices)])
    always = FORMATS[format_of_whole(value)].rounded(values[len(indices) :])
    return sparse, dense, Selection(0, n, indices, kept, always)


def assert_same(actual: Selection, expected: Selection) -> None:
    assert (actual.low, actual.high) == (expected.low, expected.high)
    assert actual.indices.tolist() == expected.indices.tolist()
    assert actual.values.tobytes() == expected.values.tobytes()
    assert actual.dense.tobytes() == expected.dense.tobytes()


@settings(deadline=None)
@given(
    n=st.integers(0, 400),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    value=st.sampled_from(sorted(FORMATS)),
    index=st.sampled_from(INDEX_CODINGS),
    cuts=st.lists(st.integers(0, 400), max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_ranges_are_unpacked_as_they_were_packed(
    n: int, density: float, value: str, index: str, cuts: list[int], seed: int
) -> None:
    sparse, dense, selected = drawn(n, density, value, seed)
    packer = Packer(sparse, dense, value, index)
    bounds = sorted({0, n, *(min(cut, n) for cut in cuts)})
    parts = []
    for low, high in itertools.pairwise(bounds):
        payload = packer.pack(selected, low, high)
        assert payload.nbytes <= packer.max_nbytes(high - low)
        parts.append(packer.unpack(memoryview(b"x" + bytes(payload))[1:], low, high))  # a frame begins anywhere
        assert (parts[-1].low, parts[-1].high) == (low, high)
    if parts:
        together = Selection(
            0, n, *(np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "values", "dense"))
        )
        assert_same(together, selected)
    assert_same(packer.unpack(packer.pack(selected, 0, n), 0, n), selected)


@for_each(("density", "most"), [(0.001, 3.7), (0.01, 3.2), (0.1, 2.8)])
@for_each("chunk", [2_000_000, 250_000])
def test_bytes_of_a_kept_element_with_fp16_and_headers(density: float, most: float, chunk: int) -> None:
    n = 2_000_000
    places = np.flatnonzero(np.random.default_rng(1).random(n) < density).astype(np.int32)
    values = FORMATS["fp16"].rounded(np.random.default_rng(2).standard_normal(len(places), dtype=np.float32))
    packer = Packer(Spans([(0, n)]), Spans([]), "fp16")
    selected = Selection(0, n, places, values, np.empty(0, np.float32))
    total = sum(packer.pack(selected, low, low + chunk).nbytes for low in range(0, n, chunk))
    assert total / len(places) <= most


@for_each(("value", "nbytes"), [("fp32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1), ("int4", 1), ("int2", 1)])
def test_what_is_always_sent_takes_as_many_bytes_as_selected_values_and_at_least_one(value: str, nbytes: int) -> None:
    n = 64 * 100
    whole = Selection(0, n, np.empty(0, np.int32), np.empty(0, np.float32), np.ones(n, np.float32))
    payload = Packer(Spans([]), Spans([(0, n)]), value).pack(whole, 0, n)
    assert 0 <= payload.nbytes - HEADER.size - nbytes * n <= n // 64  # a scale for each 64


def test_the_shortest_way_to_write_indices_is_chosen() -> None:
    n = 1000
    sizes = {}
    for name, indices in {
        "few": np.array([7, 900]), "many": np.arange(0, n, 3), "all": np.arange(n), "one": np.array([2])
    }.items():  # fmt: skip
        selected = Selection(
            0, n, indices.astype(np.int32), np.zeros(len(indices), np.float32), np.empty(0, np.float32)
        )
        for index in INDEX_CODINGS:
            payload = Packer(Spans([(0, n)]), Spans([]), "fp32", index).pack(selected, 0, n)
            sizes[name, index] = payload.nbytes - HEADER.size - 4 * len(indices)
    for name in ("few", "many", "all"):
        assert sizes[name, "auto"] == min(sizes[name, index] for index in INDEX_CODINGS)
    assert sizes["all", "auto"] == 0
    assert sizes["one", "auto"] < sizes["one", "raw"]
    assert sizes["few", "delta"] < sizes["few", "raw"] < sizes["few", "bitmap"]
    assert sizes["many", "bitmap"] <= n // 8 + 1


@settings(deadline=None, max_examples=300)
@given(
    payload=st.binary(max_size=80),
    header=st.tuples(*[st.integers(0, 255)] * 4, st.integers(0, 40) | st.integers(0, 2**32 - 1)),
    n=st.integers(0, 60),
    value=st.sampled_from(sorted(FORMATS)),
    seed=st.integers(0, 99),
)
def test_any_bytes_are_a_selection_of_the_range_or_a_codec_error(
    payload: bytes, header: tuple[int, int, int, int, int], n: int, value: str, seed: int
) -> None:
    sparse, dense, _ = drawn(60, 0.5, value, seed)
    packer = Packer(sparse, dense, value)
    kind, bits, phase, dense_phase, count = header
    for hostile in (
        payload,
        HEADER.pack(kind & 3 | FORMATS[value].code << 4, bits & 31, phase & 63, dense_phase & 63, count) + payload,
    ):
        try:
            got = packer.unpack(hostile, 0, n)
        except CodecError:
            continue
        assert sparse.hold(got.indices)
        assert (np.diff(got.indices) > 0).all()
        assert len(got.indices) == len(got.values) <= n
        assert not len(got.indices) or 0 <= got.indices[0] <= got.indices[-1] < n
        assert len(got.dense) == dense.rank(n)


@for_each("index", INDEX_CODINGS)
def test_a_payload_that_is_cut_or_longer_is_refused(index: str) -> None:
    sparse, dense, selected = drawn(300, 0.2, "fp16", 4)
    packer = Packer(sparse, dense, "fp16", index)
    payload = bytes(packer.pack(selected, 0, 300))
    for length in range(len(payload)):
        with pytest.raises(CodecError, match="invalid selection of elements 0 to 300"):
            packer.unpack(payload[:length], 0, 300)
    with pytest.raises(CodecError):
        packer.unpack(payload + b"\0", 0, 300)
    with pytest.raises(CodecError):
        packer.unpack(payload, 0, int(selected.indices[-1]))
    with pytest.raises(CodecError, match="its values are not fp32"):
        Packer(sparse, dense, "fp32", index).unpack(payload, 0, 300)


@for_each("count", [101, 2**31, 2**32 - 1])
@for_each("kind", range(6))
def test_a_count_that_the_range_has_no_room_for_takes_no_memory(kind: int, count: int) -> None:
    packer = Packer(Spans([(0, 100)]), Spans([]), "fp16")
    payload = HEADER.pack(kind | 1 << 4, 3, 0, 0, count) + bytes(500)
    tracemalloc.start()
    with pytest.raises(CodecError, match=f"it has {count} indices"):
        packer.unpack(payload, 0, 100)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_indices_of_padding_and_of_what_is_always_sent_are_refused() -> None:
    packer = Packer(Spans([(0, 50), (60, 100)]), Spans([(50, 55)]), "fp32", "raw")
    for index, good in ((49, True), (50, False), (57, False), (60, True)):
        payload = HEADER.pack(2, 0, 0, 0, 1) + np.array([index], np.uint32).tobytes() + bytes(4 + 5 * 4)
        if good:
            assert packer.unpack(payload, 0, 100).indices.tolist() == [index]
        else:
            with pytest.raises(CodecError, match="not selected but always or never sent"):
                packer.unpack(payload, 0, 100)


@for_each("raw", [[5, 5], [6, 5], [5, 100], [2**32 - 1, 5], [5, 2**32 - 1]])
def test_indices_that_do_not_ascend_in_the_range_are_refused(raw: list[int]) -> None:
    packer = Packer(Spans([(0, 1000)]), Spans([]), "fp32")
    payload = HEADER.pack(2, 0, 0, 0, 2) + np.array(raw, np.uint32).tobytes() + bytes(8)
    with pytest.raises(CodecError, match="are not ascending elements of the range"):
        packer.unpack(payload, 200, 300)


@settings(deadline=None)
@given(n=st.integers(0, 200), seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_the_sum_of_selections_is_that_of_what_they_stand_for(n: int, seeds: list[int]) -> None:
    drawn_places = np.random.default_rng(seeds[0]).integers(0, n + 1, 2)
    low, high = sorted(drawn_places.tolist())
    dense = Spans([(low, high)])
    parts, total = [], np.zeros(n, np.float32)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        chosen = rng.random(n) < 0.3
        chosen[low:high] = False
        whole = rng.standard_normal(n, dtype=np.float32)
        indices = np.flatnonzero(chosen).astype(np.int32)
        parts.append(Selection(0, n, indices, whole[indices], whole[low:high]))
        chosen[low:high] = True
        total = total + np.where(chosen, whole, 0)
    got = merged(parts)
    out = np.zeros(n, np.float32)
    out[got.indices] = got.values
    dense.scatter(got.dense, 0, out)
    assert np.array_equal(out, total)
    assert sorted({i for part in parts for i in part.indices.tolist()}) == got.indices.tolist()


def test_only_selections_of_the_same_range_are_added() -> None:
    nothing = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32)
    with pytest.raises(ValueError, match=r"\[0, 6\) cannot be added to \[0, 5\)"):
        merged([Selection(0, 5, *nothing), Selection(0, 6, *nothing)])


@settings(deadline=None)
@given(n=st.integers(0, 200), k=st.integers(0, 250), seed=st.integers(0, 10**6))
@example(n=100, k=0, seed=1)
@example(n=100, k=1, seed=1)
def test_the_strongest_and_the_rest_are_the_whole(n: int, k: int, seed: int) -> None:
    sparse, _, selected = drawn(n, 0.6, "fp32", seed)
    kept, rest = strongest(selected, k)
    places = selected.indices[reference.largest(selected.values, k)] if k else selected.indices[:0]
    assert kept.indices.tolist() == places.tolist()
    assert kept.dense.tobytes() == selected.dense.tobytes()
    assert not rest.dense.any()
    both = merged([kept, rest])
    nonzero = selected.values != 0
    assert both.indices.tolist() == selected.indices[nonzero].tolist()
    assert both.values.tobytes() == selected.values[nonzero].tobytes()
    assert sparse.hold(kept.indices)
