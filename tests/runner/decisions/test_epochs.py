"""What becomes of an elastic job when something happens, on a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.epochs import Epochs
from fusion_rt.runner.decisions.host_list import Host, parse_hosts
from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.runner.decisions.outcome import DaemonFailure, Failure, HostFailure, WorkerFailure, tell
from fusion_rt.runner.decisions.places import Place, Places
from tests.for_each import for_each

COOLDOWN_S = 10.0
KEY = "k" * 40


class Prompt:
    """Epochs that decide after each event, as those of a launcher do which hears of one at a time."""

    def __init__(self, epochs: Epochs, clock: Callable[[], float]) -> None:
        self._epochs, self._clock = epochs, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._epochs, name)
        if not callable(found):
            return found

        def tell(*arguments: Any) -> Any:
            result = found(*arguments)
            if self._epochs.due <= self._clock():
                self._epochs.tick()
            return result

        return tell


class World:
    """Hosts, agents, daemons and workers that do as they are told, unless a test has them fail; the `JobControl` of
    `Epochs`."""

    def __init__(self, hosts: str, limits: ElasticLimits | None = None) -> None:
        self.now = 0.0
        self.calls: list[tuple[object, ...]] = []
        self.said: list[str] = []
        self.agents: set[str] = set()  # told to start, and not to end
        self.ready: set[str] = set()
        self.daemons: dict[str, tuple[int, int]] = {}  # node and serial of each
        self.listening: set[str] = set()
        self.places: Places | None = None
        self.waiting: list[Place] = []
        self.running: set[Place] = set()  # in the epoch
        self.beginning: dict[Place, Places] = {}
        self.hailed: list[str] = []
        self.silent: dict[str, float] = {}  # seconds since its agent should have said something
        self.checked: list[tuple[str, int]] = []  # daemons that were to answer
        self.cut_off: set[str] = set()  # from the other hosts
        self.reaching: list[tuple[str, int]] = []
        self.ended: list[Failure] | None = None
        blacklist = Blacklist(COOLDOWN_S, COOLDOWN_S, lambda: self.now, random.Random(0))
        self.decisions = Epochs(limits or ElasticLimits(1, 1), blacklist, self, lambda: self.now)
        self.epochs: Any = Prompt(self.decisions, lambda: self.now)
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
        self.listening.discard(host)
        self.daemons.pop(host, None)
        self.running = {place for place in self.running if place[0] != host}
        self.beginning = {place: would for place, would in self.beginning.items() if place[0] != host}

    def start(self, number: int, places: Places) -> None:
        raise AssertionError("only where membership is fixed")

    def start_daemon(self, host: str, node: int, serial: int, nodes: Sequence[str]) -> None:
        assert host in self.ready
        assert nodes[node] == host
        assert serial > self.daemons.get(host, (0, 0))[1]
        self.daemons[host] = node, serial
        self.listening.discard(host)
        if serial > 1:
            self.calls.append(("daemon", host, serial))

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], waiting: Collection[Place]) -> None:
        assert set(places.names) <= self.listening
        assert not self.running
        present = [node for node in range(len(places.hosts)) if node not in places.absent]
        assert [endpoint.node for endpoint in endpoints] == present
        assert [endpoint.pid for endpoint in endpoints] == [
            self.daemons[places.hosts[node].name][1] for node in present
        ]
        assert set(waiting) <= set(places.ranks)
        self.places, self.waiting = places, list(waiting)
        for place in waiting:
            self.beginning.pop(place, None)
        self.running = set(places.ranks)
        self.calls.append(("begin", number))

    def recruit(self, number: int, place: Place, would: Places) -> None:
        assert place not in self.running
        assert place not in self.beginning
        assert place in would.ranks
        assert place[0] in self.ready
        assert number == self.epochs.number
        self.beginning[place] = would
        self.calls.append(("recruit", *place))

    def reach(self, host: str, serial: int, endpoints: Sequence[Endpoint]) -> None:
        assert self.daemons[host][1] == serial
        assert host in self.listening
        if host not in self.cut_off:
            self.reaching.append((host, serial))

    def abandon(self, number: int, reason: str) -> None:
        self.calls.append(("abandon", number))

    def probe(self, host: str) -> None:
        assert host in self.agents
        self.hailed.append(host)

    def overdue(self, host: str) -> float:
        assert host in self.agents
        return self.silent.get(host, 0.0)

    def check_daemon(self, host: str, serial: int) -> None:
        assert self.daemons[host][1] == serial
        self.checked.append((host, serial))

    def remove(self, host: str, slots: Sequence[int], reason: str) -> None:
        for slot in slots:
            self.beginning.pop((host, slot), None)
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
        for host in hosts or sorted(self.daemons.keys() - self.listening):
            if host not in self.daemons:
                continue
            node, serial = self.daemons[host]
            self.listening.add(host)
            self.epochs.daemon_up(host, serial, Endpoint(node, serial, "127.0.0.1", 1, 2, KEY))
        while self.reaching:
            self.epochs.reached(*self.reaching.pop())

    def start_up(self) -> None:
        """The daemons of the epoch say that it is up."""
        assert self.places is not None
        for host in self.places.names:
            self.epochs.started(host, self.epochs.number)

    def up(self, started: bool = True) -> Places:
        """Hosts come up, and with them the next epoch, if nobody else is needed; its places."""
        self.answer()
        self.listen()
        assert self.places is not None
        if started:
            self.start_up()
        return self.places

    def knock(self, *places: Place) -> None:
        """Workers that have begun ask for their place: all, if none is named."""
        for host, slot in places or sorted(self.beginning):
            self.epochs.asked(host, slot, self.epochs.number, "")

    def come(self) -> Places:
        """All that can come does, at once, and the others leave their epoch for it; the places then."""
        self.answer()
        self.listen()
        self.knock()
        self.wait(5)
        self.ask(error="")
        return self.up()

    def fail(self, host: str, slot: int = 0, status: int = -9) -> None:
        """A worker fails."""
        self.running.discard((host, slot))
        self.beginning.pop((host, slot), None)
        self.epochs.ended(host, slot, WorkerFailure(host, 0, status, "boom"))

    def lose(self, host: str) -> None:
        """An agent ends."""
        self._let_go(host)
        self.epochs.lost(HostFailure(host, ("it burns",)))

    def crash(self, host: str) -> None:
        """A daemon ends."""
        self.listening.discard(host)
        self.epochs.daemon_down(host, self.daemons[host][1], DaemonFailure(host, -9, "", f"host {host}"))

    def ask(self, *hosts: str, error: str = "a peer is gone", is_unfit: bool = False) -> None:
        """The workers of hosts leave the epoch: all, if none is named."""
        number = self.epochs.number
        for host, slot in sorted(self.running):
            if not hosts or host in hosts:
                self.running.discard((host, slot))
                self.epochs.asked(host, slot, number, error, is_unfit)

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


def test_the_first_epoch_begins_when_all_daemons_listen() -> None:
    world = World("a:2,b:1", ElasticLimits(2, 1))
    assert world.calls == [("connect", "a"), ("connect", "b")]
    world.answer("a")
    world.listen("a")
    assert len(world.calls) == 2, "b may be ready in a moment"
    world.answer("b")
    assert len(world.calls) == 2
    world.listen("b")
    assert world.calls[2:] == [("begin", 1)]
    assert world.running == {("a", 0), ("a", 1), ("b", 0)}
    assert world.waiting == []
    world.start_up()
    world.finish()
    assert world.ended == []
    assert world.said == []


def test_a_killed_worker_costs_the_others_an_epoch_and_is_replaced_meanwhile() -> None:
    world = World("a:2,b:1,c:1")
    world.up()
    world.calls.clear()
    world.fail("a")
    assert world.calls == [("recruit", "a", 0)]
    assert world.beginning["a", 0].ranks["a", 0] == 1, "a survivor is rank 0"
    world.ask("a", "c")
    assert len(world.calls) == 1, "b has not left"
    world.ask("b")
    assert world.calls[1:] == [("begin", 2)]
    assert world.places is not None
    assert world.places.ranks == {("a", 1): 0, ("b", 0): 1, ("c", 0): 2}
    assert world.places.absent == ()
    assert world.waiting == [("a", 1), ("b", 0), ("c", 0)]
    assert world.said == [
        "fusionrun: membership epoch 2: 3 workers on hosts a, b, c (rank 0 on host a was killed by SIGKILL)"
    ]
    world.start_up()
    world.wait(100)
    assert world.calls[2:] == [], "nobody waits for the new one"
    world.knock()
    assert world.calls[2:] == [("change", True, False)]
    world.ask(error="")
    assert world.calls[3:] == [("begin", 3)]
    assert world.places.ranks == {("a", 1): 0, ("a", 0): 1, ("b", 0): 2, ("c", 0): 3}
    assert world.places.topology.ranks[0] == (1, 0), "all have their old local_rank"
    assert world.said[1:] == ["fusionrun: membership epoch 3: 4 workers on hosts a, b, c (host a has 2 workers now)"]


def test_a_host_without_workers_gets_another_daemon_and_keeps_its_number() -> None:
    world = World("a:1,b:1")
    world.up()
    world.calls.clear()
    world.fail("a")
    world.ask()
    assert world.calls == [("recruit", "a", 0), ("begin", 2), ("daemon", "a", 2)]
    assert world.places is not None
    assert world.places.absent == (0,)
    assert world.places.topology.ranks == ((), (0,))
    world.start_up()
    world.knock()
    world.wait(1)
    assert len(world.calls) == 3, "its daemon does not listen yet"
    world.listen()
    assert world.calls[3:] == [("change", True, False)]
    world.ask(error="")
    assert world.places.topology.hosts == ("a", "b")
    assert world.places.topology.ranks == ((1,), (0,))
    assert world.said[-1] == "fusionrun: membership epoch 3: 2 workers on hosts b, a (host a was added)"


def test_several_newcomers_are_let_in_at_once_and_a_slow_one_later() -> None:
    world = World("a:1")
    world.up()
    world.find("a:1,b:3")
    world.answer()
    world.listen()
    world.calls.clear()
    world.knock(("b", 0))
    world.wait(3)
    assert world.calls == [], "the others are expected"
    world.knock(("b", 1))
    world.wait(3)
    assert world.calls == [("change", True, False)], "but not for long"
    world.ask(error="")
    assert world.places is not None
    assert set(world.places.ranks) == {("a", 0), ("b", 0), ("b", 1)}
    world.start_up()
    world.knock(("b", 2))
    assert world.calls[2:] == [("change", True, False)]
    world.ask(error="")
    assert world.places.size == 4


def test_a_loss_while_newcomers_are_let_in_does_not_throw_away_the_others() -> None:
    world = World("a:1,b:1,c:1")
    world.up()
    world.find("a:1,b:1,c:1,d:2")
    world.answer()
    world.listen()
    world.knock()
    world.ask("a", error="")
    world.fail("d", 1)
    world.fail("c")
    world.ask("b")
    assert world.places is not None
    assert world.places.ranks == {("a", 0): 0, ("b", 0): 1, ("d", 0): 2}
    world.fail("d", 0)  # as the epoch comes up
    assert ("abandon", 2) in world.calls
    world.ask()
    assert world.places.ranks == {("a", 0): 0, ("b", 0): 1}
    world.start_up()
    assert {("c", 0), ("d", 0), ("d", 1)} == set(world.beginning), "all of them are on their way again"
    assert world.come().size == 5


def test_workers_that_fail_at_once_are_replaced_ever_later_and_then_given_up() -> None:
    world = World("a:1,b:1")
    world.up()
    world.fail("b")
    world.ask()
    world.start_up()
    waits = []
    while ("b", 0) in world.beginning:
        before = world.now
        world.fail("b", status=3)
        world.wait(0.25)
        while ("b", 0) not in world.beginning and world.now < before + 100:
            world.wait(0.25)
        waits.append(world.now - before)
    assert waits[:-1] == [1.0, 2.0, 4.0]
    assert world.said[-1] == (
        "fusionrun: slot 0 of host b is abandoned: 5 workers in a row failed there, none after more than 60 s of "
        "training (--restart-limit); the last: rank 0 on host b failed: boom"
    )
    assert world.said[-2] == "fusionrun: rank 0 on host b failed: boom; another worker is started there in 4 s"
    assert world.ended is None
    world.wait(1000)
    assert ("release", "b") in world.calls
    world.finish()
    assert world.ended == []


def test_a_worker_that_has_trained_for_a_while_is_replaced_at_once() -> None:
    world = World("a:1,b:1")
    world.up()
    for _ in range(7):
        world.wait(61)
        world.fail("b")
        assert ("b", 0) in world.beginning
        world.ask()
        world.start_up()
        assert world.come().size == 2


def test_a_newcomer_that_ends_well_is_not_replaced() -> None:
    world = World("a:1,b:1")
    world.up()
    world.fail("b")
    world.ask()
    world.start_up()
    del world.beginning["b", 0]
    world.epochs.ended("b", 0, None)
    world.wait(100)
    assert ("b", 0) not in world.beginning
    world.finish()
    assert world.ended == []


def test_a_host_that_is_cut_off_is_not_waited_for() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, leave=15))
    world.up()
    world.ask("a", error="host c is silent")
    assert world.hailed == ["b", "c"]
    world.cut_off.add("c")
    world.ask("b", error="host c is silent")
    world.epochs.missed("a", 1, (2,))
    world.wait(0.75)
    assert world.epochs.number == 1
    world.wait(0.5)
    assert world.calls[-2:] == [("drop", "c"), ("begin", 2)]
    why = "host c: its agent does not answer, and other hosts cannot reach it; the host is left out for 10 s"
    assert world.said == [f"fusionrun: membership epoch 2: 2 workers on hosts a, b ({why})"]
    world.start_up()
    world.wait(COOLDOWN_S + 1)
    assert world.calls[-1] == ("connect", "c")
    world.answer()
    assert world.daemons["c"] == (2, 2), "it has its number, and another daemon"
    world.cut_off.clear()
    places = world.come()
    assert places.topology.hosts == ("a", "b", "c")
    assert places.ranks == {("a", 0): 0, ("b", 0): 1, ("c", 0): 2}


def test_a_host_that_is_cut_off_and_whose_agent_should_have_said_something_for_long_is_given_up_at_once() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, leave=15))
    world.up()
    world.cut_off.add("c")
    world.silent["c"] = 0.9
    world.ask("a", "b", error="host c is silent")
    assert world.epochs.number == 1, "nobody has missed its daemon"
    world.silent["c"] = 1.1
    world.epochs.missed("a", 1, (2,))
    assert world.calls[-2:] == [("drop", "c"), ("begin", 2)]


def test_a_host_whose_agent_is_silent_stays_if_nobody_misses_its_daemon() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 1, leave=15, probe=10))
    world.up()
    world.silent["b"] = 9.0
    world.ask("a")
    world.wait(9)
    assert world.calls[-1] != ("drop", "b")


def test_a_host_that_nobody_misses_has_more_time_to_answer() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 1, leave=15, probe=10))
    world.up()
    world.ask("a")
    world.wait(9)
    assert world.calls[-1] != ("drop", "b")
    world.wait(2)
    assert ("drop", "b") in world.calls


def test_a_daemon_that_others_have_lost_and_that_stands_still_is_ended_so_that_its_workers_leave() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, leave=15))
    world.up()
    world.epochs.missed("a", 1, (2,))
    world.epochs.missed("b", 1, (2,))
    assert world.checked == [("c", 1)], "once"
    world.epochs.answered("c")
    world.ask("a", "b")
    assert world.epochs.number == 1, "c has not left"
    world.crash("c")  # its agent has killed it
    world.ask("c", error="the daemon of rank 2's node is gone")
    assert world.places is not None
    assert (world.epochs.number, world.places.names) == (2, ("a", "b"))
    assert ("kill", "c", (0,)) not in world.calls
    world.start_up()
    world.listen("c")
    world.ask(error="")
    assert world.places.ranks == {("a", 0): 0, ("b", 0): 1, ("c", 0): 2}
    assert ("c", 0) in world.waiting, "in the same process"
    world.epochs.missed("a", 3, (2,))
    assert world.checked == [("c", 1), ("c", 2)]


def test_a_daemon_that_others_have_lost_is_not_asked_when_another_has_taken_its_place() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("b")
    world.epochs.missed("a", 1, (1,))
    assert world.checked == []


def test_of_hosts_that_miss_each_other_the_larger_part_goes_on() -> None:
    world = World("a:1,b:1,c:1")
    world.up()
    world.cut_off.add("a")
    world.epochs.missed("a", 1, (2,))  # it ended its epoch when it had noticed the first
    world.epochs.missed("b", 1, (0,))
    world.epochs.missed("c", 1, (0,))
    world.epochs.answered("a")  # which the launcher reaches
    world.ask()
    assert world.places is not None
    assert world.places.names == ("b", "c")
    assert world.calls[-2:] == [("begin", 2), ("daemon", "a", 2)]
    world.start_up()
    world.listen()
    world.wait(60)
    assert world.calls[-1] == ("daemon", "a", 2), "nobody is interrupted for a host that does not reach the others"
    world.epochs.reached("a", 1)  # which is the daemon before
    world.wait(1)
    assert world.calls[-1] == ("daemon", "a", 2)
    world.epochs.reached("a", 2)
    assert world.calls[-1] == ("change", True, False)
    world.ask(error="")
    assert world.places.ranks == {("b", 0): 0, ("c", 0): 1, ("a", 0): 2}
    assert ("a", 0) in world.waiting


def test_of_hosts_that_never_came_up_together_those_are_left_out_that_the_most_have_not_reached() -> None:
    """One daemon's word is not enough: a has reached nobody, and c is heard first."""
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1))
    world.up(started=False)
    world.epochs.missed("c", 1, (0,))
    world.epochs.answered("a")
    world.ask()
    assert world.epochs.number == 1, "others may have more to say"
    world.epochs.missed("a", 1, (1, 2))
    assert world.epochs.number == 1
    world.epochs.missed("b", 1, (0,))
    for host in "abc":
        world.epochs.answered(host)
    assert world.places is not None
    assert (world.epochs.number, world.places.names) == (2, ("b", "c"))


