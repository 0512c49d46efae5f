"""Predictions of steps of any number of nodes: whichever way they are made, they agree where both are possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.prediction import predictor
from benchmarks.prediction.predictor import Case, Predictor
from fusion_trace.simulate.model import CodecCosts, Costs, ethernet

COSTS = Costs(
    codecs={
        "topk(density=0.01)": CodecCosts(0.0075, 0.3e-9, 2e-9, 2e-9, 1e-9, 9e-9, 1e-9),
        "int8": CodecCosts(0.26, 0.2e-9, 0.1e-9, 0.1e-9, 0.2e-9, 1e-9, 0.3e-9),
    }
)
LINK = ethernet(1e9, 100e-6)


@pytest.mark.parametrize("codec", ["dense", "topk(density=0.01)", "int8"])
def test_all_wait_for_the_slowest_so_one_that_computes_as_long_stands_for_all(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("allreduce", codec, 16, 0.05, parameters=1_000_000)
    each = Predictor(LINK, COSTS)(case)
    monkeypatch.setattr(predictor, "SIMULATED", 4)
    one = Predictor(LINK, COSTS)(case)
    assert each is not None
    assert one is not None
    assert one["seconds"] == pytest.approx(each["seconds"], rel=0.03)
    assert one["messages"] == each["messages"]


@pytest.mark.parametrize("algorithm", ["allreduce", "bsp", "asp", "dpsgd(topology='ring')", "adpsgd(topology='ring')"])
def test_hundreds_of_nodes_are_predicted_for_every_kind_of_algorithm(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "SIMULATED_HOMES", 8)
    small = Case(algorithm, "dense", 4, 0.05, parameters=1_000_000)
    few, many = (Predictor(LINK, COSTS)(replace(small, nodes=nodes)) for nodes in (4, 256))
    assert few is not None
    assert many is not None
    assert many["seconds"] >= 0.85 * few["seconds"] >= 0.85 * 0.05 * 0.95
    if algorithm == "allreduce":
        assert many["sent"] == pytest.approx(2 * 4_000_000, rel=0.01)
    if algorithm == "dpsgd(topology='ring')":
        assert many["sent"] == few["sent"] == pytest.approx(2 * 4_000_000, rel=0.01)


@pytest.mark.parametrize("nodes", [64, 2048])
def test_a_graph_in_which_ranks_have_more_neighbours_takes_longer_by_what_these_send(nodes: int) -> None:
    case = Case("dpsgd(topology='exponential')", "dense", 32, 0.01, parameters=1_000_000)
    predictor = Predictor(LINK, COSTS)
    few, many = (predictor(replace(case, nodes=count)) for count in (32, nodes))
    assert few is not None
    assert many is not None
    more = nodes.bit_length() - 6  # neighbours: 5 of 32, one more for each doubling
    assert many["sent"] == pytest.approx(few["sent"] * (5 + more) / 5)
    assert many["seconds"] == pytest.approx(few["seconds"] + more * 4_000_000 * LINK.byte, rel=0.02)
