"""The one place that imports `numba.cuda`, with the differences between a GPU and Numba's simulator of one.

The simulator (environment variable NUMBA_ENABLE_CUDASIM=1) runs kernels as Python threads. It has shared memory,
atomics and barriers, but no instructions of warps and no libdevice.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numba.cuda
import numpy

cuda: Any = numba.cuda

SIMULATED = ".simulator." in cuda.jit.__module__
"""True if kernels run in the simulator."""

multiply: Any
"""The product of two float32, rounded: without this, the compiler joins a product and a sum, and rounds once."""
bits_of: Any
"""The bits of a float32 as an int32."""
launcher: Callable[[Any, int, int, Any], Callable[..., None]]
"""Makes what launches a kernel, called with its arguments, on so many blocks of so many threads, on a stream."""

if SIMULATED:

    def multiply(x: Any, y: Any) -> Any:
        return x * y

    def bits_of(x: Any) -> Any:
        return x.view("int32")

    def launcher(kernel: Any, blocks: int, threads: int, stream: Any) -> Callable[..., None]:
        return lambda *arguments: kernel[blocks, threads, stream](*arguments)  # it remembers the last grid only

else:
    try:
        importlib.import_module("numba.cuda.cudaimpl")  # or the first kernel would fail, in the midst of a step
    except AttributeError as error:
        raise ImportError(
            f"this version of numba-cuda does not work with NumPy {numpy.__version__}: {error}"
        ) from error
    libdevice: Any = importlib.import_module("numba.cuda.libdevice")
    multiply, bits_of = libdevice.fmul_rn, libdevice.float_as_int

    def launcher(kernel: Any, blocks: int, threads: int, stream: Any) -> Callable[..., None]:
        with warnings.catch_warnings():  # small buckets have few blocks; warnings may be errors
            warnings.filterwarnings("ignore", ".*Grid size")
            launch: Callable[..., None] = kernel[blocks, threads, stream]
        return launch
