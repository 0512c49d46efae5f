"""Adasum on any number of nodes and workers, against the published formula in numpy over the same tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout
from fusion_rt.core.dtypes import DTYPES
from fusiond.collectives import adasum
from fusiond.collectives.adasum import Adasum
from fusiond.collectives.base import ExchangeError, Reducer
from tests.for_each import for_each
from tests.fusiond.collectives.group import KEY, Array, Group, GroupPort, loaded

COUNT = 700  # elements, in chunks of 64: more chunks than are sent ahead, the last one not full
PARTS = ((0, 1), (16, 0), (16, 300), (320, 64), (384, 316))  # a scalar, none, across chunks, a chunk; with padding
DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16")
BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
GROUPS = [(nodes, workers) for nodes in range(1, 6) for workers in range(1, 4)]
groups = for_each(("nodes", "workers"), [*GROUPS, (8, 1)])


# --- the formula ------------------------------------------------------------------------------------------------------


def pair(a: Array, b: Array) -> Array:
    """Combines two vectors as the paper says, in float64."""
    dot, norm_a, norm_b = a @ b, a @ a, b @ b
    return (1 - dot / (2 * norm_a) if norm_a else 1) * a + (1 - dot / (2 * norm_b) if norm_b else 1) * b


def over_tree(vectors: Sequence[Array]) -> Array:
    """Those above the largest power of two are folded into the first; then neighbours combine until one is left."""
    power = 1
    while 2 * power <= len(vectors):
        power *= 2
    left = list(vectors[:power])
    for i, vector in enumerate(vectors[power:]):
        left[i] = pair(left[i], vector)
    while len(left) > 1:
        left = [pair(left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return left[0]


def expected_of(vectors: Sequence[Sequence[Array]], parts: Sequence[tuple[int, int]]) -> list[Array]:
    """The result of each tensor; `vectors` by node, then by local worker."""
    found = []
    for start, count in parts:
        nodes = [[vector[start : start + count] for vector in node] for node in vectors]
        found.append(over_tree([over_tree(node) for node in nodes]))
    return found


# --- the exchange -----------------------------------------------------------------------------------------------------


def rounded(values: Array, dtype: str) -> Array:
    """Any values as a bucket of that dtype stores them (bfloat16 cut off)."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype).view(DTYPES[dtype].storage)


def gradients(nodes: int, workers: int, dtype: str = "float32", count: int = COUNT) -> list[list[Array]]:
    """Gradients with something in common: neither sum nor average is right. As they are stored, by node and worker."""
    choose = np.random.default_rng([nodes, workers])
    common = choose.standard_normal(count)
    return [
        [rounded(common + 0.7 * choose.standard_normal(count), dtype) for _ in range(workers)] for _ in range(nodes)
    ]


class Run:
    """One Adasum of `vectors` (stored, by node and local worker) in place, and what is left in them."""

    def __init__(
        self,
        vectors: Sequence[Sequence[Array]],
        parts: Sequence[tuple[int, int]],
        dtype: str = "float32",
        codec: str = "dense",
        seed: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        inline: bool = False,
        chunk_bytes: int = 256,
    ) -> None:
        self.parts = parts
        self.dtype = dtype
        self.values = [[vector.copy() for vector in node] for node in vectors]
        reducer = Reducer("adasum", DTYPES[dtype], prescale, postscale)
        layout = Layout(DTYPES[dtype], len(vectors[0][0]))

        def make(port: GroupPort) -> Adasum:
            sources = outputs = self.values[port.position]
            if inline:  # came in messages, so they can be read only; one result for all
                sources = [np.frombuffer(source.tobytes(), source.dtype) for source in sources]
                outputs = self.values[port.position] = [np.empty_like(sources[0])]
            return Adasum(port, reducer, codecs.parse(codec).open(layout), sources, outputs, parts)

        self.group = Group(len(vectors), make, seed, chunk_bytes)

    def run(self) -> bytes:
        """The tensors, stored one after the other; the same bits on every rank."""
        self.group.run()
        results = {
            b"".join(value[start : start + count].tobytes() for start, count in self.parts)
            for node in self.values
            for value in node
        }
        assert len(results) == 1
        return results.pop()

    def tensors(self) -> list[Array]:
        """The tensors in float64."""
        whole = loaded(np.frombuffer(self.run(), DTYPES[self.dtype].storage), self.dtype)
        return np.split(whole, np.cumsum([count for _, count in self.parts])[:-1])


