"""Start of a job, or of a formation of it, from the first `Hello` on: nodes come up, the coordinator measures the links
that are new, and says `Start`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

from fusion_rt import wire
from fusion_rt.core.cost import CostModel
from fusion_rt.core.errors import WireError
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusiond.collectives.cost import worst
from fusiond.core.dispatch import Handlers
from fusiond.host.loop import EventLoop, Timer
from fusiond.host.signals import tell_starter
from fusiond.membership.epoch import Membership
from fusiond.transport.distance import (
    MANY,
    best_of_nodes,
    completed,
    disjoint,
    is_far,
    rounds_of,
    shared_out,
    suspicious,
)
from fusiond.transport.mesh import Mesh
from fusiond.transport.probe import FEW, LARGE, SMALL, LinkProbe, Pings, Probe

_log = logging.getLogger("fusiond")
_LATE = 0.8  # of the start's time-out
_COORDINATORS = 0.05  # of it, in which nodes can say that their own workers are late before the coordinator names them
_OTHERS = 0.1  # of it, in which the coordinator can name late nodes before nodes speak that do not know them
_OWN_PINGS, _PINGS = 6, 3  # to each node: by the coordinator, which decides whether any is far, and by others then
_FIRST_ROUNDS = 3  # in which pairs of many nodes are measured before slow links are looked for
_LARGE_PINGS = 2  # to each node, since a new connection is slow
_LOOK_S = 2.0  # seconds in which the first large payload to each node leaves, at most
_APART = 1e-3  # seconds between the first pings to two nodes, so that echoes do not wait for each other


class Begun(Protocol):
    """A formation, as far as it starts."""

    def started(self, start: wire.Start, seconds_per_byte: Mapping[int, float]) -> None:
        """All nodes are up; `seconds_per_byte`: of the links, by node."""

    def start_failed(self, error: str) -> None:
        """Not all nodes are up in time."""


class Starting:
    """One daemon's part in the start of a formation.

    Args:
        config, settings: this node's place; the time-out.
        membership: the workers that have come here, and, at the coordinator, the nodes that are up.
        loop, mesh: time, and the peers; None in a job of one node.
        probe: knows the links.
        formation: is told how it ends.
    """

    def __init__(
        self,
        config: bootstrap.DaemonConfig,
        settings: Settings,
        membership: Membership,
        loop: EventLoop,
        mesh: Mesh | None,
        probe: LinkProbe,
        formation: Begun,
    ) -> None:
        self._config = config
        self._settings = settings
        self._membership = membership
        self._loop = loop
        self._mesh = mesh
        self._formation = formation
        self._probe = probe
        self._pings: Pings | None = None
        self._pinged: Callable[[Mapping[int, float]], None]  # takes the latencies, when all echoes have come
        self._asked: LinkProbe | None = None  # for the coordinator
        self._awaited: dict[int, wire.Measure] = {}  # the links that nodes are measuring
        self._rounds: list[list[tuple[int, int]]] = []  # of links over a distance whose rate has to be measured
        self._latencies: dict[tuple[int, int], float] = {}  # of links over a distance
        self._rates: dict[tuple[int, int], float] = {}  # seconds a byte of them
        self._has_looked = False  # for links that are slower than others of their nodes
        self._took: dict[tuple[int, int], float] = {}  # seconds of a large payload on each, besides the latency
        self._paths: dict[tuple[int, int], wire.Path] = {}
        self._timer: Timer | None = None
        self._began = time.monotonic()

    def begin(self) -> None:
        """Starts the timer of the start's time-out."""
        self._timer = self._loop.call_later(self._settings.start_timeout, self._timed_out)

    def end(self) -> None:
        """Waits for no node any more, and measures nothing: another formation begins, perhaps with other nodes."""
        self._pings = None
        if self._timer is not None:
            self._timer.cancel()

    def check_up(self) -> None:
        """Tells the coordinator, once, that this node is up."""
        if not self._membership.became_up():
            return
        if self._config.node == self._membership.coordinator:
            self.node_up(self._config.node, self._membership.epoch)
        else:
            self._send(self._membership.coordinator, wire.Up(self._membership.epoch))

    def handlers(self) -> Handlers:
        """Returns the handlers of nodes' messages while the job starts."""
        return {
            wire.Up: lambda node, up: self.node_up(node, up.epoch),
            wire.Probe: lambda node, probe, payload: self._send(node, wire.Echo(probe.serial)),
            wire.Echo: self.echo,
            wire.Measure: self.measure,
            wire.LinkTimes: self.measured,
            wire.Start: lambda node, start: self.start(start),
        }

    def node_up(self, node: int, epoch: int) -> None:
        """Notes, at the coordinator, that a node is up in this membership epoch; measures links once all are."""
        if self._membership.came_up(node, epoch):
            self._measure()

    def echo(self, node: int, echo: wire.Echo) -> None:
        """Takes in a probe that has come back, and sends the next one."""
        if self._pings is not None:
            if probe := self._pings.echo(node, echo.serial):
                self._emit(probe)
            self._end_of_pings(self._pings)
        elif self._asked is not None:
            self._answer(self._asked, self._asked.echo(node, echo.serial))
        else:
            self._send_probe(self._probe.echo(node, echo.serial))

    def statistics(self) -> list[dict[str, object]]:
        """Returns each link that is known here: both `nodes`, `latency_seconds` one way, `bytes_per_second`."""
        return [
            {
                "nodes": list(nodes),
                "latency_seconds": round(path.latency, 6),
                "bytes_per_second": round(1 / path.seconds_per_byte),
            }
            for nodes, path in sorted(self._paths.items())
        ]

    def measure(self, node: int, order: wire.Measure) -> None:
        """Begins to measure links to nodes for the coordinator."""
        if not set(order.nodes) <= set(self._others()) or node != self._membership.coordinator or not order.nodes:
            raise WireError(f"it wants this node to measure its links to {order.nodes}, which is not its to say")
        if order.apart:
            self._ping(order.nodes, _LARGE_PINGS, self._tell_latencies, LARGE, order.apart)
        elif order.rate:
            self._asked = LinkProbe(self._loop.clock, FEW if order.far else ())
            self._answer(self._asked, self._asked.begin(order.nodes[:1]))
        else:
            self._ping(order.nodes, _PINGS, self._tell_latencies)

    def measured(self, node: int, answer: wire.LinkTimes) -> None:
        """Takes in, at the coordinator, links that a node has measured."""
        order = self._awaited.pop(node, None)
        if order is None or len(answer.latencies) != len(order.nodes) or order.rate != bool(answer.seconds_per_byte):
            raise WireError("it has measured links about which it was not asked")
        for other, latency in zip(order.nodes, answer.latencies, strict=True):
            link = min(node, other), max(node, other)
            if order.apart:
                self._took[link] = 2 * (latency - self._latencies[link])
                continue
            self._latencies[link] = min(latency, self._latencies.get(link, latency))
            if order.rate:
                self._rates[link] = answer.seconds_per_byte
        if not self._awaited:
            self._next_round()

    def start(self, start: wire.Start) -> None:
        """Starts the job here: the coordinator says that every node is up."""
        self._membership.started = True
        self._paths = {path.nodes: path for path in start.paths}
        if self._timer is not None:
            self._timer.cancel()
        self._formation.started(start, self._seconds_per_byte())
        _log.info("the job has started after %.2f s", time.monotonic() - self._began)
        self.report("started")
        if not self._membership.local:
            self.report("first_done")  # there is none to wait for

    def report(self, phase: Literal["joined", "connected", "started", "first_done"]) -> None:
        """Reports to an attending process how far the start has come."""
        if self._config.attached:
            tell_starter(bootstrap.Phase(phase))

    def _others(self) -> list[int]:
        return [node for node in self._membership.nodes if node != self._config.node]

    def _send(self, node: int, message: wire.PeerMessage) -> None:
        assert self._mesh is not None
        self._mesh.send(node, message)

    def _tell(self, answer: wire.LinkTimes) -> None:
        """Tells the coordinator the measurements for it."""
        if self._config.node == self._membership.coordinator:
            self.measured(self._config.node, answer)
        else:
            self._send(self._membership.coordinator, answer)

    def _tell_latencies(self, latencies: Mapping[int, float]) -> None:
        self._tell(wire.LinkTimes(tuple(latencies.values())))

    def _answer(self, asked: LinkProbe, probe: Probe | None) -> None:
        """Sends the next probe of a link that the coordinator wants to be measured, or tells it the results."""
        if probe is not None:
            self._emit(probe)
        elif asked.cost is not None:
            self._asked = None
            self._tell(wire.LinkTimes((asked.cost.latency,), asked.cost.seconds_per_byte))

    def _emit(self, probe: Probe) -> None:
        assert self._mesh is not None
        node, serial, nbytes = probe
        self._mesh.send_payload(node, wire.Probe(serial), bytes(nbytes))

    # --- latencies of many links at a time ----------------------------------------------------------------------------

    def _ping(
        self,
        nodes: Sequence[int],
        count: int,
        then: Callable[[Mapping[int, float]], None],
        nbytes: int = SMALL,
        apart: float = _APART,
    ) -> None:
        """Measures the latencies of links to nodes, and hands them on, by node."""
        pings = self._pings = Pings(self._loop.clock, nodes, count, nbytes)
        self._pinged = then
        for place, node in enumerate(nodes):
            self._loop.call_later(place * apart, partial(self._ping_first, pings, node))
        self._end_of_pings(pings)

    def _ping_first(self, pings: Pings, node: int) -> None:
        if pings is self._pings:
            self._emit(pings.ping(node))

    def _end_of_pings(self, pings: Pings) -> None:
        if pings.done:
            self._pings = None
            self._pinged({node: pings.latencies[node] for node in pings.nodes})

    # --- which links are measured, and how ----------------------------------------------------------------------------

    def _measure(self) -> None:
        """Has links measured that are not known yet, from an epoch or a formation before."""
        if self._paths:
            self._begin_far_job()
        else:
            self._ping(self._probe.unknown(self._others()), _OWN_PINGS, self._decide_how_to_measure)

    def _decide_how_to_measure(self, latencies: Mapping[int, float]) -> None:
        """Measures the coordinator's links, one after the other; of many nodes, what the links of disjoint pairs carry,
        all at a time, in two rounds; or, where any link is over a distance, the links of all nodes."""
        others = self._others()
        if not any(is_far(CostModel(latency)) for latency in latencies.values()):
            if len(latencies) < MANY:
                self._send_probe(self._probe.begin(others))
            else:
                self._latencies = self._between(latencies)
                self._rounds = rounds_of(self._membership.nodes, 2)
                self._next_round()
        elif len(latencies) < len(others):
            self._ping(others, _OWN_PINGS, self._measure_far)
        else:
            self._measure_far(latencies)

    # --- links over a distance ----------------------------------------------------------------------------------------

    def _measure_far(self, latencies: Mapping[int, float]) -> None:
        """Has the links of all nodes measured: first latencies, all at once, then what links carry, as many at a time
        as have no node in common."""
        self._latencies = self._between(latencies)
        self._rounds = rounds_of(self._membership.nodes, _FIRST_ROUNDS)
        others = self._others()
        self._ask({node: wire.Measure(tuple(others[place + 1 :])) for place, node in enumerate(others[:-1])})

    def _between(self, latencies: Mapping[int, float]) -> dict[tuple[int, int], float]:
        """Returns the latencies of this node's links by both nodes."""
        own = self._config.node
        return {(min(own, node), max(own, node)): latency for node, latency in latencies.items()}

    def _ask(self, orders: Mapping[int, wire.Measure]) -> None:
        """Has nodes measure links; goes on when all have."""
        self._awaited = dict(orders)
        for node, order in orders.items():
            if node == self._config.node:
                self.measure(node, order)
            else:
                self._send(node, order)
        if not orders:
            self._next_round()

    def _next_round(self) -> None:
        far = any(is_far(CostModel(latency)) for latency in self._latencies.values())
        if self._rounds:
            self._ask({one: wire.Measure((other,), rate=True, far=far) for one, other in self._rounds.pop(0)})
            return
        links = completed(self._rates, self._latencies)
        if far and len(links) > len(self._rates) and not self._has_looked:
            self._look_for_slow_links(links)
            return
        if not far:
            own = self._config.node
            self._begin_job(
                self._probe.learn(
                    {sum(pair) - own: link for pair, link in links.items() if own in pair}, self._others()
                )
            )
            return
        self._paths = {nodes: wire.Path(nodes, link.latency, link.seconds_per_byte) for nodes, link in links.items()}
        self._begin_far_job()

    def _look_for_slow_links(self, links: Mapping[tuple[int, int], CostModel]) -> None:
        """Has large payloads sent on all links, whose rates are known of few, so far apart that a node's links have one
        under way; those that take longer than their models say are measured then."""
        nodes = self._membership.nodes
        if self._took:
            self._has_looked = True
            self._rounds = disjoint(suspicious(links, self._took, LARGE), (len(nodes) - 1).bit_length())
            self._next_round()
            return
        slowest = max(best_of_nodes(self._rates).values())
        apart = min(2 * _LARGE_PINGS * slowest * LARGE, 2 * _LOOK_S / len(nodes))
        self._ask({node: wire.Measure(others, apart=apart) for node, others in shared_out(nodes).items()})

    def _begin_far_job(self) -> None:
        paths = self._paths.values()
        self._begin_job(worst([CostModel(path.latency, path.seconds_per_byte) for path in paths]))

    # --- links of a local network -------------------------------------------------------------------------------------

    def _send_probe(self, probe: Probe | None) -> None:
        if probe is not None:
            self._emit(probe)
        elif self._probe.cost is not None and not self._membership.started:
            self._begin_job(self._probe.cost)

    def _seconds_per_byte(self) -> Mapping[int, float]:
        """Returns those of this node's links, by node, as far as they have been measured."""
        own = self._config.node
        far = {sum(nodes) - own: path.seconds_per_byte for nodes, path in self._paths.items() if own in nodes}
        return far or self._probe.seconds_per_byte

    def _begin_job(self, cost: CostModel) -> None:
        """Says, at the coordinator, that the job starts; `cost`: of the worst link."""
        route = cost.rounded()
        paths = tuple(path for _, path in sorted(self._paths.items()))
        start = wire.Start(cost.latency, cost.seconds_per_byte, route.latency, route.seconds_per_byte, paths)
        for node in self._others():
            self._send(node, start)
        self.start(start)

    def _timed_out(self) -> None:
        if not self._membership.all_came or self._unreached():
            self._give_up()
            return
        share = _COORDINATORS if self._config.node == self._membership.coordinator else _OTHERS
        self._timer = self._loop.call_later(share * self._settings.start_timeout, self._give_up)

    def _give_up(self) -> None:
        who = self._membership.missing()
        if nodes := self._unreached():
            topology = self._config.topology
            missing = ", ".join(f"{node} (host {topology.hosts[node]})" for node in nodes)
            who = f"the daemons of nodes {missing} could not be reached from host {topology.hosts[self._config.node]}"
        self._formation.start_failed(
            f"the job did not come up within {self._settings.start_timeout:g} s: {who}; raise --start-timeout "
            "(HOROVOD_START_TIMEOUT) if a busy host or a slow link needs longer (docs/troubleshooting.md)"
        )

    def _unreached(self) -> list[int]:
        return [] if self._mesh is None else self._mesh.missing()

    def unreached(self) -> list[int]:
        """Returns the nodes that have not come up, though the time for that is as good as over. (Another node's clock
        may be the first to say that it is.)"""
        is_late = time.monotonic() - self._began >= _LATE * self._settings.start_timeout
        return self._unreached() if is_late and not self._membership.started else []