def test_a_daemon_that_does_not_say_whom_it_has_not_reached_is_not_waited_for() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1))
    world.up(started=False)
    world.epochs.missed("c", 1, (0,))
    world.epochs.answered("a")
    world.ask()
    world.wait(3)
    assert world.epochs.number == 2


def test_a_word_about_a_daemon_that_is_replaced_is_not_about_the_new_one() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2))
    world.up()
    world.crash("b")
    world.listen()
    world.epochs.missed("a", 1, (1,))
    world.ask()
    assert world.places is not None
    assert world.places.names == ("a", "b")
    assert ("daemon", "b", 3) not in world.calls


def test_of_two_hosts_that_miss_each_other_the_first_goes_on() -> None:
    world = World("a:1,b:1")
    world.up()
    world.epochs.missed("b", 1, (0,))
    world.epochs.missed("a", 1, (1,))
    world.ask()
    assert world.places is not None
    assert world.places.names == ("a",)
    assert world.calls[-1] == ("daemon", "b", 2)


def test_who_has_lost_one_host_after_the_other_is_taken_for_the_one_that_is_cut_off() -> None:
    """a is cut off from b and c, and notices that it does not hear c before anybody notices more."""
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1))
    world.up()
    world.cut_off.add("c")
    world.epochs.missed("a", 1, (2,))
    world.epochs.answered("c")
    world.ask("a", "b")
    world.ask("c")
    assert world.places is not None
    assert (world.epochs.number, world.places.names) == (2, ("a", "b"))
    world.epochs.missed("a", 2, (1,))
    world.epochs.missed("b", 2, (0,))
    for host in "ab":
        world.epochs.answered(host)
    world.ask("a", "b")
    assert (world.epochs.number, world.places.names) == (3, ("b",)), "c may reach b"
    world.start_up()
    world.cut_off.clear()
    world.listen("c")
    world.ask(error="")
    assert set(world.places.names) == {"b", "c"}


