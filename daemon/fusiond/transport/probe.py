"""Measures links when an epoch starts, by the time that payloads take to a node and back. No I/O: methods return what
to send next.

On a local network the coordinator measures its links, one peer at a time (`LinkProbe`), so that measurements do not
disturb each other; of many nodes, pairs that have no node in common measure theirs, all at a time. Over a distance,
where a measurement does little but wait, latencies are measured of all links at once (`Pings`), and how much links
carry of a few pairs at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from fusiond.collectives.cost import CostModel, measured, worst

SMALL, LARGE = 1, 256 * 1024  # bytes of payload
_ROUNDS = (SMALL,) * 6 + (LARGE,) * 9
FEW = (SMALL,) * 2 + (LARGE,) * 4
"""Rounds for a link over a distance, whose round trips are long."""
_IN_A_BURST = 2  # of the large ones may be faster than the link

Probe = tuple[int, int, int]  # node, serial, bytes of payload
_serials = itertools.count(1)  # of all probes, so that a late echo is not taken for another one


class Pings:
    """Measures the latencies of links to many nodes at a time: a payload at a time to each of them.

    Args:
        clock: seconds.
        nodes: at the other ends.
        count: payloads to each.
        nbytes: of each.

    Attributes:
        nodes: at the other ends.
        latencies: seconds one way, by node: half of the best round trip so far.
    """

    def __init__(self, clock: Callable[[], float], nodes: Sequence[int], count: int, nbytes: int = SMALL) -> None:
        self._clock, self._nbytes = clock, nbytes
        self.nodes = tuple(nodes)
        self._left = dict.fromkeys(nodes, count)
        self._to_come = count * len(nodes)
        self._under_way: dict[int, tuple[int, float]] = {}  # serial, and when it was sent, by node
        self.latencies: dict[int, float] = {}

    @property
    def done(self) -> bool:
        """Returns whether all echoes have come."""
        return not self._to_come

    def ping(self, node: int) -> Probe:
        """Returns the next probe of a node, to be sent now."""
        serial = next(_serials)
        self._under_way[node] = serial, self._clock()
        return node, serial, self._nbytes

    def echo(self, node: int, serial: int) -> Probe | None:
        """Takes in an echo. Returns the next probe of that node; None when there is none, or the echo is not the one
        awaited."""
        expected, sent_at = self._under_way.get(node, (0, 0.0))
        if serial != expected:
            return None
        del self._under_way[node]
        latency = (self._clock() - sent_at) / 2
        self.latencies[node] = min(latency, self.latencies.get(node, latency))
        self._left[node] -= 1
        self._to_come -= 1
        return self.ping(node) if self._left[node] else None


class LinkProbe:
    """Measures the links to other nodes, each once for each daemon at its other end.

    Attributes:
        cost: of the worst of the links that were asked about last, when all have been measured; None until then.
        links: each of them, by node.
    """

    def __init__(self, clock: Callable[[], float], rounds: Sequence[int] = ()) -> None:
        self._clock = clock
        self._rounds = rounds or _ROUNDS
        self._nodes: Sequence[int] = ()
        self._todo: deque[tuple[int, int]] = deque()
        self._serial = 0
        self._sent_at = 0.0
        self._seconds: dict[tuple[int, int], list[float]] = {}  # round trips by node and payload
        self._links: dict[int, CostModel] = {}  # those that are measured, by node
        self._daemons: dict[int, str] = {}  # their keys, by node
        self.cost: CostModel | None = None
        self.links: dict[int, CostModel] = {}

    @property
    def seconds_per_byte(self) -> dict[int, float]:
        """Seconds a byte of each link, by node."""
        return {node: link.seconds_per_byte for node, link in self.links.items()}

    def unknown(self, nodes: Sequence[int]) -> list[int]:
        """Returns those of the nodes to which the links are not measured yet."""
        return [node for node in nodes if node not in self._links]

    def learn(self, links: Mapping[int, CostModel], nodes: Sequence[int]) -> CostModel:
        """Takes over the models of links that were measured in another way, by node; returns that of the worst link to
        `nodes`, all of which are known then."""
        self._links.update(links)
        self.links = {node: self._links[node] for node in nodes}
        self.cost = worst(list(self.links.values()))
        return self.cost

    def begin(self, nodes: Sequence[int]) -> Probe | None:
        """Begins to measure the links to these nodes that are not measured yet, and nothing else. Returns the first
        probe; None if there is no link to measure."""
        self._nodes = tuple(nodes)
        self._todo = deque((node, nbytes) for node in nodes if node not in self._links for nbytes in self._rounds)
        self._seconds.clear()
        self.cost = None
        return self._next()

    def echo(self, node: int, serial: int) -> Probe | None:
        """Takes in an echo. Returns the next probe; None when there is none, or the echo is not the one awaited."""
        if self.cost is not None or serial != self._serial or not self._todo or self._todo[0][0] != node:
            return None
        measurement = self._todo.popleft()
        self._seconds.setdefault(measurement, []).append(self._clock() - self._sent_at)
        return self._next()

    def admit(self, node: int, daemon: str) -> None:
        """Notes the key of the daemon by which a node takes part. The link to another one there is measured anew."""
        if self._daemons.get(node) != daemon:
            self._daemons[node] = daemon
            self._links.pop(node, None)

    def _next(self) -> Probe | None:
        if self._todo:
            self._serial = next(_serials)
            self._sent_at = self._clock()
            node, nbytes = self._todo[0]
            return node, self._serial, nbytes
        self._links.update({node: self._link(node) for node in {node for node, _ in self._seconds}})
        self.links = {node: self._links[node] for node in self._nodes}
        self.cost = worst(list(self.links.values())) if self.links else CostModel()
        return None

    def _link(self, node: int) -> CostModel:
        """Returns the best round trip of the small payloads, since the first pay for warming up, and the best of the
        large but two: a shaped link lets the first of them through at once, from its burst. Most others may be late
        where many processes start at the same time."""
        large = sorted(self._seconds[node, LARGE])[_IN_A_BURST]
        return measured(min(self._seconds[node, SMALL]), large, LARGE - SMALL)
