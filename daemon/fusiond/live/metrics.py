"""A daemon's figures for Prometheus, on a port of this host.

Names follow Prometheus's conventions: base units, `_total` for counters. docs/live.md lists them, and
docs/grafana.json is a dashboard that shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from functools import partial
from typing import TYPE_CHECKING

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusiond.host.loop import EventLoop
from fusiond.live.figures import Figured
from fusiond.live.web import Page, WebServer

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_ANSWER = 3.0  # seconds for the event loop
_EVERYTHING = wire.FiguresRequest(0, wire.MAX_RANKS, wire.MAX_RANKS)
_STATES = "starting", "running", "failed"


class Metrics:
    """Serves `/metrics` until it is closed.

    Args:
        loop: the daemon's; figures are taken in it.
        port: on the loopback address; 0: any.
        job, topology, node: of the figures.
        daemon: has them.
        token: required of clients; empty: a random one.

    Attributes:
        topology: of the figures that are taken next.
        url: of the page, without the token.
        address: with the token, for this user only.

    Raises:
        FusionError: the port cannot be used, or the package prometheus_client is not installed.
    """

    def __init__(
        self,
        loop: EventLoop,
        port: int,
        job: str,
        topology: Topology,
        node: int,
        daemon: Figured,
        token: str = "",
    ) -> None:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        except ModuleNotFoundError:
            raise FusionError("metrics need the package prometheus_client: pip install prometheus_client") from None
        self._loop = loop
        self._daemon = daemon
        self._job = job
        self.topology = topology
        self._node = node
        self._asked: Future[wire.Figures] | None = None
        registry = CollectorRegistry()
        registry.register(self)
        page = Page(CONTENT_TYPE_LATEST, lambda: generate_latest(registry))
        self._closing = False
        self._server = WebServer(port, {"/metrics": page}, token)
        self.url = f"{self._server.url}/metrics"
        self.address = self._server.address("/metrics")

    def close(self) -> None:
        """Ends the server. To be called on the loop's thread, after the loop has stopped and before it is closed."""
        self._closing = True
        if self._asked is not None:
            self._asked.cancel()
        self._server.close()

    def describe(self) -> list[Metric]:
        """Returns nothing to the registry: the metrics are known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all figures for the registry, as the daemon has them now."""
        return families(self._job, self.topology, self._node, self._take())

    def _take(self) -> wire.Figures:
        taken = self._asked = Future[wire.Figures]()
        if self._closing:
            taken.cancel()
        else:
            self._loop.call_from_thread(partial(self._tell, taken))
        try:
            return taken.result(_ANSWER)
        except TimeoutError:
            taken.cancel()
            raise FusionError(f"the daemon does not answer within {_ANSWER:g} s") from None
        except CancelledError:
            raise FusionError("the daemon ends") from None

    def _tell(self, taken: Future[wire.Figures]) -> None:
        if taken.set_running_or_notify_cancel():
            taken.set_result(self._daemon.figures(_EVERYTHING))


def families(job: str, topology: Topology, node: int, figures: wire.Figures) -> Iterator[Metric]:
    """Yields one node's figures as metrics of Prometheus."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    whose = {"job_id": job, "node": str(node), "host": topology.hosts[node]}  # `job` is Prometheus's own

    def one(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, about: str, value: float) -> Metric:
        family = kind(f"fusion_{name}", about, labels=list(whose))
        family.add_metric(list(whose.values()), value)
        return family

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield one(counter, "operations", "Operations completed on this node.", figures.operations)
    yield one(counter, "reduced_bytes", "Bytes of these operations in the workers' memory.", figures.bytes)
    yield one(gauge, "operations_under_way", "Operations that are not complete.", figures.under_way)
    yield one(counter, "cpu_seconds", "Processor time of the daemon.", figures.cpu_seconds)
    yield one(gauge, "memory_bytes", "Resident memory of the daemon, shared memory included.", figures.memory_bytes)
    yield one(gauge, "uptime_seconds", "How long the daemon has run.", figures.uptime_seconds)
    yield one(counter, "dense_bytes", "Bytes that would have been sent without compression.", figures.dense_bytes)
    yield one(counter, "packed_bytes", "Bytes that were sent instead.", figures.packed_bytes)
    yield one(counter, "contributions", "Contributions that homes have answered.", figures.staleness_count)
    yield one(gauge, "staleness_mean", "Their mean staleness, in versions.", figures.staleness_mean)
    state = gauge("fusion_state", "1 for the state that the daemon is in.", labels=[*whose, "state"])
    for name in _STATES:
        state.add_metric([*whose.values(), name], float(name == figures.state))
    yield state
    yield from _of_ranks(whose, figures)
    yield from _of_links(whose, topology, figures)


def _of_ranks(whose: dict[str, str], figures: wire.Figures) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    labels = [*whose, "rank"]
    steps = CounterMetricFamily("fusion_steps", "Steps that a rank has begun to reduce.", labels=labels)
    parts = CounterMetricFamily("fusion_parts", "Buckets that a rank was ready in.", labels=labels)
    late = CounterMetricFamily(
        "fusion_late_seconds", "How much later than the first sign of their buckets its parts came.", labels=labels
    )
    for rank in figures.ranks:
        values = [*whose.values(), str(rank.rank)]
        steps.add_metric(values, rank.steps)
        parts.add_metric(values, rank.parts)
        late.add_metric(values, rank.late_seconds)
    yield from (steps, parts, late)


def _of_links(whose: dict[str, str], topology: Topology, figures: wire.Figures) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = [*whose, "peer", "peer_host"]
    sent = CounterMetricFamily("fusion_sent_bytes", "Payload sent to a node.", labels=labels)
    received = CounterMetricFamily("fusion_received_bytes", "Payload received from a node.", labels=labels)
    waiting = GaugeMetricFamily("fusion_waiting_bytes", "Sent to a node and not acknowledged.", labels=labels)
    anew = CounterMetricFamily("fusion_reconnections", "How often a connection was made anew.", labels=labels)
    lost = GaugeMetricFamily("fusion_peer_lost", "1 if a node was declared dead.", labels=labels)
    for link in figures.links:
        values = [*whose.values(), str(link.node), topology.hosts[link.node]]
        sent.add_metric(values, link.sent_bytes)
        received.add_metric(values, link.received_bytes)
        waiting.add_metric(values, link.waiting_bytes)
        anew.add_metric(values, link.reconnections)
        lost.add_metric(values, float(link.lost))
    yield from (sent, received, waiting, anew, lost)