def test_a_host_does_not_try_for_ever_to_reach_a_daemon_that_is_gone() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2))
    world.up()
    world.cut_off.add("b")
    world.epochs.missed("a", 1, (1,))
    world.ask()
    world.listen()
    assert world.epochs.number == 1, "b does not reach a"
    world.cut_off.clear()
    world.crash("a")
    world.listen()
    assert world.places is not None
    assert world.places.ranks == {("a", 0): 0, ("b", 0): 1}


def test_whom_a_host_could_not_reach_may_be_gone() -> None:
    world = World("a:1,b:1")
    world.up()
    world.find("a:1,b:1,c:1")
    world.answer()
    world.cut_off.add("c")
    world.listen()
    world.knock()
    world.wait(10)
    assert world.epochs.number == 1
    world.lose("b")
    world.cut_off.clear()
    world.ask()
    assert world.places is not None
    assert world.places.names == ("a",)
    world.start_up()
    world.listen()
    assert world.calls[-1] == ("change", True, False), "it was asked again, about those who are left"


def test_without_replacements_a_failed_worker_costs_its_host_and_nobody_else() -> None:
    world = World("a:2,b:1,c:1", ElasticLimits(1, 1, restarts=False))
    world.up()
    world.calls.clear()
    world.fail("a")
    world.ask("a", "c")
    assert world.calls == [], "b has not left"
    world.ask("b")
    assert world.calls == [("remove", "a", (1,)), ("begin", 2), ("release", "a")]
    assert world.places is not None
    assert world.places.ranks == {("b", 0): 0, ("c", 0): 1}
    assert world.waiting == [("b", 0), ("c", 0)]
    assert world.said == [
        "fusionrun: membership epoch 2: 2 workers on hosts b, c (rank 0 on host a was killed by SIGKILL; the host is "
        "left out for 10 s)"
    ]


