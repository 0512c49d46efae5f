"""Losses of an elastic job, each of which the others survive, and after which all come back."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.faults import nemesis
from tests.faults.soak_ledger import WorkerState
from tests.faults.soak_survival import WHOLE_S, ElasticJob, Running

GIVE_S = (0.0, 0.03)  # in which the state is given to a newcomer
LINGERS_S = 2.0  # at most, for which a fault lasts longer than until others have gone on


class NothingToLose(Exception):
    """Nobody is there who may be lost in this way now."""


def _one(job: ElasticJob, chooser: random.Random) -> WorkerState:
    return _some(job, chooser, 1)[0]


def _some(job: ElasticJob, chooser: random.Random, count: int) -> list[WorkerState]:
    """Chooses workers, and leaves one at least."""
    candidates = job.can_fail()
    if len(candidates) < count:
        raise NothingToLose
    return chooser.sample(candidates, count)


def _host(job: ElasticJob, chooser: random.Random) -> int:
    """Chooses a host, whose workers keep the state."""
    host = chooser.choice([host for host in range(job.nodes) if host != job.spared])
    job.note_disturbance(host)
    return host


def _failing_host(job: ElasticJob, chooser: random.Random) -> int:
    """Chooses a host, whose workers may count as failed."""
    hosts = job.hosts_that_can_fail()
    if not hosts:
        raise NothingToLose
    host = chooser.choice(hosts)
    for one in job.present():
        if job.host_of(one) == host:
            job.note_failure(one)
    return host


def _kill(job: ElasticJob, victims: Sequence[WorkerState]) -> None:
    for victim in victims:
        job.note_failure(victim)
        Running(victim.pid).send_signal(signal.SIGKILL)


def _without(job: ElasticJob, *hosts: int) -> list[WorkerState]:
    return [one for one in job.present() if job.host_of(one) not in hosts]


@contextmanager
def kill_worker(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills a worker."""
    victim, there = _one(job, chooser), job.present()
    _kill(job, [victim])
    yield [one for one in there if one is not victim]


@contextmanager
def kill_two_workers(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills two workers at once."""
    victims, there = _some(job, chooser, 2), job.present()
    _kill(job, victims)
    yield [one for one in there if one not in victims]


@contextmanager
def fail_worker(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Has a worker leave by an exception."""
    victim, there = _one(job, chooser), job.present()
    job.note_failure(victim)
    job.order(victim.place, "fail")
    yield [one for one in there if one is not victim]


@contextmanager
def stop_worker_for_long(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Stops a worker until the others have given it up. Its host is left out for a while then."""
    host = _failing_host(job, chooser)
    victim = chooser.choice([one for one in job.present() if job.host_of(one) == host])
    with nemesis.stopped(Running(victim.pid)):
        yield _without(job, host)


@contextmanager
def kill_daemon(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills a daemon."""
    host = _host(job, chooser)
    nemesis.kill(job.daemon(host))
    yield _without(job, host)


@contextmanager
def stop_daemon_for_long(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Stops a daemon until the others have declared it dead."""
    host = _host(job, chooser)
    with nemesis.stopped(job.daemon(host)):
        yield _without(job, host)
        time.sleep(chooser.uniform(0.0, LINGERS_S))


@contextmanager
def kill_agent(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills the agent of a host."""
    host = _failing_host(job, chooser)
    survivors = _without(job, host)
    job.agent(host).send_signal(signal.SIGKILL)
    yield survivors


@contextmanager
def stop_agent_for_long(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Stops the agent of a host until the launcher has given the host up."""
    host = _failing_host(job, chooser)
    survivors = _without(job, host)
    with nemesis.stopped(job.agent(host)):
        yield survivors


@contextmanager
def kill_host(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills all processes of a host."""
    host = _failing_host(job, chooser)
    survivors = _without(job, host)
    job.kill_all(host)
    yield survivors


@contextmanager
def cut_off(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Cuts a host off from the others until they have gone on."""
    assert job.lab is not None
    host = _host(job, chooser)
    with job.lab.cut_off(host):
        yield _without(job, host)
        time.sleep(chooser.uniform(0.0, LINGERS_S))


@contextmanager
def cut_off_one_way(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Drops what a host sends to another one until one of them was left out."""
    assert job.lab is not None
    sender = _host(job, chooser)
    receiver = chooser.choice([host for host in range(job.nodes) if host not in (sender, job.spared)])
    job.note_disturbance(receiver)
    with job.lab.dropping(sender, receiver):
        yield _without(job, sender, receiver)
        time.sleep(chooser.uniform(0.0, LINGERS_S))


@contextmanager
def kill_newcomer(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills a worker, and the next one in its place while that gets the state."""
    victim, there = _one(job, chooser), job.present()
    second = job.come(victim.place) + 2
    with _dies_at_sync(job, chooser, victim.place):
        _kill(job, [victim])
        yield [one for one in there if one is not victim]
        job.wait(lambda: job.come(victim.place) >= second, WHOLE_S, "the newcomer after a newcomer")
    job.note_failure(victim)


@contextmanager
def kill_donor(job: ElasticJob, chooser: random.Random) -> Iterator[list[WorkerState]]:
    """Kills a worker, and while the next one in its place gets the state, the one that gives it."""
    there, candidates = job.present(), job.can_fail()
    if there[0] not in candidates or len(candidates) < 2:
        raise NothingToLose
    victim = chooser.choice([one for one in candidates if one is not there[0]])
    with _dies_at_sync(job, chooser, there[0].place):
        _kill(job, [victim])
        yield [one for one in there if one not in (victim, there[0])]
        job.note_failure(there[0])
        job.wait(lambda: Running(there[0].pid).poll() is not None, WHOLE_S, "the death of the donor")


@contextmanager
def _dies_at_sync(job: ElasticJob, chooser: random.Random, place: str) -> Iterator[None]:
    job.order(place, "die", str(chooser.uniform(*GIVE_S)))
    try:
        yield
    finally:
        job.revoke(place, "die")


Loss = Callable[[ElasticJob, random.Random], contextlib.AbstractContextManager[list[WorkerState]]]
LOSSES: tuple[Loss, ...] = (
    kill_worker, kill_two_workers, fail_worker, stop_worker_for_long, kill_daemon, stop_daemon_for_long, kill_agent,
    stop_agent_for_long, kill_host, cut_off, cut_off_one_way, kill_newcomer, kill_donor,
)  # fmt: skip
