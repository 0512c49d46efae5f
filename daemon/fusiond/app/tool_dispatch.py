"""What tools ask a daemon: `fusiond status`, `top` and `stop`, `fusion-trace hang` and `collect`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fusion_rt import bootstrap, wire
from fusiond.app.effects import Acting
from fusiond.app.ending import Ending
from fusiond.app.ring_files import RingFiles
from fusiond.app.status import state_of
from fusiond.control.waiting import Survey, document, fitting
from fusiond.live import figures as live
from fusiond.membership.epoch import Membership

if TYPE_CHECKING:
    from fusiond.workers.connections import WorkerLink


class ToolRequests:
    """Of one daemon, whose other parts it uses.

    Args:
        config: which job this is, and who is where.
        statistics: tells what `fusiond status` shows.
    """

    def __init__(
        self,
        config: bootstrap.DaemonConfig,
        membership: Membership,
        gathering: live.Gathering,
        rings: RingFiles,
        acting: Acting,
        ending: Ending,
        statistics: Callable[[], dict[str, object]],
    ) -> None:
        self._job = config.job
        self._topology = config.topology
        self._membership = membership
        self._gathering = gathering
        self._rings = rings
        self._acting = acting
        self._ending = ending
        self._statistics = statistics

    def answer(self, link: WorkerLink, message: wire.ToolMessage) -> None:
        """Does what a tool asks for; the answer goes to it now or later."""
        if isinstance(message, wire.StatusRequest):
            self._tell(link, self._statistics())
        elif isinstance(message, wire.HangRequest):
            self._ending.current_engine().survey(message.everyone, lambda survey: self._tell_what_waits(link, survey))
        elif isinstance(message, wire.JobRequest):
            self._gathering.ask(self._ending.gone(), lambda told: self._tell_figures(link, told))
        elif isinstance(message, wire.JobRingsRequest):
            self._rings.tell(self._ending.gone(), lambda told: self._tell(link, told))
        elif isinstance(message, wire.JobRingRequest):
            self._rings.read(message, lambda told: self._tell(link, told))
        else:
            self._ending.stop(message.reason)
            self._tell(link, {})

    def _tell(self, link: WorkerLink, told: Mapping[str, object]) -> None:
        self._acting.workers.send(link, wire.Status(json.dumps(told)))

    def _tell_what_waits(self, link: WorkerLink, survey: Survey) -> None:
        told = {
            "state": state_of(self._ending.failure, self._membership),
            "failure": self._ending.failure,
            "epoch": self._membership.epoch,
            **document(survey, self._topology),
        }
        self._acting.workers.send(link, wire.Status(fitting(told)))

    def _tell_figures(self, link: WorkerLink, told: Mapping[int, wire.Figures]) -> None:
        self._acting.workers.send(link, wire.Status(live.fitting(live.document(self._job, self._topology, told))))