def test_a_host_comes_back_after_its_cooldown() -> None:
    world = World("a:1,b:1", ElasticLimits(1, 1, restarts=False))
    world.up()
    world.fail("a")
    world.ask()
    world.start_up()
    world.calls.clear()
    world.wait(COOLDOWN_S - 1)
    assert world.calls == []
    world.wait(2)
    assert world.calls == [("connect", "a")]
    world.answer()
    world.listen()
    world.wait(5)
    assert world.calls[1:] == [("daemon", "a", 2), ("recruit", "a", 0)]
    world.knock()
    world.wait(5)
    assert world.calls[3:] == [("change", True, False)], "said once"
    world.ask(error="")
    assert world.places is not None
    assert world.places.ranks == {("b", 0): 0, ("a", 0): 1}
    assert world.waiting == [("b", 0), ("a", 0)]
    assert world.said[-1] == "fusionrun: membership epoch 3: 2 workers on hosts b, a (host a was added)"


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


def test_a_crashed_daemon_is_replaced_and_its_workers_come_back_with_what_they_have() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("a")
    assert world.calls[-1] == ("daemon", "a", 2)
    world.ask()
    assert world.places is not None
    assert world.places.ranks == {("b", 0): 0}
    world.start_up()
    world.fail("b")  # a has the state, too
    assert world.ended is None
    world.listen()
    assert world.places.ranks == {("a", 0): 0}
    assert world.waiting == [("a", 0)]
    assert world.said == [
        "fusionrun: membership epoch 2: 1 worker on host b (the daemon of host a was killed by SIGKILL)",
        "fusionrun: membership epoch 3: 1 worker on host a (rank 0 on host b was killed by SIGKILL; host a was added)",
    ]


