"""Discrete cosine transforms of the tiles of a matrix (DCT-II in both directions, orthonormal), and back.

A tile is `size` rows and columns; at the lower and the right edge it is what is left in powers of two, the largest
first: of 100 rows and a size of 64 there are tiles of 64, 32 and 4. So there are as many coefficients as elements. They
lie tile after tile, those of a tile column after column: as those of the transposed tile, row after row. The tile whose
first element is (i, j) begins at i * columns + (rows of the tile) * j.

All arrays are float32, contiguous. Bits depend on nothing but the arguments: neither on the number of threads nor on
the processor. A value that is not finite makes all of its tile so. `reference` computes the same, plainly, to within
rounding.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from fusion_rt.kernels import cpu
from fusion_rt.kernels.cpu import Array, Routine
from fusion_rt.kernels.team import ALONE, Team

MOST = 64
"""Rows and columns of the largest tile."""

_forward, _back = Routine("cosines"), Routine("cosines-back")
ROUTINES = (_forward.name, _back.name)

_PART_ELEMENTS = 1 << 17  # below this a second thread is not worth waking


def transform(matrix: Array, coefficients: Array, size: int, team: Team = ALONE) -> None:
    """Writes the coefficients (1-D) of a matrix (rows, columns), by tiles of `size`, a power of two up to `MOST`."""
    _run(_forward, matrix, coefficients, size, team)


def transform_back(coefficients: Array, matrix: Array, size: int, team: Team = ALONE) -> None:
    """Writes the matrix that has these coefficients."""
    _run(_back, matrix, coefficients, size, team)


def tiles(rows: int, columns: int, size: int) -> Array:
    """Returns where the tiles of a matrix begin among its coefficients, and the end; int64."""
    heights, widths = pieces(rows, size), pieces(columns, size)
    sizes = [height * width for height in heights for width in widths]
    return np.cumsum([0, *sizes], dtype=np.int64)


def pieces(length: int, size: int) -> list[int]:
    """The lengths of tiles beside each other."""
    found = [size] * (length // size)
    rest = length % size
    return found + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def prepare() -> None:
    """Makes the kernels ready before they are needed in a hurry."""
    cpu.prepare([], others=ROUTINES)


def _run(routine: Routine, matrix: Array, coefficients: Array, size: int, team: Team) -> None:
    if matrix.ndim != 2 or coefficients.shape != (matrix.size,):
        raise ValueError(f"a matrix {matrix.shape} has not {coefficients.shape} coefficients")
    for array in (matrix, coefficients):
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(f"matrices and their coefficients are contiguous float32, not {array.dtype}")
    if size.bit_count() != 1 or not 1 <= size <= MOST:
        raise ValueError(f"the size of a tile is a power of two up to {MOST}, not {size}")
    rows, columns = matrix.shape
    parts = max(1, min(team.threads, matrix.size // _PART_ELEMENTS))
    bounds = [*(rows * part // parts // size * size for part in range(parts)), rows]

    def work(first: int, end: int) -> None:
        scratch = np.zeros(2 * MOST * MOST, np.float32)
        addresses = matrix.ctypes.data, coefficients.ctypes.data
        routine(*addresses, columns, size, first, end, scratch.ctypes.data)

    team.run([partial(work, *edges) for edges in itertools.pairwise(bounds) if edges[0] < edges[1]])
