"""What becomes of an elastic job when something happens, on a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.epochs import Epochs
from fusion_rt.runner.decisions.host_list import Host, parse_hosts
from fusion_rt.runner.decisions.limits import Limits
from fusion_rt.runner.decisions.outcome import DaemonFailure, Failure, HostFailure, WorkerFailure, tell
from fusion_rt.runner.decisions.places import Place, Places

COOLDOWN_S = 10.0


class World:
    """Hosts, agents and workers that do as they are told, unless a test has them fail; the `JobControl` of `Epochs`."""

    def __init__(self, hosts: str, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.calls: list[tuple[object, ...]] = []
        self.said: list[str] = []
        self.agents: set[str] = set()  # told to start, and not to end
        self.ready: set[str] = set()
        self.starting: Places | None = None
        self.places: Places | None = None
        self.survivors: list[Place] = []
        self.running: set[Place] = set()
        self.ended: list[Failure] | None = None
        blacklist = Blacklist(COOLDOWN_S, COOLDOWN_S, lambda: self.now, random.Random(0))
        self.epochs = Epochs(limits or Limits(1, 1), blacklist, self, lambda: self.now)
        self.find(hosts)

    # JobControl

    def connect(self, host: Host) -> None:
        assert host.name not in self.agents
        self.agents.add(host.name)
        self.calls.append(("connect", host.name))

    def release(self, host: str, reason: str) -> None:
        self._let_go(host)
        self.calls.append(("release", host))

    def drop(self, host: str) -> None:
        self._let_go(host)
        self.calls.append(("drop", host))

    def _let_go(self, host: str) -> None:
        assert host in self.agents
        self.agents.discard(host)
        self.ready.discard(host)
        self.running = {place for place in self.running if place[0] != host}

    def start(self, number: int, places: Places) -> None:
        assert set(places.topology.hosts) <= self.ready
        assert not self.running
        self.starting = places
        self.calls.append(("start", number))

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], survivors: Collection[Place]) -> None:
        assert places is self.starting
        assert [endpoint.node for endpoint in endpoints] == list(range(len(places.hosts)))
        assert set(survivors) <= set(places.ranks)
        self.places, self.starting, self.survivors = places, None, list(survivors)
        self.running = set(places.ranks)
        self.calls.append(("begin", number))

    def abandon(self, number: int) -> None:
        self.calls.append(("abandon", number))

    def remove(self, host: str, slots: Sequence[int], reason: str) -> None:
        self.calls.append(("remove", host, tuple(slots)))

    def kill(self, host: str, slots: Sequence[int]) -> None:
        self.calls.append(("kill", host, tuple(slots)))

    def tell_change(self, added: bool, removed: bool) -> None:
        self.calls.append(("change", added, removed))

    def say(self, line: str) -> None:
        self.said.append(line)

    def end(self, failures: Sequence[Failure]) -> None:
        assert self.ended is None
        self.ended = list(failures)

    # What a test makes happen

    def find(self, hosts: str) -> None:
        self.epochs.found(parse_hosts(hosts) if hosts else ())

    def answer(self, *hosts: str) -> None:
        """Agents pass their checks: all, if none is named."""
        for host in hosts or sorted(self.agents - self.ready):
            self.ready.add(host)
            self.epochs.ready(host)

    def listen(self, *hosts: str) -> None:
        """Daemons come up: all, if none is named."""
        places = self.starting
        assert places is not None
        for host in hosts or places.topology.hosts:
            endpoint = Endpoint(places.node_of(host), 1, "127.0.0.1", 1, 2, "k" * 40)
            self.epochs.daemon_up(host, self.epochs.number, endpoint)

    def up(self, started: bool = True) -> Places:
        """The next epoch begins; its places."""
        self.answer()
        self.listen()
        assert self.places is not None
        for host in self.places.topology.hosts if started else ():
            self.epochs.started(host, self.epochs.number)
        return self.places

    def fail(self, host: str, slot: int = 0, status: int = -9) -> None:
        """A worker fails."""
        self.running.discard((host, slot))
        self.epochs.ended(host, slot, WorkerFailure(host, 0, status, "boom"))

    def lose(self, host: str) -> None:
        """An agent ends."""
        self._let_go(host)
        self.epochs.lost(HostFailure(host, ("it burns",)))

    def crash(self, host: str) -> None:
        """A daemon ends."""
        self.epochs.daemon_down(host, self.epochs.number, DaemonFailure(host, -9, "", f"host {host}"))

    def ask(self, *hosts: str, error: str = "a peer is gone") -> None:
        """The workers of hosts leave the epoch: all, if none is named."""
        for host, slot in sorted(self.running):
            if not hosts or host in hosts:
                self.running.discard((host, slot))
                self.epochs.asked(host, slot, self.epochs.number, error)

    def unused(self, *hosts: str) -> None:
        """The agents of hosts have ended their workers, which had not begun yet."""
        for host, slot in sorted(self.running):
            if host in hosts:
                self.running.discard((host, slot))
                self.epochs.unused(host, slot)

    def finish(self, *hosts: str) -> None:
        """The workers of hosts end well: all, if none is named."""
        for host, slot in sorted(self.running):
            if not hosts or host in hosts:
                self.running.discard((host, slot))
                self.epochs.ended(host, slot, None)

    def wait(self, seconds: float) -> None:
        """Time passes, as the launcher notices it."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.25, until)
            self.epochs.tick()

    def last_words(self) -> str:
        assert self.ended
        return tell(self.ended)[-1]


