"""Products with few vectors, for low-rank approximations: matrix ~ sum over k of left[k] (x) right[k].

All arrays are float32, contiguous: a matrix (rows, columns), `left` (rank, rows), `right` (rank, columns). Bits depend
on nothing but the arguments: neither on the number of threads nor on the processor, as those of a BLAS would. What is
not finite stays so. `reference` computes the same, plainly, to within rounding.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from fusion_rt.kernels import cpu
from fusion_rt.kernels.cpu import Array, Routine
from fusion_rt.kernels.team import ALONE, Team

_left, _right = Routine("low-rank-left"), Routine("low-rank-right")
_product, _orthonormalise = Routine("low-rank-product"), Routine("low-rank-orthonormalise")
ROUTINES = tuple(routine.name for routine in (_left, _right, _product, _orthonormalise))

_PART_ELEMENTS = 1 << 17  # below this a second thread is not worth waking
_LINE = 32  # columns of a thread begin at multiples of this


def left_of(matrix: Array, right: Array, out: Array, team: Team = ALONE) -> None:
    """out[k] = matrix @ right[k]; each element is summed in float32 in 32 lanes, and these in float64."""
    _check(matrix, out, right)
    _run(_left, matrix, out, right, len(matrix), 1, team)


def right_of(matrix: Array, left: Array, out: Array, team: Team = ALONE) -> None:
    """out[k] = left[k] @ matrix, summed in float32 row by row."""
    _check(matrix, left, out)
    out[:] = 0
    _run(_right, matrix, left, out, matrix.shape[1], _LINE, team)


def product(left: Array, right: Array, out: Array, sign: int = 0, team: Team = ALONE) -> None:
    """out = left.T @ right; with `sign` 1 or -1 it is added to `out`, or taken away."""
    _check(out, left, right)
    _run(_product, out, left, right, len(out), 1, team, sign)


def orthonormalise(vectors: Array) -> None:
    """Makes vectors (rank, n) orthonormal, in their order, by modified Gram-Schmidt; those that depend on the ones
    before them become zero. A value that is not finite makes all of its vector NaN, and those after it."""
    if vectors.dtype != np.float32 or vectors.ndim != 2 or not vectors.flags.c_contiguous:
        raise ValueError(f"vectors are float32 (rank, n), contiguous, not {vectors.dtype} {vectors.shape}")
    _orthonormalise(vectors.ctypes.data, vectors.shape[1], len(vectors))


def prepare() -> None:
    """Makes the kernels ready before they are needed in a hurry."""
    cpu.prepare([], others=ROUTINES)


def _run(
    routine: Routine, matrix: Array, left: Array, right: Array, size: int, step: int, team: Team, *more: int
) -> None:
    parts = max(1, min(team.threads, matrix.size // _PART_ELEMENTS))
    bounds = [*(size * part // parts // step * step for part in range(parts)), size]
    shape = len(matrix), matrix.shape[1], len(left)

    def work(first: int, end: int) -> None:
        routine(matrix.ctypes.data, first, end, *shape, left.ctypes.data, right.ctypes.data, *more)

    team.run([partial(work, *edges) for edges in itertools.pairwise(bounds) if edges[0] < edges[1]])


def _check(matrix: Array, left: Array, right: Array) -> None:
    if matrix.ndim != 2 or left.shape != (len(left), len(matrix)) or right.shape != (len(left), matrix.shape[1]):
        raise ValueError(f"a matrix {matrix.shape} does not go with factors {left.shape} and {right.shape}")
    for array in (matrix, left, right):
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(f"matrices and their factors are contiguous float32, not {array.dtype}")
