"""Speed of reductions and conversions in memory, against numpy: `python -m benchmarks.kernels`.

Every row alternates with numpy, so that a busy machine slows both; medians and their ratio count. With numpy it is the
code that its users would write: a reduction into the first array, then copies to the others. GB/s counts each byte read
and written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import arguments as shared
from benchmarks.common import results, sampling, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import cpu

Array = npt.NDArray[Any]
Work = Callable[[], object]
NAME = "kernels"
OURS, NUMPY = "kernels", "numpy"
CALL = "one call, sum of 2 float32 of 1 element"


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--elements", type=int, default=25_600_000, help="of each array (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each row (%(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads to try (%(default)s)")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", help="element types (%(default)s)")
    shared.add_out(parser)
    arguments = parser.parse_args()
    record = collect(
        arguments.elements, arguments.rounds, shared.numbers(arguments.threads), arguments.dtypes.split(",")
    )
    if arguments.out:
        results.keep(arguments.out, NAME, record)
    show(record)


def collect(elements: int, rounds: int, threads: Sequence[int], dtypes: Sequence[str]) -> Record:
    """Times everything, in turns with numpy where numpy can do it."""
    here, date = results.begin()
    made: list[Measure] = []
    sizes: dict[str, int] = {}

    def row(
        name: str, threads: int, nbytes: int, ours: Callable[[ThreadPoolExecutor], object], numpys: Work | None
    ) -> None:
        with ThreadPoolExecutor(threads) as pool:
            turns = {OURS: lambda: _seconds(lambda: ours(pool))}
            if numpys is not None:
                turns[NUMPY] = lambda: _seconds(numpys)
            samples = {who: results.rounded(each) for who, each in sampling.alternate(turns, rounds).items()}
        label = f"{name}, threads {threads}"
        sizes[label] = nbytes
        made.append(Measure(label, "s", samples, NUMPY if NUMPY in samples else ""))

    for dtype in (DTYPES[name] for name in dtypes):
        for k in (2, 4):
            arrays = [_ones(dtype, elements) for _ in range(k)]
            numpy_work = _numpy_reduction(dtype, arrays)
            for count in threads:
                work = partial(_reduce, count, dtype, arrays)
                row(f"sum of {k} {dtype} in place", count, 2 * k * arrays[0].nbytes, work, numpy_work)
    wide, wide_array = DTYPES["float32"], np.ones(elements, np.float32)
    for half in (DTYPES["float16"], DTYPES["bfloat16"]):
        half_array = _ones(half, elements)
        for source, source_dtype, target, target_dtype in (
            (wide_array, wide, half_array, half),
            (half_array, half, wide_array, wide),
        ):
            conversion = source, source_dtype, target, target_dtype
            nbytes = wide_array.nbytes + half_array.nbytes
            row(
                f"{source_dtype} to {target_dtype}",
                1,
                nbytes,
                partial(_convert, *conversion),
                _numpy_conversion(*conversion),
            )
    made.append(Measure(CALL, "s", _latency(rounds), NUMPY))
    return Record({"elements": elements}, made, here, date, results.command_line(), {"bytes": sizes})


def show(record: Record) -> None:
    """Prints a row for each reduction and conversion, and one for the cost of a call."""
    table = Table(["what", "ms", "GB/s", "numpy ms", "numpy / ours"], title=f"{record.setting['elements']:,} elements")
    for each in record.measures:
        seconds, nbytes = sampling.median(each.samples[OURS]), record.details["bytes"].get(each.name)
        row = [tables.ms(seconds), f"{nbytes / seconds / 1e9:.1f}" if nbytes else ""]
        if each.peer:
            theirs = each.samples[NUMPY]
            row += [tables.ms(sampling.median(theirs)), tables.ratio(sampling.ratio(theirs, each.samples[OURS]))]
        table.add(each.name, *row, *([""] * (4 - len(row))))
    table.show()


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
    """Makes numpy's reduction; None for bfloat16, which numpy does not have."""
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


def _latency(rounds: int) -> dict[str, list[float]]:
    """Measures the cost of a call without the work, which dominates for small tensors."""
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

    turns = {OURS: lambda: _seconds(ours) / calls, NUMPY: lambda: _seconds(numpys) / calls}
    return {who: results.rounded(each) for who, each in sampling.alternate(turns, rounds).items()}


def _ones(dtype: DType, elements: int) -> Array:
    one = {"float16": 0x3C00, "bfloat16": 0x3F80}.get(dtype.name, 1)
    return np.full(elements, one, dtype.storage)


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
