"""The meeting of the ranks of several nodes: with all of them, with some of them, and with strangers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Endpoint, PeerTable, StartError
from fusion_rt.launchers.entries import Arrival, Assignment, Refusal, Word, seal
from fusion_rt.launchers.kvstore import HttpServer, HttpStore
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.launchers.rendezvous import Rendezvous, open_store

MEETING = Meeting("rank0", (("127.0.0.1", 1),), "scope", "n", "h", secret=b"secret")
NODES = ("x", "y", "x", "y", "z")  # of ranks 0 to 4
TOPOLOGY = Topology(("host-x", "host-y", "host-z"), ((0, 2), (1, 3), (4,)))


class Memory:
    """A store in this process, which may be out of order."""

    where = "memory"
    hosts = ("memory",)

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken = ""
        self.closed = 0

    def get(self, key: str) -> bytes | None:
        self._work()
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._work()
        self.values[key] = value

    def remove(self, key: str) -> None:
        self._work()
        self.values.pop(key, None)

    def close(self) -> None:
        self.closed += 1

    def _work(self) -> None:
        if self.broken:
            raise OSError(self.broken)


class Clock:
    """Time that passes in sleep only. `then` is called at each sleep."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.now = 0.0
        self.then = then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.then()


def arrival(rank: int, visit: str = "first", **changes: Any) -> Arrival:
    fields = {"size": 5, "local_rank": rank // 2, "node": NODES[rank], "host": f"host-{NODES[rank]}", "visit": visit}
    return Arrival(**{**fields, **changes})


def endpoint(node: int) -> Endpoint:
    return Endpoint(node, 100 + node, f"10.0.0.{node}", 1000, 2000, "k" * 40)


def rendezvous(store: Memory, rank: int, clock: Clock | None = None, size: int = 5, **changes: Any) -> Rendezvous:
    meeting = replace(MEETING, **changes)
    if clock is None:
        return Rendezvous(store, meeting, rank, size, 20.0)
    return Rendezvous(store, meeting, rank, size, 20.0, clock, clock.sleep)


def say(store: Memory, key: str, message: Any, secret: bytes = b"secret") -> None:
    store.values[f"scope/{key}"] = seal(secret, f"scope/{key}", message)


def attend(store: Memory, rank: int, visit: str) -> tuple[Assignment, PeerTable | None]:
    """All that a rank does to come up."""
    with rendezvous(store, rank) as meeting:
        assignment = meeting.assign(arrival(rank, visit), "test")
        node = assignment.topology.node_of(rank)
        first = assignment.topology.ranks[node][0] == rank
        if first:
            meeting.introduce(assignment.job, node, endpoint(node))
        return assignment, meeting.peers(assignment) if first or rank == 0 else None


def attend_all(store: Memory, visit: str) -> Assignment:
    """All ranks come up, and have agreed; what on."""
    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(attend, [store] * 5, (4, 3, 2, 1, 0), [visit] * 5))
    tables = [table for _, table in results]
    assert tables == [None if rank in (2, 3) else PeerTable(tuple(map(endpoint, range(3)))) for rank in (4, 3, 2, 1, 0)]
    (assignment,) = {assignment for assignment, _ in results}
    return assignment


def test_all_ranks_agree_also_when_the_store_is_full_of_the_past() -> None:
    store = Memory()
    jobs = [attend_all(store, visit) for visit in ("first", "second", "third")]
    assert [job.topology for job in jobs] == [TOPOLOGY] * 3
    assert len({job.job for job in jobs}) == 3
    assert store.closed == 15


@pytest.mark.parametrize("size", [4, 9])
def test_words_of_a_job_of_another_size_do_no_harm(size: int) -> None:
    store = Memory()
    for rank in range(size):
        said = Arrival(size, 0, f"node-{rank}", "host", "past")
        say(store, f"rank.{rank}", said)
        say(store, f"confirmed.{rank}", Word("test-past"))
    say(store, "assignment", Refusal("past", ("past",)))
    say(store, "begin", Word("test-past"))
    assert attend_all(store, "now").topology == TOPOLOGY


def test_rank_0_clears_up() -> None:
    store = Memory()
    with rendezvous(store, 0, size=1) as meeting:
        assignment = meeting.assign(arrival(0, size=1), "test")
        meeting.introduce(assignment.job, 0, endpoint(0))
        meeting.peers(assignment)
        assert len(store.values) == 6
        meeting.clear()
        assert store.values == {}
        store.broken = "gone"
        meeting.clear()


def test_ranks_that_do_not_come_are_named_to_all() -> None:
    store, clock = Memory(), Clock()
    for rank in (1, 2):
        say(store, f"rank.{rank}", arrival(rank))
    sentence = (
        r"ranks 3, 4 of hosts host-z did not come to the rendezvous at memory within 20 s \(HOROVOD_START_TIMEOUT\); "
        "the others are on host-x, host-y"
    )
    expected = ("host-x", "host-y.cluster", "host-z")
    with pytest.raises(FusionError, match=sentence), rendezvous(store, 0, clock, expected=expected) as meeting:
        meeting.assign(arrival(0), "test")
    assert 20 < clock.now < 25
    with pytest.raises(FusionError, match=sentence), rendezvous(store, 1, Clock()) as meeting:
        meeting.assign(arrival(1), "test")


