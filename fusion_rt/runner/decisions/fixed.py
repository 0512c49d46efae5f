"""Decides on the course of a job whose hosts and workers stay. No I/O.

It has one epoch, whose places are known before any agent is. The first failure ends the job, after a moment in which
the other ranks can report; unless the job may go on after losses (`--tolerate-losses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.job_control import JobControl
from fusion_rt.runner.decisions.outcome import Failure, HostFailure
from fusion_rt.runner.decisions.places import Places
from fusion_rt.runner.decisions.worker_states import WorkerState, WorkerStates

SETTLE_S = 1.5  # seconds from the first failure until the others are stopped
QUOTED_S = 5.0  # the same while all that is known quotes the failure of another, which is still on its way out


class Fixed:
    """The only epoch of a job. It is told the events that `Epochs` is told, which decides for elastic jobs.

    Args:
        places: all hosts and ranks.
        control: carries out the decisions.
        clock: seconds from any moment on.
        start: seconds in which all agents have to answer, and their daemons to listen.
        tolerates: the job may go on after losses: its daemons end it if it cannot.

    Attributes:
        due: when `tick` has something to do, by the clock.
    """

    def __init__(
        self, places: Places, control: JobControl, clock: Callable[[], float], start: float, tolerates: bool = False
    ) -> None:
        self._places = places
        self._control = control
        self._clock = clock
        self._start = start
        self._tolerates = tolerates
        self._workers = WorkerStates(places)
        self._ready: set[str] = set()
        self._endpoints: dict[str, Endpoint] = {}
        self._unfit: set[str] = set()  # hosts of which a failure is known
        self._losses: list[Failure] = []  # failures that the job has gone on after
        self._over = False
        self.due = math.inf

    @property
    def _is_started(self) -> bool:
        return len(self._endpoints) == len(self._places.hosts)

    def rank_of(self, host: str, slot: int) -> int | None:
        """The rank of the worker in a slot."""
        return self._places.ranks.get((host, slot))

    def found(self, hosts: tuple[Host, ...]) -> None:
        """Begins, with all hosts."""
        self.due = self._clock() + self._start
        self._control.start(1, self._places)
        for host in hosts:
            self._control.connect(host)

    def ready(self, host: str) -> None:
        self._ready.add(host)

    def refused(self, failure: HostFailure) -> None:
        """The job cannot run on a host."""
        self._unfit.add(failure.host)
        self._workers.lose(failure.host)
        self._fail(failure)

    def lost(self, failure: HostFailure) -> None:
        """An agent has ended."""
        if failure.host not in self._unfit or failure.host in self._ready:
            self.refused(failure)

    def daemon_up(self, host: str, serial: int, endpoint: Endpoint) -> None:
        self._endpoints[host] = endpoint
        if self._is_started and not self._workers.failures and not self._over:
            self.due = math.inf
            endpoints = [self._endpoints[name] for name in self._places.topology.hosts]
            self._control.begin(1, self._places, endpoints, ())

    def daemon_down(self, host: str, serial: int, failure: Failure) -> None:
        if isinstance(failure, HostFailure):
            self.refused(failure)
        else:
            self._fail(failure)

    def started(self, host: str, number: int) -> None:
        """Nothing depends on it."""

    def asked(self, host: str, slot: int, number: int, error: str, is_unfit: bool = False) -> None:
        """Nothing: there is no other epoch."""

    def ended(self, host: str, slot: int, failure: Failure | None) -> None:
        """A worker has ended, well or with a failure."""
        if self._workers.is_alive((host, slot)):
            self._workers.put((host, slot), WorkerState.FAILED if failure else WorkerState.DONE)
        if failure is not None:
            self._fail(failure)
        elif not self._workers.is_running and not self._workers.failures:
            self._end()

    def missed(self, host: str, number: int, nodes: tuple[int, ...]) -> None:
        """Nothing: the daemons decide on the lost."""

    def reached(self, host: str, serial: int) -> None:
        """Nothing: all come at once."""

    def answered(self, host: str) -> None:
        """Nothing: there is no choice."""

    def unused(self, host: str, slot: int) -> None:
        """Nothing: the epoch is never abandoned."""

    def tick(self) -> None:
        """Ends the job when the time to start, or to settle, is over."""
        if self._over or self._clock() < self.due:
            return
        limit = f"within {self._start:g} s (--start-timeout)"
        for host in self._places.topology.hosts if not self._workers.failures else ():
            if host not in self._endpoints:
                what = "its daemon did not listen" if host in self._ready else "it did not answer"
                self._workers.failures.append(HostFailure(host, (f"{what} {limit}",)))
        self._end()

    def close(self) -> None:
        """The job is ended by somebody else: nothing is decided any more."""
        self._over = True

    def _fail(self, failure: Failure) -> None:
        """Notes a failure; the job is ended when the others had time to tell theirs, or have ended."""
        failures = self._workers.failures
        if self._over:
            return  # a consequence of our own doing
        if self._tolerates and self._is_started and (self._workers.is_running or self._workers.is_finishing):
            self._losses.append(failure)
            self._control.say(f"{failure.tell()[-1]}; the job goes on without it")
        else:
            if not failures:
                self.due = self._clock() + (QUOTED_S if failure.echo == 2 else SETTLE_S)
            elif failure.echo == 0 and all(before.echo == 2 for before in failures):
                self.due = self._clock() + SETTLE_S
            failures += [*self._losses, failure]
            self._losses.clear()
        if not self._workers.is_running:
            self._end()

    def _end(self) -> None:
        self._over = True
        self._control.end(self._workers.failures)
