"""Decides on the course of an elastic job: which epoch begins, where, and when it is over. No I/O.

An epoch is *gathered* for, until there are enough workers on hosts whose daemons listen, and then *runs*, until none of
its workers does: each has asked for the next epoch, has ended, or its host is lost. The next one begins at once, with
those that have asked. A worker that comes back, or is new, begins in the background (`newcomers`) on a host that is
ready for it (`host_states`), and the others are interrupted when it has asked for its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from fusion_rt.core.wording import counted
from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.host_states import HostStates
from fusion_rt.runner.decisions.job_control import JobControl
from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.runner.decisions.newcomers import Newcomers
from fusion_rt.runner.decisions.outcome import Failure, HostFailure, MembershipFailure, in_short
from fusion_rt.runner.decisions.places import Place, Places, assign
from fusion_rt.runner.decisions.worker_states import WorkerState, WorkerStates

_TICK_S = 0.25
_KILL_S = 5.0  # seconds that an agent has to kill a worker
_MEET_S = 5.0  # seconds that a new host, or a worker that begins with another, has before others are spoken of without
_HEAR_S = 2.0  # seconds that daemons have to name those that they have not reached, after the first of them
_TELL_S = 5.0  # seconds after which it is said that the job waits for workers
_CRASHES = 2  # of a host's daemon: one may be an accident, the next is taken for the host's fault
_FAILURES = 3  # epochs that one host's workers may end before the job has come up


class Recruits(NamedTuple):
    """Workers that are to begin beside an epoch, and those that need not have begun.

    `places`: of an epoch in which all of them and the present ones would be.
    """

    places: Places
    wanted: list[Place]
    surplus: list[Place]


class NextPlaces:
    """Places of the next epoch, from all that is known of hosts, of workers in the epoch, and of those beside it.

    Args:
        blacklist: hosts that are left out.
        hosts: that the job is connected to.
        newcomers: workers beside the epoch.
        most: workers at most; None: as many as there are slots.

    Attributes:
        found: the hosts that there are.
        workers: of the epoch that has begun last.
    """

    def __init__(self, blacklist: Blacklist, hosts: HostStates, newcomers: Newcomers, most: int | None) -> None:
        self._blacklist = blacklist
        self._hosts = hosts
        self._newcomers = newcomers
        self._most = most
        self.found: tuple[Host, ...] = ()
        self.workers = WorkerStates()

    @property
    def staying(self) -> list[Place]:
        """Workers that have the state, by rank; first those of the epoch."""
        return [*self.workers.alive(), *self._newcomers.returning]

    def available(self, could: Callable[[str], bool]) -> list[Host]:
        """Hosts that are not left out, and satisfy a condition."""
        return [host for host in self.found if host.name not in self._blacklist and could(host.name)]

    def who_have_asked(self) -> Places | None:
        """The places of waiting workers, and of those in the epoch, on hosts whose daemons listen; None if there are
        none, or none of them has the state."""
        return self._choose(self._hosts.listens, self._newcomers.asking)

    def all_slots(self, listening: bool = False) -> Places | None:
        """The places of all slots; `listening`: of hosts whose daemons do. None as above."""
        return self._choose(self._hosts.listens if listening else lambda name: True, None)

    def recruits(self) -> Recruits | None:
        """Finds the slots that are free for workers, on hosts that are fit; None if there is no place at all."""
        newcomers, staying = self._newcomers, self.staying
        hosts = self.available(self._hosts.is_fit)
        has_state = {*staying}
        begun = [place for place in newcomers.present if place not in has_state]
        unusable = {*has_state, *begun} | newcomers.closed
        slots = [(host.name, slot) for host in hosts for slot in range(host.slots)]
        free = [place for place in slots if place not in unusable]
        places = assign(hosts, staying, self._most, [*begun, *free], nodes=[*self._hosts.nodes])
        if places is None:
            return None
        fit = {host.name for host in hosts}
        surplus = [place for place in begun if place not in places.ranks and place[0] in fit]
        return Recruits(places, [place for place in free if place in places.ranks], surplus)

    def _choose(self, could: Callable[[str], bool], joining: list[Place] | None) -> Places | None:
        """Places without a worker that has the state would lose it, so if there is none on the hosts that are
        available, those on hosts that are left out may stay."""
        hosts, staying = self.available(could), self.staying
        alive = Counter(name for name, _ in staying)
        if alive and not any(host.name in alive for host in hosts):
            here = [host for host in self.found if host.name in alive and could(host.name)]
            if not here:
                return None
            hosts = [replace(host, slots=min(host.slots, alive[host.name])) for host in here] + hosts
        return assign(hosts, staying, self._most, joining, self._newcomers.given_up, [*self._hosts.nodes])


class FirstStart:
    """Failures of hosts before the job has come up.

    Attributes:
        is_over: the job has come up. From now on a worker has to bring the state to each epoch.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._failed: set[tuple[str, int]] = set()  # hosts whose workers have failed, and in which epoch

    def fail(self, host: str, number: int) -> None:
        """A worker has failed in an epoch."""
        self._failed.add((host, number))

    def is_hopeless(self, hosts: Iterable[Host]) -> bool:
        """Tells whether workers failed on each of the hosts, or on one again and again.

        The script fails then, and would fail in every epoch. Others of its workers may have been ended before they came
        so far (`JobControl.abandon`). Horovod ends a job when all hosts that took part have had a failure
        (horovod/runner/elastic/registration.py).
        """
        times = Counter(host for host, _ in self._failed)
        return all(host.name in times for host in hosts) or max(times.values(), default=0) >= _FAILURES


