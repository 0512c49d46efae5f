"""Formats in which a selecting codec writes the values that it sends: `fp32`, `fp16`, `bf16`, `int8`, `int4` or `int2`.

`rounded` gives the values that receivers will get, before anything is packed, so that a codec can keep the difference.
Rounding rounded values changes nothing, and neither does packing any consecutive part of it: scales are powers of two,
and a part never needs a coarser one than the whole.

Values that are not finite stay so: infinities and NaN survive in fp32, fp16 and bf16; in the others all of them become
NaN, in int2 with all of their block. Finite values never become infinite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from fusion_rt.codecs.base import Array, CodecError
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu

BLOCK = 64
"""Values that share a power of two in int8, int4 and int2."""

_F32 = DTYPES["float32"]


class ValueFormat(ABC):
    """All values are float32, in one dimension, contiguous.

    `phase`: how many values of the first block belong to the part before this one, from 0 to `BLOCK` - 1.
    """

    code: ClassVar[int]
    """On the wire."""

    contraction: ClassVar[float] = 1.0
    """The share of the values' squared norm that arrives at least (`Codec.contraction`)."""

    half: ClassVar[DType | None] = None
    """Type that values are converted to, if any."""

    @abstractmethod
    def rounded(self, values: Array) -> Array:
        """The values as receivers will have them; a new array, or `values` itself where nothing changes."""

    @abstractmethod
    def nbytes(self, n: int, phase: int) -> int:
        """Bytes of n packed values."""

    @abstractmethod
    def pack(self, values: Array, phase: int) -> list[Array]:
        """Values that are `rounded`, or a consecutive part of such, as `nbytes` bytes (contiguous arrays)."""

    @abstractmethod
    def unpack(self, payload: Array, n: int, phase: int) -> Array:
        """The n values in the bytes (uint8) of `pack`.

        Raises:
            CodecError: the bytes, as many as there should be, hold a scale that cannot be.
        """

    def prepare(self) -> None:
        """Makes kernels ready before they are needed in a hurry."""
        if self.half is not None:
            cpu.prepare([], [(_F32, self.half), (self.half, _F32)])


class Fp32Values(ValueFormat):
    """Values as they are."""

    code = 0

    def rounded(self, values: Array) -> Array:
        return values

    def nbytes(self, n: int, phase: int) -> int:
        return 4 * n

    def pack(self, values: Array, phase: int) -> list[Array]:
        return [values.view(np.uint8)]

    def unpack(self, payload: Array, n: int, phase: int) -> Array:
        return np.frombuffer(payload.tobytes(), np.float32)  # a copy, because a payload may begin at any address


class Fp16Values(ValueFormat):
    """Half precision times a power of two that all share, so that neither small nor large gradients leave its range.

    One byte for the power, then the halves. The largest lies in (2**14, 2**15]; values 2**40 times smaller are lost.
    """

    code = 1
    half = DTYPES["float16"]
    _LEAST, _MOST = -120, 113
    _BELOW = np.float32(2**15 - 16)  # the half before 2**15

    def rounded(self, values: Array) -> Array:
        exponent, halves = self._halves(values)
        return self._values(halves, exponent)

    def nbytes(self, n: int, phase: int) -> int:
        return 2 * n + 1 if n else 0

    def pack(self, values: Array, phase: int) -> list[Array]:
        if not len(values):
            return []
        exponent, halves = self._halves(values)
        return [np.array([exponent], np.int8).view(np.uint8), halves.view(np.uint8)]

    def unpack(self, payload: Array, n: int, phase: int) -> Array:
        if not n:
            return np.empty(0, np.float32)
        exponent = int(payload[:1].view(np.int8)[0])
        if not self._LEAST <= exponent <= self._MOST:
            raise CodecError(f"a peer sent values in fp16 times 2**{exponent}, which is out of range")
        return self._values(np.frombuffer(payload[1:].tobytes(), np.uint16), exponent)

    def _halves(self, values: Array) -> tuple[int, Array]:
        fraction, exponent = np.frexp(_largest_finite(values))
        exponent = int(exponent) - (16 if fraction == 0.5 else 15) if fraction else 0
        exponent = min(max(exponent, self._LEAST), self._MOST)
        scaled = values * np.float32(2.0**-exponent)
        if exponent == self._MOST:  # rounding up could leave the range of float32
            scaled = np.where(np.isfinite(scaled), scaled.clip(-self._BELOW, self._BELOW), scaled)
        return exponent, cpu.converted(scaled, _F32, self.half)

    def _values(self, halves: Array, exponent: int) -> Array:
        values = cpu.converted(halves, self.half, _F32)
        with np.errstate(over="ignore"):  # only a peer that is faulty sends such
            values *= np.float32(2.0**exponent)
        return values


