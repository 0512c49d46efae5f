"""Start of a job, or of a formation of it, from the first `Hello` on: nodes come up, the coordinator measures the links
that are new, and says `Start`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

from fusion_rt import wire
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusiond.core.dispatch import Handlers
from fusiond.host.loop import EventLoop, Timer
from fusiond.host.signals import tell_starter
from fusiond.membership.epoch import Membership
from fusiond.transport.mesh import Mesh
from fusiond.transport.probe import LinkProbe

_log = logging.getLogger("fusiond")


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
            wire.Start: lambda node, start: self.start(start),
        }

    def node_up(self, node: int, epoch: int) -> None:
        """Notes, at the coordinator, that a node is up in this membership epoch; measures links once all are."""
        self._membership.nodes_up[node] = epoch
        if self._membership.all_up:
            self._send_probe(self._probe.begin(self._others()))

    def echo(self, node: int, echo: wire.Echo) -> None:
        """Takes in a probe that has come back, and sends the next one."""
        self._send_probe(self._probe.echo(node, echo.serial))

    def start(self, start: wire.Start) -> None:
        """Starts the job here: the coordinator says that every node is up."""
        self._membership.started = True
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

    def _send_probe(self, probe: tuple[int, int, int] | None) -> None:
        if probe is not None:
            assert self._mesh is not None
            node, serial, nbytes = probe
            self._mesh.send_payload(node, wire.Probe(serial), bytes(nbytes))
        elif self._probe.cost is not None and not self._membership.started:
            cost = self._probe.cost
            route = cost.rounded(self._settings.route_latency, self._settings.route_rate)
            start = wire.Start(cost.latency, cost.seconds_per_byte, route.latency, route.seconds_per_byte)
            for node in self._others():
                self._send(node, start)
            self.start(start)

    def _timed_out(self) -> None:
        who = self._membership.missing()
        hosts = self._config.topology.hosts
        if self._mesh is not None and (nodes := self._mesh.missing()):
            missing = ", ".join(f"{node} (host {hosts[node]})" for node in nodes)
            who = f"the daemons of nodes {missing} could not be reached from host {hosts[self._config.node]}"
        self._failed(f"the job did not come up within {self._settings.start_timeout:g} s: {who}")