def in_float64(vectors: Sequence[Sequence[Array]], dtype: str) -> list[list[Array]]:
    return [[loaded(vector, dtype) for vector in node] for node in vectors]


def assert_close(found: Sequence[Array], expected: Sequence[Array], digits: int) -> None:
    """Every tensor is right to so many binary digits of the largest element in all of them."""
    largest = max(np.abs(right).max(initial=0) for right in expected)
    for some, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(some, right, rtol=0, atol=2.0**-digits * largest)


@groups
@for_each("dtype", DTYPE_NAMES)
def test_every_tensor_is_combined_by_itself_as_the_paper_says(nodes: int, workers: int, dtype: str) -> None:
    vectors = gradients(nodes, workers, dtype)
    expected = expected_of(in_float64(vectors, dtype), PARTS)
    assert_close(Run(vectors, PARTS, dtype).tensors(), expected, BITS[dtype] - 3)
    average = [np.mean([v[s : s + n] for node in in_float64(vectors, dtype) for v in node], axis=0) for s, n in PARTS]
    if nodes * workers > 1:
        assert not np.allclose(expected[2], average[2], rtol=0.1)
        assert not np.allclose(expected[2], nodes * workers * average[2], rtol=0.1)


def test_vectors_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adasum, "_BLOCK", 48)
    for dtype in DTYPE_NAMES:
        vectors = gradients(3, 2, dtype)
        expected = expected_of(in_float64(vectors, dtype), PARTS)
        assert_close(Run(vectors, PARTS, dtype).tensors(), expected, BITS[dtype] - 3)


@for_each("count", [63, 64, 127, 128, 129])
def test_vectors_that_fill_their_chunks_or_nearly(count: int) -> None:
    vectors = gradients(3, 1, count=count)
    parts = ((0, 64), (64, count - 64)) if count > 64 else ((0, count),)
    assert_close(Run(vectors, parts).tensors(), expected_of(in_float64(vectors, "float32"), parts), 20)


def test_different_numbers_of_workers_and_submissions_in_messages() -> None:
    vectors = [gradients(1, workers)[0] for workers in (2, 1, 3, 5)]
    expected = expected_of(in_float64(vectors, "float32"), PARTS)
    for inline in (False, True):
        assert_close(Run(vectors, PARTS, inline=inline).tensors(), expected, 20)


