"""The kernels that quantise blocks, which Numba compiles: see `quantisation`, which calls them, for what they do.

Each gets the address of a block of 64-bit words. Elements are handled by the dozen (`_lanes`), and one by one where a
block ends.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import extending, types
from numba.core import imputils
from numba.extending import models

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels import _ir
from fusion_rt.kernels._lanes import (
    INFINITE,
    Lanes,
    Wire,
    add,
    lanes,
    largest_of,
    load,
    maximum,
    scale,
    store,
    where_finite,
    zeros,
)
from fusion_rt.kernels._memory import peek8, peek64, peek_double, peek_float, poke8, poke32, poke64, poke_float

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
njit: Any = numba.njit
intrinsic: Any = extending.intrinsic
register_model: Any = extending.register_model
typeof_impl: Any = extending.typeof_impl
lower_constant: Any = imputils.lower_constant

_WIDE, _SINGLE = Wire.wide(DTYPES["float32"]), Wire(DTYPES["float32"], 1)
_WIDE_INTEGERS, _SINGLE_INTEGER = Wire(DTYPES["int32"], _WIDE.lanes), Wire(DTYPES["int32"], 1)
_SCALE_BYTES = 4
_LEAST_STEP = 2.0**-126
# Of the mean magnitude, with int2: the best step for normal numbers, and no step leaves more than there was.
_OF_MEAN = 1.25
_BYTE, _BIT = ir.IntType(8), ir.IntType(1)


def _words(wire: Wire) -> Any:
    return ir.VectorType(_ir.I32, wire.lanes)


def _same(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _at(builder: Any, element: Any, count: int, address: Any) -> Any:
    return builder.inttoptr(address, ir.VectorType(element, count).as_pointer())


def _magnitude(builder: Any, value: Any) -> Any:
    words = ir.VectorType(_ir.I32, value.type.count)
    return builder.and_(builder.bitcast(value, words), _same(words, 0x7FFFFFFF))


def _is_finite(builder: Any, value: Any) -> Any:
    magnitude = _magnitude(builder, value)
    return builder.icmp_signed("<", magnitude, _same(magnitude.type, INFINITE))


@intrinsic
def _magnitudes(typing: Any, wire: Wire, value: Lanes) -> Any:
    """The bits without the sign."""
    result = Lanes(DTYPES["int32"], wire.lanes)
    return result(wire, value), lambda context, builder, signature, arguments: _magnitude(builder, arguments[1])


@intrinsic
def _finite_magnitudes(typing: Any, wire: Wire, value: Lanes) -> Any:
    """The bits without the sign; 0 of what is not finite."""
    result = Lanes(DTYPES["int32"], wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        magnitude = _magnitude(builder, arguments[1])
        return builder.select(_is_finite(builder, arguments[1]), magnitude, _same(magnitude.type, 0))

    return result(wire, value), generate


@intrinsic
def _float_of(typing: Any, magnitude: Any) -> Any:
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], _ir.I32), _ir.F32)

    return types.float32(types.int64), generate


@intrinsic
def _add_magnitudes(typing: Any, wire: Wire, sums: Lanes, value: Lanes) -> Any:
    """Adds absolute values to float64 lanes; nothing for what is not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, total, elements = arguments
        absolute = builder.bitcast(_magnitude(builder, elements), elements.type)
        absolute = builder.select(_is_finite(builder, elements), absolute, _same(elements.type, 0.0))
        return builder.fadd(total, builder.fpext(absolute, total.type))

    return sums(wire, sums, value), generate


class _Code(types.Type):
    """The integers of a format, known at compile time: `bits` of each; q is from `least` to `most`, and stands for
    (q + offset) * step, with a step of at most `longest`. Where `least` leaves room for it, what is not finite is one
    less."""

    def __init__(self, bits: int, least: int, most: int, offset: float, longest: str) -> None:
        self.bits, self.least, self.most, self.offset = bits, least, most, offset
        self.longest = float.fromhex(longest)
        self.missing = least - 1 if least > -(1 << (bits - 1)) else None
        super().__init__(name=f"Code({bits}, {least}, {most}, {offset})")


register_model(_Code)(models.OpaqueModel)
typeof_impl.register(_Code)(lambda code, context: code)
lower_constant(_Code)(lambda context, builder, typ, value: context.get_dummy_value())

_EIGHT = _Code(8, -127, 127, 0.0, "0x1.020406p+121")
_FOUR = _Code(4, -7, 7, 0.0, "0x1.249248p+125")
_TWO = _Code(2, -2, 1, 0.5, "0x1p+127")


