"""Words by which the host, and one kernel and the next, tell each other about a group; and the numbers that
host and device share.

Of `plan`, `state`, `ticket` and what `take` writes, each constant is a place in a group's row.
"""

from __future__ import annotations

THRESHOLD = 0  # the least magnitude that the smallest to take can have
WIDTH = 1  # it is less than 2 ** WIDTH above that; 0: it is that
LEFT = 2  # how many to take that are less than 2 ** WIDTH above it
FLOOR = 3  # the magnitude from which elements are collected
COLLECTED = 4  # how many were
SPOILED = 5  # 1 where a part of the gradient could not be added, since the last `take`
EXPECTED = 6  # a magnitude that as many are expected to reach in the next step; 0: none is known
SLACK = 7  # by how much that is less than the last threshold
ENDED = 8  # `take` has taken all: 1 the first time, 2 the second
STATE = 9

FIRST, END = 0, 1  # parts of the group
BLOCKS = 2  # how many work for it
OUT, ROOM = 3, 4  # the word at which its results begin, and for how many elements there is room
K = 5  # how many to take
AT_LEAST = 6  # the threshold of `collect`; `EXPECTED_ONE`: the one in `state`, or, if there is none, that of `survey`
PLAN = 7
EXPECTED_ONE = -1

ARRIVED, REACHED, LISTED = range(3)  # blocks; elements that they have collected, and that are on the list
TICKET = 3

HEADER = 4  # words before the indices in what `take` writes: selected, threshold, expected, spoiled
OPEN = -1  # instead of how many are selected: nothing is, since the threshold has to be found first
LIST = 2048  # elements of a group within 2 ** DIGIT of its threshold, at most
DIGIT = 11  # bits
BINS = 1 << DIGIT
MAGNITUDE_BITS = 31
COARSE = MAGNITUDE_BITS - DIGIT
PASSES = 3  # digits of a magnitude

NO_GRADIENT, PLAIN, MOMENTUM, NESTEROV = range(4)

MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000
INDEX = 0x7FFFFFFF  # what is masked by it is not negative, as the compiler sees then, which counts from no end
MOST_SLACK = 1275068  # in units of the last place, about a tenth of a number
LEAST_SLACK = MOST_SLACK // 16
WIDE = COARSE + 1  # bits
SPARE = 64  # so few more than wanted are no reason to expect more, or fewer


def next_slack(slack, collected, k):  # type: ignore[no-untyped-def]
    """Returns how far below this step's threshold the next step collects elements, in units of the last place: the
    nearer, the more were collected. It is compiled for the device."""
    if slack == 0 or collected < k:
        return MOST_SLACK
    if collected > 2 * k + k // 2 + 4 * SPARE:
        return max(LEAST_SLACK, slack // 2)
    if collected < k + k // 4 + SPARE:
        return min(MOST_SLACK, slack * 2)
    return slack
