"""The kernels, which Numba compiles, and the program that compiles them.

`python -m fusion_rt.kernels._kernels NAME...` writes the machine code of kernels to its standard output. `machine_code`
runs it, keeps the result, and says how a kernel is called; no other process has to import Numba.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from numba import types

from fusion_rt.core.dtypes import DType
from fusion_rt.kernels import _coding, _cosines, _low_rank, _ordinary, _quantisation, _selection
from fusion_rt.kernels.llvm.lanes import (
    Wire,
    add,
    cast,
    divide,
    float_at,
    int_at,
    lanes,
    load,
    maximum,
    minimum,
    multiply,
    scale,
    store,
)
from fusion_rt.kernels.machine_code import MIN, PRODUCT, REQUEST_WORDS, SUM, write_record

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
njit: Any = numba.njit
pointer_to: Any = types.CPointer

_REDUCE = (pointer_to(types.int64),)
_CONVERT = (types.uint64, types.uint64, types.int64)
_NAMED: dict[str, Callable[..., None]] = {
    kernel.__name__.replace("_", "-"): kernel
    for part in (_selection, _coding, _quantisation, _low_rank, _cosines, _ordinary)
    for kernel in part.KERNELS
}


@njit
def _combine(op, left, right):  # type: ignore[no-untyped-def]
    if op == SUM:
        return add(left, right)
    if op == PRODUCT:
        return multiply(left, right)
    if op == MIN:
        return minimum(left, right)
    return maximum(left, right)


@njit
def _reduce(first, wire, request):  # type: ignore[no-untyped-def]
    """Reduces as many steps of `lanes(wire)` elements as fit; returns the first element that was left."""
    op, sources, outputs = int_at(request, 0), int_at(request, 1), int_at(request, 2)
    count, divisor = int_at(request, 3), int_at(request, 4)
    prescale, postscale = float_at(request, 5), float_at(request, 6)
    i = first
    while i + lanes(wire) <= count:
        value = load(wire, int_at(request, REQUEST_WORDS), i)
        if prescale != 1.0:
            value = scale(wire, value, prescale)
        for j in range(1, sources):
            other = load(wire, int_at(request, REQUEST_WORDS + j), i)
            if prescale != 1.0:
                other = scale(wire, other, prescale)
            value = _combine(op, value, other)
        if postscale != 1.0:
            value = scale(wire, value, postscale)
        if divisor != 1:
            value = divide(wire, value, divisor)
        for j in range(sources, sources + outputs):
            store(wire, int_at(request, REQUEST_WORDS + j), i, value)
        i += lanes(wire)
    return i


@njit
def _convert(first, source_wire, target_wire, source, target, count):  # type: ignore[no-untyped-def]
    i = first
    while i + lanes(source_wire) <= count:
        store(target_wire, target, i, cast(target_wire, load(source_wire, source, i)))
        i += lanes(source_wire)
    return i


def _reduction(dtype: DType) -> Callable[..., None]:
    wide, single = Wire.wide(dtype), Wire(dtype, 1)

    def kernel(request):  # type: ignore[no-untyped-def]
        _reduce(_reduce(0, wide, request), single, request)

    return kernel


def _conversion(source_dtype: DType, target_dtype: DType) -> Callable[..., None]:
    step = min(Wire.wide(source_dtype).lanes, Wire.wide(target_dtype).lanes)
    source_wide, target_wide = Wire(source_dtype, step), Wire(target_dtype, step)
    source_single, target_single = Wire(source_dtype, 1), Wire(target_dtype, 1)

    def kernel(source, target, count):  # type: ignore[no-untyped-def]
        done = _convert(0, source_wide, target_wide, source, target, count)
        _convert(done, source_single, target_single, source, target, count)

    return kernel


def _source(name: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
    if name in _NAMED:
        return _NAMED[name], (types.int64,)
    kind, *dtype_names = name.split("-")
    dtypes = [DType.named(dtype_name) for dtype_name in dtype_names]
    return (_reduction(*dtypes), _REDUCE) if kind == "reduce" else (_conversion(*dtypes), _CONVERT)


def machine_code(name: str) -> bytes:
    """An object file with the kernel `name`, such as "reduce-float32", "convert-float32-float16" or "collect", as its
    symbol."""
    function, signature = _source(name)
    compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    compiled.compile(signature)
    module = llvmlite.binding.parse_assembly(compiled.inspect_llvm(signature))
    missing = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if missing:
        raise RuntimeError(f"kernel {name} is not complete by itself: it calls {', '.join(missing)}")
    for symbol in module.functions:  # what the kernel calls is linkonce, so this is the kernel
        if symbol.linkage == llvmlite.binding.Linkage.external and not symbol.is_declaration:
            symbol.name = name
    target = llvmlite.binding.Target.from_default_triple().create_target_machine(
        cpu=llvmlite.binding.get_host_cpu_name(),
        features=llvmlite.binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
    )
    code: bytes = target.emit_object(module)
    return code


if __name__ == "__main__":
    for kernel_name in sys.argv[1:]:
        write_record(sys.stdout.buffer, kernel_name, machine_code(kernel_name))
