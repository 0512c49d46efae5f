"""Predictions of steps of any number of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale import Case, predict_case
from fusion_rt.core.cost import CostModel

LINK = CostModel(100e-6, 8e-9)
MODEL = 4_000_000  # bytes


def predicted(case: Case) -> dict[str, float]:
    found = predict_case(LINK, 1e-4, case)
    assert found is not None
    return found


@pytest.mark.parametrize("algorithm", ["allreduce", "bsp", "asp", "dpsgd(topology='ring')", "adpsgd(topology='ring')"])
def test_hundreds_of_nodes_are_predicted_for_every_kind_of_algorithm(algorithm: str) -> None:
    small = Case(algorithm, "dense", 4, 0.05, parameters=1_000_000)
    few, many = (predicted(replace(small, nodes=nodes)) for nodes in (4, 256))
    assert many["seconds"] >= 0.85 * few["seconds"] >= 0.85 * 0.05 * 0.95
    if algorithm in ("allreduce", "bsp"):
        assert many["sent"] == pytest.approx(2 * MODEL, rel=0.01)
    if algorithm == "dpsgd(topology='ring')":
        assert many["sent"] == few["sent"] == pytest.approx(2 * MODEL, rel=0.01)


@pytest.mark.parametrize("nodes", [64, 2048])
def test_a_graph_in_which_ranks_have_more_neighbours_takes_longer_by_what_these_send(nodes: int) -> None:
    case = Case("dpsgd(topology='exponential')", "dense", 32, 0.01, parameters=1_000_000)
    few, many = (predicted(replace(case, nodes=count)) for count in (32, nodes))
    more = nodes.bit_length() - 6  # neighbours: 5 of 32, one more for each doubling
    assert many["sent"] == pytest.approx(few["sent"] * (5 + more) / 5)
    assert many["seconds"] == pytest.approx(few["seconds"] + more * MODEL * LINK.seconds_per_byte, rel=0.02)


def test_more_shards_than_buckets_do_not_help_the_home_of_the_largest() -> None:
    """Every node but the home itself sends it a bucket, however many nodes there are."""
    case = Case("bsp", "dense", 128, 0.0, parameters=1_000_000)
    few, many = (predicted(replace(case, nodes=nodes)) for nodes in (128, 256))
    of_bucket = MODEL / 50 * LINK.seconds_per_byte
    assert many["seconds"] - few["seconds"] > 0.95 * 2 * 128 * of_bucket


def test_an_algorithm_with_local_steps_exchanges_once_in_a_period() -> None:
    every = predicted(Case("local_sgd(steps=1)", "dense", 4, 0.05, parameters=1_000_000))
    rarely = predicted(Case("local_sgd(steps=10)", "dense", 4, 0.05, parameters=1_000_000))
    assert rarely["sent"] == pytest.approx(every["sent"] / 10)
    assert rarely["waited"] == pytest.approx(every["waited"] / 10)


def test_a_codec_sends_what_it_makes_of_the_tensors() -> None:
    case = Case("allreduce", "dense", 4, 0.05, parameters=1_000_000)
    dense, half = (predicted(replace(case, codec=codec))["sent"] for codec in ("dense", "fp16"))
    assert dense == pytest.approx(1.5 * MODEL, rel=0.01)
    assert half == pytest.approx(dense / 2)
