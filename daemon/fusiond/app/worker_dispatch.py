"""The ranks of this node: they come, ask and leave; what follows is passed on to the part that it is about."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from fusion_rt import bootstrap, wire
from fusion_rt.quoting import quoted
from fusiond.app.effects import Acting
from fusiond.app.ending import Ending
from fusiond.app.tool_dispatch import ToolRequests
from fusiond.app.worker_requests import ask
from fusiond.membership.epoch import Membership, not_ours
from fusiond.membership.startup import Starting
from fusiond.timeline.controller import TimelineController

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine
    from fusiond.workers.connections import WorkerLink

_log = logging.getLogger("fusiond")


class Shell(Protocol):
    """What the daemon does about it."""

    def current_engine(self) -> Engine:
        """The one of this membership epoch."""

    def begin_epoch(self) -> None:
        """A new membership epoch begins here."""


class LocalRanks:
    """One daemon's `Handler` of its workers, whose other parts it uses.

    Args:
        config: who this node is.
        links: the connections of those that have joined, by rank; kept here.
        timeline: submissions are told to it.
    """

    def __init__(
        self,
        config: bootstrap.DaemonConfig,
        membership: Membership,
        links: dict[int, WorkerLink],
        acting: Acting,
        starting: Starting,
        ending: Ending,
        timeline: TimelineController,
        tools: ToolRequests,
        shell: Shell,
    ) -> None:
        self._job = config.job
        self._host = config.topology.hosts[config.node]
        self._membership = membership
        self._links = links
        self._acting = acting
        self._starting = starting
        self._ending = ending
        self._timeline = timeline
        self._tools = tools
        self._shell = shell

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        refusal = not_ours(hello, self._job) or self._membership.may_join(hello.rank)
        if refusal or self._ending.failure:
            self._acting.workers.send(link, wire.JobFailed(self._ending.failure or refusal))
            return
        link.rank = hello.rank
        self._links[hello.rank] = link
        epoch = self._membership.epoch
        self._membership.join(hello.rank)
        if self._membership.epoch > epoch:
            self._shell.begin_epoch()
        _log.info("rank %d (pid %d) has joined", hello.rank, link.pid)
        if len(self._membership.joined) == len(self._membership.local):
            self._starting.report("joined")
        self._starting.check_up()

    def begin_epoch(self) -> None:
        """The last that was waited for in the epoch before is lost, and the others have come back."""
        self._shell.begin_epoch()
        self._starting.check_up()

    def worker_message(self, rank: int, link: WorkerLink, message: wire.WorkerMessage) -> None:
        if isinstance(message, wire.Bye):
            self._said_bye(rank, message.error)
        elif isinstance(message, wire.Ping):
            self._acting.workers.send(link, wire.Pong())
        elif isinstance(message, (wire.StartTimeline, wire.StopTimeline)):
            self._asked_for_timeline(rank, message)
        else:
            if isinstance(message, wire.Submit):
                self._timeline.submitted(message)
            ask(self._shell.current_engine(), rank, link, message)

    def worker_left(self, rank: int, pid: int, why: str) -> None:
        del self._links[rank]
        self._ending.worker_lost(rank, f"rank {rank} (host {self._host}, pid {pid}) {why}")
        self._ending.check_over()

    def connection_ended(self) -> None:
        self._ending.check_over()

    def tool_message(self, link: WorkerLink, message: wire.ToolMessage) -> None:
        self._tools.answer(link, message)

    def _said_bye(self, rank: int, error: str) -> None:
        self._membership.left.add(rank)
        del self._links[rank]
        if error:
            self._ending.worker_lost(rank, f"rank {rank} (host {self._host}) failed: {quoted(error)}")
        else:
            self._ending.worker_departed(rank)
        self._ending.check_over()

    def _asked_for_timeline(self, rank: int, message: wire.StartTimeline | wire.StopTimeline) -> None:
        def then(why: str) -> None:
            self._acting.to_worker(rank, wire.Done(message.handle, why.encode()))

        if isinstance(message, wire.StartTimeline):
            self._timeline.start(rank, message.path, message.mark_cycles, then)
        else:
            self._timeline.stop(rank, then)