def test_the_first_epoch_begins_when_all_hosts_are_ready() -> None:
    world = World("a:2,b:1", Limits(2, 1))
    assert world.calls == [("connect", "a"), ("connect", "b")]
    world.answer("a")
    assert len(world.calls) == 2, "b may be ready in a moment"
    world.answer("b")
    world.listen("a")
    assert world.calls[2:] == [("start", 1)]
    world.listen("b")
    assert world.calls[3:] == [("begin", 1)]
    assert world.running == {("a", 0), ("a", 1), ("b", 0)}
    assert world.survivors == []
    world.finish()
    assert world.ended == []
    assert world.said == []


def test_a_failed_worker_costs_its_host_and_nobody_else() -> None:
    world = World("a:2,b:1,c:1")
    world.up()
    world.calls.clear()
    world.fail("a")
    world.ask("a", "c")
    assert world.calls == [], "b has not left"
    world.ask("b")
    places = world.up()
    assert world.calls == [("start", 2), ("begin", 2), ("release", "a")]
    assert places.ranks == {("b", 0): 0, ("c", 0): 1}
    assert world.survivors == [("b", 0), ("c", 0)]
    assert world.said == ["fusionrun: epoch 2: 2 workers on hosts b, c (rank 0 on host a was killed by SIGKILL)"]


def test_a_host_comes_back_after_its_cooldown() -> None:
    world = World("a:1,b:1")
    world.up()
    world.fail("a")
    world.ask()
    world.up()
    world.calls.clear()
    world.wait(COOLDOWN_S - 1)
    assert world.calls == []
    world.wait(2)
    assert world.calls == [("connect", "a")]
    world.answer()
    world.wait(5)
    assert world.calls[1:] == [("change", True, False)], "said once"
    world.ask(error="")
    places = world.up()
    assert places.ranks == {("b", 0): 0, ("a", 0): 1}
    assert world.survivors == [("b", 0)]
    assert world.said[-1] == "fusionrun: epoch 3: 2 workers on hosts b, a (host a was added)"


def test_a_job_of_which_no_worker_is_left_fails_with_the_first_cause() -> None:
    world = World("a:1,b:1")
    world.up()
    world.fail("b", status=3)
    world.fail("a")
    assert world.last_words() == "fusionrun: rank 0 on host b failed first: boom"


def test_when_one_has_ended_well_no_other_epoch_begins() -> None:
    world = World("a:1,b:1,c:1")
    world.up()
    world.calls.clear()
    world.finish("a")
    world.find("a:1,b:1,c:1,d:1")
    world.wait(5)
    assert world.calls == []
    world.fail("b")
    assert world.ended is None, "c may end well"
    world.finish("c")
    assert world.last_words() == "fusionrun: rank 0 on host b was killed by SIGKILL"