def test_a_host_whose_daemon_crashes_again_is_left_out() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("a")
    world.ask()
    world.listen()
    world.start_up()
    world.wait(1)
    world.ask(error="")
    assert world.places is not None
    assert world.places.size == 2
    world.start_up()
    world.crash("a")
    world.ask()
    assert world.places.ranks == {("b", 0): 0}
    assert world.calls[-2:] == [("begin", 4), ("release", "a")]
    assert world.said[-1].endswith("the host is left out for 10 s)")


def test_a_job_that_needs_all_waits_for_a_daemon_that_has_crashed() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2))
    world.up()
    world.crash("a")
    world.ask()
    assert world.epochs.number == 1
    world.listen()
    assert world.places is not None
    assert world.places.ranks == {("a", 0): 0, ("b", 0): 1}
    assert world.waiting == [("a", 0), ("b", 0)]


def test_a_daemon_that_does_not_come_up_again_costs_its_host() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("a")
    world.ask()
    world.start_up()
    world.epochs.daemon_down("a", 1, DaemonFailure("a", -9, "", "host a"))  # which is known
    world.epochs.daemon_down("a", 2, HostFailure("a", ("its daemon cannot start: no room",)))
    assert world.calls[-1] == ("drop", "a")
    assert world.said[-1] == "fusionrun: host a: its daemon cannot start: no room; the host is left out for 10 s"


def test_an_error_that_all_workers_survive_is_the_reason_if_there_is_no_other() -> None:
    world = World("a:1,b:1")
    world.up()
    world.ask(error="shapes differ")
    world.up()
    assert world.said == [
        "fusionrun: membership epoch 2: 2 workers on hosts a, b (rank 0 on host a could not go on: shapes differ)"
    ]


def test_new_hosts_are_met_before_anybody_is_told() -> None:
    world = World("a:1", ElasticLimits(1, 1))
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
    assert world.calls[1:] == [("connect", "b"), ("recruit", "b", 0)], "a worker begins while the daemon does"
    world.knock()
    world.wait(1)
    assert len(world.calls) == 3
    world.listen()
    assert world.calls[3:] == [("change", True, False)]


def test_who_comes_while_an_epoch_comes_up_is_news_when_it_is_up() -> None:
    world = World("a:1,b:1,c:1")
    world.up()
    world.crash("c")
    world.ask()
    assert world.running == {("a", 0), ("b", 0)}
    world.calls.clear()
    world.listen("c")
    world.wait(1)
    assert world.calls == [], "workers that wait for their places forget what they hear"
    world.start_up()
    assert world.calls == [("change", True, False)]
    world.ask(error="")
    assert world.running == {("a", 0), ("b", 0), ("c", 0)}


def test_hosts_that_go_are_news_when_the_new_ones_are_ready_to_begin() -> None:
    world = World("a:1,b:1")
    world.up()
    world.calls.clear()
    world.find("a:1,c:1")
    world.wait(1)
    assert world.calls == [("connect", "c")]
    world.answer()
    world.listen()
    world.knock()
    assert world.calls[1:] == [("recruit", "c", 0), ("change", False, True), ("change", True, True)]
    world.find("a:1,d:1")
    world.wait(10)
    assert world.calls[-1] == ("change", False, True), "d does not come up, and c and b are to go"


def test_hosts_for_which_there_is_no_room_are_no_news() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 1, most=2))
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
    world.knock()
    assert world.calls == [("recruit", "a", 1), ("change", True, False)]
    world.find("a:2")
    assert world.calls[2:] == [("change", True, True)]
    world.ask(error="")
    assert world.places is not None
    assert world.places.ranks == {("a", 0): 0, ("a", 1): 1}
    assert world.waiting == [("a", 0), ("a", 1)]
    assert ("release", "b") in world.calls
    assert world.said == [
        "fusionrun: membership epoch 2: 2 workers on host a (host a has 2 workers now; host b was removed)"
    ]


