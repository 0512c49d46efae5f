"""Conversions of vectors between stored and accumulated elements, as LLVM IR; a single element is a vector of one.

Functions take an `IRBuilder` and values, and give the value of the result.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir

from fusion_rt.core.dtypes import DType

I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def stored(dtype: DType) -> Any:
    """The type of an element in memory."""
    return ir.IntType(8 * dtype.itemsize) if dtype.is_half or not dtype.is_floating else accumulator(dtype)


def accumulator(dtype: DType) -> Any:
    """The type in which elements are combined."""
    if not dtype.is_floating:
        return stored(dtype)
    return F64 if dtype.itemsize == 8 else F32


def is_signed(dtype: DType) -> bool:
    return dtype.storage.kind == "i"


def widen(builder: Any, dtype: DType, raw: Any) -> Any:
    """Elements as stored to accumulators; exact."""
    lanes = raw.type.count
    if dtype.name == "bool":
        return builder.zext(builder.icmp_unsigned("!=", raw, _constant(raw.type, 0)), raw.type)
    if dtype.name == "bfloat16":
        words = ir.VectorType(I32, lanes)
        return builder.bitcast(builder.shl(builder.zext(raw, words), _constant(words, 16)), ir.VectorType(F32, lanes))
    if dtype.name == "float16":
        if not _processor_converts_float16():
            return _widen_float16(builder, raw)
        return builder.fpext(builder.bitcast(raw, ir.VectorType(HALF, lanes)), ir.VectorType(F32, lanes))
    return raw


def narrow(builder: Any, dtype: DType, value: Any) -> Any:
    """Accumulators to elements as stored, rounded to the nearest, ties to even."""
    lanes = value.type.count
    if dtype.name == "bfloat16":
        return _narrow_bfloat16(builder, value)
    if dtype.name == "float16":
        if not _processor_converts_float16():
            return _narrow_float16(builder, value)
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(HALF, lanes)), ir.VectorType(I16, lanes))
    return value


def to_double(builder: Any, dtype: DType, value: Any) -> Any:
    """Integers of `dtype` to float64."""
    return (builder.sitofp if is_signed(dtype) else builder.uitofp)(value, ir.VectorType(F64, value.type.count))


def to_long(builder: Any, dtype: DType, value: Any) -> Any:
    """Integers of `dtype` to int64; exact."""
    if value.type.element == I64:
        return value
    return (builder.sext if is_signed(dtype) else builder.zext)(value, ir.VectorType(I64, value.type.count))


def from_long(builder: Any, dtype: DType, value: Any) -> Any:
    """int64 to integers of `dtype`, wrapped around."""
    if accumulator(dtype) == I64:
        return value
    return builder.trunc(value, ir.VectorType(accumulator(dtype), value.type.count))


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector of `lanes` times the same value."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Calls the LLVM intrinsic `name`, which is overloaded on the different types among its result and arguments."""
    overloads = dict.fromkeys([result, *(argument.type for argument in arguments)])
    short = {F32: "f32", F64: "f64", I64: "i64"}
    full_name = ".".join(["llvm", name, *(f"v{vector.count}{short[vector.element]}" for vector in overloads)])
    function = builder.module.globals.get(full_name)
    if function is None:
        signature = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, signature, full_name)
    return builder.call(function, arguments)


def _constant(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _processor_converts_float16() -> bool:
    """Says whether there are instructions for it; without them LLVM calls a library that is not there."""
    if llvmlite.binding.get_process_triple().startswith("aarch64"):
        return True
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c"))


def _narrow_bfloat16(builder: Any, value: Any) -> Any:
    words = ir.VectorType(I32, value.type.count)
    bits = builder.bitcast(value, words)
    high = builder.lshr(bits, _constant(words, 16))
    odd = builder.and_(high, _constant(words, 1))
    rounded = builder.lshr(builder.add(builder.add(bits, _constant(words, 0x7FFF)), odd), _constant(words, 16))
    quiet = builder.or_(high, _constant(words, 0x40))  # adding could carry a NaN into infinity or zero
    result = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(result, ir.VectorType(I16, value.type.count))


def _widen_float16(builder: Any, raw: Any) -> Any:
    """Source: Fabian Giesen, half_to_float_fast5, public domain."""
    words, floats = ir.VectorType(I32, raw.type.count), ir.VectorType(F32, raw.type.count)
    bits = builder.zext(raw, words)
    magnitude = builder.and_(bits, _constant(words, 0x7FFF))
    shifted = builder.bitcast(builder.shl(magnitude, _constant(words, 13)), floats)
    scaled = builder.bitcast(builder.fmul(shifted, _constant(floats, 2.0**112)), words)  # exact, also for denormals
    special = builder.icmp_unsigned(">=", magnitude, _constant(words, 0x7C00))
    scaled = builder.or_(scaled, builder.select(special, _constant(words, 0x7F800000), _constant(words, 0)))
    sign = builder.shl(builder.and_(bits, _constant(words, 0x8000)), _constant(words, 16))
    return builder.bitcast(builder.or_(scaled, sign), floats)


def _narrow_float16(builder: Any, value: Any) -> Any:
    """Source: Fabian Giesen, float_to_half_fast3_rtne, public domain."""
    words, floats = ir.VectorType(I32, value.type.count), ir.VectorType(F32, value.type.count)
    bits = builder.bitcast(value, words)
    sign = builder.and_(bits, _constant(words, 0x80000000))
    magnitude = builder.xor(bits, sign)
    odd = builder.and_(builder.lshr(magnitude, _constant(words, 13)), _constant(words, 1))
    rebiased = builder.add(builder.add(magnitude, _constant(words, 0xFFF - ((127 - 15) << 23))), odd)
    normal = builder.lshr(rebiased, _constant(words, 13))
    # Adding 0.5 moves the mantissa of a result below 2**-14 to its place, and the addition rounds it.
    added = builder.fadd(builder.bitcast(magnitude, floats), _constant(floats, 0.5))
    denormal = builder.sub(builder.bitcast(added, words), _constant(words, 0x3F000000))
    is_nan = builder.icmp_unsigned(">", magnitude, _constant(words, 0x7F800000))
    special = builder.select(is_nan, _constant(words, 0x7E00), _constant(words, 0x7C00))
    small = builder.icmp_unsigned("<", magnitude, _constant(words, 0x38800000))
    large = builder.icmp_unsigned(">=", magnitude, _constant(words, 0x47800000))
    result = builder.select(large, special, builder.select(small, denormal, normal))
    result = builder.or_(result, builder.lshr(sign, _constant(words, 16)))
    return builder.trunc(result, ir.VectorType(I16, value.type.count))
