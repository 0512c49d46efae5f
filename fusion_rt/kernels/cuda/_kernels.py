"""The code that runs on the device: see `selection`, which launches it, for what it does together.

The elements are divided into parts. A part belongs to a team of threads, which walks through it in steps of its width,
in order, so that what it finds is ordered too, without sorting: a warp, where there are instructions for it, and
otherwise a whole block. The teams do not wait for each other within a kernel; what follows from all of them is worked
out by the last block to end, or by the next kernel.

Elements are compared with those of their *group* only. Each block works for one group, `groups[block]`; of `plan`,
`state`, `histogram` and `ticket` each group has a row. So any number of groups costs as many launches as one.

`plan`, int64, is what the host tells, `state`, int64, what one kernel leaves to the next: see the constants. All of
that is in the device's memory, so that the arguments of launches stay the same from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_rt.kernels.cuda.shim import bits_of, cuda, multiply

THRESHOLD = 0  # digits of the magnitude of the smallest to take, as far as known
LEFT = 1  # how many to take of those that have these digits
FLOOR = 2  # the magnitude from which elements are collected
COLLECTED, SELECTED = 3, 4  # how many elements were
SPOILED = 5  # 1 where a part of the gradient could not be added, since the last `take`
EXPECTED = 6  # a magnitude that as many are expected to reach in the next step; 0: none is known
STATE = 7

FIRST, END = 0, 1  # parts of the group
BLOCKS = 2  # how many work for it
OUT, ROOM = 3, 4  # the word at which its results begin, and for how many elements there is room
K = 5  # how many to take
LEAST = 6  # where fewer have reached the threshold of `collect`, all are collected
AT_LEAST = 7  # that threshold; `EXPECTED_ONE`: the one in `state`, or, where there is none, what `survey` finds
PLAN = 8
EXPECTED_ONE = -1

HEADER = 4  # words before the indices in what `take` writes: selected, threshold, collected, spoiled
BINS = 2048
MAGNITUDE_BITS = 31
DIGITS = ((20, 11, MAGNITUDE_BITS), (10, 10, 20), (0, 10, 10))  # (shift, bits, shift of the one before)
COARSE = DIGITS[0][0]

NO_GRADIENT, PLAIN, MOMENTUM, NESTEROV = range(4)

_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000
_LOWER = 1275068  # in units of the last place, about a tenth of a number
_ITEMS = 4  # elements that a thread has on their way at once
_ALL_LANES = 0xFFFFFFFF
_WARP = 32


def expected(threshold: int, collected: int, k: int) -> int:
    """The magnitude that `k` elements are expected to reach in the next step: about 0.9 of the last threshold; 0, where
    fewer have reached what was expected last. The host computes what the device does, bit by bit: so without floats."""
    return max(1, threshold - _LOWER) if collected >= k and threshold < _INFINITE else 0


@dataclass(frozen=True)
class Kernels:
    """Kernels for blocks of `threads`, of which `teams` work on a part each."""

    threads: int
    teams: int
    survey: Any
    collect: Any
    count: Any
    place: Any
    scan: Any
    take: Any
    gather: Any
    put: Any


def build(threads: int, warps: bool) -> Kernels:
    """Args:
    threads: of a block, a multiple of 32.
    warps: whether a warp is a team; the simulator has no instructions for this.
    """
    width = _WARP if warps else threads
    tile = width * _ITEMS
    device = cuda.jit(device=True)

    if warps:

        @device
        def rank(flag):  # type: ignore[no-untyped-def]
            """Counts how many of the threads before this one in the team have the flag, and how many have it at all.
            All threads of the team have to call this."""
            hits = cuda.ballot_sync(_ALL_LANES, flag)
            before = hits & ((1 << cuda.laneid) - 1)
            return cuda.popc(np.uint32(before)), cuda.popc(np.uint32(hits))

    else:

        @device
        def rank(flag):  # type: ignore[no-untyped-def]
            flags = cuda.shared.array(threads, np.int32)
            total = cuda.syncthreads_count(np.int32(flag))
            before = 0
            if total > 0:
                me = cuda.threadIdx.x
                flags[me] = 1 if flag else 0
                cuda.syncthreads()
                for thread in range(me):
                    before += flags[thread]
                cuda.syncthreads()
            return before, total

    @device
    def finite(value):  # type: ignore[no-untyped-def]
        return bits_of(value) & _MAGNITUDE < _INFINITE

    @device
    def advance(residual, gradient, velocity, rule, momentum, factor, i, group, state):  # type: ignore[no-untyped-def]
        """Adds to one element, with a velocity, and gives what it then is."""
        step = multiply(gradient[i], factor)
        if rule == NESTEROV:
            speed = multiply(velocity[i] + step, momentum)
            step = speed + step
        else:
            speed = multiply(velocity[i], momentum) + step
            step = speed
        value = residual[i]
        if finite(value + step):
            value += step
            velocity[i] = speed
            residual[i] = value
        else:
            state[group, SPOILED] = 1
        return value

    @device
    def load(  # type: ignore[no-untyped-def]
        residual, gradient, velocity, rule, momentum, factor, first, end, values, group, state
    ):
        """The elements of this thread in the tile that begins at `first`, after addition; 0 beyond the end. All are
        read before the first is written, so that they are on their way together."""
        steps = cuda.local.array(_ITEMS, np.float32)
        lane = cuda.threadIdx.x % width
        for item in range(_ITEMS):
            i = first + item * width + lane
            values[item] = residual[i] if i < end else np.float32(0)
        if rule == PLAIN:
            for item in range(_ITEMS):
                i = first + item * width + lane
                steps[item] = multiply(gradient[i], factor) if i < end else np.float32(0)
            for item in range(_ITEMS):
                i = first + item * width + lane
                if i < end:
                    if finite(values[item] + steps[item]):
                        values[item] += steps[item]
                        residual[i] = values[item]
                    else:
                        state[group, SPOILED] = 1
        elif rule != NO_GRADIENT:
            for item in range(_ITEMS):
                i = first + item * width + lane
                if i < end:
                    values[item] = advance(residual, gradient, velocity, rule, momentum, factor, i, group, state)

    @device
    def clear(bins):  # type: ignore[no-untyped-def]
        for b in range(cuda.threadIdx.x, BINS, threads):
            bins[b] = 0
        cuda.syncthreads()

    @device
    def is_last(group, blocks, ticket):  # type: ignore[no-untyped-def]
        """Says whether this block is the last of its group's to come here. What all of them have written before is to
        be seen then."""
        last = cuda.shared.array(1, np.int32)
        cuda.threadfence()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            last[0] = cuda.atomic.add(ticket, (group, 0), 1)
            if last[0] == blocks - 1:
                ticket[group, 0] = 0
        cuda.syncthreads()
        return last[0] == blocks - 1

    @device
    def add_up(bins, group, blocks, histogram, ticket):  # type: ignore[no-untyped-def]
        """Adds a block's counts to those of its group; whether this block is the last to do so."""
        cuda.syncthreads()
        for b in range(cuda.threadIdx.x, BINS, threads):
            if bins[b] != 0:
                cuda.atomic.add(histogram, (group, b), bins[b])
        return is_last(group, blocks, ticket)

    @device
    def pick(group, histogram, bins, wanted, result):  # type: ignore[no-untyped-def]
        """The last digit that `wanted` elements have or exceed, and how many of them exceed it, into `result`; 0 and 0
        where there are fewer. Sets the histogram back to zero. One block calls this."""
        sums = cuda.shared.array(threads, np.int32)
        me = cuda.threadIdx.x
        each = (BINS + threads - 1) // threads
        mine = 0
        for b in range(me * each, min(BINS, me * each + each)):
            bins[b] = cuda.atomic.exch(histogram, (group, b), 0)  # atomic, since a plain read might find an old copy
            mine += bins[b]
        sums[me] = mine
        if me == 0:
            result[0] = 0
            result[1] = 0
        cuda.syncthreads()
        above = 0
        for thread in range(me + 1, threads):
            above += sums[thread]
        if above < wanted and wanted <= above + mine:
            digit = min(BINS, me * each + each) - 1
            while above + bins[digit] < wanted:
                above += bins[digit]
                digit -= 1
            result[0] = digit
            result[1] = above
        cuda.syncthreads()

    @device
    def part_of_team():  # type: ignore[no-untyped-def]
        return cuda.blockIdx.x * (threads // width) + cuda.threadIdx.x // width

    @device
    def known(group, plan, state):  # type: ignore[no-untyped-def]
        """The threshold for `collect` that is known before there is a survey; 0: none is."""
        threshold = plan[group, AT_LEAST]
        return state[group, EXPECTED] if threshold == EXPECTED_ONE else threshold

    @cuda.jit
    def survey(  # type: ignore[no-untyped-def]
        residual, gradient, velocity, parts, groups, rule, momentum, factor, histogram, ticket, plan, state
    ):
        bins = cuda.shared.array(BINS, np.int32)
        result = cuda.shared.array(2, np.int64)
        values = cuda.local.array(_ITEMS, np.float32)
        group = groups[cuda.blockIdx.x]
        if known(group, plan, state) > 0:
            return
        clear(bins)
        part = part_of_team()
        end = parts[part, 1]
        for first in range(parts[part, 0], end, tile):
            load(residual, gradient, velocity, rule, momentum, factor, first, end, values, group, state)
            for item in range(_ITEMS):
                magnitude = bits_of(values[item]) & _MAGNITUDE
                if magnitude > 0:
                    cuda.atomic.add(bins, magnitude >> COARSE, 1)
        if add_up(bins, group, plan[group, BLOCKS], histogram, ticket):
            pick(group, histogram, bins, plan[group, K], result)
            if cuda.threadIdx.x == 0:
                state[group, FLOOR] = max(1, result[0] << COARSE)

    @cuda.jit
    def collect(  # type: ignore[no-untyped-def]
        residual, gradient, velocity, parts, groups, rule, momentum, factor, candidates, counts, ticket, plan, state
    ):
        """Adds, where there was no survey. Where fewer than are wanted at least have reached the threshold, all
        elements are candidates, as if there were no room."""
        values = cuda.local.array(_ITEMS, np.float32)
        reached = cuda.shared.array(1, np.int32)
        if cuda.threadIdx.x == 0:
            reached[0] = 0
        cuda.syncthreads()
        group = groups[cuda.blockIdx.x]
        threshold, least = known(group, plan, state), plan[group, LEAST]
        if threshold == 0:
            threshold, rule, least = state[group, FLOOR], NO_GRADIENT, np.int64(0)
        part, lane = part_of_team(), cuda.threadIdx.x % width
        end = parts[part, 1]
        found = 0
        for first in range(parts[part, 0], end, tile):
            load(residual, gradient, velocity, rule, momentum, factor, first, end, values, group, state)
            for item in range(_ITEMS):
                i = first + item * width + lane
                hit = i < end and bits_of(values[item]) & _MAGNITUDE >= threshold
                before, total = rank(hit)
                if hit and found + before < candidates.shape[1]:
                    candidates[part, found + before] = i
                found += total
        if lane == 0:
            counts[part] = found
            cuda.atomic.add(reached, 0, found)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(ticket, (group, 1), reached[0])
        if is_last(group, plan[group, BLOCKS], ticket):
            if cuda.threadIdx.x == 0:
                reached[0] = cuda.atomic.exch(ticket, (group, 1), 0)
                state[group, COLLECTED] = reached[0]
                state[group, FLOOR] = threshold if reached[0] >= least else 1
            cuda.syncthreads()
            if reached[0] < least:
                for other in range(plan[group, FIRST] + cuda.threadIdx.x, plan[group, END], threads):
                    counts[other] = candidates.shape[1] + 1

    @device
    def candidate(parts, candidates, part, found, j):  # type: ignore[no-untyped-def]
        """The index of a part's j-th candidate; every element is one where there was no room for those found."""
        return candidates[part, j] if found <= candidates.shape[1] else parts[part, 0] + j

    @device
    def candidate_count(parts, candidates, part, found):  # type: ignore[no-untyped-def]
        return found if found <= candidates.shape[1] else parts[part, 1] - parts[part, 0]

    @cuda.jit
    def count(  # type: ignore[no-untyped-def]
        residual, parts, groups, candidates, counts, shift, digits, above, histogram, ticket, plan, state
    ):
        bins = cuda.shared.array(BINS, np.int32)
        result = cuda.shared.array(2, np.int64)
        clear(bins)
        group = groups[cuda.blockIdx.x]
        floor, threshold, left = state[group, FLOOR], np.int64(0), plan[group, K]
        if above < MAGNITUDE_BITS:  # this is not the first digit
            threshold, left = state[group, THRESHOLD], state[group, LEFT]
        part = part_of_team()
        found = counts[part]
        size = candidate_count(parts, candidates, part, found)
        for j in range(cuda.threadIdx.x % width, size, width):
            i = candidate(parts, candidates, part, found, j)
            magnitude = bits_of(residual[i]) & _MAGNITUDE
            if magnitude >= floor and magnitude >> above == threshold >> above:
                cuda.atomic.add(bins, (magnitude >> shift) & (digits - 1), 1)
        if add_up(bins, group, plan[group, BLOCKS], histogram, ticket):
            pick(group, histogram, bins, left, result)
            if cuda.threadIdx.x == 0:
                threshold |= result[0] << shift
                left -= result[1]
                if shift == 0 and threshold == 0:  # there are fewer than wanted: all of them
                    threshold, left = np.int64(1), np.int64(_MAGNITUDE)
                state[group, THRESHOLD] = threshold
                state[group, LEFT] = left

    @cuda.jit
    def place(residual, parts, groups, candidates, counts, above, ties, state):  # type: ignore[no-untyped-def]
        group = groups[cuda.blockIdx.x]
        threshold, floor = state[group, THRESHOLD], state[group, FLOOR]
        part, lane = part_of_team(), cuda.threadIdx.x % width
        found = counts[part]
        size = candidate_count(parts, candidates, part, found)
        larger, equal = 0, 0
        for first in range(0, size, width):
            magnitude = 0
            if first + lane < size:
                i = candidate(parts, candidates, part, found, first + lane)
                magnitude = bits_of(residual[i]) & _MAGNITUDE
            larger += rank(magnitude >= floor and magnitude > threshold)[1]
            equal += rank(magnitude >= floor and magnitude == threshold)[1]
        if lane == 0:
            above[part] = larger
            ties[part] = equal

    @cuda.jit
    def scan(above, ties, plan, state):  # type: ignore[no-untyped-def]
        """One block a group. `above` becomes where each part's elements go, `ties` how many of its ties are taken."""
        sums = cuda.shared.array((2, threads), np.int64)
        group, me = cuda.blockIdx.x, cuda.threadIdx.x
        low, high = plan[group, FIRST], plan[group, END]
        left = state[group, LEFT]
        each = (high - low + threads - 1) // threads
        first, end = min(high, low + me * each), min(high, low + me * each + each)
        larger, equal = np.int64(0), np.int64(0)
        for part in range(first, end):
            larger += above[part]
            equal += ties[part]
        sums[0, me], sums[1, me] = larger, equal
        cuda.syncthreads()
        larger, equal = np.int64(0), np.int64(0)
        for thread in range(me):
            larger += sums[0, thread]
            equal += sums[1, thread]
        for part in range(first, end):
            more_larger, more_equal = above[part], ties[part]
            above[part] = larger + min(left, equal)
            ties[part] = min(left, equal + more_equal) - min(left, equal)
            larger += more_larger
            equal += more_equal
        if me == threads - 1:
            state[group, SELECTED] = larger + min(left, equal)

    @cuda.jit
    def take(  # type: ignore[no-untyped-def]
        residual, parts, groups, candidates, counts, starts, quotas, out, plan, state
    ):
        group = groups[cuda.blockIdx.x]
        threshold, floor = state[group, THRESHOLD], state[group, FLOOR]
        header, room = plan[group, OUT], plan[group, ROOM]
        part, lane = part_of_team(), cuda.threadIdx.x % width
        if part == plan[group, FIRST] and lane == 0:
            collected = state[group, COLLECTED]
            out[header] = state[group, SELECTED]
            out[header + 1] = threshold
            out[header + 2] = collected
            out[header + 3] = state[group, SPOILED]
            state[group, SPOILED] = 0
            known_next = collected >= plan[group, K] and threshold < _INFINITE
            state[group, EXPECTED] = max(1, threshold - _LOWER) if known_next else 0
        found = counts[part]
        size = candidate_count(parts, candidates, part, found)
        quota, position = quotas[part], header + HEADER + starts[part]
        for first in range(0, size, width):
            i, bits, magnitude = 0, 0, 0
            if first + lane < size:
                i = candidate(parts, candidates, part, found, first + lane)
                bits = bits_of(residual[i])
                magnitude = bits & _MAGNITUDE
            wanted = magnitude >= floor and magnitude > threshold
            tied = magnitude >= floor and magnitude == threshold
            before, total = rank(tied)
            if tied and before < quota:
                wanted = True
            quota -= min(quota, total)
            before, total = rank(wanted)
            if wanted:
                out[position + before] = i
                out[position + room + before] = bits
                residual[i] = np.float32(0)
            position += total

    @cuda.jit
    def gather(values, indices, size, out):  # type: ignore[no-untyped-def]
        for j in range(cuda.grid(1), size, cuda.gridsize(1)):
            out[j] = values[indices[j]]

    @cuda.jit
    def put(indices, values, size, out, low, add):  # type: ignore[no-untyped-def]
        for j in range(cuda.grid(1), size, cuda.gridsize(1)):
            i = indices[j] - low
            out[i] = out[i] + values[j] if add else values[j]

    return Kernels(threads, threads // width, survey, collect, count, place, scan, take, gather, put)
