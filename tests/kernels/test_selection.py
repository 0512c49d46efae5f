"""`kernels.selection` against `reference`, which is plain numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.kernels import selection
from fusion_rt.kernels.selection import NOTHING, UNLIMITED, Found, Memory
from fusion_rt.kernels.team import ALONE, Team
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

SPECIALS = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38], np.float32
)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    selection.prepare()
    selection.prepare_chunks()  # so that no example below takes the seconds of compiling


@pytest.fixture(scope="module")
def team() -> Any:
    team = Team(2)
    yield team
    team.close()


def numbers(n: int, seed: int, special: float) -> Array:
    """Any bits at all, a share of them ordinary special values, so that many are equal."""
    rng = np.random.default_rng(seed)
    values = np.frombuffer(rng.bytes(4 * n), np.float32).copy()
    chosen = rng.random(n) < special
    values[chosen] = rng.choice(SPECIALS, int(chosen.sum()))
    return values


def same(actual: Array, expected: Array) -> None:
    """Equal bit by bit, but any NaN will do for a NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    assert ((actual.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()


@np.errstate(all="ignore")
def addable(residual: Array, gradient: Array, velocity: Array | None, rule: str, factor: float) -> Array:
    """To which elements the gradient can be added."""
    step = gradient * np.float32(factor) if factor != 1.0 else gradient
    if velocity is not None:
        before = velocity
        velocity = (before + step) * np.float32(0.9) if rule == "nesterov" else before * np.float32(0.9) + step
        step = velocity + step if rule == "nesterov" else velocity
    finite: Array = np.isfinite(residual + step)
    return finite


def test_magnitudes_are_in_the_order_of_absolute_values_and_nan_is_above_infinity() -> None:
    ascending = [0.0, 1e-45, 1e-40, 1.0, 1.5, 3.4e38, np.inf, np.nan]
    sizes = [selection.magnitude(value) for value in ascending]
    assert sizes == sorted(set(sizes))
    assert [selection.magnitude(-value) for value in ascending] == sizes
    assert selection.value_of(selection.magnitude(-1.5)) == 1.5
    assert sizes[-1] < NOTHING


@settings(deadline=None)
@given(
    n=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
    special=st.sampled_from([0.0, 0.5, 1.0]),
    rule=st.sampled_from(["none", "plain", "momentum", "nesterov"]),
    factor=st.sampled_from([1.0, 0.3]),
    decay=st.sampled_from([1.0, 0.95]),
    threshold=st.sampled_from([0, 1, selection.magnitude(1.0), selection.magnitude(np.inf), NOTHING]),
    quota=st.sampled_from([UNLIMITED, 0, 1, 7]),
    capacity=st.sampled_from([300, 5, 0]),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)
def test_a_pass_adds_and_finds_what_the_reference_does(
    n: int, seed: int, special: float, rule: str, factor: float, decay: float, threshold: int, quota: int,
    capacity: int, cuts: list[int],
) -> None:  # fmt: skip
    residual, gradient, velocity = (numbers(n, seed + i, special) for i in range(3))
    moving = velocity if rule in ("momentum", "nesterov") else None
    memory = Memory(
        residual.copy(), None if rule == "none" else gradient, None if moving is None else moving.copy(),
        0.9, rule == "nesterov", factor, decay,
    )  # fmt: skip
    expected, expected_velocity = residual, moving
    if rule != "none":
        expected, expected_velocity = reference.added(
            residual, gradient, moving, 0.9, rule == "nesterov", factor, decay
        )
    if rule == "none":
        memory.velocity, expected_velocity = None, None
    bounds = sorted({0, n, *(min(cut, n) for cut in cuts)})
    ranges = list(itertools.pairwise(bounds))
    starts = np.arange(0, max(0, n - 31), 32, dtype=np.int64)
    sampled = selection.sample(memory, starts, 32)
    found = Found(capacity)

    selection.collect(memory, ranges, threshold, found, quota)

    same(memory.residual, expected)
    finite = np.isfinite(sampled)
    same(sampled[finite], expected[: len(sampled)][finite])
    if np.isfinite(residual).all():
        assert np.isfinite(memory.residual).all()
        assert memory.spoiled == (
            rule != "none" and not addable(residual * np.float32(decay), gradient, moving, rule, factor).all()
        )
    if expected_velocity is not None:
        assert memory.velocity is not None
        same(memory.velocity, expected_velocity)
    indices = reference.collected(memory.residual, 0, n, threshold, quota)
    assert found.count == len(indices)
    assert found.overflowed == (len(indices) > capacity)
    kept = min(capacity, len(indices))
    assert found.indices[:kept].tolist() == indices[:kept].tolist()
    assert found.values[:kept].tobytes() == memory.residual[indices[:kept]].tobytes()


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=6),
    k=st.integers(1, 70),
    first=st.integers(0, 5),
    special=st.sampled_from([0.0, 0.5, 1.0]),
    same_size=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_largest_of_each_chunk_are_those_of_the_reference(
    sizes: list[int], k: int, first: int, special: float, same_size: bool, seed: int
) -> None:
    edges = np.cumsum([first, *sizes])
    n = int(edges[-1]) + 3
    residual, gradient = numbers(n, seed, special), numbers(n, seed + 1, 0.0)
    if same_size:
        residual[:] = np.sign(residual)  # ties, zeros, NaN
        gradient[:] = 0
    with np.errstate(all="ignore"):
        total = np.where(np.isfinite(residual * np.float32(0.5) + gradient), residual * np.float32(0.5) + gradient,
                         residual * np.float32(0.5))  # fmt: skip
    wanted = np.array([1 + (k + i) % 71 for i in range(len(sizes))], np.int64)
    memory = Memory(residual.copy(), gradient, decay=0.5)
    indices, values = selection.take_of_chunks(memory, edges.astype(np.int64), wanted)
    expected: list[int] = []
    for low, high, count in zip(edges, edges[1:], wanted, strict=False):
        expected += (low + reference.largest(total[low:high], int(count))).tolist()
    assert indices.tolist() == expected
    same(values, total[expected])
    total[: edges[0]], total[edges[-1] :] = residual[: edges[0]], residual[edges[-1] :]
    total[expected] = 0
    same(memory.residual, total)


def test_chunks_among_threads_are_the_same() -> None:
    n = 400_000
    residual, gradient = numbers(n, 1, 0.0), numbers(n, 2, 0.0)
    edges = np.append(np.arange(0, n, 4096), n).astype(np.int64)
    wanted = np.full(len(edges) - 1, 40, np.int64)
    team, results = Team(3), []
    for workers in (selection.ALONE, team):
        memory = Memory(residual.copy(), gradient)
        indices, values = selection.take_of_chunks(memory, edges, wanted, workers)
        results.append((indices.tobytes(), values.tobytes(), memory.residual.tobytes()))
    team.close()
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="have an edge more"):
        selection.take_of_chunks(Memory(residual), edges, wanted[:-1])
    with pytest.raises(ValueError, match="ascending ranges of the 400000"):
        selection.take_of_chunks(Memory(residual), edges + 1, wanted)