def test_a_worker_without_a_slot_is_removed_while_its_host_stays() -> None:
    world = World("a:2,b:1")
    world.up()
    world.find("a:1,b:1")
    world.ask(error="")
    assert ("remove", "a", (1,)) in world.calls
    assert world.waiting == [("a", 0), ("b", 0)]
    assert world.said == ["fusionrun: membership epoch 2: 2 workers on hosts a, b (host a has room for 1 now)"]


def test_a_newcomer_for_which_there_is_no_room_any_more_is_removed() -> None:
    world = World("a:1,b:1")
    world.up()
    world.find("a:2,b:1")
    world.find("a:1,b:1")
    assert world.calls[-2:] == [("recruit", "a", 1), ("remove", "a", (1,))]
    world.find("a:1,b:1,c:1")
    world.answer()
    world.find("a:1,b:1")
    assert world.calls[-2:] == [("recruit", "c", 0), ("release", "c")]


def test_a_job_waits_for_workers_and_then_goes_on() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2, timeout=60))
    world.up()
    world.lose("b")
    world.ask()
    world.find("a:1")
    world.wait(30)
    assert world.epochs.number == 1
    world.find("a:1,c:1")
    world.answer()
    world.listen()
    world.wait(10)
    assert world.epochs.number == 1
    world.knock()
    assert world.places is not None
    assert world.places.names == ("a", "c")
    assert world.places.topology.hosts == ("a", "b", "c")
    assert world.places.absent == (1,)


def test_a_job_waits_no_longer_than_it_may() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2, timeout=60))
    world.up()
    world.lose("b")
    world.find("a:1")
    world.wait(100)
    assert world.ended is None, "a still trains"
    world.ask()
    world.wait(4)
    waits = (
        "fusionrun: waiting for 2 workers; the slots there are (a:1) do not suffice; at most 60 s (--elastic-timeout)"
    )
    assert waits not in world.said
    world.wait(55)
    assert world.said.count(waits) == 1
    assert world.ended is None
    world.wait(2)
    assert world.last_words() == (
        "fusionrun: the job needs 2 workers, and the slots there are (a:1) did not suffice for 60 s "
        "(--elastic-timeout); before that: host b: it burns"
    )


def test_agents_and_daemons_have_a_limit_of_their_own_for_coming_up() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2, timeout=1, start=30))
    world.wait(20)
    assert world.ended is None, "the agents have not answered yet"
    world.answer("a")
    world.listen("a")
    world.wait(5)
    assert world.ended is None, "that of b has not"
    world.wait(10)
    assert world.last_words() == (
        "fusionrun: the job needs 2 workers, and the slots there are (a:1) did not suffice for 1 s "
        "(--elastic-timeout); before that: host b: it did not answer within 30 s (--start-timeout)"
    )


def test_a_job_that_as_many_workers_are_no_use_for_waits_for_another_number() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, timeout=60, resets=2))
    world.up()
    for fault in range(2):
        world.wait(61)
        world.fail("c")
        world.ask()
        if not fault:  # the others have to see it once
            assert world.places is not None
            assert world.places.size == 2
            world.start_up()
            world.ask(error="three are asked for", is_unfit=True)
        assert world.epochs.number == 2 + fault
        world.answer()
        world.listen()
        world.wait(30)
        assert world.said[-1] == (
            "fusionrun: waiting for more workers, at most 60 s (--elastic-timeout), since three are asked for"
        )
        world.knock()
        world.start_up()
        assert world.places is not None
        assert world.places.size == 3
    assert world.ended is None, "that a number is no use is no fault, and no reset"


def test_a_job_that_as_many_workers_are_no_use_for_waits_no_longer_than_it_may() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, timeout=60))
    world.up()
    world.lose("c")
    world.find("a:1,b:1")
    world.ask()
    world.start_up()
    world.ask(error="three are asked for", is_unfit=True)
    world.wait(59)
    assert world.ended is None
    world.wait(2)
    assert world.last_words() == (
        "fusionrun: no more workers have come for 60 s (--elastic-timeout): three are asked for"
    )


def test_the_first_epoch_waits_for_all_workers_that_were_asked_for() -> None:
    world = World("a:1", ElasticLimits(2, 1, timeout=60))
    world.answer()
    world.listen()
    assert world.places is None
    world.find("a:1,b:1")
    assert world.up().size == 2


def test_a_job_is_reset_no_more_often_than_it_may() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 2, resets=1))
    world.up()
    world.crash("a")
    world.ask()
    world.up()
    world.crash("b")
    world.ask()
    world.listen()
    assert world.last_words() == (
        "fusionrun: the job has been reset as often as --reset-limit allows (1); before that: the daemon of host b "
        "was killed by SIGKILL"
    )


def test_a_fault_and_the_return_of_the_lost_are_one_reset() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 1, resets=2))
    world.up()
    for fault in range(2):
        world.wait(61)
        world.fail("b")
        world.ask()
        world.start_up()
        assert world.come().size == 2
        assert world.epochs.number == 3 + 2 * fault
    world.wait(61)
    world.fail("b")
    world.ask()
    assert "as often as --reset-limit allows (2); before that: rank 0 on host b was killed" in world.last_words()


def test_a_host_that_is_new_is_a_reset_and_one_that_comes_back_is_none() -> None:
    world = World("a:1", ElasticLimits(1, 1, resets=2))
    world.up()
    world.find("a:1,b:1")
    world.come()
    world.lose("b")
    world.ask()
    world.start_up()
    world.wait(COOLDOWN_S + 1)
    assert world.come().size == 2
    world.find("a:1,b:1,c:1")
    world.answer()
    world.listen()
    world.knock()
    world.wait(5)
    world.ask(error="")
    assert "as often as --reset-limit allows (2)" in world.last_words()


