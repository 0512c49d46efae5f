"""`gaussiank`, `thresholdk` and `randomk`: how much they select, and what."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fusion_rt.codecs import CodecError, Layout, Span, parse
from fusion_rt.codecs.packing import HEADER, merged
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.core.dtypes import DTYPES
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

N = 100_000
DISTRIBUTIONS = {
    "normal": lambda rng: rng.standard_normal(N),
    "laplace": lambda rng: rng.laplace(size=N),
    "heavy": lambda rng: rng.standard_t(2, N),
    "shifted": lambda rng: rng.standard_normal(N) + 3,
    "uniform": lambda rng: rng.uniform(-1, 1, N),
    "equal": lambda rng: np.full(N, 2.0),
    "few": lambda rng: np.where(rng.random(N) < 0.002, rng.standard_normal(N), 0),
    "tiny": lambda rng: rng.standard_normal(N) * 1e-30,
    "huge": lambda rng: rng.standard_normal(N) * 1e30,
}


def opened(text: str, layout: Layout | None = None) -> SelectingBucketCodec:
    codec = parse(text)
    assert isinstance(codec, Selecting)
    return codec.open(layout or Layout(DTYPES["float32"], N))


@for_each("distribution", DISTRIBUTIONS)
@for_each("name", ["gaussiank", "thresholdk"])
def test_what_is_selected_are_the_largest_and_never_many_more_than_asked(name: str, distribution: str) -> None:
    codec = opened(f"{name}(density=0.01, value='fp32', every=5)" if name == "thresholdk" else f"{name}(value='fp32')")
    rng = np.random.default_rng(2)
    total = np.zeros(N, np.float32)
    for _ in range(8):
        values = DISTRIBUTIONS[distribution](rng).astype(np.float32)
        total = total + values
        selected = codec.accumulate_and_select(values)
        assert selected.indices.tolist() == reference.largest(total, len(selected)).tolist()
        assert len(selected) <= 1000
        total[selected.indices] = 0


def test_gaussiank_selects_what_a_normal_distribution_promises_and_with_feedback_its_whole_budget() -> None:
    codec = opened("gaussiank(density=0.01)")
    rng = np.random.default_rng(2)
    counts = [len(codec.accumulate_and_select(rng.standard_normal(N, dtype=np.float32))) for _ in range(30)]
    assert abs(counts[0] - 1000) < 100
    assert np.mean(counts[5:]) == pytest.approx(1000, rel=0.1)


def test_gaussiank_sends_where_all_thresholds_that_it_tries_are_too_high() -> None:
    """Most values are just below the first two thirds of the largest: half of the threshold is reached by nearly all,
    and 1.5 times that by none. Without new gradients the residual would wait forever."""
    codec = opened("gaussiank(density=0.1, minimum=0)", Layout(DTYPES["float32"], 400))
    values = np.random.default_rng(1).uniform(0.9, 1.1, 400).astype(np.float32)
    values[::2] *= -1
    selected = codec.accumulate_and_select(values)
    assert 27 <= len(selected) <= 40
    for _ in range(20):
        codec.accumulate_and_select(np.zeros(400, np.float32))
    assert codec.residual_norm() < 1e-2


def test_gaussiank_halves_a_threshold_that_fewer_than_two_thirds_reach() -> None:
    """40 of the 100 that are asked for reach the first threshold, 1.02, and 80 its half."""
    codec = opened("gaussiank(density=0.1, minimum=0)", Layout(DTYPES["float32"], 1000))
    values = np.concatenate([[3.0, -3.0] * 20, [0.8, -0.8] * 20, [1e-3, -1e-3] * 460]).astype(np.float32)
    np.random.default_rng(3).shuffle(values)
    selected = codec.accumulate_and_select(values)
    assert selected.indices.tolist() == np.flatnonzero(np.abs(values) > 0.5).tolist()


def test_thresholdk_keeps_near_k_between_exact_steps() -> None:
    codec = opened("thresholdk(density=0.01, every=10)")
    rng = np.random.default_rng(2)
    counts = [len(codec.accumulate_and_select(rng.standard_normal(N, dtype=np.float32))) for _ in range(40)]
    assert [counts[step] for step in (0, 10, 20, 30)] == [1000] * 4
    assert np.mean(counts) == pytest.approx(1000, rel=0.1)
    assert min(counts) >= 750


def test_thresholdk_selects_exactly_at_once_when_its_threshold_is_far_off() -> None:
    codec = opened("thresholdk(density=0.01, every=1000)")
    rng = np.random.default_rng(2)
    counts = []
    for scale in (1, 1e-3, 1e-3, 1e3, 1e3):
        codec.scale_residual([0.0] * len(codec.layout.spans))
        counts.append(len(codec.accumulate_and_select(scale * rng.standard_normal(N, dtype=np.float32))))
    assert counts[0] == counts[2] == counts[3] == 1000
    assert counts[1] < 500
    assert 800 <= counts[4] <= 1000


LAYOUT = Layout(
    DTYPES["float32"], 3000, (Span("a", 0, 1000), Span("a.bias", 1000, 50), Span("b", 1056, 700), Span("c", 1760, 1000))
)


@pytest.mark.parametrize("scope", ["bucket", "tensor"])
def test_randomk_is_drawn_alike_by_all_and_differently_in_each_step(scope: str) -> None:
    text = f"randomk(density=0.05, minimum=0, seed=3, scope='{scope}')"
    sender, receiver = opened(text, LAYOUT), opened(text, LAYOUT)
    seen = []
    for step in range(5):
        selected = sender.accumulate_and_select(np.full(3000, step + 1, np.float32))
        assert len(selected.indices) == 135
        for low, high in ((0, 3000), (0, 700), (700, 1058), (1058, 3000), (5, 5)):
            payload = sender.pack(selected, low, high)
            got = receiver.unpack(payload, low, high)
            expected = selected.indices[(selected.indices >= low) & (selected.indices < high)]
            assert got.indices.tolist() == expected.tolist()
            bias = min(high, 1050) - max(low, 1000)
            assert payload.nbytes <= HEADER.size + 8 + 2 * (len(expected) + max(0, bias)) + 2, "no indices are sent"
        seen.append(frozenset(selected.indices.tolist()))
    assert len(set(seen)) == 5
    assert opened("randomk(density=0.05, minimum=0, seed=4)", LAYOUT).accumulate_and_select(
        np.ones(3000, np.float32)
    ).indices.tolist() != sorted(seen[0])


def test_randomk_draws_every_element_as_often_as_the_others() -> None:
    codec = opened("randomk(density=0.0625, minimum=0)", Layout(DTYPES["float32"], 160))
    counts = np.zeros(160)
    for _ in range(1600):
        counts[codec.accumulate_and_select(np.zeros(160, np.float32)).indices] += 1
    assert counts.sum() == 16_000
    assert ((counts - 100) ** 2 / 100).sum() < 230  # chi-square, 150 degrees of freedom: less than 1 in 10,000


def test_a_selection_that_was_not_drawn_is_sent_with_its_indices() -> None:
    codec = opened("randomk(density=0.05, minimum=0)", LAYOUT)
    first, second = (codec.accumulate_and_select(np.ones(3000, np.float32)) for _ in range(2))
    both, _ = codec.rounded(merged([first, second]))
    got = codec.unpack(codec.pack(both, 0, 3000), 0, 3000)
    assert got.indices.tolist() == sorted({*first.indices.tolist(), *second.indices.tolist()})


def test_a_step_that_draws_another_number_of_elements_is_refused() -> None:
    codec = opened("randomk(density=0.05, minimum=0, warmup=10)", LAYOUT)
    payload = bytearray(codec.pack(codec.accumulate_and_select(np.ones(3000, np.float32)), 0, 3000))
    payload[HEADER.size] = 9
    with pytest.raises(CodecError, match="are not ascending elements of the range"):
        codec.unpack(bytes(payload), 0, 3000)