@for_each("rule", ["plain", "momentum", "nesterov"])
def test_what_a_pass_has_added_can_be_taken_out_again(rule: str) -> None:
    """Of what is not finite it has added nothing, and all memory stays what it was to within rounding."""
    rng = np.random.default_rng(1)
    residual, gradient, velocity = (rng.standard_normal(200_000).astype(np.float32) for _ in range(3))
    gradient[::7] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), len(gradient[::7]))
    moving = None if rule == "plain" else velocity.copy()
    memory = Memory(residual.copy(), gradient, moving, 0.9, rule == "nesterov", 0.5)
    ranges = [(0, 1000), (5000, 200_000)]
    selection.collect(memory, ranges, NOTHING, Found(0))
    assert memory.spoiled
    assert not np.allclose(memory.residual, residual, atol=0.1)
    selection.withdraw(memory, ranges)
    assert np.allclose(memory.residual, residual, rtol=0, atol=2e-6)
    assert np.array_equal(memory.residual[7 * 1000 :: 7], residual[7 * 1000 :: 7]), "nothing was added here"
    if moving is not None:
        assert np.allclose(moving, velocity, rtol=0, atol=2e-6)


@settings(deadline=None)
@given(
    n=st.integers(1, 400),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    special=st.sampled_from([0.0, 0.5, 1.0]),
    cut=st.floats(0, 1),
)
def test_the_largest_are_found_exactly_and_taken_by_parts(
    n: int, share: float, seed: int, special: float, cut: float
) -> None:
    values, k = numbers(n, seed, special), max(1, round(share * n))
    middle = round(cut * n)
    bounds = [(0, middle), (middle, n)]
    found = selection.largest([[values[low:high]] for low, high in bounds], k)
    residual = values.copy()
    indices, taken = np.empty(n, np.int32), np.empty(n, np.float32)
    done = 0
    for (low, high), quota, count in zip(bounds, found.quotas, found.counts, strict=True):
        got = selection.take(
            np.arange(low, high, dtype=np.int32), values[low:high], found.threshold, quota,
            indices[done:], taken[done:], residual,
        )  # fmt: skip
        assert got == count
        done += got
    expected = reference.largest(values, k)
    assert indices[:done].tolist() == expected.tolist()
    assert taken[:done].tobytes() == values[expected].tobytes()
    left = values.copy()
    left[expected] = 0
    assert residual.tobytes() == left.tobytes()


