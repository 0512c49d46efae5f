"""Random bits by counter: a draw depends on the numbers that it is made for, and on nothing else."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def mix(x: Array) -> Array:
    """Scatters the bits of uint64; the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


@np.errstate(over="ignore")
def key(*words: int) -> int:
    """A number from 0 to 2**64 - 1 that each of these (in the same range) decides."""
    result = 0
    for word in words:
        result = int(mix(np.array(result ^ word, np.uint64)))
    return result


@np.errstate(over="ignore")
def uniform(key: int, n: int) -> Array:
    """n numbers in [-1, 1), float32."""
    bits = mix(np.uint64(key) + np.arange(n, dtype=np.uint64)) >> np.uint64(40)
    numbers: Array = (bits.astype(np.float64) * 2.0**-23 - 1).astype(np.float32)
    return numbers
