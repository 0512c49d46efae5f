"""Quantisation of float32 in blocks, in the pass that adds the gradient to a residual.

A payload is one record for each block of consecutive elements: a float32, and then the elements. The first block may
lack `phase` elements at its beginning, and the last some at its end. So the payload of a range that begins and ends
with blocks is a part of the payload of the whole.

`INT8`: the float32 is the size s of one step, the largest finite magnitude / 127, held within [`LEAST_STEP`,
`longest`]; an element x is the int8 q = x / s, rounded down or up at random so that q * s is x on average, or to the
nearest (of two, the one below); -128 if it is not finite.

`INT4`: the same with 7 for 127 and -8 for -128. Of each 32 consecutive elements of a record, the first 16 are the lower
halves of 16 bytes, and the others the upper ones; at its end, two that follow each other share a byte.

`INT2`: s is 1.25 times the mean magnitude of the block; an element is one of four numbers, -1.5 s, -.5 s, .5 s and
1.5 s, whose q is -2 to 1. s is 0 where all elements are 0, and NaN if one is not finite. Of 32 elements, each 8 are two
bits of 8 bytes, from the lowest on; at the end of a record four that follow each other share a byte. For normal numbers
this is the best s, and the nearest of the four never leaves more of a block than there was.

`ONEBIT`: the float32 is the mean magnitude of the block, NaN if an element is not finite; an element is its sign bit, 8
in a byte from the lowest on.

The rest, element by element and in float32, is x minus its arriving value. It is 0 where that is not finite;
with `INT2` and `ONEBIT`, whose block is NaN then, all is left of the finite elements beside it. `reference` computes
the same, plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fusion_rt.kernels import cpu
from fusion_rt.kernels.cpu import Array, Routine, float_bits

LEAST_STEP = np.float32(2.0**-126)
"""The least step of a block."""

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Draw:
    """Random bits by counter: `left` and `right` (32 bits) are the key, and each element's index is the counter.

    The function is lowbias32 by Chris Wellons (hash-prospector, public domain), with the key put in at the beginning
    and in the middle.
    """

    left: int
    right: int


@dataclass(frozen=True)
class Quantiser:
    """A way to quantise; `INT8`, `INT4`, `INT2` and `ONEBIT` are all there are.

    In all methods: `block` elements make a block, a multiple of 32; and `phase` elements of the first one, fewer than
    that, come before the elements at hand.

    Attributes:
        bits: of an element.
        longest: a step, so that no number is infinite.
    """

    name: str
    bits: int
    longest: float

    @cached_property
    def _encode(self) -> Routine:
        return Routine(f"{self.name}-encode")

    @cached_property
    def _decode(self) -> Routine:
        return Routine(f"{self.name}-decode")

    def prepare(self) -> None:
        """Makes its kernels ready before they are needed in a hurry."""
        cpu.prepare([], others=(self._encode.name, self._decode.name))

    def nbytes(self, n: int, block: int, phase: int = 0) -> int:
        """Bytes of n elements."""
        first = min(n, block - phase)
        full, rest = divmod(n - first, block)
        return self._record(first) + full * self._record(block) + self._record(rest)

    def encode(
        self,
        residual: Array,
        gradient: Array | None,
        block: int,
        out: Array,
        *,
        phase: int = 0,
        keep: bool = True,
        base: int = 0,
        draw: Draw | None = None,
        decay: float = 1.0,
    ) -> bool:
        """Adds the gradient to the residual times `decay`, writes the sum as blocks, and keeps the rounding errors.

        Elements to which the gradient cannot be added, because the sum would not be finite, are written without it.

        Args:
            residual: float32, contiguous, writable, n elements.
            gradient: as `residual`; None when it has been added already.
            out: uint8, contiguous, `nbytes(n, block, phase)` bytes.
            keep: rounding errors become the residual; if not, zeros do.
            base: the counter of the first element, for `draw`.
            draw: the random bits that integers are rounded with; without, they are rounded to the nearest.
            decay: where there is a gradient, the residual is multiplied by this first.

        Returns: whether all of the gradient was added.
        """
        n = len(residual)
        for array in (residual, gradient):
            if array is not None and not (
                array.dtype == np.float32 and array.shape == (n,) and array.flags.c_contiguous
            ):
                raise ValueError(f"contiguous float32 arrays are quantised, not {array.dtype} {array.shape}")
        self._check(out, n, block, phase)
        words = self._encode(
            residual.ctypes.data, 0 if gradient is None else gradient.ctypes.data, n, block, out.ctypes.data,
            int(keep), phase, base, *((draw.left, draw.right) if draw else (0, 0)), 0, float_bits(decay), draw is None,
        )  # fmt: skip
        return not words[10]

    def decode(self, payload: Array, block: int, out: Array, *, phase: int = 0, add: bool = False) -> None:
        """Writes the n elements in a payload (uint8, `nbytes(n, block, phase)` of any bytes) to `out`, or adds them."""
        self._check(payload, len(out), block, phase)
        if not (out.dtype == np.float32 and out.ndim == 1 and out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(f"blocks are written to a contiguous float32 array, not {out.dtype} {out.shape}")
        self._decode(payload.ctypes.data, len(out), block, out.ctypes.data, int(add), phase)

    def scales(self, payload: Array, n: int, block: int, phase: int = 0) -> Array:
        """The float32 of each block in a payload of n elements; a copy."""
        self._check(payload, n, block, phase)
        starts = np.arange(-(-(n + phase) // block) if n else 0) * self._record(block)
        starts[1:] += self._record(min(n, block - phase)) - self._record(block)
        found: Array = payload[starts[:, None] + np.arange(_SCALE_BYTES)].view(np.float32).ravel()
        return found

    def _record(self, n: int) -> int:
        """Bytes of n elements of one block."""
        return _SCALE_BYTES + -(-n * self.bits // 8) if n else 0

    def _check(self, payload: Array, n: int, block: int, phase: int) -> None:
        if block <= 0 or block % 32 or not 0 <= phase < block:
            raise ValueError(f"a block has a multiple of 32 elements, and a part of it before; not {block} and {phase}")
        nbytes = self.nbytes(n, block, phase)
        if payload.dtype != np.uint8 or payload.shape != (nbytes,) or not payload.flags.c_contiguous:
            raise ValueError(
                f"{n} elements take {nbytes} bytes in blocks of {block}, not {payload.shape} of {payload.dtype}"
            )


INT8 = Quantiser("int8", 8, float.fromhex("0x1.020406p+121"))
INT4 = Quantiser("int4", 4, float.fromhex("0x1.249248p+125"))
INT2 = Quantiser("int2", 2, 2.0**127)
ONEBIT = Quantiser("onebit", 1, 0.0)
