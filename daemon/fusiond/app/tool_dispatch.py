"""Requests of tools to a daemon: `fusiond status`, `top` and `stop`, `fusion-trace hang` and `collect`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusion_rt import wire
from fusion_rt.host import bootstrap
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.app.daemon_parts import Daemonic
from fusiond.app.job_end import JobEnd
from fusiond.app.ring_files import RingFiles
from fusiond.app.status import state_of
from fusiond.control.waiting import Survey, document, fitting
from fusiond.core.dispatch import Handlers
from fusiond.live import figures as live
from fusiond.membership.epoch import Membership

if TYPE_CHECKING:
    from fusiond.workers.connections import WorkerLink


class ToolDispatch:
    """Answers to tools, from the other parts of one daemon.

    Args:
        config: the job, and the places of its ranks.
        daemon: has the data of `fusiond status`.
    """

    def __init__(
        self,
        config: bootstrap.DaemonConfig,
        membership: Membership,
        gathering: live.Gathering,
        rings: RingFiles,
        effects: DaemonEffects,
        ending: JobEnd,
        daemon: Daemonic,
    ) -> None:
        self._job = config.job
        self._topology = config.topology
        self._membership = membership
        self._gathering = gathering
        self._rings = rings
        self._effects = effects
        self._ending = ending
        self._daemon = daemon

    def handlers(self) -> Handlers:
        """Returns the handlers of tools' messages; the answer goes to the tool at once or later."""
        return {
            wire.StatusRequest: lambda link, _: self._ending.current_engine().codecs.measure(
                lambda: self._tell(link, self._daemon.statistics())
            ),
            wire.HangRequest: lambda link, asked: self._ending.current_engine().survey(
                asked.everyone, lambda survey: self._tell_what_waits(link, survey)
            ),
            wire.JobRequest: lambda link, _: self._gathering.ask(
                self._ending.gone(), lambda told: self._tell_figures(link, told)
            ),
            wire.JobRingsRequest: lambda link, _: self._rings.tell(
                self._ending.gone(), lambda told: self._tell(link, told)
            ),
            wire.JobRingRequest: lambda link, asked: self._rings.read(asked, lambda told: self._tell(link, told)),
            wire.StopRequest: self._stop,
        }

    def _stop(self, link: WorkerLink, message: wire.StopRequest) -> None:
        self._ending.stop(message.reason)
        self._tell(link, {})

    def _tell(self, link: WorkerLink, told: Mapping[str, object]) -> None:
        self._effects.workers.send(link, wire.Status(json.dumps(told)))

    def _tell_what_waits(self, link: WorkerLink, survey: Survey) -> None:
        told = {
            "state": state_of(self._ending.failure, self._membership),
            "failure": self._ending.failure,
            "formation": wire.formation_of(self._membership.epoch),
            "epoch": self._membership.epoch % wire.EPOCHS_OF_A_FORMATION,
            **document(survey, self._topology),
        }
        self._effects.workers.send(link, wire.Status(fitting(told)))

    def _tell_figures(self, link: WorkerLink, told: Mapping[int, wire.Figures]) -> None:
        self._effects.workers.send(link, wire.Status(live.fitting(live.document(self._job, self._topology, told))))