def test_a_rank_that_came_and_does_not_confirm_is_named() -> None:
    store = Memory()
    say(store, "rank.1", arrival(1, size=2))
    with pytest.raises(FusionError, match=r"rank 1 did not come .*; the others are on host-x"):
        rendezvous(store, 0, Clock(), size=2).assign(arrival(0, size=2), "test")


def test_nodes_whose_daemon_does_not_come_up_are_named() -> None:
    for answers, sentence in (
        ((endpoint(1),), r"the daemon of node 2 \(host host-z\) did not come up within 20 s"),
        ((endpoint(1), StartError("no memory")), r"node 2 \(host host-z\): no memory"),
    ):
        store, assignment = Memory(), Assignment("test-1", TOPOLOGY, ())
        for node, answer in enumerate(answers, start=1):
            say(store, f"test-1.{node}", answer)
        for node in range(2):
            meeting = rendezvous(store, node, Clock())
            meeting.introduce("test-1", node, endpoint(node))
            with pytest.raises(FusionError, match=sentence):
                meeting.peers(assignment)


def test_a_store_that_never_answers_is_told_with_its_reason() -> None:
    store, clock = Memory(), Clock()
    store.broken = "Connection refused"
    sentence = r"rank 3 did not find the others within 20 s .* at memory: Connection refused"
    with pytest.raises(FusionError, match=sentence):
        rendezvous(store, 3, clock).assign(arrival(3), "test")
    assert 20 < clock.now < 21


def test_a_store_that_comes_late_or_fails_for_a_moment_does_no_harm() -> None:
    store = Memory()
    clock = Clock(then=lambda: setattr(store, "broken", "" if int(clock.now) % 2 else "not yet"))
    store.broken = "not yet"
    with rendezvous(store, 0, clock, size=1) as meeting:
        assert meeting.assign(arrival(0, size=1), "test").topology.size == 1
    assert clock.now >= 1


def test_ranks_that_contradict_each_other_are_told_so_when_time_is_up() -> None:
    store = Memory()
    for rank in range(1, 5):
        say(store, f"rank.{rank}", arrival(rank, size=4 if rank == 3 else 5))
    with pytest.raises(FusionError, match="rank 3 was started as one of 4, and others as one of 5"):
        rendezvous(store, 0, Clock()).assign(arrival(0), "test")
    with pytest.raises(FusionError, match="rank 3 was started as one of 4"):
        rendezvous(store, 3, Clock()).assign(arrival(3, size=4), "test")


def test_what_a_stranger_writes_counts_as_not_there() -> None:
    store = Memory()
    forged: list[Callable[[], None]] = [
        lambda: store.put("scope/rank.1", b""),
        lambda: store.put("scope/rank.1", b"nonsense"),
        lambda: say(store, "rank.1", arrival(1, size=2), secret=b""),
        lambda: store.put("scope/rank.1", seal(b"secret", "scope/rank.2", arrival(1, size=2))),
        lambda: say(store, "rank.1", endpoint(1)),
    ]
    with pytest.raises(FusionError, match="did not come"):
        rendezvous(store, 0, Clock(lambda: forged and forged.pop()()), size=2).assign(arrival(0, size=2), "test")
    assert not forged


def test_another_secret_is_named_as_a_likely_cause() -> None:
    store = Memory()
    say(store, "assignment", Assignment("test-1", TOPOLOGY, ("first",) * 5), secret=b"other")
    with pytest.raises(FusionError, match="stored by another process, or with another secret"):
        rendezvous(store, 1, Clock()).assign(arrival(1), "test")


def test_a_node_notices_when_somebody_else_speaks_for_it() -> None:
    store = Memory()
    meeting = rendezvous(store, 0, size=1)
    meeting.introduce("test-1", 0, endpoint(0))
    say(store, "test-1.0", Endpoint(0, 1, "10.6.6.6", 1, 2, "e" * 40))
    with pytest.raises(FusionError, match="another endpoint for node 0"):
        meeting.peers(Assignment("test-1", Topology(("a",), ((0,),)), ()))


@pytest.mark.multiprocess
def test_ranks_meet_at_a_store_that_rank_0_serves() -> None:
    with ExitStack() as held:  # several, since another process may take a port that is free now
        free = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        ports = [server.getsockname()[1] for server in free]
    places = tuple((host, port) for port in ports for host in ("127.0.0.1", "127.0.0.2"))
    meeting = Meeting("rank0", places, "scope", "n", "h", secret=b"secret")

    def run(rank: int) -> Assignment:
        store = open_store(meeting, rank, 3)
        assert isinstance(store, HttpStore if rank else HttpServer)
        with Rendezvous(store, meeting, rank, 3, 20.0) as together:
            found = together.assign(arrival(rank, size=3), "test")
            done.wait(10)
            return found

    done = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        assert {found.topology.ranks for found in pool.map(run, range(3))} == {((0, 2), (1,))}


def test_horovodruns_store_is_the_only_place_to_look() -> None:
    store = open_store(Meeting("horovodrun", (("h", 1),), "fusion_rt", "n", "h"), 0, 2)
    assert isinstance(store, HttpStore)
    assert (store.where, store.hosts) == ("h:1", ["h"])
