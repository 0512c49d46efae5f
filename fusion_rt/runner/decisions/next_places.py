"""The workers and slots that an elastic job could have in its next epoch, and the places that follow. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.host_states import HostStates
from fusion_rt.runner.decisions.newcomers import Newcomers
from fusion_rt.runner.decisions.places import Place, Places, assign
from fusion_rt.runner.decisions.worker_states import WorkerStates


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
        """The places of those who wait, and of those in the epoch, on hosts whose daemons listen; None if there are
        none, or nobody among them has the state."""
        return self._choose(self._hosts.listens, self._newcomers.asking)

    def all_slots(self, listening: bool = False) -> Places | None:
        """The places of all slots; `listening`: of hosts whose daemons do. None as above."""
        return self._choose(self._hosts.listens if listening else lambda name: True, None)

    def recruits(self) -> Recruits | None:
        """Finds the slots that are free for workers, on hosts that are fit; None if there is no place at all."""
        newcomers, staying = self._newcomers, self.staying
        hosts = self.available(self._hosts.is_fit)
        begun = [place for place in newcomers.present if place not in staying]
        unusable = {*staying, *begun} | newcomers.closed
        slots = [(host.name, slot) for host in hosts for slot in range(host.slots)]
        free = [place for place in slots if place not in unusable]
        places = assign(hosts, staying, self._most, [*begun, *free], nodes=self._hosts.nodes)
        if places is None:
            return None
        fit = {host.name for host in hosts}
        surplus = [place for place in begun if place not in places.ranks and place[0] in fit]
        return Recruits(places, [place for place in free if place in places.ranks], surplus)

    def _choose(self, could: Callable[[str], bool], joining: list[Place] | None) -> Places | None:
        """Places without anybody who has the state would lose it, so if there is none on the hosts that are available,
        those on hosts that are left out may stay."""
        hosts, staying = self.available(could), self.staying
        alive = Counter(name for name, _ in staying)
        if alive and not any(host.name in alive for host in hosts):
            here = [host for host in self.found if host.name in alive and could(host.name)]
            if not here:
                return None
            hosts = [replace(host, slots=min(host.slots, alive[host.name])) for host in here] + hosts
        return assign(hosts, staying, self._most, joining, self._newcomers.given_up, self._hosts.nodes)
