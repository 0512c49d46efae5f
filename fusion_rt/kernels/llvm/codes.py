"""Operations on dozens of elements that quantise them: magnitudes, rounding to the integers of a format, and packing
these into bytes. `_quantisation` makes its kernels of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import imputils
from numba.extending import models

from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.llvm import vectors
from fusion_rt.kernels.llvm.lanes import INFINITE, Lanes, Wire

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
intrinsic: Any = extending.intrinsic
register_model: Any = extending.register_model
typeof_impl: Any = extending.typeof_impl
lower_constant: Any = imputils.lower_constant

_BYTE, _BIT = ir.IntType(8), ir.IntType(1)


def _words(wire: Wire) -> Any:
    return ir.VectorType(vectors.I32, wire.lanes)


def _same(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _at(builder: Any, element: Any, count: int, address: Any) -> Any:
    return builder.inttoptr(address, ir.VectorType(element, count).as_pointer())


def _magnitude(builder: Any, value: Any) -> Any:
    words = ir.VectorType(vectors.I32, value.type.count)
    return builder.and_(builder.bitcast(value, words), _same(words, 0x7FFFFFFF))


def _is_finite(builder: Any, value: Any) -> Any:
    magnitude = _magnitude(builder, value)
    return builder.icmp_signed("<", magnitude, _same(magnitude.type, INFINITE))


@intrinsic
def magnitudes(typing: Any, wire: Wire, value: Lanes) -> Any:
    """The bits without the sign."""
    result = Lanes(DTYPES["int32"], wire.lanes)
    return result(wire, value), lambda context, builder, signature, arguments: _magnitude(builder, arguments[1])


@intrinsic
def finite_magnitudes(typing: Any, wire: Wire, value: Lanes) -> Any:
    """The bits without the sign; 0 of values that are not finite."""
    result = Lanes(DTYPES["int32"], wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        magnitude = _magnitude(builder, arguments[1])
        return builder.select(_is_finite(builder, arguments[1]), magnitude, _same(magnitude.type, 0))

    return result(wire, value), generate


@intrinsic
def float_of(typing: Any, magnitude: Any) -> Any:
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], vectors.I32), vectors.F32)

    return types.float32(types.int64), generate


@intrinsic
def add_magnitudes(typing: Any, wire: Wire, sums: Lanes, value: Lanes) -> Any:
    """Adds absolute values to float64 lanes; nothing for values that are not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, total, elements = arguments
        absolute = builder.bitcast(_magnitude(builder, elements), elements.type)
        absolute = builder.select(_is_finite(builder, elements), absolute, _same(elements.type, 0.0))
        return builder.fadd(total, builder.fpext(absolute, total.type))

    return sums(wire, sums, value), generate


class Code(types.Type):
    """The integers of a format, known at compile time: `bits` of each; q is from `least` to `most`, and stands for
    (q + offset) * step, with a step of at most `longest`. Where `least` leaves room for it, a value that is not finite
    is one less."""

    def __init__(self, bits: int, least: int, most: int, offset: float, longest: str) -> None:
        self.bits, self.least, self.most, self.offset = bits, least, most, offset
        self.longest = float.fromhex(longest)
        self.missing = least - 1 if least > -(1 << (bits - 1)) else None
        super().__init__(name=f"Code({bits}, {least}, {most}, {offset})")


register_model(Code)(models.OpaqueModel)
typeof_impl.register(Code)(lambda code, context: code)
lower_constant(Code)(lambda context, builder, typ, value: context.get_dummy_value())

EIGHT = Code(8, -127, 127, 0.0, "0x1.020406p+121")
FOUR = Code(4, -7, 7, 0.0, "0x1.249248p+125")
TWO = Code(2, -2, 1, 0.5, "0x1p+127")


