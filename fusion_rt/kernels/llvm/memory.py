"""Memory by address for Numba: reads and writes of the kernels that look at single elements.

Addresses are integers, and `i` counts elements of the width in a function's name from there, as in `lanes`. Nothing is
aligned, and nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types

from fusion_rt.kernels.llvm import vectors

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
intrinsic: Any = extending.intrinsic


def _pointer(builder: Any, stored: Any, address: Any, i: Any) -> Any:
    return builder.gep(builder.inttoptr(address, stored.as_pointer()), [i])


def _peek(stored: Any, result: Any) -> Any:
    @intrinsic
    def peek(typing: Any, address: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_pointer(builder, stored, *arguments), align=1)
            return builder.zext(value, vectors.I64) if result == types.int64 and stored != vectors.I64 else value

        return result(types.int64, types.int64), generate

    return peek


def _poke(stored: Any, argument: Any) -> Any:
    @intrinsic
    def poke(typing: Any, address: Any, i: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, i, value = arguments
            if argument == types.int64 and stored != vectors.I64:
                value = builder.trunc(value, stored)
            builder.store(value, _pointer(builder, stored, address, i), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, argument), generate

    return poke


# Integers narrower than 64 bits are unsigned. An address and an index have to be int64 already.
peek8, poke8 = _peek(ir.IntType(8), types.int64), _poke(ir.IntType(8), types.int64)
peek32, poke32 = _peek(vectors.I32, types.int64), _poke(vectors.I32, types.int64)
peek64, poke64 = _peek(vectors.I64, types.int64), _poke(vectors.I64, types.int64)
peek_float, poke_float = _peek(vectors.F32, types.float32), _poke(vectors.F32, types.float32)
peek_double, poke_double = _peek(vectors.F64, types.float64), _poke(vectors.F64, types.float64)


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Counts the low bits of an int64 that are 0; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.int64), generate


@intrinsic
def shift_right(typing: Any, word: Any, bits: Any) -> Any:
    """An int64 as 64 bits without a sign; `bits` from 0 to 63."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(*arguments)

    return types.int64(types.int64, types.int64), generate
