"""The nodes of a job that `fusionrun` did not start find each other here, through a store that all of them reach.

Every rank leaves word where it is. Rank 0 makes the topology of that, and a fresh id for the job, which every rank
confirms; then each node's first worker starts its daemon and leaves the endpoint, and rank 0 puts the endpoints
together. So a rank reads and writes two or three values, and only rank 0 reads as many as there are ranks.

A store may outlive the workers that wrote into it (torchrun's does when it restarts them, and numbers the restarts
differently on each host). So each word has a random number of the visit, an assignment counts only for those whose
numbers are in it, and one with numbers of the past is never confirmed and gives way to the next.

The store is not trusted: entries are typed, limited in size, and carry a keyed digest. With a secret that the job's
processes share, nobody else can make one; without, the digest only keeps jobs apart, and whoever can write to the
store can take part (docs/launchers.md). A value that is no entry of this job counts as not there. Nothing secret is
stored.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Endpoint, PeerTable, StartError
from fusion_rt.launchers.entries import (
    Arrival,
    Assignment,
    Introduction,
    Refusal,
    Word,
    assemble,
    digest,
    is_sealed,
    name_ranks,
    seal,
    unseal,
)
from fusion_rt.launchers.kvstore import HttpServer, HttpStore, Store
from fusion_rt.launchers.meeting import Meeting

_FIRST_PAUSE = 0.005  # seconds between two looks at a store; doubles up to the longest
_LONGEST_PAUSE = 0.05
_PAUSE_PER_RANK = 0.002  # of large jobs, so that the store has no more than so many to answer
_LAST_WORDS = 2.0  # seconds that the others get, beyond the limit, to hear the reason from rank 0
_T = TypeVar("_T")


def open_store(meeting: Meeting, rank: int, size: int) -> Store:
    """The store of a job whose launcher has none that takes torch to use: horovodrun's, or the one that rank 0 serves.

    Raises:
        FusionError: this is rank 0, and cannot serve it.
    """
    if meeting.kind == "horovodrun":
        return HttpStore(meeting.addresses, meeting.scope)

    def prove(text: str) -> bytes:
        return digest(meeting.secret, f"{meeting.scope}/{text}".encode())

    if rank != 0:
        return HttpStore(meeting.addresses, meeting.scope, prove)
    hosts, ports = (list(dict.fromkeys(column)) for column in zip(*meeting.addresses, strict=True))
    admits = functools.partial(is_sealed, meeting.secret)
    return HttpServer(hosts, ports, meeting.scope, prove, admits, max_keys=4 * size + 8)


_DECISION: Any = Assignment | Refusal
_INTRODUCTION: Any = Introduction | StartError
_ENDPOINT: Any = Endpoint | StartError


class Rendezvous:
    """One rank's part in the meeting of all. To be used in a `with` block, which closes the store.

    Args:
        store: which all ranks reach.
        meeting: how the job meets.
        rank, size: of this worker.
        timeout: seconds for all ranks to come.
        clock, sleep: `time.monotonic` and `time.sleep`.
    """

    def __init__(
        self,
        store: Store,
        meeting: Meeting,
        rank: int,
        size: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._scope = meeting.scope
        self._secret = meeting.secret
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._expected = meeting.expected
        self._clock = clock
        self._sleep = sleep
        self._deadline = clock() + timeout
        self._problem = ""  # the last one with the store
        self._refused = False
        self._seen: dict[str, None] = {}  # keys in the store
        self._own: Endpoint | StartError | None = None

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._refused:
            self._sleep(_LAST_WORDS)  # the others have yet to read why, in a store that may end with this process
        self._store.close()

    @property
    def hosts(self) -> Sequence[str]:
        """Host of the store."""
        return self._store.hosts

    def assign(
        self, arrival: Arrival, launcher: str, check: Callable[[Topology], None] = lambda topology: None
    ) -> Assignment:
        """Leaves word where this rank is, and returns the choice of all ranks.

        Args:
            arrival: this rank's word.
            launcher: how the job's id begins if this is rank 0.
            check: raises FusionError if there may be no such job; then all ranks do. Only rank 0 calls it.

        Raises:
            FusionError: not all ranks came in time, or they contradict each other.
        """
        self._publish(f"rank.{self._rank}", arrival)
        return self._lead(launcher, check) if self._rank == 0 else self._follow(arrival.visit)

    def _lead(self, launcher: str, check: Callable[[Topology], None]) -> Assignment:
        """Assigns until all ranks have confirmed."""
        arrivals: dict[int, Arrival] = {}
        assignment: Assignment | None = None
        unconfirmed = set(range(self._size))
        problem: FusionError | None = None
        assigned: tuple[str, ...] = ()  # the visits
        try:
            for pause in self._pauses():
                for rank in list(unconfirmed):
                    if assignment is not None and self._read(f"confirmed.{rank}", Word) == Word(assignment.job):
                        unconfirmed.discard(rank)
                    elif (arrival := self._read(f"rank.{rank}", Arrival)) is not None:
                        arrivals[rank] = arrival
                visits = tuple(arrivals[rank].visit for rank in sorted(arrivals))
                if len(arrivals) == self._size and visits != assigned:
                    assigned, assignment, unconfirmed = visits, None, set(range(self._size))
                    try:
                        topology = assemble(arrivals)
                    except FusionError as error:
                        problem = error  # unless it is a word of the past
                        continue
                    check(topology)
                    assignment = Assignment(f"{launcher}-{secrets.token_hex(8)}", topology, visits)
                    self._publish("assignment", assignment)
                    self._publish("confirmed.0", Word(assignment.job))
                elif assignment is not None and not unconfirmed:
                    self._publish("begin", Word(assignment.job))
                    return assignment
                self._sleep(pause)
            missing = unconfirmed if assignment is not None else set(range(self._size)) - set(arrivals)
            raise self._absence(missing, arrivals) if missing or problem is None else problem
        except FusionError as error:
            self._refuse("assignment", Refusal(str(error), tuple(arrival.visit for arrival in arrivals.values())))
            raise

    def _follow(self, visit: str) -> Assignment:
        """Confirms assignments until all ranks have confirmed one."""
        found: Assignment | None = None
        for pause in self._pauses(_LAST_WORDS):
            message = self._read("assignment", _DECISION)
            if message is not None and visit in message.visits and message != found:
                if isinstance(message, Refusal):
                    raise FusionError(message.error)
                found = message
                self._publish(f"confirmed.{self._rank}", Word(found.job))
            elif found is not None and self._read("begin", Word) == Word(found.job):
                return found
            self._sleep(pause)
        raise self._unreachable()

    def introduce(self, job: str, node: int, endpoint: Endpoint | StartError) -> None:
        """Says where this node's daemon listens, or why it does not.

        Raises:
            FusionError: the store cannot be reached.
        """
        self._own = endpoint
        self._publish(f"{job}.{node}", endpoint)

    def peers(self, assignment: Assignment) -> PeerTable:
        """The endpoints of all daemons of the job.

        Raises:
            FusionError: not all of them came up in time, or another process spoke for this node.
        """
        key = f"{assignment.job}.peers"
        if self._rank == 0:
            try:
                self._publish(key, Introduction(PeerTable(self._endpoints(assignment))))
            except FusionError as error:
                self._refuse(key, StartError(str(error)))
                raise
        for pause in self._pauses(0.0 if self._rank == 0 else _LAST_WORDS):
            message = self._read(key, _INTRODUCTION)
            if isinstance(message, StartError):
                raise FusionError(message.error)
            if message is not None:
                return self._checked(message.table)
            self._sleep(pause)
        raise self._unreachable()

    def clear(self) -> None:
        """Removes the store's entries; to be called by rank 0 when all ranks have joined."""
        for key in self._seen:
            try:
                self._store.remove(key)
            except (OSError, WireError):
                return  # the store is gone already, or will go with the job

    def _absence(self, missing: Iterable[int], arrivals: Mapping[int, Arrival]) -> FusionError:
        ranks = sorted(missing)
        came = dict.fromkeys(arrival.host for rank, arrival in sorted(arrivals.items()) if rank not in ranks)
        silent = {host.split(".")[0]: host for host in self._expected}
        for host in came:
            silent.pop(host.split(".")[0], None)
        where = f" of hosts {', '.join(silent.values())}" if silent else ""
        return FusionError(f"{name_ranks(ranks)}{where} did not come to the rendezvous at {self._store.where} within "
                           f"{self._timeout:g} s (HOROVOD_START_TIMEOUT); the others are on "
                           f"{', '.join(came)}")  # fmt: skip

    def _endpoints(self, assignment: Assignment) -> tuple[Endpoint, ...]:
        hosts = assignment.topology.hosts
        found: dict[int, Endpoint] = {}
        for pause in self._pauses():
            for node, host in enumerate(hosts):
                if node in found:
                    continue
                answer = self._read(f"{assignment.job}.{node}", _ENDPOINT)
                if isinstance(answer, StartError):
                    raise FusionError(f"node {node} (host {host}): {answer.error}")
                if answer is not None:
                    found[node] = answer
            if len(found) == len(hosts):
                return tuple(found[node] for node in range(len(hosts)))
            self._sleep(pause)
        missing = [f"node {node} (host {host})" for node, host in enumerate(hosts) if node not in found]
        raise FusionError(f"the daemon of {', '.join(missing)} did not come up within {self._timeout:g} s "
                          "(HOROVOD_START_TIMEOUT)")  # fmt: skip

    def _checked(self, table: PeerTable) -> PeerTable:
        own = self._own
        if isinstance(own, Endpoint) and (len(table.endpoints) <= own.node or table.endpoints[own.node] != own):
            raise FusionError(f"the store at {self._store.where} has another endpoint for node {own.node} than its "
                              "daemon gave: another process writes to it")  # fmt: skip
        return table

    # --- entries ------------------------------------------------------------------------------------------------------

    def _refuse(self, key: str, message: msgspec.Struct) -> None:
        """Tells the others why rank 0 gives up."""
        self._refused = True
        self._deadline = self._clock() + _LAST_WORDS
        self._publish(key, message)

    def _publish(self, key: str, message: msgspec.Struct) -> None:
        name = f"{self._scope}/{key}"
        value = seal(self._secret, name, message)
        self._seen[name] = None
        for pause in self._pauses():
            try:
                self._store.put(name, value)
                return
            except (OSError, WireError) as error:
                self._problem = str(error)
            self._sleep(pause)
        raise self._unreachable()

    def _read(self, key: str, kind: type[_T]) -> _T | None:
        """The entry of the store, if this job has put it there."""
        name = f"{self._scope}/{key}"
        try:
            value = self._store.get(name)
            if value is None:
                return None
            self._seen[name] = None
            return unseal(self._secret, name, value, kind)
        except (OSError, WireError) as error:
            self._problem = str(error)
            return None

    def _pauses(self, grace: float = 0.0) -> Iterable[float]:
        """The seconds to wait until the next try, as long as there is time."""
        pause = _FIRST_PAUSE
        yield pause
        while self._clock() < self._deadline + grace:
            pause = min(2 * pause, max(_LONGEST_PAUSE, _PAUSE_PER_RANK * self._size))
            yield pause

    def _unreachable(self) -> FusionError:
        problem = self._problem or "rank 0 has not answered"
        return FusionError(
            f"rank {self._rank} did not find the others within {self._timeout:g} s (HOROVOD_START_TIMEOUT) at "
            f"{self._store.where}: {problem}"
        )
