"""Reduction and conversion of arrays on the CPU: one pass over memory, on the thread that calls, any number at once.

Kernels come as machine code (`machine_code`) when they are first used: in about 50 ms from disk, in about 2 s where
they have to be compiled; `prepare` does that ahead of time.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fusion_rt.core import scratch
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels.machine_code import MAX, MIN, PRODUCT, REQUEST, SUM, MachineCode, cache_folders

Array: TypeAlias = npt.NDArray[Any]

PAGE_BYTES = 4096
_WIDENED = 1 << 16  # elements at a time
_INT64 = DTYPES["int64"]

_OPS = {"sum": SUM, "product": PRODUCT, "min": MIN, "max": MAX}
_BITWISE: dict[str, Any] = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
_BLOCK = 1 << 16  # bytes that numpy combines at a time
_BOOL_OPS = {"sum": MAX, "product": MIN, "min": MIN, "max": MAX}  # of zeros and ones: or, and

_code = MachineCode(cache_folders())


def reduce(
    op: str,
    dtype: DType,
    sources: Sequence[Array],
    outputs: Sequence[Array],
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    divisor: int = 1,
) -> None:
    """Every output becomes op(prescale * source, for all sources) * postscale / divisor, element by element.

    Sources are combined in their order, and each element by itself: how a range is divided among calls does not change
    a bit of the result (but which of two different NaNs survives).

    float16 and bfloat16 are computed in float32 and rounded once, to the nearest, ties to even; scale factors are first
    rounded to the type that is computed in. min and max give NaN where any source is NaN, and order -0 before +0.
    Integers wrap around; their product with a scale factor is truncated toward zero; the division by `divisor` is exact
    and truncated toward zero, and its dividend was added up in int64 (`reduce_widened`). A bool is true when its
    byte is not 0: sum and max are "or", product and min are "and", outputs hold 0 or 1.

    Args:
        op: "sum", "product", "min" or "max"; for integers and bool also "band", "bor" and "bxor", without scaling. An
            average is a sum with `divisor` = the number of contributions.
        dtype: of the elements.
        sources: one or more arrays, 1-D, contiguous, of `dtype.storage`, all of n elements.
        outputs: one or more such arrays, writable. Each may be exactly one of the sources; it may not overlap a source
            in part, nor another output unless they are the same.
        prescale, postscale: factors; 1 for bool.
        divisor: from 1 to 2**63 - 1; 1 for bool.

    Raises:
        ValueError: an argument is not as described above.
        KernelError: this is the first use, and the kernel could not be compiled.
    """
    code = check_reduction(op, dtype, len(sources), len(outputs), prescale, postscale, divisor)
    n = len(sources[0])
    addresses = [_address(array, dtype, n) for array in sources]
    addresses += [_address(array, dtype, n, True) for array in outputs]
    if n == 0:
        return
    if code is None:
        _combine_bits(_BITWISE[op], dtype, sources, outputs)
        return
    if divisor != 1 and not dtype.is_floating and dtype.itemsize < _INT64.itemsize:
        reduce_widened(op, sources, outputs, prescale, postscale, divisor)
        return
    kernel = _reductions.get(dtype.name) or _reduction(dtype)
    request = REQUEST.pack(code, len(sources), len(outputs), n, divisor, prescale, postscale)
    request += _address_list(len(addresses)).pack(*addresses)
    run = kernel.holding_gil if n * dtype.itemsize * len(addresses) < _SMALL_BYTES else kernel.without_gil
    run(_UNUSED, _UNUSED, request)


@lru_cache  # the same few in every step
def check_reduction(
    op: str, dtype: DType, sources: int, outputs: int, prescale: float, postscale: float, divisor: int
) -> int | None:
    """Returns the number of a reduction's op in kernels; None if it combines bits, which no kernel does.

    Raises:
        ValueError: as of `reduce`, but for its arrays.
    """
    code = (_BOOL_OPS if dtype.name == "bool" else _OPS).get(op)
    plain = prescale == postscale == divisor == 1
    if code is None and op not in _BITWISE:
        raise ValueError(f"there is no reduction {op!r}; choose one of {', '.join((*_OPS, *_BITWISE))}")
    if code is None and (dtype.is_floating or not plain):
        raise ValueError(f"{op} is for integers and bool that are not scaled or averaged; this is {dtype}")
    if not (sources and outputs):
        raise ValueError(f"a reduction needs a source and an output; it got {sources} and {outputs}")
    if divisor < 1:
        raise ValueError(f"the divisor of a reduction is the number of contributions, so at least 1, not {divisor}")
    if dtype.name == "bool" and not plain:
        raise ValueError("bool tensors cannot be scaled or averaged; reduce them with op sum (or) or product (and)")
    return code


def reduction_at(dtype: DType) -> int:
    """Returns the address of the kernel that reduces elements of a type, for other kernels. Raises `KernelError`."""
    return _code.address(f"reduce-{dtype.name}")


def reduce_widened(
    op: str, sources: Sequence[Array], outputs: Sequence[Array], prescale: float, postscale: float, divisor: int
) -> None:
    """Reduces integers of any width, which are combined as int64; in outputs they wrap around."""
    for low in range(0, len(sources[0]), _WIDENED):
        part = slice(low, low + _WIDENED)
        wide = [source[part].astype(np.int64, copy=False) for source in sources]
        result = np.empty(len(wide[0]), np.int64)
        reduce(op, _INT64, wide, [result], prescale=prescale, postscale=postscale, divisor=divisor)
        for output in outputs:
            output[part] = result


def _combine_bits(bitwise: Any, dtype: DType, sources: Sequence[Array], outputs: Sequence[Array]) -> None:
    step = _BLOCK // dtype.itemsize
    for low in range(0, len(sources[0]), step):
        parts = [source[low : low + step] for source in sources]
        if dtype.name == "bool":
            parts = [(part != 0).view(np.uint8) for part in parts]
        result = parts[0].copy()
        for part in parts[1:]:
            bitwise(result, part, out=result)
        for output in outputs:
            output[low : low + step] = result


def convert(source: Array, source_dtype: DType, target: Array, target_dtype: DType) -> None:
    """Converts between floating types, rounding to the nearest, ties to even; values out of range become infinite.

    float64 becomes a half type by way of float32, so it is rounded twice. A NaN stays a NaN.

    Args:
        source, target: 1-D, contiguous, of their `dtype.storage`, n elements each, not overlapping.
        source_dtype, target_dtype: floating types, not both half.

    Raises:
        ValueError: an argument is not as described above.
        KernelError: this is the first use, and the kernel could not be compiled.
    """
    n = len(source)
    addresses = _address(source, source_dtype, n), _address(target, target_dtype, n, True)
    if n == 0:
        return
    kernel = _conversions.get((source_dtype.name, target_dtype.name)) or _conversion(source_dtype, target_dtype)
    run = kernel.holding_gil if n * source_dtype.itemsize < _SMALL_BYTES else kernel.without_gil
    run(_UNUSED, _UNUSED, *addresses, n)


def converted(source: Array, source_dtype: DType, target_dtype: DType) -> Array:
    """Returns the elements as `convert` would write them, in a new array; `source` itself where nothing changes. Raises
    as `convert`."""
    if source_dtype == target_dtype:
        return source
    target = scratch.empty(len(source), target_dtype.storage)
    convert(source, source_dtype, target, target_dtype)
    return target


def split(n_elements: int, n_parts: int, itemsize: int) -> list[tuple[int, int]]:
    """Divides a range of elements into at most `n_parts` nearly equal ones, for as many threads.

    Ranges begin at multiples of 4 KiB from the start, so that threads share neither cache lines nor pages.

    Returns: (first, end) of each, in order; none is empty, so there are none at all for no elements.
    """
    page = max(1, PAGE_BYTES // itemsize)  # elements
    pages = -(-n_elements // page)
    parts = min(n_parts, pages)
    bounds = [min(n_elements, pages * part // parts * page) for part in range(parts + 1)] if parts else []
    return list(itertools.pairwise(bounds))


def prepare(
    dtypes: Iterable[DType], conversions: Iterable[tuple[DType, DType]] = (), others: Iterable[str] = ()
) -> None:
    """Makes kernels ready before they are needed in a hurry. Those that are ready cost nothing.

    Args:
        dtypes: that will be reduced.
        conversions: that will be made, as (from, to).
        others: kernels by name.

    Raises:
        KernelError: they could not be compiled.
    """
    _code.prepare(
        [
            *(f"reduce-{dtype.name}" for dtype in dtypes),
            *(f"convert-{source.name}-{target.name}" for source, target in conversions),
            *others,
        ]
    )


def is_ready(dtype: DType, conversions: Iterable[tuple[DType, DType]] = ()) -> bool:
    """Says whether `reduce` of this type, and these conversions, would begin at once, and not load or compile a kernel
    before."""
    return (dtype.name in _reductions or _code.has(f"reduce-{dtype.name}")) and all(
        _code.has(f"convert-{source.name}-{target.name}") for source, target in conversions
    )


def _address(array: Array, dtype: DType, n: int, is_output: bool = False) -> int:
    """The address of the first element, after checking that n elements of `dtype` lie there."""
    if array.dtype == dtype.storage and array.ndim == 1 and len(array) == n:
        try:  # takes a fourth of the time of `array.ctypes.data`; refuses what is not contiguous or not writable
            return _address_of(_from_buffer(array))
        except TypeError:
            if array.flags.c_contiguous and not is_output:
                return int(array.ctypes.data)
        except ValueError:
            return 0  # nothing in it
    raise ValueError(
        f"{'an output' if is_output else 'a source'} of {n} elements of type {dtype} has to be a contiguous "
        f"{'writable ' if is_output else ''}1-D array of {dtype.storage}; this one has shape {array.shape}, strides "
        f"{array.strides} and type {array.dtype}{'' if array.flags.writeable else ', and is read-only'}"
    )


_address_of = ctypes.addressof
_from_buffer: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer  # before 3.12 arrays are not typed as buffers


class Kernel:
    """A compiled function as Python can call it.

    Numba's functions return a status, which is always 0 here, and begin with two pointers to where a result and an
    exception would be stored.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        prototype = (ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p, *arguments)
        address = _code.address(name)
        self.without_gil: Callable[..., int] = ctypes.CFUNCTYPE(*prototype)(address)
        self.holding_gil: Callable[..., int] = ctypes.PYFUNCTYPE(*prototype)(address)


