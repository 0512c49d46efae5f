"""Selection of the largest elements of an array on a GPU. `fusion_rt.kernels.selection` says what that is, and means
the same by a magnitude, a threshold and a quota.

Exactly the k largest, by `take_largest`, in two passes over memory, 16 bytes an element (after AIR top-k, Zhang et al.
2023; unlike there, each element is also added to, the result is ordered, and ties are broken by index):

1. `survey` adds the gradient, and counts how many elements have which first digit (11 bits) of their magnitude;
2. `collect` puts the indices of those aside that have the digit of the k-th, or a larger one: little more than k;
3. `largest` finds the magnitude of the k-th, digit by digit, and `take` the elements, among those put aside only.

The same in one pass, 12 bytes an element, where a magnitude is known that k elements will reach, such as a little less
than the last threshold: `collect` adds the gradient, and puts those aside. Where they are fewer than k, all elements
count as put aside, which the device finds out by itself: that step takes five more passes, and its result is the same.

About k, by `take_above` with a threshold that an earlier selection has found: `collect` adds the gradient, and there is
no survey, so it is one pass, 12 bytes an element. Where there is no room to put aside what a part of the array has,
the following steps walk through that part as a whole, so the result never depends on how much room there is.

Nothing here waits for the device: thresholds and counts stay on it. All functions take a `stream` (of `numba.cuda`).

The tests run it in Numba's simulator, without warps, and compile it to PTX, with them. It has not run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from fusion_rt.kernels.cuda import _kernels
from fusion_rt.kernels.cuda._kernels import HEADER as HEADER
from fusion_rt.kernels.cuda._kernels import Kernels
from fusion_rt.kernels.cuda.shim import SIMULATED, cuda, launcher

NOTHING = 0x7FFFFFFF + 1
"""A threshold that no magnitude reaches."""

Range = tuple[int, int]
DeviceArray = Any  # numba.cuda has no types

_THREADS = 256
_BLOCKS = 1056  # eight for each of the 132 multiprocessors of an H100
_LEAST_PART = 1024
_ROOM = 4  # an index is kept aside for one of this many elements


@cache
def kernels(threads: int = _THREADS, warps: bool = not SIMULATED) -> Kernels:
    """Kernels that are compiled when they are first launched, in about a second each.

    Args:
        threads: of a block.
        warps: whether instructions of warps are used, as the simulator cannot.
    """
    if warps and SIMULATED:
        raise ValueError("the simulator has no instructions of warps; use warps=False")
    if not 1 <= threads <= 1024 or (warps and threads % 32):
        raise ValueError(f"a block has a multiple of 32 threads, at most 1024, not {threads}")
    return _kernels.build(threads, warps)


@dataclass
class Memory:
    """The operands of a pass, what is added and to what, as `fusion_rt.kernels.selection.Memory`: device arrays, 1-D
    contiguous float32."""

    residual: DeviceArray
    gradient: DeviceArray | None = None
    velocity: DeviceArray | None = None
    momentum: float = 0.0
    nesterov: bool = False
    factor: float = 1.0

    def arguments(self) -> tuple[tuple[DeviceArray, ...], tuple[Any, ...]]:
        """The arguments of the kernels that add: arrays, and how."""
        rule = _kernels.NO_GRADIENT
        if self.gradient is not None:
            rule = _kernels.PLAIN
            if self.velocity is not None:
                rule = _kernels.NESTEROV if self.nesterov else _kernels.MOMENTUM
        unused = self.residual
        gradient = unused if self.gradient is None else self.gradient
        velocity = unused if self.velocity is None else self.velocity
        return (self.residual, gradient, velocity), (rule, np.float32(self.momentum), np.float32(self.factor))


class Found:
    """Values that the steps of a selection from some ranges of an array leave to each other, on the device.

    It is made once, and used for any number of selections, one after the other.

    Args:
        ranges: of the elements that are selected from, ascending.
        code: the kernels to use.
        room: how many indices can be put aside for each part; default: a fourth of its elements.
        parts: into how many the ranges are divided, about; default: what keeps an H100 busy.
        stream: on which the buffers are filled; the first selection has to come after that.
    """

    def __init__(
        self, ranges: Sequence[Range], code: Kernels | None = None, room: int | None = None, parts: int | None = None,
        stream: Any = 0,
    ) -> None:  # fmt: skip
        self.code = code = code or kernels()
        self.size = sum(high - low for low, high in ranges)
        bounds = divide(ranges, parts or _BLOCKS * code.groups, 1 if parts else _LEAST_PART)
        longest = int((bounds[:, 1] - bounds[:, 0]).max())
        room = max(1, math.ceil(longest / _ROOM) if room is None else room)
        self.parts = cuda.to_device(bounds, stream=stream)
        self.candidates = cuda.device_array((len(bounds), room), np.int32)
        self.counts = cuda.device_array(len(bounds), np.int32)
        self.starts = cuda.device_array(len(bounds), np.int32)
        self.quotas = cuda.device_array(len(bounds), np.int32)
        self.histogram = cuda.to_device(np.zeros(_kernels.BINS, np.int32), stream=stream)
        self.ticket = cuda.to_device(np.zeros(2, np.int32), stream=stream)
        self.state = cuda.to_device(np.zeros(_kernels.STATE, np.int64), stream=stream)
        self._blocks = math.ceil(len(bounds) / code.groups)
        self._launchers: dict[tuple[str, Any], Callable[..., None]] = {}

    def launch(self, name: str, stream: Any, *arguments: Any) -> None:
        """Launches the kernel of this name: `scan` on one block, others on one for each few parts."""
        made = self._launchers.get((name, stream))
        if made is None:
            blocks = 1 if name == "scan" else self._blocks
            made = launcher(getattr(self.code, name), blocks, self.code.threads, stream)
            self._launchers[name, stream] = made
        made(*arguments)


class Taken:
    """The result of `take`, as words (int32) that are copied to the host.

    Attributes:
        count: of elements.
        threshold: the magnitude of the smallest of them; 1 where there were no more than k.
        collected: how many elements had reached the threshold of `collect`.
        spoiled: whether there were elements to which the gradient could not be added; see `Memory`.
    """

    def __init__(self, words: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        room = (len(words) - HEADER) // 2
        self.count, self.threshold, self.collected = (int(word) for word in words[:3])
        self.spoiled = bool(words[3])
        self.indices = words[HEADER : HEADER + self.count]
        self.values = words[HEADER + room : HEADER + room + self.count].view(np.float32)


def words(k: int) -> int:
    """The number of words (int32) that `take` needs for k elements."""
    return HEADER + 2 * k


def take_largest(memory: Memory, found: Found, k: int, out: DeviceArray, floor: int = 0, stream: Any = 0) -> None:
    """Adds, and takes the k largest out of the residual; of equal ones the first, and no zeros.

    Args:
        k: at least 1; fewer are taken where there are fewer.
        out: int32, `words(k)` of them or more, which `Taken` reads.
        floor: a magnitude that k elements are expected to reach, not many more; 0: none is known. With it there is one
            pass less; where it is wrong that is slower, and the result is the same.

    Raises:
        ValueError: `out` has no room for k elements.
    """
    _check(k, out)
    if floor > 0:
        collect(memory, found, floor, k, stream)
    else:
        survey(memory, found, k, stream)
        collect(Memory(memory.residual), found, stream=stream)
    largest(memory.residual, found, k, stream)
    take(memory.residual, found, out, stream)


def take_above(memory: Memory, found: Found, threshold: int, k: int, out: DeviceArray, stream: Any = 0) -> None:
    """Takes the largest, but only elements whose magnitude is at least `threshold`; see `take_largest`."""
    _check(k, out)
    collect(memory, found, threshold, stream=stream)
    largest(memory.residual, found, k, stream)
    take(memory.residual, found, out, stream)


def survey(memory: Memory, found: Found, k: int, stream: Any = 0) -> None:
    """Adds, and finds the threshold for `collect` that the k largest reach, and few others; see `take_largest`."""
    arrays, how = memory.arguments()
    found.launch("survey", stream, *arrays, found.parts, *how, k, found.histogram, found.ticket, found.state)


def collect(memory: Memory, found: Found, threshold: int | None = None, least: int = 0, stream: Any = 0) -> None:
    """Adds, and puts aside what then has a magnitude of at least `threshold`; None: what `survey` has found. Where that
    is fewer than `least`, everything is.

    With the threshold `NOTHING` it only adds.
    """
    threshold = _kernels.FROM_STATE if threshold is None else max(1, threshold)
    arrays, how = memory.arguments()
    found.launch(
        "collect", stream, *arrays, found.parts, *how, threshold, least, found.candidates, found.counts, found.ticket,
        found.state,
    )  # fmt: skip


def largest(residual: DeviceArray, found: Found, k: int, stream: Any = 0) -> None:
    """Finds the magnitude of the k-th largest of what has been put aside, and how many of its ties to take."""
    for shift, bits, above in _kernels.DIGITS:
        found.launch(
            "count", stream, residual, found.parts, found.candidates, found.counts, k, shift, 1 << bits, above,
            found.histogram, found.ticket, found.state,
        )  # fmt: skip


def take(residual: DeviceArray, found: Found, out: DeviceArray, stream: Any = 0) -> None:
    """Writes the elements that `largest` has found, ascending, and puts a zero in their place. `out` has to have room
    for them."""
    found.launch(
        "place", stream, residual, found.parts, found.candidates, found.counts, found.starts, found.quotas, found.state
    )
    found.launch("scan", stream, found.starts, found.quotas, found.state)
    found.launch(
        "take", stream, residual, found.parts, found.candidates, found.counts, found.starts, found.quotas,
        (len(out) - HEADER) // 2, out, found.state,
    )  # fmt: skip


def gather(
    values: DeviceArray, indices: DeviceArray, out: DeviceArray, code: Kernels | None = None, stream: Any = 0
) -> None:
    """out[j] = values[indices[j]]; indices int32, values and out float32. Indices are not checked."""
    code = code or kernels()
    launcher(code.gather, _blocks(len(indices), code), code.threads, stream)(values, indices, len(indices), out)


def put(
    indices: DeviceArray, values: DeviceArray, out: DeviceArray, low: int = 0, add: bool = False,
    code: Kernels | None = None, stream: Any = 0,
) -> None:  # fmt: skip
    """Writes or adds values to those elements of `out` that have the indices, of which `out` has those from `low` on.
    Indices are different from each other; they are not checked."""
    code = code or kernels()
    launch = launcher(code.put, _blocks(len(indices), code), code.threads, stream)
    launch(indices, values, len(indices), out, low, add)


def divide(ranges: Sequence[Range], parts: int, least: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Cuts ascending ranges into about `parts` parts of nearly the same length, at least `least`, as rows
    (first, end); one empty part if there is nothing."""
    size = sum(high - low for low, high in ranges)
    length = max(least, math.ceil(size / parts), 1)
    rows = [(first, min(first + length, high)) for low, high in ranges for first in range(low, high, length)]
    return np.array(rows or [(0, 0)], np.int32)


def _check(k: int, out: DeviceArray) -> None:
    if k < 1 or len(out) < words(k):
        raise ValueError(
            f"k has to be at least 1, and out to have {words(max(1, k))} words; k is {k}, the words {len(out)}"
        )


def _blocks(n: int, code: Kernels) -> int:
    return max(1, min(_BLOCKS, math.ceil(n / code.threads)))