def _part(builder: Any, vector: Any, first: int, count: int) -> Any:
    mask = ir.Constant(ir.VectorType(vectors.I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, mask)


@intrinsic
def round_to(
    typing: Any, wire: Wire, code: Any, value: Any, size: Any, index: Any, left: Any, right: Any, nearest: Any
) -> Any:
    """The integers of value / size, rounded at random, or (where `nearest` is not 0) to the nearest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, elements, scalar, first, left_key, right_key, to_nearest = arguments
        words, floats = _words(wire), elements.type

        def same(integer: Any) -> Any:
            return vectors.splat(builder, builder.trunc(integer, vectors.I32), wire.lanes)

        def xor_shifted(x: Any, bits: int) -> Any:
            return builder.xor(x, builder.lshr(x, _same(words, bits)))

        scales = vectors.splat(builder, scalar, wire.lanes)
        finite = _is_finite(builder, elements)
        ratio = builder.fdiv(builder.select(finite, elements, _same(floats, 0.0)), scales)
        if code.offset:  # a scale need not be of these elements' order: what is too large for an integer is held before
            for name, bound in (("minnum", code.most + 1.0), ("maxnum", code.least - 1.0)):
                ratio = vectors.call(builder, name, floats, ratio, _same(floats, bound))
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
        half = builder.icmp_signed("!=", to_nearest, vectors.I64(0))
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
def left_over(typing: Any, wire: Wire, code: Any, value: Any, whole: Any, size: Any) -> Any:
    """Returns the rounding errors of values; 0 of values that are not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, elements, integers, scalar = arguments
        got = _value_of(builder, code, integers, elements.type, scalar)
        rest = builder.fsub(elements, got)
        return builder.select(_is_finite(builder, elements), rest, _same(elements.type, 0.0))

    return value(wire, code, value, whole, types.float32), generate


def _value_of(builder: Any, code: Code, integers: Any, floats: Any, scalar: Any) -> Any:
    numbers = builder.sitofp(integers, floats)
    if code.offset:
        numbers = builder.fadd(numbers, _same(floats, code.offset))
    return builder.fmul(numbers, vectors.splat(builder, scalar, floats.count))


@intrinsic
def put(typing: Any, wire: Wire, code: Any, value: Any, whole: Any, target: Any) -> Any:
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
            return builder.zext(builder.extract_element(integers, vectors.I32(0)), vectors.I64)
        count = wire.lanes * code.bits // 8
        packed = _part(builder, integers, 0, count)
        for number in range(1, 8 // code.bits):
            part = _part(builder, integers, number * count, count)
            packed = builder.or_(packed, builder.shl(part, _same(part.type, number * code.bits)))
        byte = ir.VectorType(_BYTE, count)
        builder.store(builder.trunc(packed, byte), _at(builder, _BYTE, count, address), align=1)
        return vectors.I64(0)

    return types.int64(wire, code, value, whole, types.int64), generate


@intrinsic
def get(typing: Any, wire: Wire, code: Any, address: Any, size: Any) -> Any:
    """The numbers that `put` wrote to an address; of one lane, `address` is its bits themselves. NaN where one was not
    finite."""
    result = Lanes(wire.dtype, wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, source, scalar = arguments
        words = _words(wire)
        if wire.lanes == 1:
            integers = builder.insert_element(
                ir.Constant(words, ir.Undefined), builder.trunc(source, vectors.I32), vectors.I32(0)
            )
        else:
            count = wire.lanes * code.bits // 8
            raw = builder.load(_at(builder, _BYTE, count, source), align=1)
            packed = builder.zext(raw, ir.VectorType(vectors.I32, count))
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
    mask = ir.Constant(ir.VectorType(vectors.I32, 2 * count), list(range(2 * count)))
    return builder.shuffle_vector(first, second, mask)


@intrinsic
def signs_of(typing: Any, wire: Wire, value: Lanes) -> Any:
    """Says which of at most 32 float32 have a sign, in the bits of an integer, the first element's lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[1], _words(wire))
        signs = builder.icmp_signed("<", bits, _same(bits.type, 0))
        return builder.zext(builder.bitcast(signs, ir.IntType(wire.lanes)), vectors.I64)

    return types.int64(wire, value), generate


@intrinsic
def without(typing: Any, wire: Wire, value: Any, size: Any) -> Any:
    """Returns values less `size` with their signs; 0 of values that are not finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, elements, scalar = arguments
        bits = builder.bitcast(elements, _words(wire))
        sign = builder.and_(bits, _same(bits.type, 0x80000000))
        size_bits = vectors.splat(builder, builder.bitcast(scalar, vectors.I32), wire.lanes)
        rest = builder.fsub(elements, builder.bitcast(builder.or_(sign, size_bits), elements.type))
        return builder.select(_is_finite(builder, elements), rest, _same(elements.type, 0.0))

    return value(wire, value, types.float32), generate


@intrinsic
def from_signs(typing: Any, wire: Wire, address: Any, size: Any) -> Any:
    """A float32 with the signs that the bits at an address say."""
    result = Lanes(wire.dtype, wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, scalar = arguments
        raw = ir.IntType(wire.lanes)
        signs = builder.load(builder.inttoptr(source, raw.as_pointer()), align=1)
        signs = builder.zext(builder.bitcast(signs, ir.VectorType(_BIT, wire.lanes)), _words(wire))
        size_bits = vectors.splat(builder, builder.bitcast(scalar, vectors.I32), wire.lanes)
        return builder.bitcast(builder.or_(builder.shl(signs, _same(_words(wire), 31)), size_bits), result.vector)

    return result(wire, types.int64, types.float32), generate


@intrinsic
def doubles(typing: Any, wire: Wire) -> Any:
    result = Lanes(DTYPES["float64"], wire.lanes)
    return result(wire), lambda context, builder, signature, arguments: ir.Constant(result.vector, None)


@intrinsic
def total_of(typing: Any, value: Lanes) -> Any:
    """The sum of float64 lanes, in their order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result = ir.Constant(vectors.F64, 0.0)
        for lane in range(arguments[0].type.count):
            result = builder.fadd(result, builder.extract_element(arguments[0], vectors.I32(lane)))
        return result

    return types.float64(value), generate
