"""Decides what becomes of an elastic job: which epoch begins, where, and when it is over. No I/O.

An epoch is *gathered* for (until enough hosts are ready), *started* (until its daemons listen) and then *runs*, until
none of its workers does: each has asked for the next epoch, has ended, or its host is lost. Workers that have asked
wait, and so survive an attempt to start an epoch that fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.job_control import JobControl
from fusion_rt.runner.decisions.limits import Limits
from fusion_rt.runner.decisions.outcome import Failure, HostFailure, MembershipFailure, in_short
from fusion_rt.runner.decisions.places import Places, assign
from fusion_rt.runner.decisions.worker_states import WorkerState, WorkerStates

_TICK_S = 0.25
_KILL_S = 5.0  # seconds that an agent has to kill a worker
_MEET_S = 5.0  # seconds that a new host has to come up before others are spoken of without it
_CRASHES = 2  # of a host's daemon: one may be an accident, the next is taken for the host's fault
_FAILED_STARTS = 3  # epochs that one host's workers may end before the job has come up for the first time


class _Stage(Enum):
    GATHERING = 0
    STARTING = 1
    RUNNING = 2


@dataclass
class _Agent:
    since: float
    ready: bool = False


class Epochs:
    """The epochs of one job. Everything that happens is told by the methods without a leading underscore.

    Attributes:
        number: of the present epoch, or the one that is being started; the first is 1.
        due: when `tick` has something to do, by the clock.
    """

    def __init__(self, limits: Limits, blacklist: Blacklist, control: JobControl, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._blacklist = blacklist
        self._control = control
        self._clock = clock
        self.number = 0
        self._stage = _Stage.GATHERING
        self._since = clock()  # when the epoch before was over; an attempt to start another does not count
        self._over = False
        self.due = clock()
        self._found: tuple[Host, ...] = ()
        self._agents: dict[str, _Agent] = {}
        self._crashes: Counter[str] = Counter()
        self._workers = WorkerStates()  # of the epoch that has begun last
        self._is_abandoned = False
        self._has_state = False  # an epoch has come up: from now on somebody has to bring the state to the next one
        self._failed_starts: set[tuple[str, int]] = set()  # hosts whose workers failed before that, and in which epoch
        # Of the epoch that is being started
        self._next: Places | None = None
        self._start_until = math.inf
        self._endpoints: dict[str, Endpoint] = {}

    def rank_of(self, host: str, slot: int) -> int | None:
        """The rank of the worker in a slot, in the epoch that has begun last; None if it has no place there."""
        places = self._workers.places
        return None if places is None else places.ranks.get((host, slot))

    # What happens

    def found(self, hosts: tuple[Host, ...]) -> None:
        """These are the hosts that there are now."""
        self._found = hosts
        self._look()

    def ready(self, host: str) -> None:
        """The agent of a host has passed its checks."""
        if host in self._agents:
            self._agents[host].ready = True
        self._look()

    def refused(self, failure: HostFailure) -> None:
        """A host is of no use: it is not fit, or does not answer. Its agent is ended."""
        self._control.drop(failure.host)
        self.lost(failure)

    def lost(self, failure: HostFailure) -> None:
        """A host is of no use: it cannot be reached, or its agent has ended."""
        host = failure.host
        if self._over or self._agents.pop(host, None) is None:
            return
        seconds = self._blacklist.add(host)
        had_workers = self._workers.lose(host)
        is_of_next = self._next is not None and host in self._next.topology.hosts
        if had_workers or is_of_next or self.number == 0:
            self._workers.note(failure)
        if not had_workers and not is_of_next:
            self._control.say(f"fusionrun: {in_short(failure)}; the host is left out for {seconds:.0f} s")
        if is_of_next:
            self._abort()
        elif had_workers:
            self._break()
        self._look()

    def daemon_up(self, host: str, number: int, endpoint: Endpoint) -> None:
        """The daemon of a host listens; when all do, the epoch begins."""
        if self._stage is not _Stage.STARTING or number != self.number or self._next is None:
            return
        self._endpoints[host] = endpoint
        if len(self._endpoints) == len(self._next.hosts):
            self._begin(self._next)
        self._look()

    def daemon_down(self, host: str, number: int, failure: Failure) -> None:
        """A daemon has ended by itself. Its workers will find out, or have already."""
        if self._over:
            return
        self._crashes[host] += 1
        if self._crashes[host] >= _CRASHES:
            self._crashes[host] = 0
            self._blacklist.add(host)
        if number == self.number:
            self._workers.note(failure)
            self._abort()
            self._break()
        elif self._stage is not _Stage.RUNNING:
            self._workers.reasons.append(in_short(failure))
        self._look()

    def started(self, host: str, number: int) -> None:
        """The daemon of a host says that every process of the epoch is up."""
        if number == self.number:
            self._workers.note_started(host)
            self._has_state |= self._workers.is_up

    def asked(self, host: str, slot: int, number: int, error: str) -> None:
        """A worker has left an epoch and asks for the next one; `error`: why, or empty if hosts have changed."""
        leave_until = self._clock() + self._limits.leave
        if number == self.number and self._workers.leave((host, slot), error, leave_until):
            self._look()

    def ended(self, host: str, slot: int, failure: Failure | None) -> None:
        """A worker has ended, well or with a failure."""
        place = (host, slot)
        if self._over or place not in self._workers.alive():
            return
        late = (
            f"it did not leave membership epoch {self.number} within {self._limits.leave:g} s after another worker did"
        )
        if self._workers.end(place, failure, late):
            self._blacklist.add(host)
            if not self._has_state:
                self._failed_starts.add((host, self.number))
            if self._next is not None and place in self._next.ranks:
                self._abort()
            self._break()
        self._look()

    def unused(self, host: str, slot: int) -> None:
        """A worker was ended because its epoch was abandoned; it had not begun with anything."""
        if not self._over and (host, slot) in self._workers.alive():
            self._workers.states[host, slot] = WorkerState.UNUSED
            self._look()

    def close(self) -> None:
        """The job is ended by somebody else: nothing is decided any more."""
        self._over = True

    def tick(self) -> None:
        """Time has passed."""
        if self._over:
            return
        now = self._clock()
        self.due = now + _TICK_S
        limit = f"within {self._limits.start:g} s (--start-timeout)"
        for host, agent in list(self._agents.items()):
            if not agent.ready and now >= agent.since + self._limits.start:
                self._give_up(host, f"it did not answer {limit}")
        if self._next is not None and now >= self._start_until:
            for host in set(self._next.topology.hosts) - self._endpoints.keys():
                self._give_up(host, f"its daemon did not listen {limit}")
        if now >= self._workers.leave_until and self._stage is _Stage.RUNNING and not self._workers.is_finishing:
            self._end_the_late()
        self._look()

    # Decisions

    def _look(self) -> None:
        """Goes on as far as what is known allows."""
        workers = self._workers
        if self._stage is _Stage.RUNNING and not workers.is_running and not self._over:
            if workers.is_finishing or not self._may_go_on:
                self._end([] if workers.is_done else [*workers.failures, *workers.errors])
            else:
                self._stage, self._since = _Stage.GATHERING, self._clock()
        if self._stage is _Stage.GATHERING and not self._over:
            self._gather()
        if not self._over:
            self._meet_hosts()
            self._tell_changes()

    def _gather(self) -> None:
        """Starts the next epoch if there are enough hosts."""
        first = self.number == 0
        if not first and not self._may_go_on:
            self._end([*self._workers.failures, MembershipFailure("no worker is left that could go on")])
            return
        if first and self._found and not self._agents and all(host.name in self._blacklist for host in self._found):
            self._end(self._workers.failures)
            return
        places = self._choose(self._available(ready=True))
        need = self._limits.wanted if first else self._limits.least
        still = first and not all(agent.ready for agent in self._agents.values())
        if places is not None and places.size >= need and not still:
            self._start(places)
        elif self._clock() >= self._since + self._limits.timeout:
            slots = ", ".join(f"{host.name}:{host.slots}" for host in self._available(ready=True)) or "none"
            self._fail(
                f"the job needs {need} workers, and the slots there are ({slots}) did not suffice for "
                f"{self._limits.timeout:g} s (--elastic-timeout)"
            )

    def _start(self, places: Places) -> None:
        resets = self._limits.resets
        if resets is not None and self.number > resets:
            self._fail(f"the job has been reset as often as --reset-limit allows ({resets})")
            return
        self.number += 1
        self._stage, self._next = _Stage.STARTING, places
        self._start_until = self._clock() + self._limits.start
        self._endpoints.clear()
        self._control.start(self.number, places)

    def _abort(self) -> None:
        """The epoch that was being started, if any, cannot begin."""
        if self._next is not None:
            self._control.abandon(self.number)
            self._next, self._stage = None, _Stage.GATHERING

    def _begin(self, places: Places) -> None:
        """The daemons listen: workers get their places."""
        survivors = self._workers.alive()
        if self.number > 1:
            self._control.say(self._workers.tell_change(self.number, places, [host.name for host in self._found]))
        for host in places.topology.hosts:
            slots = [slot for name, slot in survivors if name == host and (name, slot) not in places.ranks]
            if slots:
                self._control.remove(host, slots, self._no_place(host))
        self._stage, self._next = _Stage.RUNNING, None
        self._workers, self._is_abandoned = WorkerStates(places), False
        endpoints = [self._endpoints[host] for host in places.topology.hosts]
        self._control.begin(self.number, places, endpoints, [place for place in survivors if place in places.ranks])

    def _break(self) -> None:
        """A worker or daemon is gone. While the epoch is coming up, the others might wait for it for long."""
        if self._stage is _Stage.RUNNING and not self._workers.is_up and not self._is_abandoned:
            self._is_abandoned = True
            self._control.abandon(self.number)

    def _tell_changes(self) -> None:
        """Tells the workers if the next epoch would have other places than this one."""
        workers, now = self._workers, self._clock()
        if self._stage is not _Stage.RUNNING or not workers.is_whole or workers.places is None:
            return
        if any(not agent.ready and now < agent.since + _MEET_S for agent in self._agents.values()):
            return  # soon there will be more to tell
        would = self._choose(self._available(ready=True))
        if would is None:
            return  # all hosts are to go, and the state with them: it is kept as long as they stay
        new, old = frozenset(would.ranks), frozenset(workers.places.ranks)
        if new != workers.told:
            workers.told = new
            self._control.tell_change(bool(new - old), bool(old - new))

    def _meet_hosts(self) -> None:
        """Connects to hosts that could take part, and lets go of those that do not."""
        wanted: set[str] = set()
        could = None if self._workers.is_finishing else self._choose(self._available(ready=False))
        for host in could.hosts if could is not None else ():
            wanted.add(host.name)
            if host.name not in self._agents:
                self._agents[host.name] = _Agent(self._clock())
                self._control.connect(host)
        wanted.update(host for host, _ in self._workers.alive())
        for places in (self._next, self._workers.places if self._stage is _Stage.RUNNING else None):
            wanted.update(places.topology.hosts if places is not None else ())
        for name in self._agents.keys() - wanted:
            del self._agents[name]
            self._control.release(name, self._no_place(name))

    def _end_the_late(self) -> None:
        """Gives up the workers that have not left in time, and then hosts where they cannot even be killed."""
        for host, slots in self._workers.late().items():
            if any((host, slot) in self._workers.given_up for slot in slots):
                self._give_up(host, f"its agent did not kill a worker within {_KILL_S:g} s")
            else:
                self._workers.given_up.update((host, slot) for slot in slots)
                self._control.kill(host, slots)
        self._workers.leave_until = self._clock() + _KILL_S

    def _give_up(self, host: str, reason: str) -> None:
        self.refused(HostFailure(host, (reason,)))

    def _fail(self, reason: str) -> None:
        last = self._workers.reason()
        self._end([MembershipFailure(f"{reason}; before that: {last}" if last else reason)])

    def _end(self, failures: Sequence[Failure]) -> None:
        self._over = True
        self._control.end(failures)

    # What follows from what is known

    @property
    def _may_go_on(self) -> bool:
        """Tells whether there is a worker with the state; or there is none yet, and some were ended without a fault."""
        return bool(self._workers.alive()) or (
            self._workers.has_unused and not self._has_state and not self._cannot_start
        )

    @property
    def _cannot_start(self) -> bool:
        """Tells whether, before the job has come up once, workers failed on every host, or on one again and again.

        The script fails then, and would fail in every epoch. Others of its workers may have been ended before they came
        so far (`JobControl.abandon`). Horovod ends a job when all hosts that took part have had a failure
        (horovod/runner/elastic/registration.py).
        """
        times = Counter(host for host, _ in self._failed_starts)
        return all(host.name in times for host in self._found) or max(times.values(), default=0) >= _FAILED_STARTS

    def _available(self, ready: bool) -> list[Host]:
        """Hosts that are not left out; `ready`: whose agents are."""
        agents: Mapping[str, _Agent] = self._agents
        return [
            host
            for host in self._found
            if host.name not in self._blacklist and (not ready or (host.name in agents and agents[host.name].ready))
        ]

    def _choose(self, hosts: list[Host]) -> Places | None:
        """The places that these hosts give. One without a survivor would have lost the state, so if there is none on
        them, those on hosts that are left out may stay."""
        survivors = self._workers.alive()
        alive = Counter(name for name, _ in survivors)
        if alive and not any(host.name in alive for host in hosts):
            here = [host for host in self._found if host.name in alive]
            if not here:
                return None
            hosts = [replace(host, slots=min(host.slots, alive[host.name])) for host in here] + hosts
        return assign(hosts, survivors, self._limits.most)

    def _no_place(self, host: str) -> str:
        return f"host {host} has no place for this worker in membership epoch {self.number}"
