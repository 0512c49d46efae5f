"""All-reduce with error feedback: through owners of ranges, and by gathering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt import codecs
from fusion_rt.codecs import CodecError, Layout, Span
from fusion_rt.codecs.selecting import SelectingBucketCodec
from fusion_rt.core.dtypes import DTYPES
from fusiond.collectives.base import ExchangeError, Reducer
from fusiond.collectives.owned import Compressed, Gathered, Owned, expected_bounds
from tests.for_each import for_each
from tests.fusiond.collectives.group import Array, Group, GroupPort

ELEMENTS = 6000
TENSORS = (Span("stem.weight", 0, 700), Span("stem.bias", 700, 60), Span("body", 800, 4000), Span("head", 4800, 1200))
LAYOUT = Layout(DTYPES["float32"], ELEMENTS, TENSORS)
INSIDE = np.concatenate([np.arange(s.start, s.end) for s in TENSORS])  # the rest is padding
TOPK = 'topk(density=0.02, minimum=100, value="fp32")'
CODECS = [
    TOPK,
    "topk(density=0.02, minimum=800)",
    'topk(density=0.02, minimum=100, scope="tensor", value="int8")',
    "gaussiank(density=0.02, minimum=100)",
    "thresholdk(density=0.02, minimum=100)",
    "randomk(density=0.02, minimum=100)",
    "topk(density=0.02, minimum=100, chunk=256, value='int2')",
    "demo(density=0.02, minimum=100, chunk=16, value='int4', decay=1.0)",
    "int8(minimum=100)",
    "int4(minimum=100)",
    "int2(minimum=100)",
    "onebit(minimum=100)",
]
MOMENTUM = 'topk(density=0.005, minimum=100, value="fp32", momentum=0.9)'
MOMENTA = [
    MOMENTUM,
    "int8(minimum=100, momentum=0.9, nesterov=True)",
    "topk(density=0.02, minimum=100, value='fp32', momentum=0.9, decay=0.9)",
    "int2(minimum=100, momentum=0.9, decay=0.9)",
]
NO_FEEDBACK = "topk(density=0.02, minimum=100, feedback=False)"
kinds = pytest.mark.parametrize("kind", [Owned, Gathered])


class Job:
    """Nodes with a codec each, and some steps of a bucket."""

    def __init__(self, kind: Callable[..., Compressed], nodes: int, codec: str, layout: Layout = LAYOUT, **how: Any):
        self.kind, self.layout, self.nodes = kind, layout, nodes
        self.codecs: list[Any] = [codecs.parse(codec).open(layout) for _ in range(nodes)]
        self.reducer = Reducer("sum", layout.dtype, **how)
        self.steps = 0
        self.sent_bytes = [0] * nodes

    def step(self, gradients: Sequence[Array], chunk_bytes: int = 256, workers: int = 1) -> Array:
        """One step; the result, which is the same on every rank, bit by bit."""
        self.steps += 1
        # A node's gradient comes from its workers in equal parts: halves add up exactly.
        mine = [[g.copy() if workers == 1 else g / np.float32(workers) for _ in range(workers)] for g in gradients]

        def make(port: GroupPort) -> Compressed:
            here = mine[port.position]
            return self.kind(port, self.reducer, self.codecs[port.position], here, here)

        group = Group(self.nodes, make, self.steps, chunk_bytes)
        group.may_send_last = True
        group.run()
        self.sent_bytes = group.sent_bytes
        results = {values.tobytes() for node in mine for values in node}
        assert len(results) == 1
        return np.frombuffer(results.pop(), self.layout.dtype.storage)

    def states(self) -> list[dict[str, Array]]:
        """Returns the state of each node's codec."""
        return [codec.state_dict() for codec in self.codecs]

    def residual(self) -> Array:
        """The sum of all nodes' residuals, in float64."""
        total = np.zeros(self.layout.elements)
        for codec in self.codecs:
            state = codec.state_dict()
            for span in self.layout.spans:
                total[span.start : span.end] += state[f"residual/{span.name}"]
        return total


