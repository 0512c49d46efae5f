"""The workers of one membership epoch: running ones, those that have left, and failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from fusion_rt.core.wording import counted
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.outcome import Failure, HostFailure, WorkerGaveUp, in_short
from fusion_rt.runner.decisions.places import Place, Places


class WorkerState(Enum):
    """The state of a worker in its epoch."""

    RUNNING = "it has a place in the epoch"
    WAITING = "it has left the epoch and asks for the next"
    DONE = "it has ended well"
    FAILED = "it has ended, or its host is lost"
    UNUSED = "it was ended before it had begun with anything"


_ALIVE = (WorkerState.RUNNING, WorkerState.WAITING)


class WorkerStates:
    """The workers of an epoch, from its beginning to that of the next.

    Args:
        places: of the epoch; None before the first.

    Attributes:
        states: of the workers, in the order of ranks; changed by `put` alone.
        failures: errors that workers did not survive, in their order.
        errors: why workers have left.
        reasons: for the next change of membership, in words.
        leave_until: when workers that have not left yet are late.
        given_up: those that were late.
        told: the next epoch's places, as the workers were told.
    """

    def __init__(self, places: Places | None = None) -> None:
        self.places = places
        ranks = places.ranks if places is not None else {}
        self.states = dict.fromkeys(sorted(ranks, key=ranks.__getitem__), WorkerState.RUNNING)
        self._counts = Counter(self.states.values())
        self.failures: list[Failure] = []
        self.errors: list[WorkerGaveUp] = []
        self.reasons: list[str] = []
        self.leave_until = math.inf
        self.given_up: set[Place] = set()
        self.told: frozenset[Place] = frozenset(ranks)
        # Hosts whose daemon has not said yet that every process of the epoch is up.
        self._coming = {*places.names} if places is not None else set()

    @property
    def is_running(self) -> bool:
        """Tells whether any worker runs."""
        return self._counts[WorkerState.RUNNING] > 0

    @property
    def is_finishing(self) -> bool:
        """Tells whether a worker has ended well: then the job only waits for the others."""
        return self._counts[WorkerState.DONE] > 0

    @property
    def is_done(self) -> bool:
        """Tells whether all have ended well."""
        return self._counts[WorkerState.DONE] == len(self.states)

    @property
    def has_unused(self) -> bool:
        """Tells whether a worker was ended through no fault of its own."""
        return self._counts[WorkerState.UNUSED] > 0

    @property
    def is_up(self) -> bool:
        """Tells whether every process of the epoch has come up."""
        return self.places is not None and not self._coming

    @property
    def is_whole(self) -> bool:
        """Tells whether nothing has happened to the epoch yet."""
        return not self.failures and not self.is_finishing and self.leave_until == math.inf

    def alive(self) -> list[Place]:
        """The workers that run or wait, by rank."""
        return [place for place, state in self.states.items() if state in _ALIVE]

    def is_alive(self, place: Place) -> bool:
        """Tells whether a worker runs or waits."""
        return self.states.get(place) in _ALIVE

    def put(self, place: Place, state: WorkerState) -> None:
        """A worker of the epoch is in this state now."""
        self._counts[self.states[place]] -= 1
        self._counts[state] += 1
        self.states[place] = state

    def late(self) -> dict[str, list[int]]:
        """The slots of the workers that run, by host."""
        slots: dict[str, list[int]] = {}
        for (host, slot), state in self.states.items():
            if state is WorkerState.RUNNING:
                slots.setdefault(host, []).append(slot)
        return slots

    def note_started(self, host: str) -> None:
        self._coming.discard(host)

    def note(self, failure: Failure) -> None:
        """Something went wrong."""
        self.failures.append(failure)
        self.reasons.append(in_short(failure))

    def add(self, consequence: str) -> None:
        """Adds the consequences to the last failure."""
        self.reasons[-1] += f"; {consequence}"

    def leave(self, place: Place, error: str, leave_until: float) -> bool:
        """A worker has left; whether that is news. The others have until then to follow, if it is the first."""
        if self.states.get(place) is not WorkerState.RUNNING:
            return False
        self.put(place, WorkerState.WAITING)
        if error:
            self.errors.append(WorkerGaveUp(place[0], self._rank(place), error))
        self.leave_until = min(self.leave_until, leave_until)
        return True

    def end(self, place: Place, failure: Failure | None, late: str) -> bool:
        """Notes that a worker has ended; returns whether it has failed.

        `late`: said of one that was killed because it took too long.
        """
        if failure is None and self.states[place] is WorkerState.RUNNING and place not in self.given_up:
            self.put(place, WorkerState.DONE)
            return False
        self.put(place, WorkerState.FAILED)
        if place in self.given_up:
            failure = HostFailure(place[0], (f"rank {self._rank(place)} was killed: {late}",))
        self.note(failure or WorkerGaveUp(place[0], self._rank(place), "it ended while it waited for others"))
        return True

    def lose(self, host: str) -> bool:
        """A host is gone; whether it had workers."""
        here = [place for place in self.alive() if place[0] == host]
        for place in here:
            self.put(place, WorkerState.FAILED)
        return bool(here)

    def reason(self) -> str:
        """The last that is known of why the epoch is over, or nothing."""
        return in_short(self.failures[-1]) if self.failures else self._first_error()

    def tell_change(self, number: int, places: Places, found: Sequence[Host]) -> str:
        """A line on the next epoch: its workers, and the reason.

        Args:
            number: of that epoch.
            places: its.
            found: all hosts that there are.
        """
        reasons = list(self.reasons)
        before = self.places.names if self.places is not None else ()
        slots = {host.name: host.slots for host in found}
        for host in places.names:
            was = self.places.count(host) if self.places is not None else 0
            if host not in before:
                reasons.append(f"host {host} was added")
            elif places.count(host) > was:
                reasons.append(f"host {host} has {counted(places.count(host), 'worker')} now")
            elif slots.get(host, was) < was:
                reasons.append(f"host {host} has room for {slots[host]} now")
        now = {*slots, *places.names}
        reasons += [f"host {host} was removed" for host in before if host not in now]
        why = "; ".join(dict.fromkeys(reasons)) or self._first_error()
        hosts = ("host " if len(places.names) == 1 else "hosts ") + ", ".join(places.names)
        return f"fusionrun: membership epoch {number}: {counted(places.size, 'worker')} on {hosts} ({why})"

    def _rank(self, place: Place) -> int:
        assert self.places is not None
        return self.places.ranks[place]

    def _first_error(self) -> str:
        return in_short(self.errors[0]) if self.errors else ""