def test_what_is_not_finite_is_the_largest() -> None:
    values = np.array([1, np.nan, 3.4e38, -np.inf, np.inf, -np.nan, 2], np.float32)
    assert reference.largest(values, 2).tolist() == [1, 5]
    assert selection.largest([[values]], 4).counts == [4]
    assert selection.value_of(selection.largest([[values]], 4).threshold) == np.inf


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_are_never_among_the_largest(value: float) -> None:
    values = np.full(100, value, np.float32)
    values[7] = 1e-45
    assert selection.largest([[values[:50]], [values[50:]]], 10).counts == [1, 0]


@settings(deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    room=st.integers(50, 120),
    seed=st.integers(0, 2**32 - 1),
)
def test_sparse_arrays_are_added_like_the_reference(sizes: tuple[int, int], room: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [
        (np.sort(rng.choice(room, size, replace=False)).astype(np.int32), numbers(size, seed + i, 0.3))
        for i, size in enumerate(sizes)
    ]
    indices, values = selection.merge(pairs[0], pairs[1])
    expected_indices, expected = reference.merged(pairs[0], pairs[1])
    assert indices.tolist() == expected_indices.tolist()
    same(values, expected)


@pytest.mark.parametrize("add", [False, True])
def test_values_are_put_where_they_belong(add: bool, team: Team) -> None:
    n = 300_000
    rng = np.random.default_rng(6)
    indices = np.sort(rng.choice(n, 200_000, replace=False)).astype(np.int32)
    values, out = rng.standard_normal(200_000, dtype=np.float32), rng.standard_normal(n, dtype=np.float32)
    expected = out.copy()
    expected[indices] = expected[indices] + values if add else values
    selection.put(indices + np.int32(77), values, out, 77, add, team)
    assert out.tobytes() == expected.tobytes()
    for wrong in ([-1], [n], [0, n]):
        with pytest.raises(ValueError, match="are not in"):
            selection.put(np.array(wrong, np.int32), values[: len(wrong)], out)
    with pytest.raises(ValueError, match="as int32 and float32, not int64 and float32"):
        selection.put(np.array([1]), values[:1], out)


def test_moments_do_not_depend_on_the_threads(team: Team) -> None:
    values = np.random.default_rng(3).standard_normal(300_000, dtype=np.float32)
    ranges = [(0, 7), (10, 100_003), (150_000, 300_000)]
    plain, squared = selection.moments(values, ranges)
    assert selection.moments(values, ranges, team) == (plain, squared)
    wide = np.concatenate([values[low:high] for low, high in ranges]).astype(np.float64)
    assert plain == pytest.approx(wide.sum(), abs=0.05)
    assert squared == pytest.approx((wide**2).sum(), rel=1e-6)
    assert selection.moments(values, [], team) == (0.0, 0.0)


@given(
    lengths=st.lists(st.integers(1, 400_000), max_size=5),
    gaps=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    parts=st.integers(1, 4),
)
def test_threads_share_ranges_evenly_and_in_order(lengths: list[int], gaps: list[int], parts: int) -> None:
    ranges, end = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        ranges.append((end + gap, end + gap + length))
        end += gap + length
    shares = selection.share(ranges, parts)
    flat = [r for part in shares for r in part]
    assert [i for low, high in flat for i in (low, high)] == sorted(i for low, high in flat for i in (low, high))
    covered = np.zeros(end, np.int8)
    for low, high in flat:
        covered[low:high] += 1
    expected = np.zeros(end, np.int8)
    for low, high in ranges:
        expected[low:high] = 1
    assert (covered == expected).all()
    sizes = [sum(high - low for low, high in part) for part in shares]
    assert 1 <= len(shares) <= parts
    assert max(sizes) - min(sizes) <= 1


@for_each("wrong", [np.zeros(9, np.float32), np.zeros(10), np.zeros(20, np.float32)[::2]])
def test_arrays_that_a_kernel_cannot_use_are_refused(wrong: Array) -> None:
    with pytest.raises(ValueError, match="contiguous float32 arrays of one length"):
        Memory(np.zeros(10, np.float32), wrong)


def test_one_thread_and_two_give_the_same(team: Team) -> None:
    values = numbers(200_000, 5, 0.2)
    parts = [[values[low:high] for low, high in part] for part in selection.share([(0, 200_000)], 2)]
    assert len(parts) == 2
    assert selection.largest(parts, 12_345, team) == selection.largest(parts, 12_345, ALONE)