def _part(builder: Any, vector: Any, first: int, count: int) -> Any:
    mask = ir.Constant(ir.VectorType(_ir.I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, mask)


@intrinsic
def _round(
    typing: Any, wire: Wire, code: Any, value: Any, size: Any, index: Any, left: Any, right: Any, nearest: Any
) -> Any:
    """The integers of value / size, rounded at random, or (where `nearest` is not 0) to the nearest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, elements, scalar, first, left_key, right_key, to_nearest = arguments
        words, floats = _words(wire), elements.type

        def same(integer: Any) -> Any:
            return _ir.splat(builder, builder.trunc(integer, _ir.I32), wire.lanes)

        def xor_shifted(x: Any, bits: int) -> Any:
            return builder.xor(x, builder.lshr(x, _same(words, bits)))

        scales = _ir.splat(builder, scalar, wire.lanes)
        finite = _is_finite(builder, elements)
        ratio = builder.fdiv(builder.select(finite, elements, _same(floats, 0.0)), scales)
        if code.offset:  # a scale need not be of these elements' order: what is too large for an integer is held before
            for name, bound in (("minnum", code.most + 1.0), ("maxnum", code.least - 1.0)):
                ratio = _ir.call(builder, name, floats, ratio, _same(floats, bound))
            ratio = builder.fsub(ratio, _same(floats, code.offset))
        whole = builder.fptosi(ratio, words)
        whole = builder.add(whole, builder.sext(builder.fcmp_ordered("<", ratio, builder.sitofp(whole, floats)), words))
        fraction = builder.fsub(ratio, builder.sitofp(whole, floats))

        x = builder.add(builder.add(same(first), ir.Constant(words, list(range(wire.lanes)))), same(left_key))
        x = builder.mul(xor_shifted(x, 16), _same(words, 0x7FEB352D))
        x = builder.xor(xor_shifted(x, 15), same(right_key))
        x = xor_shifted(builder.mul(x, _same(words, 0x846CA68B)), 16)
        drawn = builder.sitofp(builder.lshr(x, _same(words, 8)), floats)
        drawn = builder.fmul(drawn, _same(floats, 2.0**-24))
        half = builder.icmp_signed("!=", to_nearest, _ir.I64(0))
        drawn = builder.select(half, _same(floats, 0.5), drawn)

        whole = builder.add(whole, builder.zext(builder.fcmp_ordered("<", drawn, fraction), words))
        for bound, sign in ((code.most, ">"), (code.least, "<")):
            limit = _same(words, bound)
            whole = builder.select(builder.icmp_signed(sign, whole, limit), limit, whole)
        return whole

    integers = Lanes(DTYPES["int32"], wire.lanes)
    arguments = types.float32, types.int64, types.int64, types.int64, types.int64
    return integers(wire, code, value, *arguments), generate


@intrinsic
def _left_over(typing: Any, wire: Wire, code: Any, value: Any, whole: Any, size: Any) -> Any:
    """Returns what is left of values; nothing of what is not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, elements, integers, scalar = arguments
        got = _value_of(builder, code, integers, elements.type, scalar)
        rest = builder.fsub(elements, got)
        return builder.select(_is_finite(builder, elements), rest, _same(elements.type, 0.0))

    return value(wire, code, value, whole, types.float32), generate


def _value_of(builder: Any, code: _Code, integers: Any, floats: Any, scalar: Any) -> Any:
    numbers = builder.sitofp(integers, floats)
    if code.offset:
        numbers = builder.fadd(numbers, _same(floats, code.offset))
    return builder.fmul(numbers, _ir.splat(builder, scalar, floats.count))


@intrinsic
def _put(typing: Any, wire: Wire, code: Any, value: Any, whole: Any, target: Any) -> Any:
    """Writes integers to the address `target`, as parts of the vector side by side in each byte; of one lane, its bits
    alone are the result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, elements, integers, address = arguments
        words = integers.type
        if code.missing is not None:
            finite = _is_finite(builder, elements)
            integers = builder.select(finite, integers, _same(words, code.missing))
        integers = builder.and_(integers, _same(words, (1 << code.bits) - 1))
        if wire.lanes == 1:
            return builder.zext(builder.extract_element(integers, _ir.I32(0)), _ir.I64)
        count = wire.lanes * code.bits // 8
        packed = _part(builder, integers, 0, count)
        for number in range(1, 8 // code.bits):
            part = _part(builder, integers, number * count, count)
            packed = builder.or_(packed, builder.shl(part, _same(part.type, number * code.bits)))
        byte = ir.VectorType(_BYTE, count)
        builder.store(builder.trunc(packed, byte), _at(builder, _BYTE, count, address), align=1)
        return _ir.I64(0)

    return types.int64(wire, code, value, whole, types.int64), generate


@intrinsic
def _get(typing: Any, wire: Wire, code: Any, address: Any, size: Any) -> Any:
    """The numbers that `_put` wrote to an address; of one lane, `address` is its bits themselves. NaN where one was not
    finite."""
    result = Lanes(wire.dtype, wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, source, scalar = arguments
        words = _words(wire)
        if wire.lanes == 1:
            integers = builder.insert_element(
                ir.Constant(words, ir.Undefined), builder.trunc(source, _ir.I32), _ir.I32(0)
            )
        else:
            count = wire.lanes * code.bits // 8
            raw = builder.load(_at(builder, _BYTE, count, source), align=1)
            packed = builder.zext(raw, ir.VectorType(_ir.I32, count))
            parts = [builder.lshr(packed, _same(packed.type, number * code.bits)) for number in range(8 // code.bits)]
            while len(parts) > 1:
                parts = [_beside(builder, *parts[i : i + 2]) for i in range(0, len(parts), 2)]
            integers = parts[0]
        up = _same(words, 32 - code.bits)
        integers = builder.ashr(builder.shl(integers, up), up)
        values = _value_of(builder, code, integers, result.vector, scalar)
        if code.missing is not None:
            missing = builder.icmp_signed("==", integers, _same(words, code.missing))
            values = builder.select(missing, _same(result.vector, float("nan")), values)
        return values

    return result(wire, code, types.int64, types.float32), generate


def _beside(builder: Any, first: Any, second: Any) -> Any:
    count = first.type.count
    mask = ir.Constant(ir.VectorType(_ir.I32, 2 * count), list(range(2 * count)))
    return builder.shuffle_vector(first, second, mask)


@intrinsic
def _sign(typing: Any, wire: Wire, value: Lanes) -> Any:
    """Says which of at most 32 float32 have a sign, in the bits of an integer, the first element's lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[1], _words(wire))
        signs = builder.icmp_signed("<", bits, _same(bits.type, 0))
        return builder.zext(builder.bitcast(signs, ir.IntType(wire.lanes)), _ir.I64)

    return types.int64(wire, value), generate


@intrinsic
def _without(typing: Any, wire: Wire, value: Any, size: Any) -> Any:
    """Returns what is left of values after `size` with their signs was taken away; 0 of what is not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, elements, scalar = arguments
        bits = builder.bitcast(elements, _words(wire))
        sign = builder.and_(bits, _same(bits.type, 0x80000000))
        size_bits = _ir.splat(builder, builder.bitcast(scalar, _ir.I32), wire.lanes)
        rest = builder.fsub(elements, builder.bitcast(builder.or_(sign, size_bits), elements.type))
        return builder.select(_is_finite(builder, elements), rest, _same(elements.type, 0.0))

    return value(wire, value, types.float32), generate


@intrinsic
def _from_signs(typing: Any, wire: Wire, address: Any, size: Any) -> Any:
    """A float32 with the signs that the bits at an address say."""
    result = Lanes(wire.dtype, wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, scalar = arguments
        raw = ir.IntType(wire.lanes)
        signs = builder.load(builder.inttoptr(source, raw.as_pointer()), align=1)
        signs = builder.zext(builder.bitcast(signs, ir.VectorType(_BIT, wire.lanes)), _words(wire))
        size_bits = _ir.splat(builder, builder.bitcast(scalar, _ir.I32), wire.lanes)
        return builder.bitcast(builder.or_(builder.shl(signs, _same(_words(wire), 31)), size_bits), result.vector)

    return result(wire, types.int64, types.float32), generate


@njit
def _accumulate(wire, residual, gradient, i, tops, decay):  # type: ignore[no-untyped-def]
    """Adds where the sum is finite. Gives it, and the largest magnitudes of all sums."""
    value = load(wire, residual, i)
    if gradient != 0:
        if decay != 1.0:
            value = scale(wire, value, decay)
        wanted = add(value, load(wire, gradient, i))
        tops = maximum(tops, _magnitudes(wire, wanted))
        value = where_finite(wire, wanted, wanted, value)
        store(wire, residual, i, value)
    return value, tops


@njit
def _block_end(low, size, block, phase):  # type: ignore[no-untyped-def]
    """The end of the block that begins at element `low`; of the first one, `phase` elements come before these."""
    return min(low + block - (phase if low == 0 else 0), size)


def _encoding(name: str, code: _Code) -> Any:
    """The kernel that rounds to the integers of a format."""
    by_mean, fraction, most, longest = code.missing is None, code.bits, code.most, code.longest
    per_byte = 8 // code.bits

    def encode(request):  # type: ignore[no-untyped-def]
        residual, gradient, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
        out, keep, phase, base = peek64(request, 4), peek64(request, 5), peek64(request, 6), peek64(request, 7)
        left, right = peek64(request, 8), peek64(request, 9)
        decay, nearest = peek_double(request, 11), peek64(request, 12)
        low, tops, top = 0, zeros(_WIDE_INTEGERS), zeros(_SINGLE_INTEGER)
        while low < size:
            high = _block_end(low, size, block, phase)
            peaks, sums, i = zeros(_WIDE_INTEGERS), _doubles(_WIDE), low
            while i + lanes(_WIDE) <= high:
                value, tops = _accumulate(_WIDE, residual, gradient, i, tops, decay)
                if by_mean:
                    peaks, sums = maximum(peaks, _magnitudes(_WIDE, value)), _add_magnitudes(_WIDE, sums, value)
                else:
                    peaks = maximum(peaks, _finite_magnitudes(_WIDE, value))
                i += lanes(_WIDE)
            peak, total = largest_of(peaks), 0.0
            if by_mean:
                total = _total(sums)
            while i < high:
                single, top = _accumulate(_SINGLE, residual, gradient, i, top, decay)
                if by_mean:
                    peak = max(peak, largest_of(_magnitudes(_SINGLE, single)))
                    total += _total(_add_magnitudes(_SINGLE, _doubles(_SINGLE), single))
                else:
                    peak = max(peak, largest_of(_finite_magnitudes(_SINGLE, single)))
                i += 1
            if by_mean:
                size_of_one = numba.float32(_OF_MEAN * total / (high - low))
            else:
                size_of_one = _float_of(peak) / numba.float32(most)
            size_of_one = numba.float32(min(max(size_of_one, _LEAST_STEP), longest))
            good = not by_mean or peak < INFINITE
            told = size_of_one if good else _float_of(0x7FC00000)
            if by_mean and peak == 0:
                told = numba.float32(0)
            poke_float(out, 0, told)
            out += _SCALE_BYTES
            i = low
            while i + lanes(_WIDE) <= high:
                value = load(_WIDE, residual, i)
                whole = _round(_WIDE, code, value, size_of_one, base + i, left, right, nearest)
                _put(_WIDE, code, value, whole, out)
                if keep == 0:
                    store(_WIDE, residual, i, zeros(_WIDE))
                elif good:
                    store(_WIDE, residual, i, _left_over(_WIDE, code, value, whole, told))
                else:
                    store(_WIDE, residual, i, where_finite(_WIDE, value, value, zeros(_WIDE)))
                out += lanes(_WIDE) * fraction >> 3
                i += lanes(_WIDE)
            bits, filled = 0, 0
            while i < high:
                single = load(_SINGLE, residual, i)
                one = _round(_SINGLE, code, single, size_of_one, base + i, left, right, nearest)
                bits |= _put(_SINGLE, code, single, one, out) << (filled * fraction)
                if keep == 0:
                    store(_SINGLE, residual, i, zeros(_SINGLE))
                elif good:
                    store(_SINGLE, residual, i, _left_over(_SINGLE, code, single, one, told))
                else:
                    store(_SINGLE, residual, i, where_finite(_SINGLE, single, single, zeros(_SINGLE)))
                filled += 1
                i += 1
                if filled == per_byte or i == high:
                    poke8(out, 0, bits)
                    out += 1
                    bits, filled = 0, 0
            low = high
        poke64(request, 10, max(largest_of(tops), largest_of(top)) >= INFINITE)

    encode.__name__ = f"{name}_encode"
    return encode


@njit
def _deliver(wire, out, i, value, adding):  # type: ignore[no-untyped-def]
    store(wire, out, i, add(load(wire, out, i), value) if adding != 0 else value)


def _decoding(name: str, code: _Code) -> Any:
    """The opposite of `_encoding`."""
    fraction, per_byte = code.bits, 8 // code.bits

    def decode(request):  # type: ignore[no-untyped-def]
        payload, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2)
        out, adding, phase = peek64(request, 3), peek64(request, 4), peek64(request, 5)
        low = 0
        while low < size:
            high = _block_end(low, size, block, phase)
            size_of_one, i = peek_float(payload, 0), low
            payload += _SCALE_BYTES
            while i + lanes(_WIDE) <= high:
                _deliver(_WIDE, out, i, _get(_WIDE, code, payload, size_of_one), adding)
                payload += lanes(_WIDE) * fraction >> 3
                i += lanes(_WIDE)
            first = i
            while i < high:
                place = i - first
                bits = peek8(payload, place // per_byte) >> (place % per_byte * fraction)
                _deliver(_SINGLE, out, i, _get(_SINGLE, code, bits, size_of_one), adding)
                i += 1
            payload += ((high - first) * fraction + 7) >> 3
            low = high

    decode.__name__ = f"{name}_decode"
    return decode


@intrinsic
def _doubles(typing: Any, wire: Wire) -> Any:
    result = Lanes(DTYPES["float64"], wire.lanes)
    return result(wire), lambda context, builder, signature, arguments: ir.Constant(result.vector, None)


@intrinsic
def _total(typing: Any, value: Lanes) -> Any:
    """The sum of float64 lanes, in their order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result = ir.Constant(_ir.F64, 0.0)
        for lane in range(arguments[0].type.count):
            result = builder.fadd(result, builder.extract_element(arguments[0], _ir.I32(lane)))
        return result

    return types.float64(value), generate


def onebit_encode(request):  # type: ignore[no-untyped-def]
    residual, gradient, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2), peek64(request, 3)
    out, keep, phase, decay = peek64(request, 4), peek64(request, 5), peek64(request, 6), peek_double(request, 11)
    low, tops, top = 0, zeros(_WIDE_INTEGERS), zeros(_SINGLE_INTEGER)
    while low < size:
        high = _block_end(low, size, block, phase)
        peaks, sums, i = zeros(_WIDE_INTEGERS), _doubles(_WIDE), low
        while i + lanes(_WIDE) <= high:
            value, tops = _accumulate(_WIDE, residual, gradient, i, tops, decay)
            peaks = maximum(peaks, _magnitudes(_WIDE, value))
            sums = _add_magnitudes(_WIDE, sums, value)
            i += lanes(_WIDE)
        peak, total = largest_of(peaks), _total(sums)
        while i < high:
            single, top = _accumulate(_SINGLE, residual, gradient, i, top, decay)
            peak = max(peak, largest_of(_magnitudes(_SINGLE, single)))
            total += _total(_add_magnitudes(_SINGLE, _doubles(_SINGLE), single))
            i += 1
        mean = numba.float32(total / (high - low))
        good = peak < INFINITE
        poke_float(out, 0, mean if good else _float_of(0x7FC00000))
        taken = mean if good else numba.float32(0)
        out += _SCALE_BYTES
        i = low
        while i + lanes(_WIDE) <= high:
            value = load(_WIDE, residual, i)
            poke32(out, 0, _sign(_WIDE, value))
            rest = _without(_WIDE, value, taken)
            store(_WIDE, residual, i, rest if keep != 0 else zeros(_WIDE))
            out += lanes(_WIDE) >> 3
            i += lanes(_WIDE)
        bits, filled = 0, 0
        while i < high:
            value = load(_SINGLE, residual, i)
            bits |= _sign(_SINGLE, value) << filled
            rest = _without(_SINGLE, value, taken)
            store(_SINGLE, residual, i, rest if keep != 0 else zeros(_SINGLE))
            filled += 1
            i += 1
            if filled == 8 or i == high:
                poke8(out, 0, bits)
                out += 1
                bits, filled = 0, 0
        low = high
    poke64(request, 10, max(largest_of(tops), largest_of(top)) >= INFINITE)


def onebit_decode(request):  # type: ignore[no-untyped-def]
    payload, size, block = peek64(request, 0), peek64(request, 1), peek64(request, 2)
    out, adding, phase = peek64(request, 3), peek64(request, 4), peek64(request, 5)
    low = 0
    while low < size:
        high = _block_end(low, size, block, phase)
        mean, i = peek_float(payload, 0), low
        payload += _SCALE_BYTES
        while i + lanes(_WIDE) <= high:
            _deliver(_WIDE, out, i, _from_signs(_WIDE, payload, mean), adding)
            payload += lanes(_WIDE) >> 3
            i += lanes(_WIDE)
        first = i
        while i < high:
            bit = (peek8(payload, (i - first) >> 3) >> ((i - first) & 7)) & 1
            value = -mean if bit != 0 else mean
            if adding != 0:
                value += peek_float(out, i)
            poke_float(out, i, value)
            i += 1
        payload += (high - first + 7) >> 3
        low = high


KERNELS = (
    *(make(*each) for each in (("int8", _EIGHT), ("int4", _FOUR), ("int2", _TWO)) for make in (_encoding, _decoding)),
    onebit_encode,
    onebit_decode,
)
