"""Links over a distance: how many connections one gets, how much of its payload may be under way, and in which order a
ring visits the nodes. No I/O.

A round trip of `FAR` or more makes a link far. All else is a local network, of which nothing here changes anything.

One connection of TCP keeps no more under way than its congestion window. Where packets are lost that is little,
whatever the link could carry: about 1.2 segments / sqrt(loss), 56 KB at 0.1 % (Mathis et al., 1997). So a far link gets
as many connections as windows of that size fill it (`connections`). What the measurement at the start saw of its rate
is a lower bound, since a new connection is slow at first. So the bytes that may be under way follow the rate at which
payloads arrive (`Pipe`), up to twice as many as that fills: they double in a round trip until the link is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice, pairwise
from statistics import median

import numpy as np
import numpy.typing as npt

from fusion_rt.core.cost import CostModel

FAR = 5e-3  # seconds of a round trip
MOST_CONNECTIONS = 8
_WINDOW = 64 * 1024  # bytes that one connection keeps under way where a packet in a thousand is lost
MANY = 11  # nodes from which on the best order of a ring is not found for certain, nor the rate of each link measured
_MOST = 128  # nodes whose order is looked for: 50 ms
_PASSES = 8  # over a round, in each of which every part of it may be turned
_LESS = 1e-9  # seconds of latency that are worth a turn
_PERIODS = 8  # whose best rate counts
_BUSY = 10e-3  # seconds for which a peer's event loop may be busy otherwise

Places = npt.NDArray[np.intp]
Rates = npt.NDArray[np.float64]
Costs = Mapping[tuple[int, int], CostModel]
"""The model of each link by its two nodes, the lower one first."""


def is_far(link: CostModel) -> bool:
    return 2 * link.latency >= FAR


def connections(link: CostModel) -> int:
    """Returns how many payload connections fill a link: one on a local network."""
    if not is_far(link):
        return 1
    under_way = 2 * link.latency / link.seconds_per_byte
    return min(MOST_CONNECTIONS, max(1, -(-int(under_way) // _WINDOW)))


class Pipe:
    """Bytes that may be under way on each connection of a far link.

    Args:
        link: as measured at the start.
        connections: of it.
        least, most: bytes of `credit`.

    Attributes:
        credit: bytes, at most twice those that a round trip carries at the best rate of late.
        rate: that, B/s; 0 until something was measured.
    """

    def __init__(self, link: CostModel, connections: int, least: int, most: int) -> None:
        self.credit = least
        self.rate = 0.0
        self._round_trip = 2 * link.latency
        self._connections = connections
        self._least = least
        self._most = most
        self._rates: deque[float] = deque(maxlen=_PERIODS)
        self._since: tuple[float, int] | None = None

    def acknowledged(self, now: float, arrived: int, waiting: bool) -> int:
        """Notes arrived bytes, and returns `credit`.

        Args:
            now: seconds.
            arrived: bytes that are known to have arrived, in all.
            waiting: payloads wait for credit. Where none do, the rate says something about the job and not the link.
        """
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = now, arrived
        elif now - self._since[0] >= self._round_trip:
            began, before = self._since
            self._since = now, arrived
            self._rates.append((arrived - before) / (now - began))
            self.rate = max(self._rates)
            wanted = int(2 * self.rate * (self._round_trip + _BUSY)) // self._connections
            self.credit = min(self._most, max(self._least, wanted))
        return self.credit


def pairs(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns all pairs of nodes, the lower first, in rounds in which no node is twice (the circle method)."""
    return list(_rounds(nodes))


