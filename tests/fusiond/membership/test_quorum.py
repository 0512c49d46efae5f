"""Which nodes go on: one part of the network at most, all of it in the same views, and the others with a sentence."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import Loss, View
from fusiond.membership.quorum import PATIENCE, Views, coordinator_of, is_quorum
from tests.for_each import for_each

Links = set[tuple[int, int]]


class Member:
    """A node: its views, and what came of them."""

    def __init__(self, network: Network, node: int) -> None:
        self.network = network
        self.node = node
        self.views = Views(network.topology, node, cast(Any, self), self)  # as much of its effects as views use
        self.seen = [self.views.view]
        self.error = ""
        self.told = False
        self.dead = False
        self.given_up: set[int] = set()

    def lose(self, peer: int, why: str = "silent") -> None:
        """What a mesh does: gives a peer up, and tells it."""
        if peer in self.given_up or self.dead or self.error:
            return
        self.given_up.add(peer)
        self.network.send(self.node, peer, None)
        if peer in self.views.view.nodes:
            self.views.suspect(Loss(peer, f"node {peer} is lost: {why}"))

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        if node not in self.given_up and not self.dead:
            self.network.send(self.node, node, message)

    def receive(self, source: int, message: wire.PeerMessage | None) -> None:
        if self.dead or self.error or source in self.given_up:
            return
        if message is None:
            self.lose(source, f"it has given node {self.node} up")
        elif isinstance(message, wire.Abort):
            self.job_ends(message.error, False)
        elif self.views.admits(source, message):
            self.views.message(source, message)  # type: ignore[arg-type]

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        self.network.at(seconds, lambda: None if self.dead else callback())
        return None

    def is_over(self) -> bool:
        return False

    def why_not_without(self, losses: Sequence[Loss]) -> str:
        return "" if self.network.tolerant else f"the job ends: {losses[0].why}"

    def view_begins(self, view: View, news: Sequence[Loss]) -> None:
        self.seen.append(view)
        for loss in news:
            if loss.rank is None:
                self.lose(loss.node, loss.why)

    def job_ends(self, error: str, tell: bool) -> None:
        assert not self.error
        self.error, self.told = error, tell
        self.views.end()
        for node in range(len(self.network.members)) if tell else ():
            if node != self.node:
                self.to_node(node, wire.Abort(error))


class Network:
    """Nodes with one worker each (or as many as `workers` says), and virtual time. Every link keeps its order."""

    def __init__(self, nodes: int, seed: int = 0, tolerant: bool = True, workers: Sequence[int] = ()) -> None:
        ranks, first = [], 0
        for n in workers or [1] * nodes:
            ranks.append(tuple(range(first, first + n)))
            first += n
        self.topology = Topology(tuple(f"host{n}" for n in range(nodes)), tuple(ranks))
        self.tolerant = tolerant
        self.random = random.Random(seed)
        self.now = 0.0
        self.cut: Links = set()  # from and to
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._last: dict[tuple[int, int], float] = {}
        self.members = [Member(self, node) for node in range(nodes)]

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), action))

    def send(self, source: int, target: int, message: wire.PeerMessage | None) -> None:
        if (source, target) in self.cut:
            return
        if message is not None:
            message = wire.decode_peer_message(wire.encode(message))
        due = max(self.now + self.random.choice([0.0, 0.001, 0.01, 0.1]), self._last.get((source, target), 0.0))
        self._last[source, target] = due
        arrive = lambda: None if (source, target) in self.cut else self.members[target].receive(source, message)  # noqa: E731
        self.at(due - self.now, arrive)

    def kill(self, node: int) -> None:
        """Its peers notice in their own time. What it has sent may still arrive."""
        self.members[node].dead = True
        for peer in range(len(self.members)):
            if peer != node:
                self.at(self.random.uniform(0, 0.5), lambda peer=peer: self.members[peer].lose(node))  # type: ignore[misc]

    def separate(self, source: int, target: int) -> None:
        """Nothing gets from one node to the other any more, which that one notices."""
        self.cut.add((source, target))
        self.at(self.random.uniform(0.2, 0.5), lambda: self.members[target].lose(source))

    def part(self, one: Sequence[int]) -> None:
        """The network falls into two parts."""
        others = [node for node in range(len(self.members)) if node not in one]
        for a, b in itertools.product(one, others):
            self.separate(a, b)
            self.separate(b, a)

    def run(self, seconds: float = 60.0) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end

    # --- what has to hold, whatever happened --------------------------------------------------------------------------

    @property
    def going_on(self) -> list[int]:
        return [m.node for m in self.members if not m.dead and not m.error]

    def check(self) -> None:
        """At most one part goes on, all of it in the same view; no two views have one number."""
        decided: dict[int, View] = {}
        for member in self.members:
            assert [view.number for view in member.seen] == sorted({view.number for view in member.seen})
            for view in member.seen:
                assert decided.setdefault(view.number, view) == view
        for view in decided.values():
            before = decided.get(view.number - 1)
            assert before is None or (
                set(view.nodes) <= set(before.nodes) and view.lost[: len(before.lost)] == before.lost
            )
        last = {self.members[node].views.view for node in self.going_on}
        assert len(last) <= 1, last
        for view in last:
            assert set(self.going_on) <= set(view.nodes)
            assert set(view.nodes) == set(self.going_on)


# --- who may decide ---------------------------------------------------------------------------------------------------


@for_each("nodes", range(1, 8))
def test_any_two_quorums_have_a_node_in_common(nodes: int) -> None:
    topology = Topology(tuple("abcdefg"[:nodes]), tuple((n,) for n in range(nodes)))
    view = View(0, tuple(range(nodes)))
    subsets = [set(s) for n in range(nodes + 1) for s in itertools.combinations(range(nodes), n)]
    quorums = [subset for subset in subsets if is_quorum(subset, view, topology)]
    assert all(one & other for one in quorums for other in quorums)
    for subset in subsets:  # and of two parts of the network, one is a quorum
        assert is_quorum(subset, view, topology) != is_quorum(set(range(nodes)) - subset, view, topology)


def test_the_lowest_node_with_workers_left_coordinates() -> None:
    topology = Topology(("a", "b", "c", "d"), ((0,), (), (1, 2), (3,)))
    assert coordinator_of(View(0, (0, 1, 2, 3)), topology) == 0
    assert coordinator_of(View(1, (1, 2, 3), (Loss(0, "x"),)), topology) == 2
    assert coordinator_of(View(1, (0, 1, 2, 3), (Loss(0, "x", 0),)), topology) == 2
    assert coordinator_of(View(1, (0, 1, 2, 3), (Loss(2, "x", 1),)), topology) == 0


# --- nodes that die ---------------------------------------------------------------------------------------------------


@for_each("victim", range(4))
def test_all_others_go_on_without_a_node_that_dies(victim: int) -> None:
    for seed in range(20):
        job = Network(4, seed)
        job.kill(victim)
        job.run(5)
        job.check()
        others = [node for node in range(4) if node != victim]
        assert job.going_on == others
        for node in others:
            view = job.members[node].views.view
            assert (view.number, view.nodes) == (1, tuple(others))
            assert [loss.why for loss in view.lost] == [f"node {victim} is lost: silent"]
            assert job.members[node].views.coordinator == others[0]


def test_nodes_may_die_one_after_the_other_until_one_is_left() -> None:
    for seed in range(10):
        job = Network(5, seed)
        for victim in (0, 3, 1, 4):
            job.kill(victim)
            job.run(5)
            job.check()
        assert job.going_on in ([2], [])  # half of two nodes goes on if it is the first of them
        assert job.going_on == [2]


def test_of_two_nodes_the_first_goes_on_without_the_second_only() -> None:
    for victim in (1, 0):
        job = Network(2)
        job.kill(victim)
        job.run(5)
        job.check()
        assert job.going_on == ([0] if victim else [])
    assert job.members[1].error == (
        "node 1 (host host1) is cut off from most of the job, which has declared it dead or cannot go on either: "
        "node 0 is lost: silent"
    )


def test_a_node_may_die_while_it_takes_over() -> None:
    for seed in range(200):
        job = Network(5, seed)
        job.kill(0)
        job.at(job.random.uniform(0, 1.2), lambda job=job: job.kill(1))  # type: ignore[misc]
        job.run(10)
        job.check()
        assert job.going_on == [2, 3, 4]


def test_a_lost_worker_is_agreed_upon_and_its_node_stays() -> None:
    job = Network(3, workers=(2, 1, 1))
    job.members[1].views.suspect(Loss(1, "rank 2 died", 2))
    job.run(5)
    job.check()
    assert job.going_on == [0, 1, 2]
    assert [m.views.view for m in job.members] == [View(1, (0, 1, 2), (Loss(1, "rank 2 died", 2),))] * 3


# --- networks that fail -----------------------------------------------------------------------------------------------


@for_each(
    ("parts", "survivors"),
    [
        (([0, 1], [2]), [0, 1]),
        (([1, 2], [0]), [1, 2]),
        (([0], [1]), [0]),
        (([0, 3], [1, 2]), [0, 3]),
        (([1, 2, 3], [0, 4]), [1, 2, 3]),
    ],
)
def test_of_two_parts_of_the_network_the_one_that_may_decide_goes_on(
    parts: tuple[list[int], list[int]], survivors: list[int]
) -> None:
    for seed in range(30):
        job = Network(sum(map(len, parts)), seed)
        job.part(parts[0])
        job.run(20)
        job.check()
        assert job.going_on == survivors
        for member in job.members:
            if member.node not in survivors:
                assert f"node {member.node} (host host{member.node}) " in member.error
                assert not member.told  # it does not end the job of those that go on


def test_a_link_that_fails_one_way_costs_one_node() -> None:
    for seed in range(40):
        for source, target in itertools.permutations(range(4), 2):
            job = Network(4, seed)
            job.separate(source, target)
            job.run(20)
            job.check()
            assert len(job.going_on) == 3, (source, target, [m.error for m in job.members])


def test_a_node_that_hears_nobody_fails_alone() -> None:
    for seed in range(40):
        job = Network(4, seed)
        for source in (0, 1, 3):
            job.cut.add((source, 2))
            job.at(job.random.uniform(0.4, 0.41), lambda source=source, job=job: job.members[2].lose(source))  # type: ignore[misc]
        job.run(20)
        job.check()
        assert job.going_on == [0, 1, 3]


def test_a_node_that_was_stopped_learns_that_it_was_given_up() -> None:
    job = Network(3)
    stopped = job.members[2]
    for peer in (0, 1):
        job.members[peer].given_up.add(2)  # whose last word is still on its way
        job.members[peer].views.suspect(Loss(2, "node 2 is lost: silent"))
    job.run(3)
    stopped.views.message(0, wire.NewView(job.members[0].views.view))
    assert stopped.error == (
        "node 2 (host host2) was declared dead by the others, which go on without it: node 2 is lost: silent"
    )


@settings(max_examples=300, deadline=None)
@given(
    nodes=st.integers(2, 6),
    seed=st.integers(0, 2**32),
    faults=st.lists(
        st.tuples(
            st.sampled_from(["kill", "separate", "part"]), st.floats(0, 3), st.integers(0, 63), st.integers(0, 63)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_whatever_fails_at_most_one_part_goes_on(
    nodes: int, seed: int, faults: list[tuple[str, float, int, int]]
) -> None:
    job = Network(nodes, seed)
    for what, when, one, other in faults:
        if what == "kill":
            job.at(when, lambda one=one: job.kill(one % nodes))  # type: ignore[misc]
        elif what == "part":
            members = [node for node in range(nodes) if one >> node & 1]
            job.at(when, lambda members=members: job.part(members))  # type: ignore[misc]
        elif one % nodes != other % nodes:
            job.at(when, lambda a=one % nodes, b=other % nodes: job.separate(a, b))  # type: ignore[misc]
    job.run(120)
    job.check()
    killed = {member.node for member in job.members if member.dead}
    if all(what == "kill" for what, *_ in faults) and is_quorum(
        set(range(nodes)) - killed, View(0, tuple(range(nodes))), job.topology
    ):
        assert set(job.going_on) == set(range(nodes)) - killed


# --- jobs that end ----------------------------------------------------------------------------------------------------


@for_each("nodes", [2, 3, 5])
def test_all_are_told_the_same_when_the_job_cannot_go_on(nodes: int) -> None:
    for seed in range(20):
        for victim in range(nodes):
            job = Network(nodes, seed, tolerant=False)
            job.kill(victim)
            job.run(0.5 + PATIENCE + 0.5)
            assert {m.error for m in job.members if m.node != victim} == {
                f"the job ends: node {victim} is lost: silent"
            }


def test_whoever_noticed_first_is_believed_even_if_others_saw_another_symptom() -> None:
    job = Network(3, tolerant=False)
    job.members[1].lose(2, "its connection was closed")
    job.run(0.01)
    job.members[0].lose(2, "its daemon was silent")
    job.run(2)
    assert len({job.members[0].error, job.members[1].error}) == 1


# --- the fence --------------------------------------------------------------------------------------------------------


def test_what_an_expelled_node_says_is_dropped_and_counted_and_it_is_told() -> None:
    job = Network(3)
    job.kill(0)
    job.run(5)
    one = job.members[1]
    before = one.views.fenced
    assert not one.views.admits(0, wire.Verdict(wire.OpKey(0, 0, "x", 0)))
    assert not one.views.admits(0, wire.Canvass(7, 1))
    assert one.views.fenced == before + 2
    assert one.views.admits(2, wire.Verdict(wire.OpKey(0, 0, "x", 0)))


def test_messages_of_views_that_are_over_change_nothing() -> None:
    job = Network(3)
    job.kill(0)
    job.run(5)
    one = job.members[1]
    view = one.views.view
    for message in (
        wire.NewView(View(1, (0, 1))),
        wire.NewView(View(0, (0, 1, 2))),
        wire.Canvass(1, 1 << 40),
        wire.ViewProposal(1 << 40, View(1, (1,))),
        wire.Support(1, 1 << 40),
        wire.ViewAnswer(1, 1 << 40, True),
    ):
        one.receive(2, message)
    job.run(5)
    assert one.views.view == view
    assert (one.error, one.seen[-1]) == ("", view)
