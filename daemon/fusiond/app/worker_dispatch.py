"""Dispatch of this node's ranks: they come and leave, and their messages, and those of tools, get to their handlers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusion_rt import wire
from fusion_rt.core.traceback_format import quoted
from fusion_rt.host import bootstrap
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.app.ending import Ending
from fusiond.app.tool_dispatch import ToolDispatch
from fusiond.membership.epoch import Membership, not_ours
from fusiond.membership.startup import Starting
from fusiond.timeline.controller import TimelineController
from fusiond.workers.relayed_ports import RelayedPorts

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine
    from fusiond.workers.connections import WorkerLink

_log = logging.getLogger("fusiond")


class WorkerDispatch:
    """One daemon's `WorkerEvents`.

    Args:
        config: this node's place in the formation.
        number: of the formation.
        links: the connections of those that have joined, by rank; kept here.
        timeline: submissions are told to it.
        relayed: ports of other nodes.
        begin_epoch: begins a membership epoch in all parts of the daemon.

    Attributes:
        handlers: of the messages of workers that have joined, and of tools.
    """

    def __init__(
        self,
        config: bootstrap.DaemonConfig,
        number: int,
        membership: Membership,
        links: dict[int, WorkerLink],
        effects: DaemonEffects,
        starting: Starting,
        ending: Ending,
        timeline: TimelineController,
        tools: ToolDispatch,
        relayed: RelayedPorts,
        begin_epoch: Callable[[], None],
    ) -> None:
        self._job = config.job
        self._formation = number if config.elastic else None
        self._is_over = False
        self._host = config.topology.hosts[config.node]
        self._membership = membership
        self._links = links
        self._effects = effects
        self._starting = starting
        self._ending = ending
        self._timeline = timeline
        self._relayed = relayed
        self._begin_epoch = begin_epoch
        self.handlers: dict[type[Any], Callable[..., None]] = {
            wire.Ping: lambda link, _: effects.workers.send(link, wire.Pong()),
            wire.TrafficRequest: self._tell_traffic,
            wire.StartTimeline: self._start_timeline,
            wire.StopTimeline: self._stop_timeline,
            wire.RelayPort: self._relay_port,
            **tools.handlers(),
        }

    def engine_begins(self, engine: Engine) -> None:
        """Switches to the engine of a new membership epoch."""
        of_engine = engine.worker_handlers()

        def submit(link: WorkerLink, message: wire.Submit) -> None:
            self._timeline.submitted(message)
            of_engine[wire.Submit](link, message)

        self.handlers.update(of_engine)
        self.handlers[wire.Submit] = submit

    def _tell_traffic(self, link: WorkerLink, asked: wire.TrafficRequest) -> None:
        told = dict(zip(("sent", "received"), self._effects.traffic(), strict=True))
        self._effects.workers.send(link, wire.Done(asked.handle, json.dumps(told).encode()))

    def end(self) -> None:
        """Ends this formation here: its workers are heard until they leave, and nothing comes of what they say."""
        self._is_over = True
        self.handlers = {kind: _ignored for kind in self.handlers} | {wire.Ping: self.handlers[wire.Ping]}

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        refusal = not_ours(hello, self._job, self._formation) or self._membership.may_join(hello.rank)
        if refusal or self._ending.failure:
            self._effects.workers.send(link, wire.JobFailed(self._ending.failure or refusal, hello.formation))
            return
        link.rank = hello.rank
        self._links[hello.rank] = link
        epoch = self._membership.epoch
        self._membership.join(hello.rank)
        if self._membership.epoch > epoch:
            self._begin_epoch()
        _log.info("rank %d (pid %d) has joined", hello.rank, link.pid)
        if len(self._membership.joined) == len(self._membership.local):
            self._starting.report("joined")
        self._starting.check_up()

    def worker_left(self, rank: int, bye: wire.Bye) -> None:
        self._membership.left.add(rank)
        del self._links[rank]
        if self._is_over:
            return
        if bye.error:
            self._ending.worker_lost(rank, f"rank {rank} (host {self._host}) failed: {quoted(bye.error)}")
        else:
            self._ending.worker_departed(rank)
        self._ending.check_over()

    def worker_lost(self, rank: int, pid: int, why: str) -> None:
        del self._links[rank]
        if self._is_over:
            return
        self._ending.worker_lost(rank, f"rank {rank} (host {self._host}, pid {pid}) {why}")
        self._ending.check_over()

    def connection_ended(self) -> None:
        self._ending.check_over()

    def _start_timeline(self, link: WorkerLink, message: wire.StartTimeline) -> None:
        assert link.rank is not None
        self._timeline.start(link.rank, message.path, message.mark_cycles, self._tell_why(link.rank, message.handle))

    def _stop_timeline(self, link: WorkerLink, message: wire.StopTimeline) -> None:
        assert link.rank is not None
        self._timeline.stop(link.rank, self._tell_why(link.rank, message.handle))

    def _relay_port(self, link: WorkerLink, asked: wire.RelayPort) -> None:
        try:
            answer = str(self._relayed.port_for(asked.node, asked.port))
        except OSError as error:
            answer = f"no port of host {self._host} can lead to node {asked.node}: {error.strerror}"
        self._effects.workers.send(link, wire.Done(asked.handle, answer.encode()))

    def _tell_why(self, rank: int, handle: int) -> Callable[[str], None]:
        """Returns a callback that answers a rank with the reason why something cannot be done; empty if it is done."""
        return lambda why: self._effects.to_worker(rank, wire.Done(handle, why.encode()))


def _ignored(link: WorkerLink, message: wire.WorkerMessage) -> None:
    """Handles what a worker says that does not know yet that its membership epoch is over."""