def test_an_error_when_another_worker_has_ended_well_is_the_jobs() -> None:
    world = World("a:1,b:1")
    world.up()
    world.finish("a")
    world.ask("b", error="rank 0 has left\nTraceback")
    assert world.last_words() == "fusionrun: rank 1 on host b could not go on: rank 0 has left"


def test_a_daemon_may_crash_once_and_its_host_takes_part_again() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("a")
    world.ask()
    places = world.up()
    assert places.topology.hosts == ("a", "b")
    assert world.survivors == [("a", 0), ("b", 0)]
    world.crash("a")
    world.ask()
    places = world.up()
    assert places.topology.hosts == ("b",)
    assert world.said == [
        "fusionrun: epoch 2: 2 workers on hosts a, b (the daemon of host a was killed by SIGKILL)",
        "fusionrun: epoch 3: 1 workers on hosts b (the daemon of host a was killed by SIGKILL)",
    ]


def test_a_crash_that_is_heard_of_late_is_still_the_reason() -> None:
    world = World("a:1,b:1")
    world.up()
    world.ask()
    assert world.starting is not None
    world.epochs.daemon_down("a", 1, DaemonFailure("a", -9, "", "host a"))
    world.up()
    assert world.said == ["fusionrun: epoch 2: 2 workers on hosts a, b (the daemon of host a was killed by SIGKILL)"]


def test_an_error_that_all_workers_survive_is_the_reason_if_there_is_no_other() -> None:
    world = World("a:1,b:1")
    world.up()
    world.ask(error="shapes differ")
    world.up()
    assert world.said == [
        "fusionrun: epoch 2: 2 workers on hosts a, b (rank 0 on host a could not go on: shapes differ)"
    ]


def test_new_hosts_are_met_before_anybody_is_told() -> None:
    world = World("a:1", Limits(1, 1))
    world.up()
    world.calls.clear()
    world.find("a:1,b:1")
    assert world.calls == [("connect", "b")]
    world.lose("b")
    assert "host b: it burns; the host is left out for 10 s" in world.said[0]
    world.find("a:1,b:1")
    assert world.calls == [("connect", "b")], "the workers have heard nothing of it"
    world.wait(COOLDOWN_S + 1)
    world.answer()
    assert world.calls[1:] == [("connect", "b"), ("change", True, False)]


def test_hosts_that_are_exchanged_are_one_piece_of_news() -> None:
    world = World("a:1,b:1")
    world.up()
    world.calls.clear()
    world.find("a:1,c:1")
    world.wait(1)
    assert world.calls == [("connect", "c")]
    world.answer()
    assert world.calls[1:] == [("change", True, True)]
    world.find("a:1,d:1")
    world.wait(10)
    assert world.calls[-1] == ("change", False, True), "d does not come up, and c and b are to go"


def test_hosts_for_which_there_is_no_room_are_no_news() -> None:
    world = World("a:1,b:1", Limits(2, 1, most=2))
    world.up()
    world.calls.clear()
    world.find("a:1,b:2,c:1")
    world.wait(5)
    assert world.calls == []


def test_slots_that_come_and_go_are_news() -> None:
    world = World("a:1,b:1")
    world.up()
    world.calls.clear()
    world.find("a:2,b:1")
    assert world.calls == [("change", True, False)]
    world.find("a:2")
    assert world.calls[1:] == [("change", True, True)]
    world.ask(error="")
    places = world.up()
    assert places.ranks == {("a", 0): 0, ("a", 1): 1}
    assert world.survivors == [("a", 0)]
    assert ("release", "b") in world.calls
    assert world.said == ["fusionrun: epoch 2: 2 workers on hosts a (host a has room for 2 now; host b was removed)"]


def test_a_worker_without_a_slot_is_removed_while_its_host_stays() -> None:
    world = World("a:2,b:1")
    world.up()
    world.find("a:1,b:1")
    world.ask(error="")
    world.up()
    assert ("remove", "a", (1,)) in world.calls
    assert world.survivors == [("a", 0), ("b", 0)]


