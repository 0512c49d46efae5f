"""The kernel that reduces and copies memory of other processes, which Numba compiles: see `ordinary`, which calls it.

Block by block: parts of other processes are read into scratch memory that stays in the processor's cache, reduced there
by the kernel of their type, and the result is written to all who want it. The interpreter takes no part in between.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import extending, types

from fusion_rt.kernels.llvm import vectors
from fusion_rt.kernels.llvm.memory import peek64, poke64
from fusion_rt.kernels.machine_code import PLACES, REQUEST_WORDS, UNUSED, VECTORS

# Numba's annotations describe ordinary functions; what these make of a function has another signature.
intrinsic: Any = extending.intrinsic
njit: Any = numba.njit

_I8_POINTER = ir.IntType(8).as_pointer()
_TRANSFER = ir.FunctionType(vectors.I64, [vectors.I32, vectors.I64, vectors.I64, vectors.I64, vectors.I64, vectors.I64])
_REDUCTION = ir.FunctionType(vectors.I32, [_I8_POINTER, _I8_POINTER, vectors.I64])


@intrinsic
def transfer(typing: Any, function: Any, pid: Any, local: Any, remote: Any) -> Any:
    """Calls process_vm_readv or process_vm_writev, which is at `function`, with one iovec on each side."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, pid, local, remote = arguments
        pointer = builder.inttoptr(function, _TRANSFER.as_pointer())
        one, zero = vectors.I64(1), vectors.I64(0)
        return builder.call(pointer, [builder.trunc(pid, vectors.I32), local, one, remote, one, zero])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def call_reduction(typing: Any, function: Any, unused: Any, request: Any) -> Any:
    """Calls the kernel of a reduction, which is at `function`; it may write 16 bytes at `unused`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, unused, request = arguments
        pointer = builder.inttoptr(function, _REDUCTION.as_pointer())
        first = builder.inttoptr(unused, _I8_POINTER)
        second = builder.inttoptr(builder.add(unused, vectors.I64(8)), _I8_POINTER)
        return builder.sext(builder.call(pointer, [first, second, request]), vectors.I64)

    return types.int64(types.int64, types.int64, types.int64), generate


@njit
def _move(function, pid, here, there, nbytes, vectors):  # type: ignore[no-untyped-def]
    """Moves bytes between this process and another one; returns how many it moved before the kernel refused."""
    done = 0
    while done < nbytes:
        poke64(vectors, 0, here + done)
        poke64(vectors, 1, nbytes - done)
        poke64(vectors, 2, there + done)
        poke64(vectors, 3, nbytes - done)
        moved = transfer(function, pid, vectors, vectors + 16)
        if moved <= 0:
            return done
        done += moved
    return done


def through_scratch(request):  # type: ignore[no-untyped-def]
    reduction, reads, writes = peek64(request, 1), peek64(request, 2), peek64(request, 3)
    nbytes, block, itemsize = peek64(request, 4), peek64(request, 5), peek64(request, 6)
    sources, outputs, inner = peek64(request, 7), peek64(request, 8), peek64(request, 9)
    scratch, vectors, unused = peek64(request, 10), request + 8 * VECTORS, request + 8 * UNUSED
    places = request + 8 * PLACES
    done = 0
    while done < nbytes:
        size = min(block, nbytes - done)
        for j in range(sources):
            pid, address = peek64(places, 2 * j), peek64(places, 2 * j + 1) + done
            if pid:
                here = scratch + j * block
                if _move(reads, pid, here, address, size, vectors) != size:
                    poke64(request, 0, j)
                    return
                address = here
            poke64(inner, REQUEST_WORDS + j, address)
        result = peek64(inner, REQUEST_WORDS)
        if reduction:
            # To all outputs of this process at once, or to scratch memory, which may be that of the first source.
            result = scratch
            at = REQUEST_WORDS + sources
            poke64(inner, at, result)
            for j in range(sources, sources + outputs):
                if not peek64(places, 2 * j):
                    result = peek64(places, 2 * j + 1) + done
                    poke64(inner, at, result)
                    at += 1
            poke64(inner, 2, max(1, at - REQUEST_WORDS - sources))
            poke64(inner, 3, size // itemsize)
            call_reduction(reduction, unused, inner)
        for j in range(sources, sources + outputs):
            pid = peek64(places, 2 * j)
            if pid and _move(writes, pid, result, peek64(places, 2 * j + 1) + done, size, vectors) != size:
                poke64(request, 0, j)
                return
        done += size
    poke64(request, 0, -1)


KERNELS = (through_scratch,)
