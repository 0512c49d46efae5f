"""`kernels.cosines` against `reference`, which is plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.kernels import cosines
from fusion_rt.kernels.team import Team
from tests.kernels import reference


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    cosines.prepare()  # so that no example below takes the seconds of compiling


@settings(deadline=None)
@given(
    rows=st.integers(0, 140),
    columns=st.integers(1, 140),
    size=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_coefficients_are_those_of_the_reference_and_make_the_matrix_again(
    rows: int, columns: int, size: int, scale: float, seed: int
) -> None:
    matrix = (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)
    before = matrix.tobytes()
    coefficients, again = np.full(rows * columns, 7, np.float32), np.full((rows, columns), 7, np.float32)
    cosines.transform(matrix, coefficients, size)
    assert matrix.tobytes() == before
    np.testing.assert_allclose(coefficients, reference.cosines(matrix, size).reshape(-1), rtol=1e-5, atol=1e-5 * scale)
    assert np.square(coefficients / scale).sum() == pytest.approx(np.square(matrix / scale).sum(), rel=1e-5)
    cosines.transform_back(coefficients, again, size)
    np.testing.assert_allclose(again, matrix, rtol=1e-5, atol=1e-5 * scale)
    edges = cosines.tiles(rows, columns, size)
    assert (edges[0], edges[-1]) == (0, rows * columns)
    assert len(edges) - 1 == len(reference._powers(rows, size)) * len(reference._powers(columns, size))


def test_the_number_of_threads_changes_nothing_and_tiles_do_not_mix() -> None:
    matrix = np.random.default_rng(1).standard_normal((1000, 700)).astype(np.float32)
    team, results = Team(3), []
    for workers in (cosines.ALONE, team):
        coefficients, again = np.empty(matrix.size, np.float32), np.empty_like(matrix)
        cosines.transform(matrix, coefficients, 64, workers)
        cosines.transform_back(coefficients, again, 64, workers)
        results.append((coefficients.tobytes(), again.tobytes()))
    team.close()
    assert results[0] == results[1]
    matrix[70, 70] = np.nan
    cosines.transform(matrix, coefficients, 64)
    first = 64 * 700 + 64 * 64
    assert np.flatnonzero(np.isnan(coefficients)).tolist() == list(range(first, first + 4096))


def test_arrays_that_do_not_fit_are_refused() -> None:
    matrix, coefficients = np.zeros((8, 8), np.float32), np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=r"has not \(63,\) coefficients"):
        cosines.transform(matrix, coefficients[:-1], 8)
    with pytest.raises(ValueError, match="contiguous float32, not float64"):
        cosines.transform(np.zeros((8, 8)), coefficients, 8)
    for size in (0, 3, 128):
        with pytest.raises(ValueError, match=f"a power of two up to 64, not {size}"):
            cosines.transform_back(coefficients, matrix, size)
