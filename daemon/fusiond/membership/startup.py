"""Start of a job, or of a formation of it, from the first `Hello` on: nodes come up, the coordinator measures the links
that are new, and says `Start`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

from fusion_rt import wire
from fusion_rt.core.cost import CostModel
from fusion_rt.core.errors import WireError
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusiond.core.dispatch import Handlers
from fusiond.host.loop import EventLoop, Timer
from fusiond.host.signals import tell_starter
from fusiond.membership.epoch import Membership
from fusiond.transport.distance import is_far, pairs
from fusiond.transport.mesh import Mesh
from fusiond.transport.probe import FEW, LinkProbe

_log = logging.getLogger("fusiond")
_LATE = 0.8  # of the start's time-out
_COORDINATORS = 0.05  # of it, in which nodes can say that their own workers are late before the coordinator names them
_OTHERS = 0.1  # of it, in which the coordinator can say who is late before nodes speak that do not know


class Starting:
    """One daemon's part in the start of a formation.

    Args:
        config, settings: this node's place; the time-out.
        membership: the workers that have come here, and, at the coordinator, the nodes that are up.
        loop, mesh: time, and the peers; None in a job of one node.
        probe: knows the links.
        started: called with the `Start` and the links' seconds a byte by node, when all nodes are up.
        failed: called with a sentence when they are not in time.
    """

    def __init__(
        self,
        config: bootstrap.DaemonConfig,
        settings: Settings,
        membership: Membership,
        loop: EventLoop,
        mesh: Mesh | None,
        probe: LinkProbe,
        started: Callable[[wire.Start, Mapping[int, float]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._config = config
        self._settings = settings
        self._membership = membership
        self._loop = loop
        self._mesh = mesh
        self._started = started
        self._failed = failed
        self._probe = probe
        self._asked: LinkProbe | None = None  # for the coordinator
        self._rounds: list[list[tuple[int, int]]] | None = None  # of links of others that have to be measured
        self._paths: dict[tuple[int, int], wire.Path] = {}
        self._timer: Timer | None = None
        self._began = time.monotonic()

    def begin(self) -> None:
        """Starts the timer of the start's time-out."""
        self._timer = self._loop.call_later(self._settings.start_timeout, self._timed_out)

    def end(self) -> None:
        """Waits for nobody any more: another formation begins."""
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
            wire.Path: self.measured,
            wire.Start: lambda node, start: self.start(start),
        }

    def node_up(self, node: int, epoch: int) -> None:
        """Notes, at the coordinator, that a node is up in this membership epoch; measures links once all are."""
        self._membership.nodes_up[node] = epoch
        if self._membership.all_up:
            self._send_probe(self._probe.begin(self._others()))

    def echo(self, node: int, echo: wire.Echo) -> None:
        """Takes in a probe that has come back, and sends the next one."""
        if self._asked is not None:
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
        """Begins to measure the link to a node for the coordinator."""
        if order.node not in self._others() or node != self._membership.coordinator:
            raise WireError(f"it wants this node to measure its link to node {order.node}, which is not its to say")
        self._asked = LinkProbe(self._loop.clock, FEW)
        self._answer(self._asked, self._asked.begin([order.node]))

    def measured(self, node: int, path: wire.Path) -> None:
        """Takes in, at the coordinator, a link that another node has measured."""
        if self._rounds and path.nodes in self._rounds[0] and path.nodes[0] == node:
            self._paths[path.nodes] = path
            self._rounds[0].remove(path.nodes)
            self._measure_others()

    def start(self, start: wire.Start) -> None:
        """Starts the job here: the coordinator says that every node is up."""
        self._membership.started = True
        self._paths = {path.nodes: path for path in start.paths}
        if self._timer is not None:
            self._timer.cancel()
        self._started(start, self._probe.seconds_per_byte)
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

    def _answer(self, asked: LinkProbe, probe: tuple[int, int, int] | None) -> None:
        """Sends the next probe of a link that the coordinator wants to be measured, or tells it what was found."""
        if probe is not None:
            self._emit(probe)
        elif asked.cost is not None:
            self._asked = None
            for node, link in asked.links.items():
                self._send(self._membership.coordinator, _path(self._config.node, node, link))

    def _emit(self, probe: tuple[int, int, int]) -> None:
        assert self._mesh is not None
        node, serial, nbytes = probe
        self._mesh.send_payload(node, wire.Probe(serial), bytes(nbytes))

    def _measure_others(self) -> None:
        """Has the links of others measured, where any link is over a distance: pair by pair, as many at a time as have
        no node in common; then starts the job."""
        if self._rounds is None:
            far = any(is_far(link) for link in self._probe.links.values())
            self._rounds = []
            if far:
                self._rounds = [links for links in pairs(self._others()) if links]
                own = [_path(self._config.node, node, link) for node, link in self._probe.links.items()]
                self._paths = {path.nodes: path for path in own}
            self._ask()
        elif self._rounds and not self._rounds[0]:
            self._rounds.pop(0)
            self._ask()
        if not self._rounds:
            self._begin_job()

    def _ask(self) -> None:
        for one, other in self._rounds[0] if self._rounds else ():
            self._send(one, wire.Measure(other))

    def _send_probe(self, probe: tuple[int, int, int] | None) -> None:
        if probe is not None:
            self._emit(probe)
        elif self._probe.cost is not None and not self._membership.started:
            self._measure_others()

    def _begin_job(self) -> None:
        """Says, at the coordinator, that the job starts."""
        assert self._probe.cost is not None
        cost = self._probe.cost
        if self._paths:  # the slowest link may be one between others
            links = [CostModel(path.latency, path.seconds_per_byte) for path in self._paths.values()]
            cost = CostModel(max(link.latency for link in links), max(link.seconds_per_byte for link in links))
        route = cost.rounded(self._settings.route_latency, self._settings.route_rate)
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
        self._failed(
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


def _path(one: int, other: int, link: CostModel) -> wire.Path:
    return wire.Path((min(one, other), max(one, other)), link.latency, link.seconds_per_byte)
