"""Reduction and copies of arrays that are in the memory of other processes, beside those of this one.

`Remote` stands for such an array. It can be sliced, so that threads share the work as they do with arrays of this
process; the work on it takes one pass, block by block, without the interpreter (`_ordinary`).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from fusion_rt.core.dtypes import DType
from fusion_rt.host.process_memory import CALLS, Process, ProcessMemoryError
from fusion_rt.kernels import cpu
from fusion_rt.kernels.cpu import PAGE_BYTES, Array, Routine
from fusion_rt.kernels.machine_code import PLACES, REQUEST, REQUEST_WORDS

_SCRATCH_BYTES = 1 << 19  # of all sources; a core's share of a cache has room for it
_LEAST_BLOCK, _MOST_BLOCK = 1 << 16, 1 << 18  # bytes; fewer cost more system calls

_INT64_BYTES = 8

_through_scratch = Routine("through-scratch")
ROUTINES = (_through_scratch.name,)


@dataclass(frozen=True, slots=True)
class Remote:
    """A contiguous 1-D array in the memory of another process.

    Attributes:
        process: whose memory it is in.
        address: of its first element there.
        dtype: of its elements, as they are stored.
        size: number of elements.
    """

    process: Process
    address: int
    dtype: np.dtype[Any]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Remote:
        low, high, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"an array in another process can only be sliced by consecutive elements, not by {part}")
        return Remote(self.process, self.address + low * self.dtype.itemsize, self.dtype, max(0, high - low))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def view(self, dtype: Any) -> Remote:
        """Returns the same bytes as elements of another type."""
        storage = np.dtype(dtype)
        return Remote(self.process, self.address, storage, self.nbytes // storage.itemsize)


Operand: TypeAlias = Array | Remote


def are_here(operands: Sequence[Operand]) -> TypeGuard[Sequence[Array]]:
    """Returns whether all these arrays are in this process."""
    return Remote not in map(type, operands)


def are_same(first: Operand, second: Operand) -> bool:
    """Returns whether two arrays begin at one place: views of it are different objects."""
    if isinstance(first, Remote) or isinstance(second, Remote):
        return (
            isinstance(first, Remote)
            and isinstance(second, Remote)
            and (first.process, first.address) == (second.process, second.address)
        )
    return int(first.ctypes.data) == int(second.ctypes.data)


def reduce(
    op: str,
    dtype: DType,
    sources: Sequence[Operand],
    outputs: Sequence[Operand],
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    divisor: int = 1,
) -> None:
    """Reduces as `cpu.reduce` does, with the same bits, where some of the arrays are in other processes.

    Outputs in other processes may be written before all sources are read: an output is a source, or overlaps none.

    Raises:
        ProcessMemoryError: the memory of a process cannot be read or written. Outputs are undefined then.
        ValueError, KernelError: as of `cpu.reduce`.
    """
    here = max(1, sum(not isinstance(output, Remote) for output in outputs))
    code = cpu.check_reduction(op, dtype, len(sources), len(outputs), prescale, postscale, divisor)
    if code is None or (divisor != 1 and not dtype.is_floating and dtype.itemsize < _INT64_BYTES):
        step = _MOST_BLOCK // dtype.itemsize
        for low in range(0, len(sources[0]), step):
            part = slice(low, low + step)
            taken = [_taken(source[part]) for source in sources]
            given = np.empty_like(taken[0])
            cpu.reduce(op, dtype, taken, [given], prescale=prescale, postscale=postscale, divisor=divisor)
            copy(given, [output[part] for output in outputs])
        return
    request: Array = np.zeros(REQUEST_WORDS + len(sources) + here, np.int64)
    REQUEST.pack_into(request.data, 0, code, len(sources), here, 0, divisor, prescale, postscale)
    _run(cpu.reduction_at(dtype), request, sources, outputs)


def copy(source: Operand, outputs: Sequence[Operand]) -> None:
    """Copies an array to others of the same type and length; any of them may be in other processes.

    Raises:
        ProcessMemoryError: the memory of a process cannot be read or written. Outputs are undefined then.
    """
    here = [output for output in outputs if not isinstance(output, Remote)]
    there = [output for output in outputs if isinstance(output, Remote)]
    if isinstance(source, Remote) and here:
        _check(here[0], source.size, source.dtype)
        source.process.read(source.address, here[0].ctypes.data, source.nbytes)
        source = here.pop(0)
    if isinstance(source, Remote):
        _run(0, np.zeros(REQUEST_WORDS + 1, np.int64), [source], there)
        return
    for output in here:
        np.copyto(output, source)
    for target in there:
        _check(target, len(source), source.dtype)
        target.process.write(target.address, source.ctypes.data, target.nbytes)


def _taken(source: Operand) -> Array:
    """Returns an array in this process with the same elements; itself if it is here."""
    if not isinstance(source, Remote):
        return source
    values: Array = np.empty(len(source), source.dtype)
    copy(source, [values])
    return values


def _run(reduction: int, request: Array, sources: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    """Calls the kernel for all elements. `machine_code` describes the request.

    Args:
        reduction: the address of a kernel; 0: the only source is copied.
        request: of that kernel, which has room for addresses.
    """
    size, dtype = len(sources[0]), sources[0].dtype
    places = []
    for operand in (*sources, *outputs):
        _check(operand, size, dtype)
        if isinstance(operand, Remote):
            operand.process.check()
            places += [operand.process.pid, operand.address]
        else:
            places += [0, operand.ctypes.data]
    block = max(_LEAST_BLOCK, min(_MOST_BLOCK, _SCRATCH_BYTES // len(sources) // PAGE_BYTES * PAGE_BYTES))
    scratch = _scratch.of(block * len(sources))
    head = [0, reduction, CALLS.reads, CALLS.writes, size * dtype.itemsize, block, dtype.itemsize]
    head += [len(sources), len(outputs), request.ctypes.data, scratch.ctypes.data]
    failed = int(_through_scratch(*head, *(0 for _ in range(PLACES - len(head))), *places)[0])
    if failed >= 0:
        raise _why((*sources, *outputs)[failed], failed < len(sources))


def _check(operand: Operand, size: int, dtype: np.dtype[Any]) -> None:
    plain = isinstance(operand, Remote) or (operand.ndim == 1 and operand.flags.c_contiguous)
    if len(operand) != size or operand.dtype != dtype or not plain:
        raise ValueError(f"an array of {len(operand)} {operand.dtype} does not go with {size} {dtype} in a row")


def _why(operand: Operand, read: bool) -> ProcessMemoryError:
    """Finds out why the kernel, which does not know it itself, could not read (or write) an array."""
    assert isinstance(operand, Remote)
    process, block, number = operand.process, np.empty(_MOST_BLOCK, np.uint8), 0
    for at in range(0, operand.nbytes, len(block)):
        size = min(len(block), operand.nbytes - at)
        number = number or CALLS.move(CALLS.reads, process.pid, block.ctypes.data, operand.address + at, size)
    verb = "read" if read else "written"
    return process.refused(verb, operand.address, operand.nbytes, number or errno.EFAULT)


class _Scratch(threading.local):
    """The scratch memory of each thread, which grows as needed, and whose pages stay warm."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> Array:
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory


_scratch = _Scratch()
