"""Aligns the clocks of all nodes with node 0's.

Daemons have measured how far each peer's clock is from their own (records of kind `CLOCK`): an echo of the peer's time,
and the round trip it took. The true offset is within half a round trip of the measured one, so the echoes with the
shortest round trips say most (the filter of NTP, RFC 5905, section 10). Clocks drift apart by up to some 50 us a
second; so a line with a corner every `PIECE` is laid through the measurements, by least squares with weights that fall
with the round trip's fourth power, which leaves next to nothing to echoes that waited somewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.reader import Records

_MOST_DRIFT = 1e-4  # seconds a second by which clocks may drift apart: twice NTP's assumption
PIECE = 16 * 10**9  # ns between corners, at least
_SHORT = 2 * 10**9  # ns in which no drift can be told from noise
_ENOUGH = 8  # measurements for a piece of the line
_MOST = 4096  # measurements that are used; of more, those with the shortest round trips


@dataclass(frozen=True, eq=False)
class Offset:
    """A function of time that is added to times of a node to have them on node 0's clock.

    Attributes:
        at: times of the node's clock, ns, increasing.
        ns: the offset at each of these; in between it is interpolated, outside it goes on as it began or ended.
        error: by how much it may be wrong, ns; -1: unknown.
        how: in words.
    """

    at: NDArray[np.int64]
    ns: NDArray[np.int64]
    error: int
    how: str

    def apply(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns times of the node on node 0's clock; int64 ns."""
        base = int(self.ns[0])
        x, at, changes = (times - self.at[0]).astype(float), (self.at - self.at[0]).astype(float), self.ns - base
        moved = np.interp(x, at, changes)
        if len(at) > 1:
            slope = np.clip(np.diff(changes) / np.diff(at), -_MOST_DRIFT, _MOST_DRIFT)
            moved += slope[0] * np.minimum(x - at[0], 0) + slope[-1] * np.maximum(x - at[-1], 0)
        aligned: NDArray[np.int64] = times + base + np.rint(moved).astype(np.int64)
        return aligned


def same(how: str = "the clock of node 0") -> Offset:
    return fixed(0, 0, how)


def fixed(ns: int, error: int, how: str) -> Offset:
    return Offset(np.zeros(1, np.int64), np.array([ns], np.int64), error, how)


def to_node_0(daemons: Mapping[int, Records]) -> dict[int, Offset]:
    """Returns the offset of every node that can be reached from node 0 by measurements, node 0 among them.

    Args:
        daemons: by node, its daemon's records, in times of its own clock.
    """
    measured: dict[tuple[int, int], Offset] = {}  # (node, other): to be added to times of node
    for node, records in daemons.items():
        clock = records[records["kind"] == Kind.CLOCK]
        for other in np.unique(clock["peer"]).tolist():
            mine = clock[clock["peer"] == other]
            measured[node, other] = _fitted(mine["time"], mine["value"], mine["extra"])
    # One side's measurements will do; the better of two is taken.
    best: dict[int, Offset] = {0: same()}
    waiting = [(0, 0)]
    done = set()
    while waiting:
        _, near = heapq.heappop(waiting)
        if near in done:
            continue
        done.add(near)
        for far in sorted({pair[0] for pair in measured} | {pair[1] for pair in measured}):
            ways = [measured[far, near]] if (far, near) in measured else []
            if (near, far) in measured:
                ways.append(_inverse(measured[near, far]))
            if not ways or far in done:
                continue
            step = min(ways, key=lambda way: way.error)
            error = step.error + best[near].error
            if far not in best or error < best[far].error:
                there = step.at + step.ns  # times of `near`
                how = f"measured, {'with' if near == 0 else 'over'} node {near}"
                best[far] = Offset(step.at, step.ns + best[near].apply(there) - there, error, how)
                heapq.heappush(waiting, (error, far))
    return best


def by_machine(offsets: Mapping[int, Offset], machines: Mapping[int, str]) -> dict[int, Offset]:
    """Returns offsets in which nodes of one machine have one offset, that which is known best: they have one clock.

    A measurement on a busy machine may be wrong by more than a step lasts. A container may have a clock of its own
    (time_namespaces(7)): offsets that differ by more than their errors stay as they are.

    Args:
        machines: by node, the number of its machine; "": not known.
    """
    best: dict[str, int] = {}
    found = dict(offsets)
    for node in sorted(offsets, key=lambda node: (offsets[node].error, node)):
        machine = machines.get(node, "")
        first = best.setdefault(machine, node) if machine else node
        one, other = offsets[first], offsets[node]
        at = np.concatenate([one.at, other.at])
        if first != node and np.abs(one.apply(at) - other.apply(at)).max() <= one.error + other.error:
            found[node] = replace(one, how=f"the machine of node {first}")
    return found


def _fitted(times: NDArray[np.int64], offsets: NDArray[np.int64], round_trips: NDArray[np.uint32]) -> Offset:
    """Fits a line with corners to measurements (round trips in us); its error is half of the shortest round trips."""
    spans = np.array_split(np.arange(len(times)), min(_MOST, len(times)))
    kept = np.array([span[np.argmin(round_trips[span])] for span in spans])
    times, offsets, trips = times[kept], offsets[kept], np.maximum(round_trips[kept].astype(float), 1)
    corners = [0]
    for place in range(_ENOUGH, len(times)):
        if place - corners[-1] >= _ENOUGH and times[place] - times[corners[-1]] >= PIECE:
            corners.append(place)
    pieces = [trips[begin:end] for begin, end in pairwise([*corners, len(trips)]) if end - begin >= _ENOUGH]
    # The record's round trip is rounded to microseconds: half of it, and the largest rounding error.
    error = int(max(piece.min() for piece in pieces or [trips])) * 500 + 500
    if len(times) < _ENOUGH or times[-1] - times[0] < _SHORT:
        best = int(np.argmin(trips))
        return Offset(times[best : best + 1], offsets[best : best + 1], error, "")
    # The last corner is the end: times after the last but one are a piece too, or belong to the one before.
    if len(corners) > 1 and len(times) - corners[-1] < _ENOUGH:
        corners.pop()
    at = np.append(times[corners], times[-1])
    x, knots = (times - times[0]).astype(float), (at - times[0]).astype(float)
    hats = np.stack([np.interp(x, knots, unit) for unit in np.eye(len(knots))], axis=1)
    weight = trips.min() ** 2 / trips**2
    base = int(offsets[0])
    fitted = np.linalg.lstsq(hats * weight[:, None], (offsets - base) * weight, rcond=None)[0]
    return Offset(at, np.rint(fitted).astype(np.int64) + base, error, "")


def _inverse(offset: Offset) -> Offset:
    return Offset(offset.at + offset.ns, -offset.ns, offset.error, offset.how)
