"""Vectors for Numba: `Lanes`, some dozen elements of an array in registers, and the kernels' operations on them.

A plain loop over arrays would be left to LLVM's vectorizer, which has to prove that arrays do not overlap. A reduction
in place does overlap, and it gives up. Blocks through a scratch buffer get around that, but took 20 to 30 % longer on
one thread. With vectors made here, any number of sources is combined in registers, each cache line is read once and
written once, and a branch in the loop (which op, scaled or not) costs nothing.

Only `_kernels` imports this.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import imputils
from numba.extending import models

from fusion_rt.core.dtypes import DType
from fusion_rt.kernels.llvm import vectors

_LANE_BYTES = 128  # of one accumulator: two cache lines; 64 and 256 measured no better
_MAX_LANES = 32
INFINITE = 0x7F800000
"""The bits of infinity: those of a float32 that is not finite, without the sign, are no less."""

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
intrinsic: Any = extending.intrinsic
register_model: Any = extending.register_model
typeof_impl: Any = extending.typeof_impl
lower_constant: Any = imputils.lower_constant


class Wire(types.Type):
    """The type of a wire format, known at compile time: an element type as it is stored, and how many elements one
    `Lanes` takes.

    In a kernel's Python it is a constant of its own type, which takes no memory.
    """

    def __init__(self, dtype: DType, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"Wire({dtype.name}, {lanes})")

    @classmethod
    def wide(cls, dtype: DType) -> Wire:
        """A `Wire` of as many elements at a time as do well on processors with vectors of 16 to 64 bytes."""
        itemsize = 4 if dtype.is_half else dtype.itemsize
        return cls(dtype, min(_LANE_BYTES // itemsize, _MAX_LANES))


class Lanes(types.Type):
    """The elements at hand, as accumulators."""

    def __init__(self, dtype: DType, lanes: int) -> None:
        self.vector = ir.VectorType(vectors.accumulator(dtype), lanes)
        self.is_floating = dtype.is_floating
        self.is_signed = vectors.is_signed(dtype)
        super().__init__(name=f"Lanes({self.vector}, {'signed' if self.is_signed else 'unsigned'})")


@register_model(Wire)
class _WireModel(models.OpaqueModel):
    pass


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, typ: Lanes) -> None:
        super().__init__(manager, typ, typ.vector)  # type: ignore[no-untyped-call]


typeof_impl.register(Wire)(lambda wire, context: wire)
lower_constant(Wire)(lambda context, builder, typ, value: context.get_dummy_value())


# Functions of compiled Python. Addresses are integers; `i` counts elements from there. An intrinsic gives its signature
# and a function that generates the LLVM IR of a call.


@intrinsic
def lanes(typing: Any, wire: Wire) -> Any:
    """The number of elements that one step takes."""
    return types.int64(wire), lambda context, builder, signature, arguments: vectors.I64(wire.lanes)


@intrinsic
def int_at(typing: Any, request: Any, word: Any) -> Any:
    """The 64-bit word of a request as an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.gep(arguments[0], [arguments[1]]))

    return types.int64(request, word), generate


@intrinsic
def float_at(typing: Any, request: Any, word: Any) -> Any:
    """The 64-bit word of a request as a floating-point number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.load(builder.gep(arguments[0], [arguments[1]])), vectors.F64)

    return types.float64(request, word), generate


@intrinsic
def load(typing: Any, wire: Wire, address: Any, i: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, wire, arguments[1], arguments[2])
        return vectors.widen(builder, wire.dtype, builder.load(pointer, align=1))

    return Lanes(wire.dtype, wire.lanes)(wire, address, i), generate


@intrinsic
def store(typing: Any, wire: Wire, address: Any, i: Any, value: Lanes) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, wire, arguments[1], arguments[2])
        builder.store(vectors.narrow(builder, wire.dtype, arguments[3]), pointer, align=1)
        return context.get_dummy_value()

    return types.void(wire, address, i, value), generate


def _pointer(builder: Any, wire: Wire, address: Any, i: Any) -> Any:
    stored = vectors.stored(wire.dtype)
    first = builder.gep(builder.inttoptr(address, stored.as_pointer()), [i])
    return builder.bitcast(first, ir.VectorType(stored, wire.lanes).as_pointer())


@intrinsic
def add(typing: Any, left: Lanes, right: Lanes) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return (builder.fadd if left.is_floating else builder.add)(*arguments)

    return left(left, right), generate


@intrinsic
def multiply(typing: Any, left: Lanes, right: Lanes) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return (builder.fmul if left.is_floating else builder.mul)(*arguments)

    return left(left, right), generate


def _extremum(floating: str, comparison: str) -> Any:
    @intrinsic
    def extremum(typing: Any, left: Lanes, right: Lanes) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if left.is_floating:  # IEEE 754-2019: NaN wins, and -0 is less than +0
                return vectors.call(builder, floating, left.vector, *arguments)
            compare = builder.icmp_signed if left.is_signed else builder.icmp_unsigned
            return builder.select(compare(comparison, *arguments), *arguments)

        return left(left, right), generate

    return extremum


minimum = _extremum("minimum", "<")
maximum = _extremum("maximum", ">")


@intrinsic
def scale(typing: Any, wire: Wire, value: Lanes, factor: Any) -> Any:
    """Times a float64. Floating types round the factor to their accumulator first; integers multiply in float64,
    truncate toward zero, hold the result within int64 (NaN is 0), and wrap it around."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, elements, scalar = arguments
        if wire.dtype.is_floating:
            scalar = scalar if elements.type.element == vectors.F64 else builder.fptrunc(scalar, vectors.F32)
            return builder.fmul(elements, vectors.splat(builder, scalar, wire.lanes))
        product = builder.fmul(
            vectors.to_double(builder, wire.dtype, elements), vectors.splat(builder, scalar, wire.lanes)
        )
        longs = vectors.call(builder, "fptosi.sat", ir.VectorType(vectors.I64, wire.lanes), product)
        return vectors.from_long(builder, wire.dtype, longs)

    return value(wire, value, factor), generate