def test_a_job_waits_for_hosts_and_then_goes_on() -> None:
    world = World("a:1,b:1", Limits(2, 2, timeout=60))
    world.up()
    world.lose("b")
    world.ask()
    world.find("a:1")
    world.wait(30)
    assert world.starting is None
    world.find("a:1,c:1")
    places = world.up()
    assert places.topology.hosts == ("a", "c")


def test_a_job_waits_no_longer_than_it_may() -> None:
    world = World("a:1,b:1", Limits(2, 2, timeout=60))
    world.up()
    world.lose("b")
    world.find("a:1")
    world.wait(100)
    assert world.ended is None, "a still trains"
    world.ask()
    world.wait(59)
    assert world.ended is None
    world.wait(2)
    assert world.last_words() == (
        "fusionrun: the job needs 2 workers, and the slots there are (a:1) did not suffice for 60 s "
        "(--elastic-timeout); before that: host b: it burns"
    )


def test_the_first_epoch_waits_for_all_workers_that_were_asked_for() -> None:
    world = World("a:1", Limits(2, 1, timeout=60))
    world.answer()
    assert world.starting is None
    world.find("a:1,b:1")
    assert world.up().size == 2


def test_a_job_is_reset_no_more_often_than_it_may() -> None:
    world = World("a:1,b:1", Limits(2, 1, resets=1))
    world.up()
    world.crash("a")
    world.ask()
    world.up()
    world.crash("b")
    world.ask()
    assert world.last_words() == (
        "fusionrun: the job has been reset as often as --reset-limit allows (1); before that: the daemon of host b "
        "was killed by SIGKILL"
    )


def test_who_does_not_leave_in_time_is_killed_and_its_host_left_out() -> None:
    world = World("a:1,b:1,c:1", Limits(3, 1, leave=15))
    world.up()
    world.fail("c")
    world.wait(100)
    world.calls.clear()
    world.ask("a")
    world.wait(14)
    assert world.calls == []
    world.wait(2)
    assert world.calls == [("kill", "b", (0,))]
    world.finish("b")  # whatever its status is
    places = world.up()
    assert places.topology.hosts[0] == "a"
    assert (
        "host b: rank 1 was killed: it did not leave membership epoch 1 within 15 s after another worker did"
        in (world.said[0])
    )


def test_a_host_where_nobody_can_be_killed_is_dropped() -> None:
    world = World("a:1,b:1", Limits(2, 1, leave=15))
    world.up()
    world.ask("a")
    world.wait(30)
    assert ("kill", "b", (0,)) in world.calls
    assert ("drop", "b") in world.calls
    assert world.up().topology.hosts == ("a",)


def test_when_others_have_ended_well_nobody_is_hurried() -> None:
    world = World("a:1,b:1,c:1", Limits(3, 1, leave=15))
    world.up()
    world.finish("a")
    world.ask("b")
    world.wait(100)
    assert world.ended is None
    assert not any(call[0] == "kill" for call in world.calls)


def test_an_epoch_whose_daemon_does_not_come_up_is_tried_again_without_that_host() -> None:
    world = World("a:1,b:1,c:1", Limits(3, 1, start=30))
    world.up()
    world.crash("c")
    world.ask()
    world.listen("a", "c")
    world.wait(29)
    assert ("abandon", 2) not in world.calls
    world.wait(2)
    assert world.calls[-3:] == [("drop", "b"), ("abandon", 2), ("start", 3)]
    places = world.up()
    assert places.topology.hosts == ("a", "c")
    assert world.survivors == [("a", 0), ("c", 0)]
    assert "host b: its daemon did not listen within 30 s (--start-timeout)" in world.said[-1]


def test_a_survivor_that_dies_while_the_epoch_is_started_is_no_survivor() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("b")
    world.ask()
    world.fail("a")
    places = world.up()
    assert ("abandon", 2) in world.calls
    assert places.topology.hosts == ("b",)
    assert world.survivors == [("b", 0)]


