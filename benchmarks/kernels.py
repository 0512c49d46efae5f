"""How fast buckets are reduced and converted in memory, against numpy: `python -m benchmarks.kernels`.

Every row alternates with numpy, so that a busy machine slows both; medians and their ratio count. numpy does what its
users would write: a reduction into the first array, then copies to the others. GB/s counts each byte read and written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_rt.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu

Array = npt.NDArray[Any]
Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000, help="of each array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each row (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads to try (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="element types (default: %(default)s)")
    arguments = parser.parse_args()
    threads = [int(count) for count in arguments.threads.split(",")]

    print(f"{'':42} {'threads':>7} {'ms':>8} {'GB/s':>6} {'numpy ms':>9} {'ratio':>6}")
    for dtype in (DTYPES[name] for name in arguments.dtypes.split(",")):
        for k in (2, 4):
            arrays = [_ones(dtype, arguments.elements) for _ in range(k)]
            numpy_work = _numpy_reduction(dtype, arrays)
            for count in threads:
                row(
                    f"sum of {k} {dtype} in place", count, 2 * k * arrays[0].nbytes,
                    partial(_reduce, count, dtype, arrays),
                    numpy_work, arguments.rounds,
                )  # fmt: skip
    wide, wide_array = DTYPES["float32"], np.ones(arguments.elements, np.float32)
    for half in (DTYPES["float16"], DTYPES["bfloat16"]):
        half_array = _ones(half, arguments.elements)
        nbytes = wide_array.nbytes + half_array.nbytes
        for source, source_dtype, target, target_dtype in (
            (wide_array, wide, half_array, half),
            (half_array, half, wide_array, wide),
        ):
            row(
                f"{source_dtype} to {target_dtype}", 1, nbytes,
                partial(_convert, source, source_dtype, target, target_dtype),
                _numpy_conversion(source, source_dtype, target, target_dtype), arguments.rounds,
            )  # fmt: skip
    _latency()


def row(
    name: str, threads: int, nbytes: int, ours: Callable[[ThreadPoolExecutor], object], numpys: Work | None, rounds: int
) -> None:
    """Times both in turn, after one round that does not count, and prints a line."""
    our_s: list[float] = []
    numpy_s: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):
            our_s.append(_seconds(lambda: ours(pool)))
            if numpys is not None:
                numpy_s.append(_seconds(numpys))
    our_median = statistics.median(our_s[1:])
    line = f"{name:42} {threads:7} {our_median * 1e3:8.2f} {nbytes / our_median / 1e9:6.1f}"
    if numpy_s:
        numpy_median = statistics.median(numpy_s[1:])
        line += f" {numpy_median * 1e3:9.2f} {numpy_median / our_median:6.2f}"
    print(line, flush=True)


def _reduce(threads: int, dtype: DType, arrays: Sequence[Array], pool: ThreadPoolExecutor) -> None:
    def part(low: int, high: int) -> None:
        slices = [array[low:high] for array in arrays]
        cpu.reduce("sum", dtype, slices, slices, divisor=len(arrays))

    bounds = cpu.split(len(arrays[0]), threads, dtype.itemsize)
    for future in [pool.submit(part, low, high) for low, high in bounds]:
        future.result()


def _convert(source: Array, source_dtype: DType, target: Array, target_dtype: DType, _: ThreadPoolExecutor) -> None:
    cpu.convert(source, source_dtype, target, target_dtype)


def _numpy_reduction(dtype: DType, arrays: Sequence[Array]) -> Work | None:
    """None for bfloat16, which numpy does not have."""
    if dtype.name == "bfloat16":
        return None
    views = [array.view(np.float16) if dtype.name == "float16" else array for array in arrays]

    def work() -> None:
        first, *others = views
        for other in others:
            np.add(first, other, out=first)
        np.divide(first, len(views), out=first)
        for other in others:
            np.copyto(other, first)

    return work


def _numpy_conversion(source: Array, source_dtype: DType, target: Array, target_dtype: DType) -> Work | None:
    if "bfloat16" in (source_dtype.name, target_dtype.name):
        return None
    halves = {"float16": np.float16}
    source = source.view(halves.get(source_dtype.name, source.dtype))
    target = target.view(halves.get(target_dtype.name, target.dtype))
    return lambda: np.copyto(target, source)


def _latency() -> None:
    """What one call costs beside the work, which is what matters for small tensors."""
    dtype, calls = DTYPES["float32"], 20_000
    arrays = [np.ones(1, np.float32) for _ in range(2)]

    def ours() -> None:
        for _ in range(calls):
            cpu.reduce("sum", dtype, arrays, arrays, divisor=2)

    def numpys() -> None:
        first, second = arrays
        for _ in range(calls):
            np.add(first, second, out=first)
            np.divide(first, 2, out=first)
            np.copyto(second, first)

    ours_s, numpys_s = (
        min(seconds) / calls for seconds in zip(*((_seconds(ours), _seconds(numpys)) for _ in range(5)), strict=True)
    )
    print(f"one call, sum of 2 float32 of 1 element: {ours_s * 1e6:.2f} µs, numpy {numpys_s * 1e6:.2f} µs")


def _ones(dtype: DType, elements: int) -> Array:
    one = {"float16": 0x3C00, "bfloat16": 0x3F80}.get(dtype.name, 1)
    return np.full(elements, one, dtype.storage)


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