@intrinsic
def divide(typing: Any, wire: Wire, value: Lanes, divisor: Any) -> Any:
    """Divides by an int64 above zero; integers exactly, truncated toward zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, elements, scalar = arguments
        if wire.dtype.is_floating:
            scalar = builder.sitofp(scalar, elements.type.element)
            return builder.fdiv(elements, vectors.splat(builder, scalar, wire.lanes))
        longs = vectors.to_long(builder, wire.dtype, elements)
        return vectors.from_long(builder, wire.dtype, builder.sdiv(longs, vectors.splat(builder, scalar, wire.lanes)))

    return value(wire, value, divisor), generate


@intrinsic
def cast(typing: Any, wire: Wire, value: Lanes) -> Any:
    """Casts from one floating accumulator to that of `wire`."""
    target = Lanes(wire.dtype, wire.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == target:
            return arguments[1]
        return (builder.fpext if target.vector.element == vectors.F64 else builder.fptrunc)(arguments[1], target.vector)

    return target(wire, value), generate


@intrinsic
def zeros(typing: Any, wire: Wire) -> Any:
    result = Lanes(wire.dtype, wire.lanes)
    return result(wire), lambda context, builder, signature, arguments: ir.Constant(result.vector, None)


@intrinsic
def total(typing: Any, wire: Wire, value: Lanes) -> Any:
    """The sum of floating elements as a float64, added in float64 in their order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result = ir.Constant(vectors.F64, 0.0)
        for lane in range(wire.lanes):
            element = builder.extract_element(arguments[1], vectors.I32(lane))
            result = builder.fadd(
                result, element if element.type == vectors.F64 else builder.fpext(element, vectors.F64)
            )
        return result

    return types.float64(wire, value), generate


@intrinsic
def hits(typing: Any, wire: Wire, value: Lanes, threshold: Any) -> Any:
    """Says which of at most 32 float32 have a magnitude (the bits without the sign) of at least `threshold`, as the
    bits of an integer, the first element's lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, elements, scalar = arguments
        words = ir.VectorType(vectors.I32, wire.lanes)
        magnitudes = builder.and_(builder.bitcast(elements, words), ir.Constant(words, [0x7FFFFFFF] * wire.lanes))
        least = vectors.splat(builder, builder.trunc(scalar, vectors.I32), wire.lanes)
        found = builder.icmp_unsigned(">=", magnitudes, least)
        return builder.zext(builder.bitcast(found, ir.IntType(wire.lanes)), vectors.I64)

    return types.int64(wire, value, types.int64), generate


@intrinsic
def where_finite(typing: Any, wire: Wire, tested: Lanes, value: Any, other: Any) -> Any:
    """`value` where the float32 in `tested` is finite, and `other` elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, elements, chosen, instead = arguments
        words = ir.VectorType(vectors.I32, wire.lanes)
        magnitudes = builder.and_(builder.bitcast(elements, words), ir.Constant(words, [0x7FFFFFFF] * wire.lanes))
        finite = builder.icmp_signed("<", magnitudes, ir.Constant(words, [INFINITE] * wire.lanes))
        return builder.select(finite, chosen, instead)

    return tested(wire, tested, value, other), generate


@intrinsic
def count_hits(typing: Any, wire: Wire, counts: Lanes, value: Lanes, threshold: Any) -> Any:
    """Adds 1 to the int32 lanes in which a float32 has a magnitude (the bits without the sign) of at least
    `threshold`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, sums, elements, scalar = arguments
        magnitudes = builder.and_(
            builder.bitcast(elements, sums.type), ir.Constant(sums.type, [0x7FFFFFFF] * wire.lanes)
        )
        least = vectors.splat(builder, builder.trunc(scalar, vectors.I32), wire.lanes)
        found = builder.icmp_unsigned(">=", magnitudes, least)
        return builder.sub(sums, builder.sext(found, sums.type))

    return counts(wire, counts, value, types.int64), generate


def _over_lanes(operation: str) -> Any:
    """The function that combines int32 lanes into an int64 by LLVM's `llvm.vector.reduce.OPERATION`."""

    @intrinsic
    def combined(typing: Any, value: Lanes) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = arguments[0].type
            name = f"llvm.vector.reduce.{operation}.v{vector.count}i32"
            function = builder.module.globals.get(name)
            if function is None:
                function = ir.Function(builder.module, ir.FunctionType(vectors.I32, [vector]), name)
            return builder.zext(builder.call(function, arguments), vectors.I64)

        return types.int64(value), generate

    return combined


sum_of = _over_lanes("add")
largest_of = _over_lanes("smax")
