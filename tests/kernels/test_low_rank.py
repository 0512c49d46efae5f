"""`kernels.low_rank` against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.kernels import low_rank
from fusion_rt.kernels.team import Team
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    low_rank.prepare()  # so that no example below takes the seconds of compiling


@pytest.fixture(scope="module")
def team() -> Any:
    team = Team(3)
    yield team
    team.close()


def matrix(rows: int, columns: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


@settings(deadline=None)
@given(rows=st.integers(1, 70), columns=st.integers(1, 100), rank=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_products_are_those_of_numpy_to_rounding(rows: int, columns: int, rank: int, seed: int) -> None:
    a, left, right = matrix(rows, columns, seed), matrix(rank, rows, seed + 1), matrix(rank, columns, seed + 2)
    wide = [array.astype(np.float64) for array in (a, left, right)]
    out = np.full((rank, rows), 7, np.float32)
    low_rank.left_of(a, right, out)
    assert out == pytest.approx(wide[2] @ wide[0].T, rel=1e-5, abs=1e-4)
    out = np.full((rank, columns), 7, np.float32)
    low_rank.right_of(a, left, out)
    assert out == pytest.approx(wide[1] @ wide[0], rel=1e-5, abs=1e-4)
    for sign in (0, 1, -1):
        out = a.copy()
        low_rank.product(left, right, out, sign)
        added = wide[1].T @ wide[2] * (sign or 1)
        assert out == pytest.approx(wide[0] * abs(sign) + added, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1000, 777), (3, 300_000), (300_000, 3)])
def test_threads_change_no_bit(rows: int, columns: int, team: Team) -> None:
    a, left, right = matrix(rows, columns, 1), matrix(2, rows, 2), matrix(2, columns, 3)
    results = []
    for workers in (None, team):
        more = {} if workers is None else {"team": workers}
        p, q, m = np.empty((2, rows), np.float32), np.empty((2, columns), np.float32), a.copy()
        low_rank.left_of(a, right, p, **more)
        low_rank.right_of(a, left, q, **more)
        low_rank.product(left, right, m, -1, **more)
        results.append((p.tobytes(), q.tobytes(), m.tobytes()))
    assert results[0] == results[1]


@settings(deadline=None)
@given(
    rank=st.integers(0, 6),
    n=st.integers(0, 200),
    size=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vectors_become_orthonormal(rank: int, n: int, size: float, seed: int) -> None:
    rank = min(rank, n)
    vectors = matrix(rank, n, seed) * np.float32(size)
    before = vectors.copy()
    low_rank.orthonormalise(vectors)
    assert vectors.astype(np.float64) @ vectors.T.astype(np.float64) == pytest.approx(np.eye(rank), abs=1e-5)
    if rank < n // 2:  # well enough conditioned to compare
        assert vectors == pytest.approx(reference.orthonormal(before), abs=1e-3)


def test_vectors_that_depend_on_others_become_zero() -> None:
    a, b = matrix(2, 50, 1)
    vectors = np.stack([a, 2 * a, b, np.zeros_like(a), a - b])
    low_rank.orthonormalise(vectors)
    assert [bool(vector.any()) for vector in vectors] == [True, False, True, False, False]
    assert vectors == pytest.approx(reference.orthonormal(np.stack([a, 2 * a, b, np.zeros_like(a), a - b])), abs=1e-5)


@for_each("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    vectors = matrix(3, 50, 1)
    vectors[1, 7] = bad
    low_rank.orthonormalise(vectors)
    assert np.isfinite(vectors[0]).all()
    assert np.isnan(vectors[1:]).any(axis=1).all()
    a = matrix(20, 40, 2)
    a[3, 4] = bad
    left, right = np.empty((2, 20), np.float32), np.empty((2, 40), np.float32)
    low_rank.left_of(a, matrix(2, 40, 3), left)
    low_rank.right_of(a, matrix(2, 20, 4), right)
    assert (~np.isfinite(left)).sum(axis=1).tolist() == [1, 1]
    assert (~np.isfinite(right)).sum(axis=1).tolist() == [1, 1]


def test_factors_that_do_not_fit_are_refused() -> None:
    a = matrix(10, 20, 1)
    with pytest.raises(ValueError, match="does not go with factors"):
        low_rank.left_of(a, matrix(2, 21, 1), matrix(2, 10, 1))
    with pytest.raises(ValueError, match="contiguous float32"):
        low_rank.right_of(a, matrix(2, 10, 1).astype(np.float64), matrix(2, 20, 1))
    with pytest.raises(ValueError, match="vectors are float32"):
        low_rank.orthonormalise(matrix(4, 4, 1)[:, ::2])