class Bf16Values(ValueFormat):
    """The upper halves of float32; the largest are held at the largest finite one."""

    code = 2
    half = DTYPES["bfloat16"]
    _LARGEST = np.uint32(0x7F7F0000).view(np.float32)

    def rounded(self, values: Array) -> Array:
        held = np.where(np.isfinite(values), np.clip(values, -self._LARGEST, self._LARGEST), values)
        return cpu.converted(cpu.converted(held, _F32, self.half), self.half, _F32)

    def nbytes(self, n: int, phase: int) -> int:
        return 2 * n

    def pack(self, values: Array, phase: int) -> list[Array]:
        return [cpu.converted(values, _F32, self.half).view(np.uint8)]

    def unpack(self, payload: Array, n: int, phase: int) -> Array:
        return cpu.converted(np.frombuffer(payload.tobytes(), np.uint16), self.half, _F32)


class BlockValues(ValueFormat):
    """Integers of a few bits times a power of two for each block of `BLOCK` values.

    First the powers, a byte each, then the integers, one after the other from the lowest bits on.
    """

    bits: ClassVar[int]

    def rounded(self, values: Array) -> Array:
        return self._values(*self._integers(values, 0), len(values), 0)

    def nbytes(self, n: int, phase: int) -> int:
        return -(-n * self.bits // 8) + self._blocks(n, phase)

    def pack(self, values: Array, phase: int) -> list[Array]:
        exponents, integers = self._integers(values, phase)
        codes = integers.ravel()[phase : phase + len(values)].view(np.uint8)
        return [exponents.view(np.uint8), self._together(codes)]

    def unpack(self, payload: Array, n: int, phase: int) -> Array:
        blocks = self._blocks(n, phase)
        exponents = payload[:blocks].view(np.int8)
        self._check(exponents)
        integers = np.zeros((blocks, BLOCK), np.int8)
        integers.ravel()[phase : phase + n] = self._apart(payload[blocks:], n).view(np.int8)
        return self._values(exponents, integers, n, phase)

    def _blocks(self, n: int, phase: int) -> int:
        return -(-(phase + n) // BLOCK) if n else 0

    def _divided(self, values: Array, phase: int) -> tuple[Array, Array, Array]:
        """Values in blocks, which of them are finite, and the largest finite magnitude of each block."""
        blocks = np.zeros((self._blocks(len(values), phase), BLOCK), np.float32)
        blocks.ravel()[phase : phase + len(values)] = values
        finite = np.isfinite(blocks)
        return blocks, finite, np.where(finite, np.abs(blocks), 0).max(axis=1, initial=0)

    def _together(self, codes: Array) -> Array:
        """Codes (uint8, of which the lowest bits count) in as few bytes as they take."""
        parts = 8 // self.bits
        whole = np.zeros(-(-len(codes) // parts) * parts, np.uint8)
        whole[: len(codes)] = codes & np.uint8((1 << self.bits) - 1)
        shifted = whole.reshape(-1, parts) << np.arange(0, 8, self.bits, dtype=np.uint8)
        packed: Array = np.bitwise_or.reduce(shifted, axis=1)
        return packed

    def _apart(self, payload: Array, n: int) -> Array:
        """The opposite of `_together`: n codes (uint8), with the highest of their bits above them."""
        up = np.uint8(8 - self.bits)
        parts = (payload[:, None] >> np.arange(0, 8, self.bits, dtype=np.uint8)).ravel()[:n] << up
        codes: Array = (parts.view(np.int8) >> up.view(np.int8)).view(np.uint8)
        return codes

    @abstractmethod
    def _integers(self, values: Array, phase: int) -> tuple[Array, Array]:
        """The powers (int8) and the codes (int8, in blocks) of values."""

    @abstractmethod
    def _values(self, exponents: Array, integers: Array, n: int, phase: int) -> Array:
        """The opposite."""

    def _check(self, exponents: Array) -> None:
        """Raises `CodecError` for powers that `_integers` does not give."""


class SymmetricValues(BlockValues):
    """Integers with a sign; the lowest stands for values that are not finite. A rounded value is off by half a unit at
    most."""

    _LEAST = -128

    def __init__(self, bits: int, code: int, most: int) -> None:
        self.bits, self.code, self._most = bits, code, most  # type: ignore[misc]  # of others they are of the class
        self._largest, self._missing = (1 << (bits - 1)) - 1, -(1 << (bits - 1))

    def _check(self, exponents: Array) -> None:
        if len(exponents) and int(exponents.max()) > self._most:
            raise CodecError(f"a peer sent values in int{self.bits} times 2**{exponents.max()}, which is out of range")

    def _integers(self, values: Array, phase: int) -> tuple[Array, Array]:
        blocks, finite, largest = self._divided(values, phase)
        fractions, exponents = np.frexp(largest)
        exponents = exponents - (self.bits - 1) + (np.rint(fractions * -self._missing) > self._largest)
        exponents = np.where(fractions == 0, self._LEAST, exponents).clip(self._LEAST, self._most)
        integers = np.rint(np.ldexp(np.where(finite, blocks, 0), -exponents[:, None]))
        integers = integers.clip(-self._largest, self._largest)
        return exponents.astype(np.int8), np.where(finite, integers, self._missing).astype(np.int8)

    def _values(self, exponents: Array, integers: Array, n: int, phase: int) -> Array:
        missing = integers == self._missing
        values = np.ldexp(np.where(missing, 0, integers).astype(np.float32), exponents.astype(np.int32)[:, None])
        values[missing] = np.nan
        return values.ravel()[phase : phase + n]


class Int2Values(BlockValues):
    """Signs, and which of two powers of two: that next to the largest of a block, or half of it.

    There is no zero, which suits elements that were selected for their size, and no others. A block of zeros (or of
    nothing above 2**-127) arrives as zeros; one with a value that is not finite, as NaN.
    """

    code, bits = 5, 2
    contraction = 0.0  # what is far below the largest of its block arrives too large
    _ZERO, _LEAST, _MOST, _MISSING = -128, -127, 126, 127

    def _integers(self, values: Array, phase: int) -> tuple[Array, Array]:
        blocks, finite, largest = self._divided(values, phase)
        fractions, exponents = np.frexp(largest)
        exponents = np.minimum(exponents - 2 + (fractions >= 0.75), self._MOST)
        exponents = np.where((fractions == 0) | (exponents < self._LEAST), self._ZERO, exponents)
        exponents = np.where(finite.all(axis=1), exponents, self._MISSING).astype(np.int32)
        halfway = np.ldexp(np.float32(1.5), exponents)[:, None]
        large = (np.abs(blocks) >= halfway) | (exponents == self._LEAST)[:, None]  # so that half of it is never needed
        return exponents.astype(np.int8), (large + 2 * np.signbit(blocks)).astype(np.int8)

    def _values(self, exponents: Array, integers: Array, n: int, phase: int) -> Array:
        powers = exponents.astype(np.int32)
        sizes = np.ldexp(np.float32(1), powers)
        sizes[powers == self._ZERO] = 0
        sizes[powers == self._MISSING] = np.nan
        values = sizes[:, None] * (1 + (integers & 1)).astype(np.float32)
        signed: Array = np.copysign(values, np.where(integers & 2, np.float32(-1), np.float32(1)))
        return signed.ravel()[phase : phase + n]


FORMATS: dict[str, ValueFormat] = {
    "fp32": Fp32Values(),
    "fp16": Fp16Values(),
    "bf16": Bf16Values(),
    "int8": SymmetricValues(8, 3, 121),
    "int4": SymmetricValues(4, 4, 125),
    "int2": Int2Values(),
}


def format_of_whole(name: str) -> str:
    """The format of elements that are always sent, where selected values are sent in `name`; at least a byte each."""
    return "int8" if name in ("int4", "int2") else name


def _largest_finite(values: Array) -> float:
    if not len(values):
        return 0.0
    largest = float(max(values.max(), -values.min()))
    return largest if math.isfinite(largest) else float(np.abs(values[np.isfinite(values)]).max(initial=0))