def test_a_newcomer_that_hangs_before_it_asks_is_killed_and_counts_as_one_that_fails() -> None:
    world = World("a:1,b:1", ElasticLimits(1, 1, begin=30))
    world.up()
    world.fail("b")
    world.ask()
    world.start_up()
    world.listen()
    world.wait(29)
    world.calls.clear()
    world.wait(2)
    assert world.calls == [("kill", "b", (0,))], "once"
    world.fail("b")
    assert world.said[-1] == (
        "fusionrun: host b: the worker that was to be rank 1 was killed: it did not come to its training function "
        "within 30 s (--newcomer-timeout); another worker is started there in 1 s"
    )
    assert ("b", 0) not in world.beginning
    world.wait(1)
    assert ("b", 0) in world.beginning
    assert world.come().size == 2, "and the next one has its own time"
    world.wait(100)
    assert [call for call in world.calls if call[0] == "kill"] == [("kill", "b", (0,))]


def test_who_does_not_leave_in_time_is_killed_and_its_host_left_out() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, leave=15))
    world.up()
    world.fail("c")
    world.wait(100)
    world.calls.clear()
    world.ask("a")
    world.epochs.answered("b")
    world.wait(14)
    assert world.calls == []
    world.wait(2)
    assert world.calls == [("kill", "b", (0,))]
    world.finish("b")  # whatever its status is
    assert world.places is not None
    assert world.places.names == ("a",)
    assert (
        "host b: rank 1 was killed: it did not leave membership epoch 1 within 15 s after another worker did "
        "(--leave-timeout)" in world.said[0]
    )
    assert world.calls[1:] == [("begin", 2), ("release", "b"), ("daemon", "c", 2)]


def test_a_rank_that_saves_a_checkpoint_when_another_one_is_lost_is_waited_for() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1))
    world.up()
    world.fail("c")
    world.calls.clear()
    world.ask("b")
    world.epochs.answered("a")  # its agent is there
    world.wait(40)
    assert not [call for call in world.calls if call[0] in ("kill", "drop")]
    world.ask("a")
    assert world.places is not None
    assert "a" in world.places.names


def test_a_host_where_nobody_can_be_killed_is_dropped() -> None:
    world = World("a:1,b:1", ElasticLimits(2, 1, leave=15))
    world.up()
    world.ask("a")
    world.epochs.answered("b")
    world.wait(30)
    assert ("kill", "b", (0,)) in world.calls
    assert ("drop", "b") in world.calls
    assert world.places is not None
    assert world.places.names == ("a",)


def test_when_others_have_ended_well_nobody_is_hurried() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, leave=15))
    world.up()
    world.finish("a")
    world.ask("b")
    world.epochs.answered("c")
    world.wait(100)
    assert world.ended is None
    assert not any(call[0] == "kill" for call in world.calls)


def test_a_daemon_that_does_not_listen_is_not_waited_for() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 1, start=30))
    world.answer()
    world.listen("a", "c")
    world.wait(29)
    assert world.places is None
    world.wait(2)
    assert ("drop", "b") in world.calls
    assert world.places is None, "three were asked for"
    world.wait(COOLDOWN_S)
    assert world.up().names == ("a", "b", "c")


def test_a_survivor_that_dies_while_the_job_waits_is_no_survivor() -> None:
    world = World("a:1,b:1,c:1", ElasticLimits(3, 2))
    world.up()
    world.lose("c")
    world.crash("b")
    world.ask()
    world.fail("a")
    assert world.epochs.number == 1
    world.knock(("a", 0))
    world.listen()
    assert world.places is not None
    assert world.places.ranks == {("b", 0): 0, ("a", 0): 1}


def test_a_loss_while_an_epoch_comes_up_fails_it_so_that_nobody_waits() -> None:
    world = World("a:1,b:1,c:1")
    world.up(started=False)
    world.fail("c")
    world.fail("b")
    assert world.calls.count(("abandon", 1)) == 1
    world.ask()
    world.start_up()
    world.wait(COOLDOWN_S + 1)
    assert world.come().size == 3
    world.fail("c")
    assert world.calls.count(("abandon", 3)) == 0, "its daemons are up, and tell everybody who is gone"


def test_the_next_epoch_may_fail_to_come_up_too() -> None:
    world = World("a:1,b:1,c:1")
    world.up(started=False)
    world.fail("c")
    world.ask()
    world.up(started=False)
    world.fail("b")
    assert ("abandon", 2) in world.calls


def test_a_newcomer_of_an_epoch_that_did_not_come_up_is_in_the_next_one() -> None:
    world = World("a:1,b:1,c:1")
    world.up()
    world.find("a:1,b:1,c:1,d:1")
    world.answer()
    world.listen()
    world.knock()
    world.ask(error="")
    world.fail("c")
    assert ("abandon", 2) in world.calls
    world.ask()
    assert world.places is not None
    assert world.places.ranks == {("a", 0): 0, ("b", 0): 1, ("d", 0): 2}
    assert world.places.absent == (2,)


def test_a_job_that_has_no_state_yet_may_begin_again() -> None:
    world = World("a:1,b:1,c:1")
    world.up(started=False)
    world.fail("c")
    world.unused("a", "b")
    assert world.places is not None
    assert world.places.names == ("a", "b")
    assert world.waiting == []
    assert world.said == [
        "fusionrun: membership epoch 2: 2 workers on hosts a, b (rank 0 on host c was killed by SIGKILL; the host is "
        "left out for 10 s)"
    ]
    world.fail("a")
    world.fail("b", status=3)
    assert world.last_words() == "fusionrun: rank 0 on host a was killed by SIGKILL"


