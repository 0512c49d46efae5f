"""Selection of the largest elements of a float32 array, in the pass that adds the gradient to it.

The magnitude of a number is its bits without the sign, as an integer from 0 to 2**31 - 1. It orders numbers by absolute
value; infinity is above all of them, and NaN above infinity. So a threshold is an integer, there are no special cases,
and values that are not finite are selected before all others. `reference` computes the same, plainly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np

from fusion_rt.kernels import cpu
from fusion_rt.kernels.cpu import Array, Routine, float_bits
from fusion_rt.kernels.team import ALONE, Team

NOTHING = 0x7FFFFFFF + 1
"""A threshold that no magnitude reaches."""

UNLIMITED = 2**62

Range = tuple[int, int]
"""(first, end) of consecutive elements."""

_DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the parts in which a threshold is found
_RUN = 32  # elements that kernels look at together
_PART_ELEMENTS = 1 << 16  # below this a second thread is not worth waking

_collect, _count, _take = Routine("collect"), Routine("count"), Routine("take")
_sample, _moments, _merge, _put = Routine("sample"), Routine("moments"), Routine("merge"), Routine("put")
_chunks = Routine("chunks")
ROUTINES = tuple(routine.name for routine in (_collect, _count, _take, _sample, _moments, _merge, _put))


@dataclass
class Memory:
    """The operands of a pass, a gradient and the memory that it is added to: 1-D contiguous float32 arrays of the same
    length.

    With g = gradient * factor, element by element and in float32, and after residual *= decay:

    * residual += g;
    * with a velocity u (momentum correction): u = momentum * u + g, residual += u;
    * nesterov: u = momentum * (u + g), residual += u + g.

    Elements whose residual would not be finite afterwards do without, and so does their velocity.

    Attributes:
        spoiled: a pass has left such elements.
    """

    residual: Array
    gradient: Array | None = None
    velocity: Array | None = None
    momentum: float = 0.0
    nesterov: bool = False
    factor: float = 1.0
    decay: float = 1.0
    spoiled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for array in (self.residual, self.gradient, self.velocity):
            if array is not None and not (
                array.dtype == np.float32
                and array.shape == (len(self.residual),)
                and array.flags.c_contiguous
                and (array is self.gradient or array.flags.writeable)
            ):
                raise ValueError(
                    f"a pass works on contiguous float32 arrays of one length, not {array.dtype} {array.shape}"
                )

    def words(self) -> tuple[int, int, int]:
        return self.residual.ctypes.data, _address(self.gradient), _address(self.velocity)

    def factors(self) -> tuple[int, int, int]:
        return float_bits(self.momentum), float_bits(self.factor), int(self.nesterov)


class Found:
    """Elements that a pass has found, in ascending order: their indices (int32) and values (float32).

    Attributes:
        count: how many there were; those beyond the capacity are counted, and not kept.
    """

    def __init__(self, capacity: int) -> None:
        self.indices: Array = np.empty(capacity, np.int32)
        self.values: Array = np.empty(capacity, np.float32)
        self.count = 0

    @property
    def overflowed(self) -> bool:
        return self.count > len(self.indices)


def collect(memory: Memory, ranges: Iterable[Range], threshold: int, found: Found, quota: int = UNLIMITED) -> None:
    """Adds, and appends to `found` the elements whose magnitude is then at least `threshold`.

    Args:
        ranges: of elements, ascending.
        quota: how many elements of exactly that magnitude count; the first ones do.
    """
    base, factors, decay = memory.words(), memory.factors(), float_bits(memory.decay)
    out = found.indices.ctypes.data, found.values.ctypes.data
    for low, high in ranges:
        results = _collect(
            *base, low, high, threshold, quota, len(found.indices), *out, *factors, found.count, 0, decay
        )  # fmt: skip
        quota, found.count = int(results[6]), int(results[13])
        if results[14]:  # only ever set, so that threads may share a memory
            memory.spoiled = True


@np.errstate(over="ignore", invalid="ignore")
def withdraw(memory: Memory, ranges: Iterable[Range]) -> None:
    """Takes out the sums that passes over the same memory have added, as exactly as float32 adds up and multiplies."""
    assert memory.gradient is not None
    for first, end in ranges:
        for low in range(first, end, _PART_ELEMENTS):
            part = slice(low, min(low + _PART_ELEMENTS, end))
            gradient, residual = memory.gradient[part] * np.float32(memory.factor), memory.residual[part]
            added = np.isfinite(gradient)
            if memory.velocity is None:
                step = gradient
            else:
                velocity, momentum = memory.velocity[part], np.float32(memory.momentum)
                step = velocity + gradient if memory.nesterov else velocity.copy()
                before = velocity / momentum - gradient if memory.nesterov else (velocity - gradient) / momentum
                np.copyto(velocity, before, where=added & np.isfinite(before))
            before = residual - step
            np.copyto(residual, before, where=added & np.isfinite(before))
            if memory.decay != 1.0:
                before = residual / np.float32(memory.decay)
                np.copyto(residual, before, where=np.isfinite(before))


def sample(memory: Memory, starts: Array, length: int) -> Array:
    """Returns the elements as they will be once `collect` has added: `length` of them from each of `starts` (int64);
    float32."""
    values = np.empty(len(starts) * length, np.float32)
    out, decay = values.ctypes.data, float_bits(memory.decay)
    _sample(*memory.words(), starts.ctypes.data, len(starts), length, out, *memory.factors(), decay)
    return values


@dataclass(frozen=True)
class Cut:
    """The end of the largest.

    Attributes:
        threshold: the magnitude of the last one.
        quotas: how many of exactly that magnitude belong to them, for each part; the first ones do.
        counts: how many belong to them at all, for each part.
    """

    threshold: int
    quotas: list[int]
    counts: list[int]


def largest(parts: Sequence[Sequence[Array]], k: int, team: Team = ALONE) -> Cut:
    """Finds the k largest magnitudes of some arrays (float32); of equal ones the first are taken.

    Found digit by digit: each pass counts how many elements have which next digit, among those whose digits so far are
    those of the threshold.

    Args:
        parts: each is counted by one thread.
        k: from 1 to the number of elements. Zeros do not count: where fewer are left, there are fewer.
    """
    threshold, left, prefix_shift = 0, k, 31
    above = np.zeros(len(parts), np.int64)
    ties = above
    for shift, bits in _DIGITS:
        counts = np.zeros((len(parts), 1 << bits), np.int64)
        prefix = threshold >> prefix_shift
        team.run(
            [
                partial(_count_digits, part, counts[p], shift, 1 << bits, prefix_shift, prefix)
                for p, part in enumerate(parts)
            ]
        )
        larger = np.cumsum(counts.sum(axis=0)[::-1])[::-1]  # elements with this digit or a larger one
        digit = int(np.searchsorted(-larger, -left, side="right")) - 1  # the last where there are enough
        above = above + counts[:, digit + 1 :].sum(axis=1)
        ties = counts[:, digit]
        left -= int(larger[digit + 1]) if digit + 1 < len(larger) else 0
        threshold |= digit << shift
        prefix_shift = shift
    if threshold == 0:
        return Cut(1, [UNLIMITED] * len(parts), [int(n) for n in above])
    quotas = []
    for tied in ties:
        quotas.append(min(int(tied), left))
        left -= quotas[-1]
    return Cut(threshold, quotas, [int(n) + quota for n, quota in zip(above, quotas, strict=True)])


def _count_digits(arrays: Sequence[Array], counts: Array, *digits: int) -> None:
    for array in arrays:
        _count(array.ctypes.data, counts.ctypes.data, len(array), *digits)


def take(
    indices: Array,
    values: Array,
    threshold: int,
    quota: int,
    out_indices: Array,
    out_values: Array,
    residual: Array | None = None,
) -> int:
    """Copies the elements whose magnitude is above the threshold, and the first `quota` of those that are at it, and
    puts a zero in their place in `residual`. Returns how many; the outputs have to have room."""
    words = _take(
        indices.ctypes.data, values.ctypes.data, len(indices), threshold, quota,
        out_indices.ctypes.data, out_values.ctypes.data, _address(residual), 0,
    )  # fmt: skip
    return int(words[8])


def collect_shares(memory: Memory, shares: list[list[Range]], threshold: int, capacity: int, team: Team) -> list[Found]:
    """Collects the finds of each thread in its share, of which it keeps at most `capacity` elements."""
    found = [Found(min(capacity, sum(high - low for low, high in part))) for part in shares]
    team.run([partial(collect, memory, part, threshold, each) for part, each in zip(shares, found, strict=True)])
    return found


def at_most(found: list[Found], k: int) -> Cut:
    """All that was found, or the k largest of it; on this thread, since waking another takes as long."""
    counts = [each.count for each in found]
    if sum(counts) <= k:
        return Cut(1, [UNLIMITED] * len(found), counts)
    return largest([[each.values[: each.count]] for each in found], k)


def take_found(residual: Array, found: list[Found], cut: Cut, team: Team) -> tuple[Array, Array]:
    """Takes those of the found elements that belong to the largest; they are cleared in the residual."""
    starts = [0, *accumulate(cut.counts)]
    indices, values = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.float32)

    def work(part: int) -> None:
        each, start = found[part], starts[part]
        kept = each.indices[: each.count], each.values[: each.count]
        take(*kept, cut.threshold, cut.quotas[part], indices[start:], values[start:], residual)

    team.run([partial(work, part) for part in range(len(found))])
    return indices, values


def take_of_chunks(memory: Memory, edges: Array, wanted: Array, team: Team = ALONE) -> tuple[Array, Array]:
    """Adds to the elements of consecutive chunks, and takes the largest of each out of the residual; of equal ones the
    first, and none that are zero.

    Args:
        edges: int64, where chunks begin, and the end of the last one.
        wanted: int64, how many of each, at least 1.

    Returns: indices (int32, ascending) and values (float32).
    """
    if not (len(edges) == len(wanted) + 1 and edges.dtype == wanted.dtype == np.int64):
        raise ValueError(f"{len(wanted)} chunks have an edge more, as int64; not {len(edges)} of {edges.dtype}")
    if not 0 <= edges[0] <= edges[-1] <= len(memory.residual) or (np.diff(edges) < 0).any() or (wanted < 1).any():
        raise ValueError(f"chunks are ascending ranges of the {len(memory.residual)} elements, of each 1 is taken")
    room = np.minimum(wanted, np.diff(edges))
    count = max(1, min(team.threads, int(edges[-1] - edges[0]) // _PART_ELEMENTS))
    bounds = [int(np.searchsorted(edges, edges[0] + (edges[-1] - edges[0]) * i // count)) for i in range(count)]
    found: list[tuple[Array, Array]] = [(np.empty(0, np.int32), np.empty(0, np.float32))] * count

    def work(part: int, first: int, end: int) -> None:
        most = int(room[first:end].sum())
        indices, values = np.empty(most, np.int32), np.empty(most, np.float32)
        near, near_values = (np.empty(int(np.diff(edges).max(initial=0)) + _RUN, np.int32) for _ in range(2))
        addresses = memory.residual.ctypes.data, edges.ctypes.data, wanted.ctypes.data
        out = indices.ctypes.data, values.ctypes.data
        number = guess = 0
        while first < end:  # a part that stays in a cache between the two passes
            last = min(end, max(first + 1, int(np.searchsorted(edges, edges[first] + _PART_ELEMENTS))))
            collect(memory, [(int(edges[first]), int(edges[last]))], NOTHING, Found(0))
            words = _chunks(
                *addresses, first, last, *out, number, guess, near.ctypes.data, near_values.ctypes.data
            )  # fmt: skip
            number, guess, first = int(words[7]), int(words[8]), last
        found[part] = indices[:number], values[:number]

    edged = [*bounds, len(wanted)]
    team.run([partial(work, part, *edged[part : part + 2]) for part in range(count) if edged[part] < edged[part + 1]])
    if count == 1:
        return found[0]
    return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])


def put(indices: Array, values: Array, out: Array, low: int = 0, add: bool = False, team: Team = ALONE) -> None:
    """Writes or adds values (float32) to those elements of `out` (float32) that have the indices (int32, different),
    of which `out` has those from `low` on."""
    if not all(array.flags.c_contiguous and array.itemsize == 4 for array in (indices, values, out)):
        raise ValueError(f"indices and values are put as int32 and float32, not {indices.dtype} and {values.dtype}")
    if len(indices) and not low <= indices.min() <= indices.max() < low + len(out):
        raise ValueError(f"there are indices that are not in [{low}, {low + len(out)})")

    def work(first: int, end: int) -> None:
        part = indices[first:end], values[first:end]
        _put(out.ctypes.data, part[0].ctypes.data, part[1].ctypes.data, end - first, low, int(add))

    team.run([partial(work, *bounds) for part in share([(0, len(indices))], team.threads) for bounds in part])


def merge(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """The sum of two sparse arrays: ascending indices (int32) and values (float32) each; left + right where both have
    an element."""
    room = len(left[0]) + len(right[0])
    indices, values = np.empty(room, np.int32), np.empty(room, np.float32)
    count = _merge(
        left[0].ctypes.data, left[1].ctypes.data, len(left[0]),
        right[0].ctypes.data, right[1].ctypes.data, len(right[0]),
        indices.ctypes.data, values.ctypes.data, 0,
    )[8]  # fmt: skip
    return indices[:count], values[:count]


def moments(values: Array, ranges: Iterable[Range], team: Team = ALONE) -> tuple[float, float]:
    """The sum of some elements of a float32 array and the sum of their squares, added up in float32 within groups of
    4,096 elements and in float64 beyond. The number of threads changes nothing."""
    pieces = [
        (low, min(low + _PART_ELEMENTS, end)) for first, end in ranges for low in range(first, end, _PART_ELEMENTS)
    ]
    sums = np.zeros((len(pieces), 2))

    def work(first: int, end: int) -> None:
        for p in range(first, end):
            low, high = pieces[p]
            words = _moments(values.ctypes.data + 4 * low, high - low, 0, 0)
            sums[p] = words[2:4].view(np.float64)

    shares = [len(pieces) * t // team.threads for t in range(team.threads + 1)]
    team.run([partial(work, first, end) for first, end in itertools.pairwise(shares) if first < end])
    plain, squared = sums.sum(axis=0)
    return float(plain), float(squared)


def share(ranges: Sequence[Range], parts: int) -> list[list[Range]]:
    """Divides ascending ranges among threads: at most `parts` lists, in order, of nearly as many elements each."""
    size = sum(high - low for low, high in ranges)
    parts = max(1, min(parts, size // _PART_ELEMENTS))
    shares: list[list[Range]] = [[] for _ in range(parts)]
    done = 0
    for first, high in ranges:
        low = first
        while low < high:
            part = min(parts - 1, done * parts // size)
            end = high if part == parts - 1 else min(high, low + -(-size * (part + 1) // parts) - done)
            shares[part].append((low, end))
            done += end - low
            low = end
    return shares


def magnitude(value: float) -> int:
    """The magnitude of a number, rounded to float32."""
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32)) & 0x7FFFFFFF


def value_of(magnitude: int) -> float:
    """The number without a sign that has this magnitude."""
    return float(np.uint32(magnitude).view(np.float32))


def prepare() -> None:
    """Makes the kernels ready before they are needed in a hurry."""
    cpu.prepare([], others=ROUTINES)


def prepare_chunks() -> None:
    """Makes that of `take_of_chunks` ready, too."""
    cpu.prepare([], others=[_chunks.name])


def _address(array: Array | None) -> int:
    return 0 if array is None else array.ctypes.data