def test_a_loss_while_an_epoch_comes_up_ends_its_daemons_so_that_nobody_waits() -> None:
    world = World("a:1,b:1,c:1")
    world.up(started=False)
    world.fail("c")
    world.fail("b")
    assert world.calls.count(("abandon", 1)) == 1
    world.ask()
    world.up()
    world.wait(COOLDOWN_S + 1)
    world.answer()
    world.ask()
    world.up()
    world.fail("c")
    assert world.calls.count(("abandon", 3)) == 0, "its daemons were up, and tell everybody who is gone"


def test_the_next_epoch_may_fail_to_come_up_too() -> None:
    world = World("a:1,b:1,c:1")
    world.up(started=False)
    world.fail("c")
    world.ask()
    world.up(started=False)
    world.fail("b")
    assert world.calls[-1] == ("abandon", 2)


def test_new_workers_of_an_epoch_that_did_not_come_up_are_replaced_and_nobody_is_blamed() -> None:
    world = World("a:1,b:1,c:1")
    world.up()
    world.find("a:1,b:1,c:1,d:1")
    world.answer()
    world.ask(error="")
    world.up(started=False)
    world.fail("c")
    assert world.calls[-1] == ("abandon", 2)
    world.unused("d")
    world.ask("a", "b")
    places = world.up()
    assert places.topology.hosts == ("a", "b", "d")
    assert world.survivors == [("a", 0), ("b", 0)]


def test_a_job_that_has_no_state_yet_may_begin_again() -> None:
    world = World("a:1,b:1,c:1")
    world.up(started=False)
    world.fail("c")
    world.unused("a", "b")
    places = world.up(started=False)
    assert places.topology.hosts == ("a", "b")
    assert world.survivors == []
    assert world.said == ["fusionrun: epoch 2: 2 workers on hosts a, b (rank 0 on host c was killed by SIGKILL)"]
    world.fail("a")
    world.fail("b", status=3)
    assert world.last_words() == "fusionrun: rank 0 on host a was killed by SIGKILL"


def test_a_job_whose_workers_fail_on_all_hosts_before_it_has_come_up_ends_with_their_error() -> None:
    world = World("a:2,b:2", Limits(4, 1))
    world.up(started=False)
    world.fail("a", status=1)
    world.unused("a", "b")
    assert world.up(started=False).topology.hosts == ("b",)
    world.fail("b", status=1)
    world.unused("b")
    assert world.last_words() == "fusionrun: rank 0 on host b failed first: boom"


def test_a_job_on_one_host_ends_when_a_worker_fails_before_it_has_come_up() -> None:
    world = World("a:2")
    world.up(started=False)
    world.fail("a", 0, status=1)
    world.unused("a")  # which would have failed a moment later
    assert world.last_words() == "fusionrun: rank 0 on host a failed first: boom"


def test_a_host_that_is_needed_and_fails_at_each_start_ends_the_job() -> None:
    world = World("a:1,b:1", Limits(2, 2))
    for start in (1, 2, 3):
        assert world.ended is None, f"before start {start}"
        world.up(started=False)
        world.fail("a", status=1)
        world.unused("b")
        world.wait(COOLDOWN_S + 1)
    assert world.last_words() == "fusionrun: rank 0 on host a failed first: boom"


def test_a_job_that_has_lost_its_state_does_not_begin_again() -> None:
    world = World("a:1,b:1")
    world.up()
    world.fail("b")
    world.ask("a")
    world.wait(COOLDOWN_S + 1)
    world.answer()
    world.ask("a", error="")
    world.up(started=False)
    world.fail("a")
    world.unused("b")
    assert world.last_words() == "fusionrun: rank 0 on host a was killed by SIGKILL"


def test_who_is_leaving_needs_no_more_news() -> None:
    world = World("a:1,b:1")
    world.up()
    world.ask("a", error="")
    world.find("a:1,b:1,c:1")
    world.answer()
    assert not any(call[0] == "change" for call in world.calls)
    world.ask("b", error="")
    assert world.up().size == 3