@for_each(("nodes", "workers"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_for_powers_of_two_it_does_not_matter_where_the_ranks_are(nodes: int, workers: int) -> None:
    ranks = gradients(8, 1, "float64")
    expected = expected_of(ranks, PARTS)  # neighbouring ranks first
    flat = [rank for node in ranks for rank in node]
    vectors = [flat[workers * node : workers * (node + 1)] for node in range(nodes)]
    assert_close(Run(vectors, PARTS, "float64").tensors(), expected, 48)


@groups
@for_each("dtype", ["float32", "float16"])
def test_equal_gradients_stay_and_orthogonal_ones_are_added(nodes: int, workers: int, dtype: str) -> None:
    ranks = nodes * workers
    one = gradients(1, 1, dtype)[0][0]
    equal = Run([[one] * workers] * nodes, [(0, COUNT)], dtype).run()
    assert equal == one.tobytes()
    apart = [rounded(np.where(np.arange(COUNT) % ranks == r, loaded(one, dtype), 0), dtype) for r in range(ranks)]
    vectors = [apart[workers * node : workers * (node + 1)] for node in range(nodes)]
    found = np.frombuffer(Run(vectors, [(0, COUNT)], dtype).run(), one.dtype)
    np.testing.assert_array_equal(loaded(found, dtype), loaded(one, dtype))  # -0 becomes 0


@for_each(("nodes", "workers"), [(2, 1), (4, 1), (2, 2), (1, 4)])
@for_each("dtype", ["float32", "float16"])
def test_parallel_gradients_of_any_length_are_averaged(nodes: int, workers: int, dtype: str) -> None:
    """Lengths go from the smallest number to the root of the largest, as Horovod tests its stability."""
    ranks = nodes * workers
    limits = np.finfo(dtype)
    smallest, largest = float(limits.tiny), float(limits.max) ** 0.5
    lengths = [largest ** ((r + 1) / ranks) * smallest ** ((ranks - r - 1) / ranks) for r in range(ranks)]
    direction = np.random.default_rng(2).standard_normal(COUNT)
    flat = [rounded(length * direction, dtype) for length in np.random.default_rng(3).permutation(lengths)]
    vectors = [flat[workers * node : workers * (node + 1)] for node in range(nodes)]
    expected = np.mean([loaded(vector, dtype) for vector in flat], axis=0)
    assert_close(Run(vectors, [(0, COUNT)], dtype).tensors(), [expected], BITS[dtype] - 2)


@groups
def test_scaled_gradients_give_the_scaled_result(nodes: int, workers: int) -> None:
    vectors = gradients(nodes, workers)
    plain = np.frombuffer(Run(vectors, PARTS).run(), np.float32)
    larger = [[1024 * vector for vector in node] for node in vectors]
    np.testing.assert_array_equal(np.frombuffer(Run(larger, PARTS).run(), np.float32), 1024 * plain)
    scaled = Run(vectors, PARTS, prescale=0.25, postscale=-8.0).run()
    np.testing.assert_array_equal(np.frombuffer(scaled, np.float32), -2 * plain)
    inline = Run(vectors, PARTS, prescale=0.25, postscale=-8.0, inline=True).run()
    assert inline == scaled


def test_prescaling_keeps_half_precision_from_overflowing() -> None:
    large = np.full(COUNT, 40000, np.float16)
    even = np.where(np.arange(COUNT) % 2, large, 0).view(np.uint16)
    vectors = [[even, large.view(np.uint16)], [even, large.view(np.uint16)]]
    found = Run(vectors, [(0, COUNT)], "float16", prescale=0.25).tensors()
    assert_close(
        found, expected_of([[v / 4 for v in node] for node in in_float64(vectors, "float16")], [(0, COUNT)]), 8
    )


@for_each(("nodes", "workers"), [(1, 3), (2, 1), (3, 2)])
def test_zeros_count_for_nothing_and_what_is_not_a_number_is_not_lost(nodes: int, workers: int) -> None:
    zeros = [[np.zeros(COUNT, np.float32) for _ in range(workers)] for _ in range(nodes)]
    assert not np.frombuffer(Run(zeros, PARTS).run(), np.float32).any()
    zeros[-1][-1] = gradients(1, 1)[0][0]
    wanted = b"".join(zeros[-1][-1][start : start + count].tobytes() for start, count in PARTS)
    assert Run(zeros, PARTS).run() == wanted
    vectors = gradients(nodes, workers)
    vectors[-1][-1][20] = np.inf
    tensors = Run(vectors, PARTS).tensors()
    assert [bool(np.isfinite(tensor).all()) for tensor in tensors] == [True, True, False, True, True]


@for_each("nodes", range(1, 6))
def test_nothing_at_all(nodes: int) -> None:
    for parts in ([], [(0, 0)]):
        run = Run([[np.empty(0, np.float32)] * 2] * nodes, parts)
        assert run.run() == b""
        assert not run.group.delivered


@for_each("nodes", range(2, 9))
@for_each("codec", ["dense", "fp16", "bf16"])
def test_bits_are_equal_on_all_ranks_whatever_the_order_of_delivery(nodes: int, codec: str) -> None:
    vectors = [gradients(nodes, 1 + node % 2)[node] for node in range(nodes)]
    results = {Run(vectors, PARTS, codec=codec, seed=seed).run() for seed in range(8)}
    assert len(results) == 1
    tensors = Run(vectors, PARTS, codec=codec).tensors()
    digits = {"dense": 20, "fp16": 7, "bf16": 4}[codec]
    assert_close(tensors, expected_of(in_float64(vectors, "float32"), PARTS), digits)


@for_each(("nodes", "vectors_sent"), [(2, 2), (3, 4), (4, 8), (5, 10), (8, 24)])
def test_every_round_moves_one_vector_a_node(nodes: int, vectors_sent: int) -> None:
    run = Run(gradients(nodes, 2), PARTS)
    run.run()
    assert sum(run.group.sent_bytes) == vectors_sent * 4 * COUNT
    run = Run(gradients(nodes, 2), PARTS, codec="fp16")
    run.run()
    assert sum(run.group.sent_bytes) == vectors_sent * 2 * COUNT


# --- peers that send what they should not -----------------------------------------------------------------------------


@for_each("nodes", [2, 3, 4, 5])
def test_a_chunk_that_comes_twice_is_refused(nodes: int) -> None:
    run = Run(gradients(nodes, 1), PARTS)
    while run.group.step():
        if run.group.delivered:
            source, target, chunk, payload = run.group.delivered[-1]
            with pytest.raises(ExchangeError):
                run.group.exchanges[target].receive(source, chunk, memoryview(payload))
    result = run.run()
    for source, target, chunk, payload in run.group.delivered:
        with pytest.raises(ExchangeError):
            run.group.exchanges[target].receive(source, chunk, memoryview(payload))
    assert run.run() == result == Run(gradients(nodes, 1), PARTS).run()


@for_each("nodes", [2, 3, 4, 5])
def test_a_chunk_that_has_no_place_is_refused_and_changes_nothing(nodes: int) -> None:
    run = Run(gradients(nodes, 1), PARTS)
    group = run.group
    while group.step():
        for source, target, chunk, payload in group.to_started_nodes()[-1:]:
            fields = [{"part": 1}, {"part": 2**48 - 1}, {"start": 1}, {"start": 64 * 11}, {"start": 2**48 - 64}]
            fields += [{"hop": hop} for hop in (chunk.hop - 1, chunk.hop + 1, 2**48 - 1) if hop >= 0]
            wrong = [(source, replace(chunk, **changed)) for changed in fields]
            wrong += [(other, chunk) for other in range(nodes) if other not in (source, target)]
            before = run.values[target][0].copy()
            for position, bad in wrong:
                with pytest.raises(ExchangeError):
                    group.exchanges[target].receive(position, bad, memoryview(payload))
            np.testing.assert_array_equal(run.values[target][0], before)
    assert run.run() == Run(gradients(nodes, 1), PARTS).run()


def test_a_peer_may_send_a_few_chunks_of_a_later_round_and_no_more() -> None:
    run = Run(gradients(4, 1), PARTS)
    exchange = run.group.exchanges[0]
    exchange.start()
    for index in range(4):
        exchange.receive(2, wire.Chunk(KEY, 0, 0, 64 * index, 2), memoryview(bytes(256)))
    with pytest.raises(ExchangeError):
        exchange.receive(2, wire.Chunk(KEY, 0, 0, 64 * 4, 2), memoryview(bytes(256)))


@for_each("codec", ["dense", "fp16"])
@for_each("length", [0, 3, 12, 252, 260, 5000])
def test_a_payload_of_the_wrong_size_is_refused(codec: str, length: int) -> None:
    run = Run(gradients(2, 1), PARTS, codec=codec)
    while run.group._to_start or not run.group.under_way:
        run.group.step()
    source, target, chunk, _ = run.group.under_way[0]
    before = run.values[target][0].copy()
    with pytest.raises(CodecError):
        run.group.exchanges[target].receive(source, chunk, memoryview(bytes(length)))
    np.testing.assert_array_equal(run.values[target][0], before)


def test_a_node_alone_has_no_peers_to_hear_from() -> None:
    other = Run(gradients(2, 1), PARTS)
    other.run()
    source, _, chunk, payload = other.group.delivered[0]
    run = Run(gradients(1, 2), PARTS)
    run.run()
    with pytest.raises(ExchangeError):
        run.group.exchanges[0].receive(source, chunk, memoryview(payload))