class Epochs:
    """The epochs of one job. Everything that happens is told by the methods without a leading underscore.

    Attributes:
        number: of the last epoch that has begun; the first is 1.
        due: when `tick` has something to do, by the clock. Decisions are made there alone, once for all that has
            happened at the same time: they take a while where there are many workers.
    """

    def __init__(
        self, limits: ElasticLimits, blacklist: Blacklist, control: JobControl, clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._blacklist = blacklist
        self._control = control
        self._clock = clock
        self.number = 0
        self._is_running = False
        self._since = clock()  # when the epoch before was over
        self._has_told = False  # that the job waits for workers
        self._heard_of: set[str] = set()  # hosts whose daemons have said that the last epoch is over
        self._split_at = math.inf  # when one of them first named a daemon that it had not reached as the epoch began
        self._is_probe_due = False  # agents of workers that have not left are to be asked,
        self._probed_at = -math.inf  # as they were last at this time
        self._over = False
        self.due = clock()
        self._hosts = HostStates(limits, control, clock)
        self._newcomers = Newcomers(clock, limits.failures)
        self._crashes: Counter[str] = Counter()
        self._resets = 0  # changes that count for the limit
        self._filled: set[Place] = set()  # in any epoch
        self._unfit: dict[int, str] = {}  # why so many workers are of no use, by their number
        self._next = NextPlaces(blacklist, self._hosts, self._newcomers, limits.most)
        self._is_abandoned = False
        self._start = FirstStart()

    def rank_of(self, host: str, slot: int) -> int | None:
        """The rank of the worker in a slot, or the one that it was told; None if there is none."""
        newcomer = self._newcomers.present.get((host, slot))
        if newcomer is not None:
            return newcomer.rank
        places = self._workers.places
        return None if places is None else places.ranks.get((host, slot))

    @property
    def _workers(self) -> WorkerStates:
        """Those of the epoch that has begun last."""
        return self._next.workers

    # Events

    def found(self, hosts: tuple[Host, ...]) -> None:
        """These are the hosts that there are now."""
        self._next.found = hosts
        self._decide_soon()

    def ready(self, host: str) -> None:
        """The agent of a host has passed its checks."""
        self._hosts.note_fit(host)
        self._decide_soon()

    def refused(self, failure: HostFailure) -> None:
        """A host is of no use: it is not fit, or does not answer. Its agent is ended."""
        self._control.drop(failure.host)
        self.lost(failure)

    def lost(self, failure: HostFailure) -> None:
        """A host is of no use: it cannot be reached, or its agent has ended."""
        host = failure.host
        if self._over or not self._hosts.forget(host):
            return
        self._newcomers.lose(host)
        left_out = self._leave_out(host)
        had_workers = self._workers.lose(host)
        if had_workers or self.number == 0:
            self._workers.note(failure)
        if had_workers:
            self._workers.add(left_out)
            self._break()
        elif not self._none_is_left:  # else the job ends, and says why
            self._control.say(f"fusionrun: {in_short(failure)}; {left_out}")
        self._decide_soon()

    def daemon_up(self, host: str, serial: int, endpoint: Endpoint) -> None:
        """A daemon of a host listens."""
        self._hosts.note_up(host, serial, endpoint)
        self._decide_soon()

    def daemon_down(self, host: str, serial: int, failure: Failure) -> None:
        """A daemon has ended by itself. Its workers will find out, or have already; another one is started."""
        if self._over or not self._hosts.note_down(host, serial):
            return
        self._crashes[host] += 1
        left_out = ""
        if self._crashes[host] >= _CRASHES:
            self._crashes[host] = 0
            if isinstance(failure, HostFailure):  # it never listens
                self.refused(failure)
                return
            left_out = self._leave_out(host)
        if self._takes_part(host):
            self._workers.note(failure)
            if left_out:
                self._workers.add(left_out)
            self._break()
        else:
            self._control.say(f"fusionrun: {'; '.join(filter(None, (in_short(failure), left_out)))}")
        self._hosts.start_daemon(host)
        self._decide_soon()

    def reached(self, host: str, serial: int) -> None:
        """A host reaches the daemons of the others."""
        self._hosts.note_reach(host, serial)
        self._decide_soon()

    def started(self, host: str, number: int) -> None:
        """The daemon of a host says that every process of the epoch is up."""
        if number == self.number:
            self._workers.note_started(host)
            if self._workers.is_up:
                self._hosts.settle()
                self._start.is_over = True
                self._decide_soon()

    def missed(self, host: str, number: int, nodes: tuple[int, ...]) -> None:
        """The epoch is over at the daemon of a host, which takes others for lost, or has not reached them."""
        places = self._workers.places
        if number == self.number and places is not None and places.has(host):
            self._heard_of.add(host)
            if nodes and not self._workers.is_up:
                self._split_at = min(self._split_at, self._clock())
            names = places.topology.hosts
            missed = [names[node] for node in nodes if node < len(names) and places.has(names[node])]
            for name in missed:
                self._hosts.miss(name, host)
            self._give_up_useless(missed)
            if not self._is_running:
                self._decide_soon()

    def answered(self, host: str) -> None:
        """The agent of a host is there."""
        self._hosts.note_answer(host)

    def asked(self, host: str, slot: int, number: int, error: str, is_unfit: bool = False) -> None:
        """A worker has left an epoch and asks for the next one, or a new one asks for its first; `error`: why, or empty
        if hosts have changed. `is_unfit`: no epoch with as many workers is of use, which is no fault."""
        place = (host, slot)
        if is_unfit and number == self.number and place in self._workers.states:
            self._unfit[len(self._workers.states)] = error
            error = ""
        self._hosts.note_answer(host)
        if place in self._newcomers.present:
            if self._newcomers.ask(place):
                self._decide_soon()
        elif number == self.number and self._workers.leave(place, error, self._clock() + self._limits.leave):
            if error:
                self._is_probe_due = True
                self._probe_the_late()
            if not self._workers.is_running:
                self._decide_soon()

    def ended(self, host: str, slot: int, failure: Failure | None) -> None:
        """A worker has ended, well or with a failure."""
        place = (host, slot)
        if self._over:
            return
        if place in self._newcomers.present:
            self._newcomer_ended(place, failure)
        elif self._workers.is_alive(place):
            self._worker_ended(place, failure)
        self._decide_soon()

    def unused(self, host: str, slot: int) -> None:
        """A worker was ended because its epoch was abandoned; it had not begun with anything."""
        if not self._over and self._workers.is_alive((host, slot)):
            self._workers.put((host, slot), WorkerState.UNUSED)
            self._decide_soon()

    def close(self) -> None:
        """The job is ended by somebody else: nothing is decided any more."""
        self._over = True

    def tick(self) -> None:
        """Time has passed."""
        if self._over:
            return
        now = self._clock()
        self.due = now + _TICK_S
        self._give_up_useless()
        self._probe_the_late()
        if now >= self._workers.leave_until and self._is_running and not self._workers.is_finishing:
            self._end_the_late()
        for host, slot in self._newcomers.give_up(self._limits.begin):
            self._control.kill(host, [slot])
        self._look()

    def _decide_soon(self) -> None:
        """Something has happened that decisions depend on."""
        self.due = min(self.due, self._clock())

    # Workers that end

    def _worker_ended(self, place: Place, failure: Failure | None) -> None:
        workers = self._workers
        late = (
            f"it did not leave membership epoch {self.number} within {self._limits.leave:g} s after another worker did "
            "(--leave-timeout)"
        )
        if not workers.end(place, failure, late):
            return
        if not self._start.is_over:
            self._start.fail(place[0], self.number)
        if not self._start.is_over or not self._limits.restarts or place in workers.given_up:
            workers.add(self._leave_out(place[0]))
        elif told := self._newcomers.fail(place, workers.failures[-1]):
            self._control.say(f"fusionrun: {told}")
        self._break()

    def _newcomer_ended(self, place: Place, failure: Failure | None) -> None:
        if failure is None:
            self._newcomers.close(place)
            return
        newcomer = self._newcomers.present[place]
        if newcomer.is_late:
            late = f"it did not come to its training function within {self._limits.begin:g} s (--newcomer-timeout)"
            failure = HostFailure(place[0], (f"the worker that was to be rank {newcomer.rank} was killed: {late}",))
        told = self._newcomers.fail(place, failure) or in_short(failure)
        if not self._limits.restarts:
            told = f"{in_short(failure)}; {self._leave_out(place[0])}"
        self._control.say(f"fusionrun: {told}")

    def _leave_out(self, host: str) -> str:
        """Leaves a host out for a while; returns for how long, in words."""
        return f"the host is left out for {self._blacklist.add(host):.0f} s"

    def _break(self) -> None:
        """A worker or daemon is gone. While the epoch is coming up, the others might wait for it for long."""
        if self._is_running and not self._workers.is_up and not self._is_abandoned:
            self._is_abandoned = True
            self._control.abandon(self.number, self._workers.reason())

    def _end_the_late(self) -> None:
        """Gives up the workers that have not left in time, and then hosts where they cannot even be killed."""
        for host, slots in self._workers.late().items():
            if any((host, slot) in self._workers.given_up for slot in slots):
                self._give_up(host, f"its agent did not kill a worker within {_KILL_S:g} s")
            else:
                self._workers.given_up.update((host, slot) for slot in slots)
                self._control.kill(host, slots)
        self._workers.leave_until = self._clock() + _KILL_S

    def _probe_the_late(self) -> None:
        """Asks the agents of workers that have not left, though others have for an error, whether they are there. Not
        at each error: thousands leave in the same moment."""
        if self._is_probe_due and self._clock() >= self._probed_at + _TICK_S:
            self._is_probe_due, self._probed_at = False, self._clock()
            self._hosts.probe(self._workers.late())

    def _give_up_useless(self, names: Iterable[str] | None = None) -> None:
        for host, why in self._hosts.useless(names):
            self._give_up(host, why)

    def _give_up(self, host: str, reason: str) -> None:
        self.refused(HostFailure(host, (reason,)))

    # Decisions

    def _look(self) -> None:
        """Goes on as far as the known facts allow."""
        workers = self._workers
        if self._is_running and not workers.is_running and not self._over:
            if workers.is_finishing or not self._may_go_on:
                self._end([] if workers.is_done else [*workers.failures, *workers.errors])
            else:
                self._is_running, self._since, self._has_told = False, self._clock(), False
        if not self._is_running and not self._over:
            self._gather()
        if not self._over:
            self._meet_hosts()
            self._hosts.replace_stale()
            self._start_newcomers()
            self._tell_changes()

    def _gather(self) -> None:
        """Begins the next epoch if there are enough workers, or slots for them."""
        first = self.number == 0
        if not first and not self._may_go_on:
            self._end([*self._workers.failures, MembershipFailure("no worker is left that could go on")])
            return
        if first and self._none_is_left:
            self._end(self._workers.failures)
            return
        if self._may_hear_more:
            return
        before = self._workers.places
        self._hosts.part(before.names if before is not None else ())
        if first and not all(self._hosts.listens(host) for host in self._hosts.present):
            self._wait_for_more(self._limits.wanted, "")
            return
        places = self._next.who_have_asked() if self._start.is_over else self._next.all_slots(listening=True)
        need = self._limits.wanted if first else self._limits.least
        unfit = self._unfit.get(places.size, "") if places is not None else ""
        if places is None or places.size < need:
            self._wait_for_more(need, "")
        elif unfit:
            self._wait_for_more(need, unfit)
        else:
            self._begin(places)

    def _wait_for_more(self, need: int, unfit: str) -> None:
        """Waits for more than the hosts and workers that there are, says so, and ends the job when that takes too long.

        Args:
            need: workers.
            unfit: why as many as there are are of no use, or empty if there are too few.
        """
        slots, limit = f"the slots there are ({self._slots()})", f"{self._limits.timeout:g} s (--elastic-timeout)"
        if self._clock() >= self._since + self._limits.timeout and not self._hosts.are_starting:
            lacks = f"the job needs {counted(need, 'worker')}, and {slots} did not suffice for {limit}"
            self._fail(f"no more workers have come for {limit}: {unfit}" if unfit else lacks)
        elif self._clock() >= self._since + _TELL_S and not self._has_told:
            self._has_told = True
            waits = f"waiting for {counted(need, 'worker')}; {slots} do not suffice; at most {limit}"
            self._control.say(
                "fusionrun: " + (f"waiting for more workers, at most {limit}, since {unfit}" if unfit else waits)
            )

    @property
    def _may_hear_more(self) -> bool:
        """Tells whether an epoch has not come up since hosts did not reach each other, and not all have said whom: on
        half of that the wrong ones would be left out."""
        places = self._workers.places
        waits = [host for host in (places.names if places else ()) if self._hosts.listens(host)]
        is_split = self._split_at <= self._clock() < self._split_at + _HEAR_S
        return is_split and not self._heard_of.issuperset(waits)

    def _slots(self) -> str:
        """The slots of hosts that could be in an epoch now, in words."""
        hosts = self._next.available(self._hosts.listens)
        return ", ".join(f"{host.name}:{host.slots}" for host in hosts) or "none"

    @property
    def _none_is_left(self) -> bool:
        """Tells whether no host can take part, before any epoch has begun."""
        found = self._next.found
        none = not self._hosts.present and all(host.name in self._blacklist for host in found)
        return self.number == 0 and bool(found) and none

    def _begin(self, places: Places) -> None:
        """Begins an epoch: workers that have asked get their places, and in its free slots others are started."""
        resets = self._limits.resets
        if self.number > 0 and not self._is_return(places):
            if resets is not None and self._resets >= resets:
                self._fail(f"the job has been reset as often as --reset-limit allows ({resets})")
                return
            self._resets += 1
        self._filled.update(places.ranks)
        self.number += 1
        found = self._next.found
        if self.number > 1:
            self._control.say(self._workers.tell_change(self.number, places, found))
        asking = [*self._workers.alive(), *self._newcomers.present]
        self._see_off(places)
        endpoints = self._hosts.take_part(places.names)
        before = {*self._workers.alive()}
        for place in places.ranks:
            if place not in before:
                self._newcomers.take(place)
        self._is_running, self._next.workers, self._is_abandoned = True, WorkerStates(places), False
        self._heard_of, self._split_at, self._is_probe_due = set(), math.inf, False
        self._control.begin(self.number, places, endpoints, [place for place in asking if place in places.ranks])

    def _see_off(self, places: Places) -> None:
        """Decides on workers that have no place in the epoch that begins."""
        usable = {host.name for host in self._next.available(self._hosts.is_fit)}
        for place in self._workers.alive():
            if place in places.ranks:
                continue
            host, slot = place
            if host in usable and not self._hosts.listens(host):
                self._newcomers.wait(place, self.rank_of(host, slot) or 0)
            else:
                self._control.remove(host, [slot], self._no_place(host))

    def _start_newcomers(self) -> None:
        """Starts workers in the slots that are free, and ends those for which there is no room any more."""
        if not self._start.is_over or self._workers.is_finishing:
            return
        recruits = self._next.recruits()
        if recruits is None:
            return
        for place in recruits.surplus:
            self._newcomers.lose_one(place)
            self._control.remove(place[0], [place[1]], self._no_place(place[0]))
        for place in recruits.wanted:
            self._newcomers.begin(place, recruits.places.ranks[place])
            self._control.recruit(self.number, place, recruits.places)

    def _tell_changes(self) -> None:
        """Tells the workers if the next epoch would have other places than this one. Before all of them have their
        places in this one, they would take it for older news, and forget it."""
        workers, now = self._workers, self._clock()
        if not self._is_running or not workers.is_whole or workers.places is None or not workers.is_up:
            return
        met = self._hosts.present.items()
        if any(not self._hosts.listens(name) and now < host.since + _MEET_S for name, host in met):
            return  # soon there will be more to tell
        if self._newcomers.are_expected(_MEET_S):
            return
        would = self._next.who_have_asked()
        if would is None:
            return  # all hosts are to go, and the state with them: it is kept as long as they stay
        new, old = frozenset(would.ranks), frozenset(workers.places.ranks)
        if new != workers.told:
            workers.told = new
            if new != old:
                self._control.tell_change(bool(new - old), bool(old - new))

    def _meet_hosts(self) -> None:
        """Connects to hosts that could take part, and lets go of those that do not."""
        wanted: set[str] = set()
        could = None if self._workers.is_finishing else self._next.all_slots()
        found = {host.name: host for host in self._next.found}
        for name in could.names if could is not None else ():
            wanted.add(name)
            if name not in self._hosts.present:
                self._hosts.connect(found[name])
        wanted.update(host for host, _ in self._workers.alive())
        if self._is_running and self._workers.places is not None:
            wanted.update(self._workers.places.names)
        for name in self._hosts.present.keys() - wanted:
            self._hosts.forget(name)
            self._newcomers.lose(name)
            self._control.release(name, self._no_place(name))

    def _fail(self, reason: str) -> None:
        last = self._workers.reason()
        self._end([MembershipFailure(f"{reason}; before that: {last}" if last else reason)])

    def _end(self, failures: list[Failure]) -> None:
        self._over = True
        self._control.end(failures)

    # Consequences

    @property
    def _may_go_on(self) -> bool:
        """Tells whether there is a worker with the state; or there is none yet, and some were ended without a fault."""
        if self._next.staying:
            return True
        return self._workers.has_unused and not self._start.is_over and not self._start.is_hopeless(self._next.found)

    def _is_return(self, places: Places) -> bool:
        """Tells whether nothing has happened but that lost workers' slots are filled again. The loss was counted as a
        reset, as Horovod does, where the next epoch waits for replacements of the lost."""
        before = self._workers
        is_intact = before.places is not None and not before.failures and not before.errors
        return is_intact and set(before.alive()) <= set(places.ranks) <= self._filled

    def _takes_part(self, host: str) -> bool:
        """Tells whether a host is in the epoch that runs."""
        return self._is_running and self._workers.places is not None and self._workers.places.has(host)

    def _no_place(self, host: str) -> str:
        return f"host {host} has no place for this worker in membership epoch {self.number}"