def _rounds(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    circle: list[int | None] = list(nodes)
    if len(circle) % 2:
        circle.append(None)
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def rounds_of(nodes: Sequence[int], most: int | None = None) -> list[list[tuple[int, int]]]:
    """Returns the pairs of nodes that measure the rate of their link, in rounds in which no node is twice: all pairs of
    up to ten nodes, and of more `most` rounds, or log2 N, so that the start takes no longer than a person waits."""
    few = None if len(nodes) < MANY else most or (len(nodes) - 1).bit_length()
    return list(islice(_rounds(nodes), few))


def shared_out(nodes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Returns the half of the pairs of nodes that each of them measures, in an order in which no node is the next of
    two: each begins with the one behind it."""
    count, found = len(nodes), {}
    for place, node in enumerate(nodes):
        steps = (count - 1) // 2 + (count % 2 == 0 and place < count // 2)
        found[node] = tuple(nodes[(place + step) % count] for step in range(1, steps + 1))
    return {node: others for node, others in found.items() if others}


def disjoint(links: Iterable[tuple[int, int]], most: int) -> list[list[tuple[int, int]]]:
    """Returns pairs of nodes, the first ones first, in at most so many rounds in which no node is twice."""
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for link in links:
        free = next((number for number, nodes in enumerate(busy) if nodes.isdisjoint(link)), len(rounds))
        if free == most:
            continue
        if free == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[free].append(link)
        busy[free].update(link)
    return rounds


def suspicious(
    links: Mapping[tuple[int, int], CostModel], took: Mapping[tuple[int, int], float], nbytes: int
) -> list[tuple[int, int]]:
    """Returns the links that seem to carry less than half of their models' rates, the slowest first.

    Args:
        links: models, of which most rates are those of other links of the same nodes.
        took: seconds that a payload of `nbytes` took beyond the latency, among others that were under way.
    """
    usual = median(took.values())
    beyond = {link: took[link] / max(links[link].seconds_per_byte * nbytes, usual) for link in took}
    return sorted((link for link, ratio in beyond.items() if ratio > 2), key=lambda link: (-beyond[link], link))


def best_of_nodes(links: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Returns the least seconds a byte of any link of each node."""
    best: dict[int, float] = {}
    for nodes, seconds in links.items():
        for node in nodes:
            best[node] = min(seconds, best.get(node, seconds))
    return best


def completed(
    links: Mapping[tuple[int, int], float], latencies: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], CostModel]:
    """Returns the model of each link whose latency is known.

    Args:
        links: measured seconds a byte by both nodes, the lower one first; at least one link of each node. Another link
            is taken to carry what the better of the measured links of either end does, whichever is less.
        latencies: seconds, of all links.
    """
    best = best_of_nodes(links)
    return {
        nodes: CostModel(latency, links.get(nodes) or max(best[node] for node in nodes))
        for nodes, latency in latencies.items()
    }


def time_of(order: Sequence[int], costs: Costs) -> tuple[float, float]:
    """Returns the cost of a ring in that order: seconds a byte of its slowest link, which all others wait for, then the
    seconds of latency around it."""
    links = [costs[min(pair), max(pair)] for pair in pairwise([*order, order[0]])]
    return max(link.seconds_per_byte for link in links), sum(link.latency for link in links)


def ring_order(nodes: Sequence[int], costs: Costs) -> tuple[int, ...]:
    """Returns the order in which a ring visits nodes, the first of them first: the one with the fastest slowest link,
    and of those the one with the least latency; the given order where none is better by a tenth, since measurements
    differ by that much. For more than ten nodes a good one, which need not be the best; for more than `_MOST` the given
    one, since to look for it would take the event loop too long.

    Args:
        nodes: at least one.
        costs: of all their links; where one is missing, the given order is kept.
    """
    given = tuple(nodes)
    if (
        len(given) <= 3
        or len(given) > _MOST
        or any((min(a, b), max(a, b)) not in costs for a in given for b in given if a != b)
    ):
        return given  # three nodes have one ring only
    found = _best(given, costs) if len(given) < MANY else _good(given, costs)
    (slow, late), (least_slow, least_late) = time_of(given, costs), time_of(found, costs)
    better = slow > 1.1 * least_slow or (slow >= least_slow and late > 1.1 * least_late)
    return found if better else given


def _best(nodes: tuple[int, ...], costs: Costs) -> tuple[int, ...]:
    """Finds the best order (Held and Karp): the slowest link first, then, along links no slower, the least latency."""

    def link(a: int, b: int) -> CostModel:
        return costs[min(nodes[a], nodes[b]), max(nodes[a], nodes[b])]

    count = len(nodes)
    rates = [[0.0 if a == b else link(a, b).seconds_per_byte for b in range(count)] for a in range(count)]
    late = [[0.0 if a == b else link(a, b).latency for b in range(count)] for a in range(count)]
    everybody = (1 << (count - 1)) - 1  # of nodes 1 and up

    @lru_cache(None)
    def slowest(visited: int, last: int) -> float:
        """The least slowest link of a way from node 0 through `visited`, which ends at `last`."""
        rest = visited & ~(1 << (last - 1))
        if not rest:
            return rates[0][last]
        return min(max(slowest(rest, b), rates[b][last]) for b in range(1, count) if rest >> (b - 1) & 1)

    limit = min(max(slowest(everybody, last), rates[last][0]) for last in range(1, count))

    @lru_cache(None)
    def shortest(visited: int, last: int) -> tuple[float, tuple[int, ...]]:
        rest = visited & ~(1 << (last - 1))
        if not rest:
            return (late[0][last] if rates[0][last] <= limit else float("inf")), (0, last)
        ways = []
        for b in (b for b in range(1, count) if rest >> (b - 1) & 1):
            seconds, way = shortest(rest, b)
            ways.append((seconds + late[b][last] if rates[b][last] <= limit else float("inf"), (*way, last)))
        return min(ways)

    closed = []
    for last in range(1, count):
        seconds, way = shortest(everybody, last)
        closed.append((seconds + late[last][0] if rates[last][0] <= limit else float("inf"), way))
    return tuple(nodes[place] for place in min(closed)[1])


def _good(nodes: tuple[int, ...], costs: Costs) -> tuple[int, ...]:
    """Goes to the nearest node that is left, from each, and turns parts of that round while that helps (2-opt; Croes: A
    method for solving traveling-salesman problems, 1958). A turn changes two links, so it is judged by these alone."""
    count = len(nodes)
    rates, late = np.full((count, count), np.inf), np.full((count, count), np.inf)
    for (one, a), (other, b) in combinations(enumerate(nodes), 2):
        link = costs[min(a, b), max(a, b)]
        rates[one, other] = rates[other, one] = link.seconds_per_byte
        late[one, other] = late[other, one] = link.latency
    order = np.zeros(count, np.intp)
    left = np.ones(count, bool)
    left[0] = False
    for place in range(1, count):
        here = order[place - 1]
        near = np.where(left, rates[here], np.inf)
        order[place] = np.where(near == near.min(), np.where(left, late[here], np.inf), np.inf).argmin()
        left[order[place]] = False
    for _ in range(_PASSES):
        turned = [_turn(order, first, rates, late) for first in range(count - 2)]
        if not any(turned):
            break
    return tuple(nodes[place] for place in order)


def _turn(order: Places, first: int, rates: Rates, late: Rates) -> bool:
    """Turns the part of a round that begins after the place `first` and ends where that is best; returns whether it is
    any better."""
    count = len(order)
    after = np.roll(order, -1)
    slow = rates[order, after]
    ranked = np.argsort(-slow, kind="stable")[:3]  # of the slowest links, two may be replaced
    last = np.arange(first + 2, count - (first == 0))
    if not len(last):
        return False
    a, b, c, d = order[first], after[first], order[last], after[last]
    rest = np.where((last == ranked[1]) | (first == ranked[1]), slow[ranked[2]], slow[ranked[1]])
    rest = np.where((last == ranked[0]) | (first == ranked[0]), rest, slow[ranked[0]])
    slowest = np.maximum(rest, np.maximum(rates[a, c], rates[b, d]))
    longer = late[a, c] + late[b, d] - late[a, b] - late[c, d]
    best = int(np.where(slowest == slowest.min(), longer, np.inf).argmin())
    if (slowest[best], longer[best]) >= (slow[ranked[0]], -_LESS):
        return False
    order[first + 1 : last[best] + 1] = order[first + 1 : last[best] + 1][::-1].copy()
    return True
