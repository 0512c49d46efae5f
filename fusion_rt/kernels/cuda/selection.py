"""Selection of the largest elements of an array on a GPU. `fusion_rt.kernels.selection` says what that is, and means
the same by a magnitude, a threshold and a quota.

Exactly the k largest, by `take_largest`, in two passes over memory, 16 bytes an element (after AIR top-k, Zhang et al.
2023; unlike there, each element is also added to, the result is ordered, and ties are broken by index):

1. `survey` adds the gradient, and counts how many elements have which first digit (11 bits) of their magnitude;
2. `collect` puts the indices of those aside that have the digit of the k-th, or a larger one: little more than k. It
   counts how far above that they are, and so finds the magnitude of the k-th but for its last digit;
3. `take` finds the last digit and takes the elements, among those put aside only.

The same in one pass, 12 bytes an element, where a magnitude is known that k elements will reach, such as a little less
than the last threshold: `collect` adds the gradient, and puts those aside. How much less that is follows from how many
were put aside. Where they are fewer than k, all elements count as put aside, which the device finds out by itself.

That, or a threshold which is far from the k-th magnitude, or very many elements near it, leave more digits to be found:
`largest` finds them, in up to three passes over the elements put aside. It is launched with the rest, or afterwards
(`take_open`), when the host has seen in the result that it has to be. The result is always the same.

Where there is no room to put aside what a part of the array has, the following steps walk through that part as a whole,
so the result never depends on how much room there is.

All of that is done for several groups of elements at once, each with its own k and threshold, by as many launches as
for one: three, where the last threshold was near.

Nothing here waits for the device: thresholds and counts stay on it. All functions take a `stream` (of `numba.cuda`).

The tests run it in Numba's simulator, without warps, and compile it to PTX, with them; `python -m tests.gpu` runs it on
a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from fusion_rt.kernels.cuda import _kernels, _words
from fusion_rt.kernels.cuda._words import HEADER as HEADER
from fusion_rt.kernels.cuda.shim import SIMULATED, cuda, launcher

Range = tuple[int, int]
DeviceArray = Any  # numba.cuda has no types

_THREADS = 256
_BLOCKS = 528  # four for each of the 132 multiprocessors of an H100; half and twice as many take longer there
_LEAST_PART = 1024
_LINE = 32  # elements of a line of the device's memory
_ROOM = 4  # an index is kept aside for one of this many elements


@dataclass(frozen=True)
class Kernels:
    """Kernels for blocks of `threads`, of which `teams` work on a part each."""

    threads: int
    teams: int
    survey: Any
    collect: Any
    count: Any
    place: Any
    take: Any


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
    return Kernels(threads, **_kernels.build(threads, warps))


@dataclass
class Memory:
    """The operands of a pass, a gradient and the memory that it is added to, as `fusion_rt.kernels.selection.Memory`:
    device arrays, 1-D contiguous float32."""

    residual: DeviceArray
    gradient: DeviceArray | None = None
    velocity: DeviceArray | None = None
    momentum: float = 0.0
    nesterov: bool = False
    factor: float = 1.0

    def arguments(self) -> tuple[tuple[DeviceArray, ...], tuple[Any, ...]]:
        """The arguments of the kernels that add: arrays, and how."""
        rule = _words.NO_GRADIENT
        if self.gradient is not None:
            rule = _words.PLAIN
            if self.velocity is not None:
                rule = _words.NESTEROV if self.nesterov else _words.MOMENTUM
        unused = self.residual
        gradient = unused if self.gradient is None else self.gradient
        velocity = unused if self.velocity is None else self.velocity
        return (self.residual, gradient, velocity), (rule, np.float32(self.momentum), np.float32(self.factor))


class Found:
    """Values that the steps of a selection from some groups of elements leave to each other, on the device.

    It is made once, and used for any number of selections, one after the other.

    Args:
        groups: ranges of the elements that are compared with each other, ascending.
        rooms: for how many elements of each group there is room in the result.
        code: the kernels to use.
        room: how many indices can be put aside for each part; default: a fourth of its elements.
        parts: into how many the ranges are divided, about; default: enough to keep an H100 busy.
        stream: on which the buffers are filled; the first selection has to come after that.

    Attributes:
        offsets: of each group's result, in words of the output of `take`, and the end.
    """

    def __init__(
        self, groups: Sequence[Sequence[Range]], rooms: Sequence[int], code: Kernels | None = None,
        room: int | None = None, parts: int | None = None, stream: Any = 0,
    ) -> None:  # fmt: skip
        self.code = code = code or kernels()
        self.rooms = tuple(rooms)
        self.offsets = (0, *accumulate(map(words, rooms)))
        size = sum(high - low for ranges in groups for low, high in ranges)
        length = part_length(size, parts or _BLOCKS * code.teams, 1 if parts else _LEAST_PART, 1 if parts else _LINE)
        divided = [divide(ranges, length, code.teams) for ranges in groups]
        ends = [0, *accumulate(map(len, divided))]
        bounds = np.concatenate(divided)
        self._plan = np.zeros((len(divided), _words.PLAN), np.int64)
        self._plan[:, _words.FIRST], self._plan[:, _words.END] = ends[:-1], ends[1:]
        self._plan[:, _words.BLOCKS] = np.diff(ends) // code.teams
        self._plan[:, _words.OUT], self._plan[:, _words.ROOM] = self.offsets[:-1], self.rooms
        longest = int((bounds[:, 1] - bounds[:, 0]).max())
        room = max(1, math.ceil(longest / _ROOM) if room is None else room)
        here = np.repeat(np.arange(len(divided), dtype=np.int32), np.diff(ends) // code.teams)
        self.parts, self.groups = (cuda.to_device(array, stream=stream) for array in (bounds, here))
        self.candidates = cuda.device_array((len(bounds), room), np.int32)
        self.counts = cuda.device_array(len(bounds), np.int32)
        self.above = cuda.device_array(len(bounds), np.int32)
        self.ties = cuda.device_array(len(bounds), np.int32)
        self.sums = cuda.device_array((len(here), 2), np.int32)
        most = max(sum(high - low for low, high in ranges) for ranges in groups)
        self.near = cuda.device_array((len(divided), 2, max(1, min(_words.LIST, most))), np.int32)
        self.histogram = cuda.to_device(np.zeros((len(divided), _words.BINS), np.int32), stream=stream)
        self.ticket = cuda.to_device(np.zeros((len(divided), _words.TICKET), np.int32), stream=stream)
        self.state = cuda.to_device(np.zeros((len(divided), _words.STATE), np.int64), stream=stream)
        self.plan = cuda.to_device(self._plan, stream=stream)
        self._told: tuple[Any, ...] = ()
        self._launchers: dict[tuple[str, Any], Callable[..., None]] = {}

    def tell(self, ks: Sequence[int], thresholds: Sequence[int] | None = None, stream: Any = 0) -> None:
        """Tells the device, if it is news, the numbers to select.

        Args:
            ks: of each group, how many.
            thresholds: of each group, from which magnitude on elements are put aside; 0: none is known, and `survey`
                finds it; None: the expectation after the last selection.

        Raises:
            ValueError: there is no room for so many.
        """
        for k, room in zip(ks, self.rooms, strict=True):
            if not 1 <= k <= room:
                raise ValueError(f"there is room for 1 to {room} elements, not for {k}")
        news = tuple(ks), None if thresholds is None else tuple(thresholds)
        if news == self._told:
            return
        self._told = news
        self._plan[:, _words.K] = ks
        self._plan[:, _words.AT_LEAST] = _words.EXPECTED_ONE if thresholds is None else thresholds
        self.plan.copy_to_device(self._plan.copy(), stream=stream)

    def launch(self, name: str, stream: Any, *arguments: Any) -> None:
        """Launches the kernel of this name, on a block for each few parts."""
        made = self._launchers.get((name, stream))
        if made is None:
            made = launcher(getattr(self.code, name), len(self.groups), self.code.threads, stream)
            self._launchers[name, stream] = made
        made(*arguments)


class Taken:
    """The result of `take` for one group, as words (int32) that are copied to the host.

    Attributes:
        open: nothing has been taken yet, and `take_open` will.
        count: of elements.
        threshold: the magnitude of the smallest of them; 1 where there were no more than k.
        expected: a magnitude that as many are expected to reach in the next step; 0 where none is known.
        spoiled: whether there were elements to which the gradient could not be added; see `Memory`.
    """

    def __init__(self, words: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        room = (len(words) - HEADER) // 2
        self.count, self.threshold, self.expected = (int(word) for word in words[:3])
        self.open, self.spoiled = self.count == _words.OPEN, bool(words[3])
        self.indices = words[HEADER : HEADER + self.count]
        self.values = words[HEADER + room : HEADER + room + self.count].view(np.float32)


def words(k: int) -> int:
    """The number of words (int32) that `take` needs for k elements of a group."""
    return HEADER + 2 * k


def take_largest(
    memory: Memory, found: Found, ks: Sequence[int], out: DeviceArray, thresholds: Sequence[int] | None = (),
    surveys: bool = True, digits: bool = True, stream: Any = 0,
) -> None:  # fmt: skip
    """Adds, and takes the k largest of each group out of the residual; of equal ones the first, and no zeros.

    Args:
        ks: of each group, at least 1; fewer are taken where there are fewer.
        out: int32, `words(room)` of them for each group, which `Taken` reads.
        thresholds: of each group, a magnitude that k elements are expected to reach, not many more; 0: none is known;
            default: none is of any; None: what the last selection has let expect (`Taken.expected`). With it there is
            one pass less; where it is wrong that is slower, and the result is the same.
        surveys: a group may have no threshold; it costs a launch where that is unknown.
        digits: launch the search for thresholds that are not nearly known. Without it the result may be `Taken.open`.

    Raises:
        ValueError: there is no room for so many elements.
    """
    if thresholds is not None and not thresholds:
        thresholds = [0] * len(found.rooms)
    found.tell(ks, thresholds, stream=stream)
    if surveys:
        survey(memory, found, stream)
    collect(memory, found, stream)
    if digits:
        largest(memory.residual, found, stream)
    take(memory.residual, found, out, stream=stream)


def take_open(residual: DeviceArray, found: Found, out: DeviceArray, stream: Any = 0) -> None:
    """Takes, in groups whose result is open, the elements that a selection should have taken."""
    largest(residual, found, stream)
    take(residual, found, out, again=True, stream=stream)


def survey(memory: Memory, found: Found, stream: Any = 0) -> None:
    """Adds, in groups without a threshold, and finds one for `collect` that the k largest reach, and few others."""
    arrays, how = memory.arguments()
    found.launch(
        "survey", stream, *arrays, found.parts, found.groups, *how, found.histogram, found.ticket, found.plan,
        found.state,
    )  # fmt: skip


def collect(memory: Memory, found: Found, stream: Any = 0) -> None:
    """Adds, in other groups than `survey`, and puts aside elements whose magnitude is then at least the threshold.
    Where that is fewer than are wanted, everything is."""
    arrays, how = memory.arguments()
    found.launch(
        "collect", stream, *arrays, found.parts, found.groups, *how, found.candidates, found.counts, found.histogram,
        found.ticket, found.plan, found.state,
    )  # fmt: skip


def largest(residual: DeviceArray, found: Found, stream: Any = 0) -> None:
    """Finds the magnitude of the k-th largest element put aside, and how many of its ties to take: `collect`
    has found all but its last digit, if its threshold was near."""
    for _ in range(_words.PASSES):
        found.launch(
            "count", stream, residual, found.parts, found.groups, found.candidates, found.counts, found.histogram,
            found.ticket, found.plan, found.state,
        )  # fmt: skip


def take(residual: DeviceArray, found: Found, out: DeviceArray, again: bool = False, stream: Any = 0) -> None:
    """Writes the elements that have been found, ascending, and puts a zero in their place.

    Args:
        again: only in groups where that was not possible before.
    """
    where = (
        residual, found.parts, found.groups, found.candidates, found.counts, found.above, found.ties, found.sums,
        found.near, again,
    )  # fmt: skip
    found.launch("place", stream, *where, found.ticket, found.state)
    found.launch("take", stream, *where, out, found.ticket, found.plan, found.state)


def part_length(size: int, parts: int, least: int, multiple: int = 1) -> int:
    """Returns the length of parts, at least `least` and a multiple of `multiple`, of which about so many cover so many
    elements."""
    return -(-max(least, math.ceil(size / parts), 1) // multiple) * multiple


def divide(ranges: Sequence[Range], length: int, multiple: int = 1) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Cuts ascending ranges into parts of at most so many elements, as rows (first, end), at multiples of that: a team
    then reads whole lines of the memory, whichever part it has.

    Args:
        multiple: there are a multiple of so many parts, at least one, of which the last may be empty.
    """
    rows = [
        (max(low, first), min(first + length, high))
        for low, high in ranges
        if low < high
        for first in range(low // length * length, high, length)
    ]
    rows += [(0, 0)] * (-len(rows) % multiple if rows else multiple)
    return np.array(rows, np.int32)
