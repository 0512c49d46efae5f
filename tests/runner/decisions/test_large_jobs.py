"""Decisions in jobs of thousands of workers cost calls of functions and orders, which are counted on the product's own
classes without I/O."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions import epochs as module
from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.epochs import Epochs
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.runner.decisions.outcome import HostFailure, WorkerFailure
from fusion_rt.runner.decisions.places import Place, Places, assign


class Job:
    """An elastic job that does as it is told, at once; the `JobControl` of its epochs, which counts their orders.

    Events are told one by one, and decisions are made when `tick` is due, as those of a launcher are.
    """

    def __init__(self, hosts: int, slots: int) -> None:
        self.now = 0.0
        self.orders: Counter[str] = Counter()
        self.places: Places | None = None
        self.serials: dict[str, int] = {}
        self.recruited: list[Place] = []
        self.killed: list[Place] = []
        blacklist = Blacklist(10.0, 10.0, lambda: self.now, random.Random(0))
        self.epochs = Epochs(ElasticLimits(1, 1), blacklist, self, lambda: self.now)
        self.epochs.found(tuple(Host(f"h{number}", slots) for number in range(hosts)))
        self.decide()
        for name in [*self.serials]:
            self.epochs.ready(name)
        self.decide()
        self.listen()
        self.decide()
        self.come_up()

    def decide(self) -> None:
        while self.epochs.due <= self.now:
            self.epochs.tick()

    def listen(self) -> None:
        for node, (name, serial) in enumerate(self.serials.items()):
            self.epochs.daemon_up(name, serial, Endpoint(node, serial, "127.0.0.1", 1, 2, "k" * 40))

    def come_up(self) -> None:
        assert self.places is not None
        for name in self.places.names:
            self.epochs.started(name, self.epochs.number)
        self.decide()

    def leave(self, workers: Collection[Place]) -> None:
        """These workers leave their epoch, since a peer is gone."""
        number = self.epochs.number
        for host, slot in workers:
            self.epochs.asked(host, slot, number, "a peer is gone")
            self.decide()

    # JobControl

    def connect(self, host: Host) -> None:
        self.serials[host.name] = 0

    def start_daemon(self, host: str, node: int, serial: int, nodes: Sequence[str]) -> None:
        self.serials[host] = serial

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], waiting: Collection[Place]) -> None:
        self.places = places
        self.orders["begin"] += 1

    def recruit(self, number: int, place: Place, would: Places) -> None:
        self.recruited.append(place)

    def kill(self, host: str, slots: Sequence[int]) -> None:
        self.killed += [(host, slot) for slot in slots]

    def overdue(self, host: str) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        def count(*arguments: Any) -> None:
            self.orders[name] += 1

        return count


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called meanwhile."""
    found = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def lose_a_worker(job: Job) -> None:
    """A worker is killed, the others leave, and the next epoch begins without it."""
    assert job.places is not None
    victim, *others = job.places.ranks
    job.epochs.ended(*victim, WorkerFailure(victim[0], 0, -9, "boom"))
    job.decide()
    job.leave(others)
    job.come_up()
    assert victim not in job.places.ranks
    assert job.places.size == len(others)


def lose_a_host(job: Job) -> None:
    """A host burns, all others' daemons say so, and the next epoch begins without it."""
    assert job.places is not None
    lost, node = job.places.names[-1], job.places.node_of(job.places.names[-1])
    others = [place for place in job.places.ranks if place[0] != lost]
    for name in job.places.names[:-1]:
        job.epochs.missed(name, 1, (node,))
        job.decide()
    job.epochs.lost(HostFailure(lost, ("it burns",)))
    job.decide()
    job.leave(others)
    job.come_up()
    assert job.places.size == len(others)


@pytest.mark.parametrize("lose", [lose_a_worker, lose_a_host])
def test_the_work_after_a_loss_grows_with_the_number_of_workers_and_no_faster(
    lose: Callable[[Job], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for hosts in (64, 1024):
        job, assigned = Job(hosts, 8), []

        def noted(*arguments: Any, assigned: list[int] = assigned, **options: Any) -> Places | None:
            assigned.append(1)
            return assign(*arguments, **options)

        monkeypatch.setattr(module, "assign", noted)
        job.orders.clear()
        found[hosts] = calls_of(lambda job=job: lose(job))  # type: ignore[misc]
        assert job.epochs.number == 2
        assert job.orders["begin"] == 1
        assert not job.killed
        assert len(assigned) <= 20, "places of all are worked out a few times, and not for each worker"
        assert sum(job.orders.values()) <= 3 * hosts
    assert found[1024] <= 16 * 1.2 * found[64]
    assert found[1024] <= 100 * 1024 * 8


def test_places_of_many_hosts_take_time_for_each_place_once() -> None:
    def calls(count: int) -> int:
        hosts = [Host(f"h{number}", 8) for number in range(count)]
        staying = [(host.name, slot) for host in hosts for slot in range(1, 8)]
        return calls_of(lambda: assign(hosts, staying, None, [("h0", 0)], nodes=[host.name for host in hosts]))

    assert calls(1024) <= 16 * 1.1 * calls(64)


def test_a_job_of_a_thousand_hosts_starts_by_a_few_decisions_where_all_come_at_once() -> None:
    found = {hosts: calls_of(lambda hosts=hosts: Job(hosts, 8)) for hosts in (64, 1024)}  # type: ignore[misc]
    assert found[1024] <= 16 * 1.2 * found[64]
