"""The code that runs on the device: `selection`, which launches it, describes it as a whole.

The elements are divided into parts. A part belongs to a team of threads, which walks through it in steps of its width,
in order, so that its finds are ordered too, without sorting: a warp, where there are instructions for it, and
otherwise a whole block. The teams do not wait for each other within a kernel; what follows from all of them is worked
out by the last block to end, or by the next kernel.

Elements are compared with those of their *group* only. Each block works for one group, `groups[block]`; of `plan`,
`state`, `histogram` and `ticket` each group has a row. So any number of groups costs as many launches as one.

`plan`, int64, is for words of the host, `state`, int64, for words of one kernel to the next: see the constants. All of
that is in the device's memory, so that the arguments of launches stay the same from step to step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusion_rt.kernels.cuda import _words as w
from fusion_rt.kernels.cuda.shim import bits_of, cuda, multiply

_ITEMS = 4  # elements that a thread has on their way at once
_WARP, _ALL_LANES = 32, 0xFFFFFFFF


def build(threads: int, warps: bool) -> dict[str, Any]:
    """Returns the kernels by name, and the number of teams of a block.

    Args:
        threads: of a block, a multiple of 32.
        warps: a warp is a team; the simulator has no instructions for this.
    """
    width = _WARP if warps else threads
    teams, tile = threads // width, width * _ITEMS
    BINS, LIST = w.BINS, w.LIST  # shapes have to be constants of this function
    device = cuda.jit(device=True)
    next_slack = device(w.next_slack)

    if warps:

        @device
        def rank(flag):  # type: ignore[no-untyped-def]
            """Counts how many of the threads before this one in the team have the flag, and how many have it at all.
            All threads of the team have to call this."""
            hits = cuda.ballot_sync(_ALL_LANES, flag)
            before = hits & ((1 << cuda.laneid) - 1)
            return cuda.popc(np.uint32(before)), cuda.popc(np.uint32(hits))

        @device
        def some(flag):  # type: ignore[no-untyped-def]
            """Says whether a thread of the team has the flag. All of them have to call this."""
            return cuda.any_sync(_ALL_LANES, flag)

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
        def some(flag):  # type: ignore[no-untyped-def]
            return cuda.syncthreads_or(np.int32(flag))

    @device
    def finite(value):  # type: ignore[no-untyped-def]
        return bits_of(value) & w.MAGNITUDE < w.INFINITE

    @device
    def advance(residual, gradient, velocity, rule, momentum, factor, i, group, state):  # type: ignore[no-untyped-def]
        """Adds to one element, and gives its new value."""
        step = speed = multiply(gradient[i], factor)
        if rule == w.NESTEROV:
            speed = multiply(velocity[i] + step, momentum)
            step = speed + step
        elif rule == w.MOMENTUM:
            step = speed = multiply(velocity[i], momentum) + step
        value = residual[i]
        if finite(value + step):
            value += step
            residual[i] = value
            if rule != w.PLAIN:
                velocity[i] = speed
        else:
            state[group, w.SPOILED] = 1
        return value

    @device
    def add_whole(residual, gradient, factor, first, values, group, state):  # type: ignore[no-untyped-def]
        """Adds to the elements of this thread in a tile that is whole, without a velocity. All are read before the
        first is written, so that they are on their way together; this is most of a selection's time."""
        steps = cuda.local.array(_ITEMS, np.float32)
        i = (first + cuda.threadIdx.x % width) & w.INDEX
        for item in range(_ITEMS):
            values[item] = residual[i + item * width]
        for item in range(_ITEMS):
            steps[item] = gradient[i + item * width]
        fine = True
        for item in range(_ITEMS):
            steps[item] = values[item] + multiply(steps[item], factor)
            fine = fine and finite(steps[item])
        if fine:
            for item in range(_ITEMS):
                values[item] = steps[item]
                residual[i + item * width] = steps[item]
        else:
            state[group, w.SPOILED] = 1
            for item in range(_ITEMS):
                if finite(steps[item]):
                    values[item] = steps[item]
                    residual[i + item * width] = steps[item]

    @device
    def load(residual, gradient, velocity, rule, momentum, factor, first, end, values, group, state):  # type: ignore[no-untyped-def]
        """The elements of this thread in the tile that begins at `first`, after addition; 0 beyond the end."""
        if rule == w.PLAIN and first + tile <= end:
            add_whole(residual, gradient, factor, first, values, group, state)
            return
        lane = cuda.threadIdx.x % width
        for item in range(_ITEMS):
            i = (first + item * width + lane) & w.INDEX
            if i >= end:
                values[item] = np.float32(0)
            elif rule == w.NO_GRADIENT:
                values[item] = residual[i]
            else:
                values[item] = advance(residual, gradient, velocity, rule, momentum, factor, i, group, state)

    @device
    def clear(bins):  # type: ignore[no-untyped-def]
        for b in range(cuda.threadIdx.x, BINS, threads):
            bins[b] = 0
        cuda.syncthreads()

    @device
    def is_last(group, blocks, ticket, last):  # type: ignore[no-untyped-def]
        """Says whether this block is the last of its group's to come here. What all of them have written before is to
        be seen then."""
        cuda.threadfence()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            last[0] = cuda.atomic.add(ticket, (group, w.ARRIVED), 1)
            if last[0] == blocks - 1:
                ticket[group, w.ARRIVED] = 0
        cuda.syncthreads()
        if last[0] == blocks - 1:
            cuda.threadfence()
        return last[0] == blocks - 1

    @device
    def add_up(bins, group, histogram):  # type: ignore[no-untyped-def]
        """Adds a block's counts to those of its group."""
        cuda.syncthreads()
        for b in range(cuda.threadIdx.x, BINS, threads):
            if bins[b] != 0:
                cuda.atomic.add(histogram, (group, b), bins[b])

    @device
    def add_to_suffix(sums, mine):  # type: ignore[no-untyped-def]
        """Sums up the counts of this thread and all after it."""
        me = cuda.threadIdx.x
        sums[me] = mine
        cuda.syncthreads()
        step = 1
        while step < threads:
            more = sums[me + step] if me + step < threads else 0
            cuda.syncthreads()
            sums[me] += more
            cuda.syncthreads()
            step *= 2
        return sums[me]

    @device
    def choose(bins, wanted, result, sums):  # type: ignore[no-untyped-def]
        """The last bin that `wanted` elements have or exceed, and how many of them exceed it, into `result`; -1 and 0
        where there are fewer. One block calls this."""
        me = cuda.threadIdx.x
        each = (BINS + threads - 1) // threads
        if me == 0:
            result[0] = -1
            result[1] = 0
        cuda.syncthreads()
        mine = 0
        for b in range(me * each, min(BINS, me * each + each)):
            mine += bins[b]
        above = add_to_suffix(sums, mine) - mine
        if above < wanted and wanted <= above + mine:
            digit = min(BINS, me * each + each) - 1
            while above + bins[digit] < wanted:
                above += bins[digit]
                digit -= 1
            result[0] = digit
            result[1] = above
        cuda.syncthreads()

    @device
    def pick(group, histogram, bins, wanted, result, sums):  # type: ignore[no-untyped-def]
        """Chooses as `choose` does, from the counts of all blocks of a group, and sets the histogram back to zero."""
        for b in range(cuda.threadIdx.x, BINS, threads):
            bins[b] = histogram[group, b]
            histogram[group, b] = 0
        choose(bins, wanted, result, sums)

    @device
    def narrow(group, result, base, width_of_bin, left, state):  # type: ignore[no-untyped-def]
        """Notes the finds of `pick` in bins that begin at a magnitude: one thread calls this."""
        if result[0] < 0:  # there are fewer than wanted: all of them
            state[group, w.THRESHOLD], state[group, w.WIDTH], state[group, w.LEFT] = 1, 0, w.MAGNITUDE
        else:
            state[group, w.THRESHOLD] = base + (result[0] << width_of_bin)
            state[group, w.WIDTH] = width_of_bin
            state[group, w.LEFT] = left - result[1]

    @device
    def part_of_team():  # type: ignore[no-untyped-def]
        return cuda.blockIdx.x * teams + cuda.threadIdx.x // width

    @device
    def known(group, plan, state):  # type: ignore[no-untyped-def]
        """The threshold for `collect` that is known before there is a survey; 0: none is."""
        threshold = plan[group, w.AT_LEAST]
        return state[group, w.EXPECTED] if threshold == w.EXPECTED_ONE else threshold

    @cuda.jit
    def survey(  # type: ignore[no-untyped-def]
        residual, gradient, velocity, parts, groups, rule, momentum, factor, histogram, ticket, plan, state
    ):
        bins = cuda.shared.array(BINS, np.int32)
        result = cuda.shared.array(2, np.int64)
        sums = cuda.shared.array(threads, np.int32)
        last = cuda.shared.array(1, np.int32)
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
                magnitude = bits_of(values[item]) & w.MAGNITUDE
                if magnitude > 0:
                    cuda.atomic.add(bins, magnitude >> w.COARSE, 1)
        add_up(bins, group, histogram)
        if is_last(group, plan[group, w.BLOCKS], ticket, last):
            pick(group, histogram, bins, plan[group, w.K], result, sums)
            if cuda.threadIdx.x == 0:
                state[group, w.FLOOR] = max(1, result[0] << w.COARSE)

    @cuda.jit
    def collect(  # type: ignore[no-untyped-def]
        residual, gradient, velocity, parts, groups, rule, momentum, factor, candidates, counts, histogram, ticket,
        plan, state,
    ):  # fmt: skip
        """Adds, where there was no survey. Where fewer than are wanted have reached the threshold, all
        elements are candidates, as if there were no room.

        It also counts how far above the threshold they are: in steps of 2 ** w.DIGIT, where most are, and of
        2 ** w.WIDE beyond."""
        bins = cuda.shared.array(BINS, np.int32)
        result = cuda.shared.array(2, np.int64)
        sums = cuda.shared.array(threads, np.int32)
        last = cuda.shared.array(1, np.int32)
        values = cuda.local.array(_ITEMS, np.float32)
        reached = cuda.shared.array(1, np.int32)
        if cuda.threadIdx.x == 0:
            reached[0] = 0
        clear(bins)
        group = groups[cuda.blockIdx.x]
        threshold, least = known(group, plan, state), plan[group, w.K]
        if threshold == 0:
            threshold, rule, least = state[group, w.FLOOR], w.NO_GRADIENT, np.int64(0)
        floor = np.uint32(threshold)
        part, lane = part_of_team(), cuda.threadIdx.x % width
        end = parts[part, 1]
        found = 0
        for first in range(parts[part, 0], end, tile):
            load(residual, gradient, velocity, rule, momentum, factor, first, end, values, group, state)
            hit = False
            for item in range(_ITEMS):
                hit = hit or np.uint32(bits_of(values[item]) & w.MAGNITUDE) >= floor
            if some(hit):  # in most tiles there is none
                for item in range(_ITEMS):
                    magnitude = bits_of(values[item]) & w.MAGNITUDE
                    hit = np.uint32(magnitude) >= floor
                    before, total = rank(hit)
                    if hit:
                        if found + before < candidates.shape[1]:
                            candidates[part, found + before] = first + item * width + lane
                        over = magnitude - threshold
                        fine = over < BINS // 2 << w.DIGIT
                        cuda.atomic.add(bins, over >> w.DIGIT if fine else BINS // 2 + (over >> w.WIDE), 1)
                    found += total
        if lane == 0:
            counts[part] = found
            cuda.atomic.add(reached, 0, found)
        add_up(bins, group, histogram)
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(ticket, (group, w.REACHED), reached[0])
        if is_last(group, plan[group, w.BLOCKS], ticket, last):
            if cuda.threadIdx.x == 0:
                reached[0] = cuda.atomic.exch(ticket, (group, w.REACHED), 0)
                ticket[group, w.LISTED] = state[group, w.ENDED] = 0
            pick(group, histogram, bins, plan[group, w.K], result, sums)
            enough = reached[0] >= least
            if cuda.threadIdx.x == 0:
                state[group, w.COLLECTED] = reached[0]
                state[group, w.FLOOR] = threshold if enough else 1
                if not enough:
                    state[group, w.THRESHOLD], state[group, w.LEFT] = 0, plan[group, w.K]
                    state[group, w.WIDTH] = w.MAGNITUDE_BITS
                elif result[0] < BINS // 2:
                    narrow(group, result, threshold, w.DIGIT, plan[group, w.K], state)
                else:
                    result[0] -= BINS // 2
                    narrow(group, result, threshold, w.WIDE, plan[group, w.K], state)
            if not enough:
                for other in range(plan[group, w.FIRST] + cuda.threadIdx.x, plan[group, w.END], threads):
                    counts[other] = candidates.shape[1] + 1

    @device
    def candidate_count(parts, candidates, part, found):  # type: ignore[no-untyped-def]
        return found if found <= candidates.shape[1] else parts[part, 1] - parts[part, 0]

    @device
    def candidate(residual, parts, candidates, part, found, j):  # type: ignore[no-untyped-def]
        """The index of a part's j-th candidate, and its bits; every element is one where there was no room for those
        found. Zeros beyond the last."""
        i, bits = np.int64(0), np.int32(0)
        if j < candidate_count(parts, candidates, part, found):
            i = np.int64(candidates[part, j] if found <= candidates.shape[1] else parts[part, 0] + j)
            bits = bits_of(residual[i])
        return i, bits

    @cuda.jit
    def count(residual, parts, groups, candidates, counts, histogram, ticket, plan, state):  # type: ignore[no-untyped-def]
        """Finds one more digit of the threshold, where it is not known yet."""
        bins = cuda.shared.array(BINS, np.int32)
        result = cuda.shared.array(2, np.int64)
        sums = cuda.shared.array(threads, np.int32)
        last = cuda.shared.array(1, np.int32)
        group = groups[cuda.blockIdx.x]
        bits = state[group, w.WIDTH]
        if bits == 0 or state[group, w.ENDED] == 1:
            return
        clear(bins)
        floor, base, left = state[group, w.FLOOR], state[group, w.THRESHOLD], state[group, w.LEFT]
        shift = max(0, bits - w.DIGIT)
        part = part_of_team()
        found = counts[part]
        size = candidate_count(parts, candidates, part, found)
        for j in range(cuda.threadIdx.x % width, size, width):
            magnitude = candidate(residual, parts, candidates, part, found, j)[1] & w.MAGNITUDE
            if magnitude >= max(floor, base) and (magnitude - base) >> bits == 0:
                cuda.atomic.add(bins, (magnitude - base) >> shift, 1)
        add_up(bins, group, histogram)
        if is_last(group, plan[group, w.BLOCKS], ticket, last):
            pick(group, histogram, bins, left, result, sums)
            if cuda.threadIdx.x == 0:
                narrow(group, result, base, shift, left, state)

    @cuda.jit
    def place(  # type: ignore[no-untyped-def]
        residual, parts, groups, candidates, counts, above, ties, sums, near, again, ticket, state
    ):
        """Counts, for each part, how many elements the parts before it in its block have that are above the threshold,
        and that equal it; and for each block, how many it has. Where the threshold is known but for its last digit,
        elements that may equal it are put on the list."""
        team_larger = cuda.shared.array(teams, np.int32)
        team_equal = cuda.shared.array(teams, np.int32)
        group = groups[cuda.blockIdx.x]
        bits = state[group, w.WIDTH]
        if bits > w.DIGIT or (again and state[group, w.ENDED] == 1):
            return
        threshold, floor = state[group, w.THRESHOLD], state[group, w.FLOOR]
        part, lane, team = part_of_team(), cuda.threadIdx.x % width, cuda.threadIdx.x // width
        found = counts[part]
        size = candidate_count(parts, candidates, part, found)
        larger, equal = 0, 0
        for first in range(0, size, width):
            i, found_bits = candidate(residual, parts, candidates, part, found, first + lane)
            magnitude = found_bits & w.MAGNITUDE
            over = (magnitude - threshold) >> bits if magnitude >= max(floor, threshold) else -1
            larger += rank(over > 0)[1]
            equal += rank(over == 0)[1]
            if over == 0 and bits > 0:
                entry = cuda.atomic.add(ticket, (group, w.LISTED), 1)
                if entry < near.shape[2]:
                    near[group, 0, entry], near[group, 1, entry] = i, magnitude - threshold
        if lane == 0:
            team_larger[team], team_equal[team] = larger, equal
        cuda.syncthreads()
        if lane == 0:
            larger, equal = 0, 0
            for other in range(team):
                larger += team_larger[other]
                equal += team_equal[other]
            above[part], ties[part] = larger, equal
            if team == teams - 1:
                sums[cuda.blockIdx.x, 0] = larger + team_larger[team]
                sums[cuda.blockIdx.x, 1] = equal + team_equal[team]

    @device
    def before_block(sums, first, larger, equal):  # type: ignore[no-untyped-def]
        """Sums up the counts of the blocks from `first` on that come before this one: above the threshold, and
        equal."""
        my_larger, my_equal = 0, 0
        for block in range(first + cuda.threadIdx.x, cuda.blockIdx.x, threads):
            my_larger += sums[block, 0]
            my_equal += sums[block, 1]
        add_to_suffix(larger, my_larger)
        add_to_suffix(equal, my_equal)
        return larger[0], equal[0]

    @cuda.jit
    def take(  # type: ignore[no-untyped-def]
        residual, parts, groups, candidates, counts, above, ties, sums, near, again, out, ticket, plan, state
    ):
        """Takes the elements out and writes them where they go. Where the last digit of the threshold is not known,
        each block finds it by itself, from the list; with more digits, or too many on the list, nothing is taken."""
        bins = cuda.shared.array(BINS, np.int32)
        indices = cuda.shared.array(LIST, np.int32)
        overs = cuda.shared.array(LIST, np.int32)
        result = cuda.shared.array(2, np.int64)
        larger_after = cuda.shared.array(threads, np.int32)
        equal_after = cuda.shared.array(threads, np.int32)
        group = groups[cuda.blockIdx.x]
        if again and state[group, w.ENDED] == 1:
            return
        bits, listed = state[group, w.WIDTH], ticket[group, w.LISTED]
        header, room = plan[group, w.OUT], plan[group, w.ROOM]
        tells = cuda.threadIdx.x == 0 and (cuda.blockIdx.x + 1) * teams == plan[group, w.END]
        if bits > w.DIGIT or (bits > 0 and listed > near.shape[2]):
            if tells:
                out[header] = w.OPEN
            return
        threshold, floor, left = state[group, w.THRESHOLD], state[group, w.FLOOR], state[group, w.LEFT]
        part, lane = part_of_team(), cuda.threadIdx.x % width
        larger, equal = before_block(sums, plan[group, w.FIRST] // teams, larger_after, equal_after)
        selected = larger + sums[cuda.blockIdx.x, 0] + min(left, equal + sums[cuda.blockIdx.x, 1])  # by the last block
        larger, equal = larger + above[part], equal + ties[part]
        if bits > 0:
            clear(bins)
            for entry in range(cuda.threadIdx.x, listed, threads):
                indices[entry], overs[entry] = near[group, 0, entry], near[group, 1, entry]
                cuda.atomic.add(bins, overs[entry], 1)
            cuda.syncthreads()
            choose(bins, left, result, larger_after)
            selected, left, threshold = plan[group, w.K], left - result[1], threshold + result[0]
            equal, start, digit = 0, parts[part, 0], result[0]
            for first in range(0, listed, width):  # those on the list that come before this part
                entry, over = first + lane, -1
                if entry < listed and indices[entry] < start:
                    over = overs[entry]
                larger += rank(over > digit)[1]
                equal += rank(over == digit)[1]
        if tells:
            collected, k = state[group, w.COLLECTED], plan[group, w.K]
            slack = next_slack(state[group, w.SLACK], collected, k)
            known_next = collected >= k and threshold < w.INFINITE
            expected = max(1, threshold - slack) if known_next else 0
            state[group, w.SLACK], state[group, w.EXPECTED] = slack, expected
            state[group, w.ENDED] = 2 if again else 1
            out[header] = selected
            out[header + 1] = threshold
            out[header + 2] = expected
            out[header + 3] = state[group, w.SPOILED]
            state[group, w.SPOILED] = 0
        found = counts[part]
        size = candidate_count(parts, candidates, part, found)
        quota, position = max(0, left - equal), header + w.HEADER + larger + min(left, equal)
        for first in range(0, size, width):
            i, found_bits = candidate(residual, parts, candidates, part, found, first + lane)
            magnitude = found_bits & w.MAGNITUDE
            wanted = magnitude >= floor and magnitude > threshold
            tied = magnitude >= floor and magnitude == threshold
            before, total = rank(tied)
            if tied and before < quota:
                wanted = True
            quota -= min(quota, total)
            before, total = rank(wanted)
            if wanted:
                out[position + before] = i
                out[position + room + before] = found_bits
                residual[i] = np.float32(0)
            position += total

    return {"teams": teams, "survey": survey, "collect": collect, "count": count, "place": place, "take": take}