def test_a_worker_that_has_ended_well_does_not_ask() -> None:
    world = World("a:1,b:1")
    world.up()
    world.finish("a")
    world.epochs.asked("a", 0, 1, "late")
    world.finish("b")
    assert world.ended == []


def test_the_only_survivors_stay_on_a_host_that_is_left_out() -> None:
    world = World("a:2")
    world.up()
    world.fail("a", 0)
    world.ask()
    places = world.up()
    assert places.ranks == {("a", 1): 0}
    world.wait(COOLDOWN_S + 1)
    world.ask(error="")
    places = world.up()
    assert places.ranks == {("a", 1): 0, ("a", 0): 1}


def test_a_job_whose_hosts_are_all_to_go_runs_as_long_as_they_stay() -> None:
    world = World("a:1")
    world.up()
    world.calls.clear()
    world.find("b:1")
    world.wait(5)
    assert not any(call[0] == "change" for call in world.calls)
    world.finish()
    assert world.ended == []


def test_hosts_that_all_fail_at_the_start_end_the_job() -> None:
    world = World("a:1,b:1")
    world.lose("a")
    world.lose("b")
    assert world.ended is not None
    assert tell(world.ended) == ["fusionrun: host a: it burns", "fusionrun: host b: it burns"]


def test_an_agent_that_does_not_answer_is_not_waited_for() -> None:
    world = World("a:1,b:1", Limits(1, 1, start=30))
    world.answer("a")
    world.wait(29)
    assert world.starting is None
    world.wait(2)
    assert ("drop", "b") in world.calls
    assert world.up().topology.hosts == ("a",)


def test_news_of_an_epoch_that_is_over_is_none() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("a")
    world.ask()
    world.epochs.daemon_up("a", 1, Endpoint(0, 1, "127.0.0.1", 1, 2, "k" * 40))
    world.listen("b")
    assert world.starting is not None
    world.listen("a")
    world.epochs.asked("a", 0, 1, "late")
    world.epochs.lost(HostFailure("z", ("unknown",)))
    world.epochs.ended("z", 0, None)
    assert ("a", 0) in world.running
    world.finish()
    assert world.ended == []


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_state_survives_and_the_job_comes_to_an_end(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcd"
    world = World("a:2,b:2,c:2,d:2", Limits(2, rng.choice([1, 2, 3]), rng.choice([None, 5]), timeout=120, leave=15))
    has_state: set[Place] = set()
    number = 0

    def look() -> None:
        """Whoever begins an epoch gets the state of its rank 0, which must have it."""
        nonlocal has_state, number
        if world.places is not None and world.epochs.number > number and world.starting is None:
            number = world.epochs.number
            first = next(place for place, rank in world.places.ranks.items() if rank == 0)
            assert not has_state or (first in world.survivors and first in has_state)
            assert set(world.survivors) <= has_state or not has_state
            has_state = set(world.places.ranks)

    for _ in range(rng.randint(20, 150)):
        if world.ended is not None:
            break
        act = rng.choice(["answer", "listen", "fail", "lose", "crash", "ask", "ask", "wait", "wait", "find"])
        host = rng.choice(names)
        if act == "answer":
            world.answer()
        elif act == "listen" and world.starting is not None:
            world.listen(*[name for name in world.starting.topology.hosts if rng.random() < 0.8])
        elif act == "fail" and (host, 0) in world.running:
            world.fail(host)
        elif act == "lose" and host in world.agents:
            world.lose(host)
        elif act == "crash" and world.places is not None and host in world.places.topology.hosts:
            world.crash(host)
        elif act == "ask" and rng.random() < 0.5:
            world.ask()
        elif act == "wait":
            world.wait(rng.choice([1, 5, 40]))
        elif act == "find":
            world.find(",".join(f"{name}:{rng.randint(1, 2)}" for name in names if rng.random() < 0.8))
        look()
    for _ in range(300):  # from here on all goes well
        if world.ended is not None:
            break
        world.answer()
        if world.starting is not None:
            world.listen()
        look()
        world.wait(1)
        if world.running and world.epochs.number == number:
            world.finish()
    assert world.ended is not None