def gradients(nodes: int, seed: int, elements: int = ELEMENTS) -> list[Array]:
    choose = np.random.default_rng(seed)
    return [choose.standard_normal(elements).astype(np.float32) for _ in range(nodes)]


@kinds
@pytest.mark.parametrize("codec", CODECS)
@for_each("nodes", [2, 3, 5])
def test_nothing_is_lost(kind: Callable[..., Compressed], codec: str, nodes: int) -> None:
    """The sum of what was given is that of what all got and of what waits in residuals."""
    job = Job(kind, nodes, codec)
    given, got = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for step in range(4):
        values = gradients(nodes, step)
        given += np.sum(values, axis=0, dtype=float)
        got += job.step(values, workers=1 + step % 2)
    assert np.allclose((got + job.residual())[INSIDE], given[INSIDE], atol=2e-4, rtol=0)
    assert not got[760:800].any()  # padding


NOT_FINITE = [np.nan, np.inf, -np.inf]


@kinds
@pytest.mark.parametrize("codec", [*CODECS, *MOMENTA, NO_FEEDBACK])
@settings(deadline=None, max_examples=6)
@given(
    nodes=st.integers(2, 3),
    where=st.lists(st.tuples(st.integers(0, 2), st.integers(0, len(INSIDE) - 1)), min_size=1, max_size=3),
    bad=st.sampled_from(NOT_FINITE),
    workers=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_a_gradient_that_is_not_finite_spoils_its_step_on_all_nodes_and_no_memory(
    kind: Callable[..., Compressed],
    codec: str,
    nodes: int,
    where: list[tuple[int, int]],
    bad: float,
    workers: int,
    seed: int,
) -> None:
    """The result is NaN in all tensors; residuals and velocities are what they were, and nothing is lost afterwards."""
    job = Job(kind, nodes, codec)
    given_values, got = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    job.steps = seed
    for step in range(4):
        values = gradients(nodes, seed + step)
        before = job.states()
        if step == 2:
            for node, place in where:
                values[node % nodes][INSIDE[place]] = bad
            result = job.step(values, workers=workers)
            assert np.isnan(result[INSIDE]).all()
            assert not result[760:800].any()  # padding
            for old, new in zip(before, job.states(), strict=True):
                for key in (key for key in old if key.startswith(("residual", "velocity"))):
                    assert np.allclose(new[key], old[key], rtol=0, atol=1e-5), key
            continue
        given_values += np.sum(values, axis=0, dtype=float)
        result = job.step(values, workers=workers)
        assert np.isfinite(result).all()
        got += result
    if "momentum" not in codec and "feedback" not in codec:
        assert np.allclose((got + job.residual())[INSIDE], given_values[INSIDE], atol=2e-4, rtol=0)


@kinds
def test_a_sum_of_finite_gradients_that_is_not_finite_leaves_finite_residuals(kind: Callable[..., Compressed]) -> None:
    for codec in CODECS:
        job = Job(kind, 3, codec)
        values = gradients(3, 1)
        for gradient in values:
            gradient[1000:1400] = 2e38
        result = job.step(values)
        assert codec.startswith("onebit") or not np.isfinite(result).all(), codec  # its means are finite
        assert all(np.isfinite(state[key]).all() for state in job.states() for key in state), codec
        for step in range(2):
            job.step([np.zeros(ELEMENTS, np.float32)] * 3)
            assert all(np.isfinite(state[key]).all() for state in job.states() for key in state), (codec, step)


@for_each("nodes", [2, 3, 4, 7])
def test_the_owners_send_the_largest_of_the_sum(nodes: int) -> None:
    """Against numpy: each owner's share of the sum of the selections, the largest of its range."""
    job = Job(Owned, nodes, TOPK)
    values = gradients(nodes, 3)
    sums = np.zeros(ELEMENTS, np.float32)
    for gradient in values:
        codec = codecs.parse(TOPK).open(LAYOUT)
        assert isinstance(codec, SelectingBucketCodec)
        out = np.zeros(ELEMENTS, np.float32)
        codec.write(codec.contribute(gradient), [out], 1.0, 1)
        sums = sums + out
    k = job.codecs[0]
    result = job.step(values)
    bounds = expected_bounds(k, nodes)
    always = np.zeros(ELEMENTS, bool)
    for low, high in k.always:
        always[low:high] = True
    for low, high in pairwise(bounds):
        part = np.where(always[low:high], 0, sums[low:high])
        share = -(-(k.wanted() - int(always.sum())) // nodes)
        kept = np.zeros(high - low, bool)
        kept[np.argsort(-np.abs(part), kind="stable")[:share]] = True
        assert np.array_equal(result[low:high], np.where(kept | always[low:high], sums[low:high], 0))


@kinds
def test_an_average_with_scales(kind: Callable[..., Compressed]) -> None:
    scaled = Job(kind, 3, TOPK, prescale=0.5, postscale=4.0, divisor=3).step(gradients(3, 1))
    plain = Job(kind, 3, TOPK).step([values * np.float32(0.5) for values in gradients(3, 1)])
    assert np.array_equal(scaled, plain * np.float32(4) / np.float32(3))


@kinds
@for_each("dtype", ["float64", "float16", "bfloat16"])
def test_other_types_are_converted(kind: Callable[..., Compressed], dtype: str) -> None:
    layout = Layout(DTYPES[dtype], 500)
    job = Job(kind, 2, "topk(density=0.1, minimum=0)", layout)
    values = [np.zeros(500, layout.dtype.storage) for _ in range(2)]
    one = {"float64": 1.0, "float16": 0x3C00, "bfloat16": 0x3F80}[dtype]
    two = {"float64": 2.0, "float16": 0x4000, "bfloat16": 0x4000}[dtype]
    values[0][3:9] = one
    values[1][3:6] = one
    result = job.step(values)
    assert (result[3:6] == two).all()
    assert (result[6:9] == one).all()
    assert not result[9:].any()


def test_what_a_node_sends_does_not_grow_with_their_number() -> None:
    """Beside gathering, whose cost does. In values of 2 bytes with an index of at most 2."""
    layout = Layout(DTYPES["float32"], 200_000)
    k = 2000
    for nodes in (2, 4, 8):
        owned, gathered = (Job(kind, nodes, "topk(density=0.01, minimum=0)", layout) for kind in (Owned, Gathered))
        for step in range(3):
            values = gradients(nodes, step, 200_000)
            owned.step(values, 1 << 16)
            gathered.step(values, 1 << 16)
        assert max(owned.sent_bytes) <= 2 * k * 4 + 2 * nodes * 200
        assert max(gathered.sent_bytes) >= (nodes - 1) * k * 2.5


def test_ranges_follow_what_is_selected() -> None:
    """All large values are in the first tenth of the bucket: after a step every owner has a part of it."""
    layout = Layout(DTYPES["float32"], 20_000)
    job = Job(Owned, 4, "topk(density=0.02, minimum=0)", layout)
    values = gradients(4, 1, 20_000)
    for gradient in values:
        gradient[2000:] *= 1e-3
    job.step(values)
    bounds = job.codecs[0].bounds
    assert all(codec.bounds == bounds for codec in job.codecs)
    counts = [np.sum([np.abs(v[low:high]) > 0.1 for v in values]) for low, high in pairwise(bounds)]
    assert max(counts) < 1.5 * min(counts)
    assert bounds[3] < 2100


def test_elements_that_are_always_sent_are_divided_too() -> None:
    layout = Layout(DTYPES["float32"], 12_000, (Span("a.bias", 0, 4000), Span("w", 4000, 8000)))
    job = Job(Owned, 4, "topk(density=0.001, minimum=0)", layout)
    for step in range(2):
        result = job.step(gradients(4, step, 12_000))
    assert np.count_nonzero(result[:4000]) == 4000
    assert [b <= 4100 for b in job.codecs[0].bounds] == [True, True, True, True, False]


def test_nodes_at_different_steps_are_told() -> None:
    job = Job(Owned, 2, TOPK)
    job.codecs[1].contribute(gradients(1, 0)[0])
    with pytest.raises(ExchangeError, match="load a checkpoint on all ranks, or on none"):
        job.step(gradients(2, 1))


@kinds
@for_each(
    "harm",
    [
        lambda payload: payload[:-1],
        lambda payload: payload + b"\0",
        lambda payload: payload[:4] + b"\xff" * (len(payload) - 4),
        lambda payload: payload[:6],
        lambda payload: b"",
    ],
)
def test_what_is_no_payload_is_refused(kind: Callable[..., Compressed], harm: Callable[[bytes], bytes]) -> None:
    job = Job(kind, 2, TOPK)
    values = gradients(2, 0)

    def make(port: GroupPort) -> Compressed:
        here = [values[port.position]]
        return kind(port, job.reducer, job.codecs[port.position], here, here)

    group = Group(2, make, 0, 1 << 20)
    group.may_send_last = True
    while not group.to_started_nodes():
        group.step()
    source, target, chunk, payload = group.to_started_nodes()[0]
    with pytest.raises((CodecError, ExchangeError)):
        group.exchanges[target].receive(source, chunk, memoryview(harm(bytes(payload))))


@kinds
def test_a_payload_is_limited_before_it_is_kept(kind: Callable[..., Compressed]) -> None:
    job = Job(kind, 2, TOPK)
    values = gradients(2, 0)

    def make(port: GroupPort) -> Compressed:
        here = [values[port.position]]
        return kind(port, job.reducer, job.codecs[port.position], here, here)

    group = Group(2, make, 0, 256)
    group.may_send_last = True
    while not group.to_started_nodes():
        group.step()
    source, target, chunk, _ = group.to_started_nodes()[0]
    chunk.start = 256 * 4000
    with pytest.raises(ExchangeError, match="are no piece of at most"):
        group.exchanges[target].receive(source, chunk, memoryview(bytes(256)))


@kinds
def test_a_failed_step_leaves_the_codec_as_it_was(kind: Callable[..., Compressed]) -> None:
    job = Job(kind, 3, TOPK)
    job.step(gradients(3, 0))
    before = job.residual()
    values = gradients(3, 1)

    def make(port: GroupPort) -> Compressed:
        here = [values[port.position]]
        return kind(port, job.reducer, job.codecs[port.position], here, here)

    group = Group(3, make, 0, 256)
    group.may_send_last = True
    for exchange in group.exchanges:
        for run in exchange.jobs(1):
            run()
        exchange.start()
        exchange.abandon()
        exchange.abandon()  # changes nothing
    assert np.allclose(job.residual()[INSIDE], before[INSIDE], atol=1e-5, rtol=0)
    assert [codec.step for codec in job.codecs] == [1, 1, 1]


@pytest.mark.parametrize("codec", CODECS)
def test_what_owners_left_out_of_sums_counts_once_when_the_step_fails(codec: str) -> None:
    job = Job(Owned, 3, codec)
    got = job.step(gradients(3, 0))
    values = gradients(3, 1)
    given = np.sum([*gradients(3, 0), *values], axis=0, dtype=float)

    def make(port: GroupPort) -> Compressed:
        here = [values[port.position].copy()]
        return Owned(port, job.reducer, job.codecs[port.position], here, here)

    group = Group(3, make, 0, 256)
    group.may_send_last = True
    for exchange in group.exchanges:
        for run in exchange.jobs(1):
            run()
    for exchange in group.exchanges:
        exchange.start()
    contributions = [message for message in group.under_way if message[2].part == 0]
    group.under_way = []
    for source, target, chunk, payload in contributions:
        group.exchanges[target].receive(source, chunk, memoryview(bytes(payload)))
    assert {(source, chunk.part) for source, _, chunk, _ in group.under_way} == {(0, 1), (1, 1), (2, 1)}
    for exchange in group.exchanges:
        exchange.abandon()
    assert np.allclose((got + job.residual())[INSIDE], given[INSIDE], atol=1e-4, rtol=0)


@kinds
@pytest.mark.parametrize(
    "codec", ["topk(density=0.1, minimum=0)", "topk", "randomk(minimum=0)", "int8", "onebit(minimum=0)"]
)
@for_each("elements", [0, 1, 3, 33])
def test_buckets_with_hardly_any_elements(kind: Callable[..., Compressed], codec: str, elements: int) -> None:
    """Some ranges are empty then."""
    layout = Layout(DTYPES["float32"], elements)
    job = Job(kind, 4, codec, layout)
    given, got = np.zeros(elements), np.zeros(elements)
    for step in range(3):
        values = gradients(4, step, elements)
        given += np.sum(values, axis=0, dtype=float)
        got += job.step(values)
    residual = np.sum([c.state_dict()["residual/"] for c in job.codecs], axis=0, dtype=float)
    assert np.allclose(got + residual, given, atol=1e-4, rtol=0)


@kinds
@pytest.mark.parametrize("codec", [*CODECS, MOMENTUM])
@for_each("nodes", [2, 4])
def test_a_step_that_is_dropped_after_it_was_complete_leaves_no_trace(
    kind: Callable[..., Compressed], codec: str, nodes: int
) -> None:
    job, undisturbed = Job(kind, nodes, codec), Job(kind, nodes, codec)
    for each in job.codecs:
        each.keeps_before = True
    for one in (job, undisturbed):
        one.step(gradients(nodes, 1))
    before = job.states()
    job.step(gradients(nodes, 2))
    for each in job.codecs:
        each.go_back()
    for state, expected in zip(job.states(), before, strict=True):
        assert state.keys() == expected.keys()
        for key, value in state.items():
            np.testing.assert_array_equal(value, expected[key], key)
    result, expected = (one.step(gradients(nodes, 3)) for one in (job, undisturbed))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("codec", [*CODECS, *MOMENTA, NO_FEEDBACK])
@for_each("results", [0, 2])
def test_a_step_that_is_dropped_on_its_way_leaves_no_trace(codec: str, results: int) -> None:
    """Owners have left something out of their sums by then, and some results are written where gradients were."""
    job = Job(Owned, 3, codec)
    for each in job.codecs:
        each.keeps_before = True
    job.step(gradients(3, 0))
    before, values = job.states(), gradients(3, 1)

    def make(port: GroupPort) -> Compressed:
        here = [values[port.position]]
        return Owned(port, job.reducer, job.codecs[port.position], here, here)

    group = Group(3, make, 1, 1 << 20)
    group.may_send_last = True
    for exchange in group.exchanges:
        for run in exchange.jobs(1):
            run()
        exchange.start()
    for part, count in ((0, 6), (1, results)):
        sent = [message for message in group.under_way if message[2].part == part][:count]
        assert len(sent) == count
        for source, target, chunk, payload in sent:
            group.exchanges[target].receive(source, chunk, memoryview(bytes(payload)))
    for exchange in group.exchanges:
        exchange.abandon()
    for state, expected in zip(job.states(), before, strict=True):
        assert state.keys() == expected.keys()
        for key, value in state.items():
            np.testing.assert_array_equal(value, expected[key], key)


def test_what_was_before_is_kept_until_the_next_step_only_and_only_where_a_step_may_be_dropped() -> None:
    job = Job(Owned, 2, TOPK)
    job.step(gradients(2, 1))
    assert [each.go_back for each in job.codecs] == [None, None]
    job.codecs[0].keeps_before = True
    job.step(gradients(2, 2))
    assert job.codecs[0].go_back is not None
    job.codecs[0].keeps_before = False
    job.step(gradients(2, 3))
    assert job.codecs[0].go_back is None
