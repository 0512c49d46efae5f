"""All-reduce of a low-rank approximation: two dense ones, and nodes may be in different ones."""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import codecs
from fusion_rt.codecs import Layout, Span
from fusion_rt.codecs.powersgd import PowerSGDBucket
from fusion_rt.core.dtypes import DTYPES
from fusiond.algorithms.allreduce import AllReduce
from fusiond.algorithms.exchange import Work
from fusiond.collectives.base import Exchange, ExchangeError, Reducer
from fusiond.collectives.cost import CostModel
from fusiond.collectives.low_rank import LowRank
from tests.for_each import for_each
from tests.fusiond.collectives.group import Array, Group, GroupPort

LAYOUT = Layout(DTYPES["float32"], 2600, (Span("w", 0, 40 * 60, (40, 60)), Span("b.bias", 2400, 100, (100,))))
REDUCER = Reducer("sum", LAYOUT.dtype, 0.5, 3.0, 4)


class Job:
    def __init__(self, nodes: int, codec: str = "powersgd(rank=2)") -> None:
        self.nodes = nodes
        self.codecs = [codecs.parse(codec).open(LAYOUT) for _ in range(nodes)]

    def group(self, mine: list[list[Array]], seed: int) -> Group:
        def make(port: GroupPort) -> Exchange:
            here = mine[port.position]
            cost = CostModel()
            return AllReduce().exchange(Work(port, REDUCER, self.codecs[port.position], cost, here, here, ()))

        group = Group(self.nodes, make, seed)
        group.may_send_last = True
        return group

    def step(self, gradients: list[Array], seed: int) -> Array:
        """The result, the same on every rank, bit by bit. Each node has two workers with half of its gradient."""
        mine = [[g / np.float32(2), g / np.float32(2)] for g in gradients]
        group = self.group(mine, seed).run()
        assert all(isinstance(exchange, LowRank) for exchange in group.exchanges)
        results = {values.tobytes() for node in mine for values in node}
        assert len(results) == 1
        return np.frombuffer(results.pop(), np.float32)


def gradients(nodes: int, seed: int) -> list[Array]:
    choose = np.random.default_rng(seed)
    return [choose.standard_normal(LAYOUT.elements).astype(np.float32) for _ in range(nodes)]


@for_each("nodes", [2, 3, 5])
def test_it_is_the_codec_with_sums_by_numpy(nodes: int) -> None:
    """Over some steps, with chunks in any order."""
    job = Job(nodes)
    references = [codecs.parse("powersgd(rank=2)").open(LAYOUT) for _ in range(nodes)]
    for step in range(4):
        values = gradients(nodes, step)
        result = job.step(values, step)
        buckets = [codec for codec in references if isinstance(codec, PowerSGDBucket)]
        first = np.sum([codec.start(g * np.float32(0.5)) for codec, g in zip(buckets, values, strict=True)], axis=0)
        second = np.sum([codec.second(first) for codec in buckets], axis=0)
        expected = np.empty(LAYOUT.elements, np.float32)
        for codec in buckets:
            codec.finish(second, [expected], 3.0, 4)
        assert result == pytest.approx(expected, abs=2e-4)


def test_nothing_is_lost() -> None:
    job = Job(3)
    given, got = np.zeros(LAYOUT.elements), np.zeros(LAYOUT.elements)
    for step in range(5):
        values = gradients(3, step)
        given += 0.5 * np.sum(values, axis=0, dtype=float)
        got += job.step(values, step).astype(float) * 4 / 3
    residual = np.zeros(LAYOUT.elements)
    for codec in job.codecs:
        state = codec.state_dict()
        residual[:2400] += state["residual/w"]
    assert (got + residual)[:2500] == pytest.approx(given[:2500], abs=2e-3)


@for_each("bad", [np.nan, np.inf, -np.inf, 3e38])
@for_each(("node", "place"), [(0, 0), (1, 2450), (2, 2399)])
def test_a_gradient_that_is_not_finite_spoils_its_step_on_all_nodes_and_no_residual(
    bad: float, node: int, place: int
) -> None:
    """So does one with products that are not."""
    job = Job(3)
    job.step(gradients(3, 1), 1)
    before = [codec.state_dict() for codec in job.codecs]
    values = gradients(3, 2)
    values[node][place] = bad
    result = job.step(values, 2)
    assert np.isnan(result[:2500]).all()
    assert not result[2500:].any()  # padding
    for codec, old in zip(job.codecs, before, strict=True):
        left = codec.state_dict()["residual/w"]
        lost = np.abs(left - old["residual/w"]) > 1e-6
        assert lost.sum() <= (bad == 3e38), "beside so large a number a small one is lost"
    assert np.isfinite(job.step(gradients(3, 3), 3)).all()


@for_each("seed", range(4))
@for_each("steps", [0, 7, 1000])
def test_a_step_that_is_dropped_leaves_no_trace_on_its_way_or_complete(steps: int, seed: int) -> None:
    job, undisturbed = Job(3), Job(3)
    for codec in job.codecs:
        codec.keeps_before = True
    for one in (job, undisturbed):
        one.step(gradients(3, 1), 1)
    before = [codec.state_dict() for codec in job.codecs]
    group = job.group([[g] for g in gradients(3, 2)], seed)
    for _ in range(steps):
        group.step()
    for exchange, codec in zip(group.exchanges, job.codecs, strict=True):
        exchange.abandon()
        if steps == 1000:
            assert codec.go_back is not None
            codec.go_back()
    for codec, expected in zip(job.codecs, before, strict=True):
        for key, value in codec.state_dict().items():
            np.testing.assert_array_equal(value, expected[key], key)
    result, expected = (one.step(gradients(3, 3), 3) for one in (job, undisturbed))
    np.testing.assert_array_equal(result, expected)


def test_far_fewer_bytes_are_sent() -> None:
    job = Job(4)
    values = gradients(4, 0)
    group = job.group([[g] for g in values], 0).run()
    of_a_ring = 2 * LAYOUT.elements * 4 * 3 / 4
    assert max(group.sent_bytes) < 0.3 * of_a_ring
    told = job.codecs[0].statistics()
    assert told["dense_nbytes"] == pytest.approx(of_a_ring, abs=1)
    assert 0 < told["packed_nbytes"] < 0.3 * of_a_ring


def test_a_chunk_of_a_stage_that_does_not_exist_is_refused() -> None:
    job = Job(2)
    group = job.group([[g] for g in gradients(2, 0)], 0)
    while not group.to_started_nodes():
        group.step()
    source, target, chunk, payload = group.to_started_nodes()[0]
    chunk.part += 2 << 20
    with pytest.raises(ExchangeError):
        group.exchanges[target].receive(source, chunk, memoryview(payload))