class Routine:
    """A kernel that takes the address of a block of 64-bit words. Without the GIL; loaded when it is first called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kernel: Kernel | None = None

    def __call__(self, *words: int) -> Array:
        """Returns the words as the kernel left them (int64). Whatever they are the addresses of has to exist."""
        kernel = self._kernel = self._kernel or Kernel(self.name, ctypes.c_int64)
        block: Array = np.array(words, np.int64)
        kernel.without_gil(_UNUSED, _UNUSED, block.ctypes.data)
        return block


def float_bits(number: float) -> int:
    """The word of a routine that is a float64."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


@cache
def _address_list(count: int) -> struct.Struct:
    return struct.Struct(f"{count}Q")


# Below this a kernel takes microseconds; a thread that gives the GIL away may wait 5 ms until it has it again.
_SMALL_BYTES = 32 * 1024
_unused_buffer = ctypes.create_string_buffer(8)
_UNUSED = ctypes.cast(_unused_buffer, ctypes.c_char_p)

_reductions: dict[str, Kernel] = {}
_conversions: dict[tuple[str, str], Kernel] = {}


def _reduction(dtype: DType) -> Kernel:
    kernel = _reductions[dtype.name] = Kernel(f"reduce-{dtype.name}", ctypes.c_char_p)
    return kernel


def _conversion(source: DType, target: DType) -> Kernel:
    if not (source.is_floating and target.is_floating) or (source.is_half and target.is_half):
        raise ValueError(
            f"there is no conversion from {source} to {target}; only between floating types, not both half"
        )
    kernel = _conversions[source.name, target.name] = Kernel(
        f"convert-{source.name}-{target.name}", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64
    )
    return kernel
