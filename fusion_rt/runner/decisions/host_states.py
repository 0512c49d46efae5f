"""The hosts that an elastic job is connected to: their agents, their daemons, and the silent ones. No I/O.

A host has one daemon at a time, which goes from epoch to epoch, and a node's number that it keeps as long as the job
lives. A daemon that was left out of an epoch, or has died, is followed by another one, with other keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.job_control import JobControl
from fusion_rt.runner.decisions.limits import ElasticLimits


@dataclass
class HostState:
    """A host whose agent was started.

    Attributes:
        since: when, by the clock.
        is_fit: the agent has passed its checks.
        daemon: serial number of the host's present daemon; 0: there is none.
        endpoint: of that, when it listens.
        is_in_reach: the host has been seen to reach the daemons of the epoch that ran when it listened.
        listen_until: by when it has to listen.
        has_taken_part: it was in an epoch.
        is_stale: it is to be replaced, since others do not speak to it any more.
        probed: when the agent was asked whether it is there; inf: it was not, or has answered.
    """

    since: float
    is_fit: bool = False
    daemon: int = 0
    endpoint: Endpoint | None = None
    is_in_reach: bool = False
    listen_until: float = math.inf
    has_taken_part: bool = False
    is_stale: bool = False
    probed: float = math.inf

    @property
    def listens(self) -> bool:
        """Tells whether the daemon may be in the next epoch."""
        return self.endpoint is not None and self.is_in_reach and not self.is_stale


class HostStates:
    """All of them, by name.

    Args:
        limits: of the job.
        control: starts agents and daemons.
        clock: seconds from any moment on.

    Attributes:
        present: the hosts.
        nodes: the number of each host that there ever was, in this order.
    """

    def __init__(self, limits: ElasticLimits, control: JobControl, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._control = control
        self._clock = clock
        self._serials: dict[str, int] = {}  # of the last daemon that was started on a host
        self._taking_part: dict[str, int] = {}  # the daemon of each host in the last epoch
        # By an accused daemon (its host, its number): its accusers.
        self._misses: dict[tuple[str, int], set[tuple[str, int]]] = {}
        self._apart: set[frozenset[str]] = set()  # hosts of which one took the other for lost since an epoch was up
        self.present: dict[str, HostState] = {}
        self.nodes: dict[str, int] = {}

    def connect(self, host: Host) -> None:
        """Starts the agent of a host."""
        self.nodes.setdefault(host.name, len(self.nodes))
        self.present[host.name] = HostState(self._clock())
        self._control.connect(host)

    def forget(self, host: str) -> bool:
        """A host is not connected any more; whether it was."""
        was_there = self.present.pop(host, None) is not None
        self._check_others()
        return was_there

    def note_fit(self, host: str) -> None:
        """An agent has passed its checks: it starts a daemon."""
        if host in self.present and not self.present[host].is_fit:
            self.present[host].is_fit = True
            self.start_daemon(host)

    def start_daemon(self, host: str) -> None:
        """Has a host's agent start another daemon in the place of that which there may be."""
        state = self.present[host]
        state.daemon = self._serials[host] = self._serials.get(host, 0) + 1
        state.endpoint, state.is_in_reach, state.has_taken_part, state.is_stale = None, False, False, False
        state.listen_until = self._clock() + self._limits.start
        self._control.start_daemon(host, self.nodes[host], state.daemon, tuple(self.nodes))
        self._check_others()

    def is_fit(self, host: str) -> bool:
        """Tells whether the agent of a host has passed its checks."""
        return host in self.present and self.present[host].is_fit

    def listens(self, host: str) -> bool:
        """Tells whether a host has a daemon that may be in the next epoch."""
        return host in self.present and self.present[host].listens

    @property
    def are_starting(self) -> bool:
        """Tells whether an agent is about to answer, or a daemon to listen; they have a limit of their own for that."""
        return any(not state.is_fit or state.listen_until < math.inf for state in self.present.values())

    def note_up(self, host: str, serial: int, endpoint: Endpoint) -> None:
        """A daemon listens. While others are in an epoch, they hear of it when its host has been seen to reach them: a
        network that is cut between hosts need not be so towards the launcher."""
        if host in self.present and self.present[host].daemon == serial:
            state = self.present[host]
            state.endpoint, state.listen_until = endpoint, math.inf
            self._check_reach(host, state)

    def _check_reach(self, host: str, state: HostState) -> None:
        """Has the agent of a host find out whether it reaches the daemons of the epoch."""
        # Only those of the last epoch have taken part and are not to be replaced.
        epoch = [self.present[name] for name in self._taking_part if name in self.present]
        others = [one.endpoint for one in epoch if one.has_taken_part and not one.is_stale]
        wanted = [endpoint for endpoint in others if endpoint is not None]
        state.is_in_reach = not wanted
        if wanted:
            self._control.reach(host, state.daemon, wanted)

    def _check_others(self) -> None:
        """Asks again for hosts that have not reached all daemons: some of these may be gone."""
        for name, state in self.present.items() if self._taking_part else ():
            if state.endpoint is not None and not state.is_in_reach:
                self._check_reach(name, state)

    def note_reach(self, host: str, serial: int) -> None:
        """A host reaches the daemons that it was asked about."""
        if host in self.present and self.present[host].daemon == serial:
            self.present[host].is_in_reach = True

    def note_down(self, host: str, serial: int) -> bool:
        """A daemon has ended by itself; whether it was the present one."""
        if host not in self.present or self.present[host].daemon != serial:
            return False
        self.present[host].endpoint, self.present[host].listen_until = None, math.inf
        self._check_others()
        return True

    def take_part(self, names: Iterable[str]) -> list[Endpoint]:
        """These hosts are in the epoch that begins; returns the endpoints of their daemons, by node. Daemons that are
        left out are forgotten by these."""
        chosen = set(names)
        for name, state in self.present.items():
            state.probed = math.inf
            if name in chosen:
                state.has_taken_part = True
            elif state.has_taken_part:
                state.is_stale = True
        self._check_others()
        self._taking_part = {name: state.daemon for name, state in self.present.items() if name in chosen}
        endpoints = [self.present[name].endpoint for name in self.nodes if name in chosen]
        return [endpoint for endpoint in endpoints if endpoint is not None]

    def replace_stale(self) -> None:
        """Starts daemons in the place of those to which others do not speak any more."""
        for name, state in self.present.items():
            if state.is_stale:
                self.start_daemon(name)

    def probe(self, names: Iterable[str]) -> None:
        """Has the agents of these hosts asked whether they are there, if they are not asked already."""
        for name in names:
            if name in self.present and self.present[name].probed == math.inf:
                self.present[name].probed = self._clock()
                self._control.probe(name)

    def note_answer(self, host: str) -> None:
        """An agent is there."""
        if host in self.present:
            self.present[host].probed = math.inf

    def miss(self, host: str, by: str) -> None:
        """In the last epoch, the daemon of another host has taken that of this one for lost, and never speaks to it
        again. It may be silent because it stands still; then its own workers would wait for it for long."""
        if host != by and host in self._taking_part and by in self._taking_part:
            serial = self._taking_part[host]
            is_news = (host, serial) not in self._misses
            self._misses.setdefault((host, serial), set()).add((by, self._taking_part[by]))
            self._apart.add(frozenset((by, host)))
            self.probe([host])
            if is_news and host in self.present and self.present[host].daemon == serial:
                self._control.check_daemon(host, serial)

    def settle(self) -> None:
        """An epoch is up: earlier separations of hosts are over."""
        self._apart.clear()

    def part(self, order: Sequence[str]) -> None:
        """Chooses between hosts whose daemons do not speak to each other: as few as possible are left out, and if that
        leaves a choice, those that more hosts have taken for lost since an epoch was up, and then the later ones in
        this order. So of a network that fell apart the larger part goes on, or that of the first host, also if the
        losses were noticed one after the other. The daemons of the others are replaced."""
        lately = Counter(name for pair in self._apart for name in pair)
        while counts := Counter(name for pair in self._at_odds() for name in pair):
            later = {name: order.index(name) if name in order else len(order) for name in counts}
            self.present[max(counts, key=lambda name: (counts[name], lately[name], later[name]))].is_stale = True

    def _at_odds(self) -> set[frozenset[str]]:
        """Pairs of hosts of which one's present daemon takes the other's for lost."""
        present = {(name, state.daemon) for name, state in self.present.items() if not state.is_stale}
        misses = {one: by & present for one, by in self._misses.items() if one in present}
        self._misses = {one: by for one, by in misses.items() if by}
        return {frozenset((name, host)) for (host, _), by in self._misses.items() for name, _ in by}

    def useless(self, names: Iterable[str] | None = None) -> list[tuple[str, str]]:
        """Returns the hosts, of these or of all, that have not come up in time or are silent, and why they are not
        waited for."""
        now, limit, found = self._clock(), f"within {self._limits.start:g} s (--start-timeout)", []
        for name in self.present if names is None else self.present.keys() & set(names):
            state = self.present[name]
            is_missed = (name, state.daemon) in self._misses
            patience = self._limits.probe_missed if is_missed else self._limits.probe
            if not state.is_fit and now >= state.since + self._limits.start:
                found.append((name, f"it did not answer {limit}"))
            elif now >= state.listen_until:
                found.append((name, f"its daemon did not listen {limit}"))
            elif now >= state.probed + patience or (is_missed and self._control.overdue(name) >= patience):
                silent = "its agent does not answer" + (", and other hosts cannot reach it" if is_missed else "")
                found.append((name, silent))
        return found