def test_a_job_whose_workers_fail_on_all_hosts_before_it_has_come_up_ends_with_their_error() -> None:
    world = World("a:2,b:2", ElasticLimits(4, 1))
    world.up(started=False)
    world.fail("a", status=1)
    world.unused("a", "b")
    assert world.up(started=False).names == ("b",)
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
    world = World("a:1,b:1", ElasticLimits(2, 2))
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
    world.start_up()
    world.listen()
    world.knock()
    world.fail("a")
    assert world.last_words() == "fusionrun: rank 0 on host a was killed by SIGKILL"


def test_who_is_leaving_needs_no_more_news() -> None:
    world = World("a:1,b:1")
    world.up()
    world.ask("a", error="")
    world.find("a:1,b:1,c:1")
    world.answer()
    world.listen()
    world.knock()
    assert not any(call[0] == "change" for call in world.calls)
    assert world.hailed == [], "all leave in good order"
    world.ask("b", error="")
    assert world.places is not None
    assert world.places.size == 3


def test_a_worker_that_has_ended_well_does_not_ask() -> None:
    world = World("a:1,b:1")
    world.up()
    world.finish("a")
    world.epochs.asked("a", 0, 1, "late")
    world.finish("b")
    assert world.ended == []


def test_the_only_survivors_stay_on_a_host_that_is_left_out() -> None:
    world = World("a:2", ElasticLimits(1, 1, restarts=False))
    world.up()
    world.fail("a", 0)
    world.ask()
    assert world.places is not None
    assert world.places.ranks == {("a", 1): 0}
    world.start_up()
    world.wait(COOLDOWN_S + 1)
    world.knock()
    world.ask(error="")
    assert world.places.ranks == {("a", 1): 0, ("a", 0): 1}


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
    assert world.said == ["fusionrun: host a: it burns; the host is left out for 10 s"], "b is not waited for"


def test_an_agent_that_does_not_answer_is_not_waited_for() -> None:
    world = World("a:1,b:1", ElasticLimits(1, 1, start=30))
    world.answer("a")
    world.listen("a")
    world.wait(29)
    assert world.places is None
    world.wait(2)
    assert ("drop", "b") in world.calls
    assert world.places is not None
    assert world.places.names == ("a",)


def test_news_of_an_epoch_that_is_over_is_none() -> None:
    world = World("a:1,b:1")
    world.up()
    world.crash("a")
    world.epochs.daemon_up("a", 1, Endpoint(0, 1, "127.0.0.1", 1, 2, KEY))
    world.ask()
    world.listen()
    world.start_up()
    world.epochs.asked("b", 0, 1, "late")
    world.epochs.missed("b", 1, (0,))
    world.epochs.started("a", 1)
    world.epochs.lost(HostFailure("z", ("unknown",)))
    world.epochs.ended("z", 0, None)
    world.epochs.answered("z")
    assert ("b", 0) in world.running
    world.ask(error="")
    world.finish()
    assert world.ended == []


@for_each("seed", range(100))
def test_whatever_happens_the_state_survives_and_the_job_comes_to_an_end(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcd"
    limits = ElasticLimits(
        2, rng.choice([1, 2, 3]), rng.choice([None, 5]), timeout=120, leave=15, restarts=rng.random() < 0.8
    )
    world = World("a:2,b:2,c:2,d:2", limits)
    has_state: set[Place] = set()
    number, is_up = 0, False

    def look() -> None:
        """Whoever begins an epoch gets the state of its rank 0, which must have it, once the job has come up."""
        nonlocal has_state, number
        if world.places is None or world.epochs.number == number:
            return
        number = world.epochs.number
        places = world.places
        first = next(place for place, rank in places.ranks.items() if rank == 0)
        if is_up:
            assert first in world.waiting
            assert first in has_state
            assert set(places.ranks) == set(world.waiting), "nobody is waited for who has not asked"
        for name, (node, _) in world.daemons.items():
            assert node >= len(places.hosts) or places.hosts[node].name == name
        has_state = set(places.ranks)

    for _ in range(rng.randint(20, 150)):
        if world.ended is not None:
            break
        act = rng.choice(
            [
                "answer",
                "listen",
                "fail",
                "fail new",
                "lose",
                "crash",
                "ask",
                "ask",
                "wait",
                "wait",
                "find",
                "start",
                "knock",
            ]
        )
        host = rng.choice(names)
        if act == "answer":
            world.answer()
        elif act == "listen":
            world.listen(
                *[name for name in sorted(world.daemons.keys() - world.listening) if rng.random() < 0.8] or ["-"]
            )
        elif act == "fail" and (host, 0) in world.running:
            world.fail(host)
        elif act == "fail new" and (host, 1) in world.beginning:
            world.fail(host, 1)
        elif act == "lose" and host in world.agents:
            world.lose(host)
        elif act == "crash" and host in world.listening:
            world.crash(host)
        elif act == "ask" and rng.random() < 0.5:
            world.ask()
        elif act == "wait":
            world.wait(rng.choice([1, 5, 40]))
        elif act == "find":
            world.find(",".join(f"{name}:{rng.randint(1, 2)}" for name in names if rng.random() < 0.8))
        elif act == "start" and world.places is not None:
            world.start_up()
            is_up = True
        elif act == "knock" and world.beginning:
            world.knock(*rng.sample(sorted(world.beginning), 1))
        look()
    for _ in range(300):  # from here on all goes well
        if world.ended is not None:
            break
        world.answer()
        world.listen()
        world.knock()
        look()
        world.wait(1)
        look()
        if world.running:
            world.finish()
    assert world.ended is not None
