"""Who has come and who has left."""

from __future__ import annotations

from fusion_rt.core.topology import Topology
from fusion_rt.wire import Loss, View
from fusiond.membership.epoch import Membership

TWO = Topology(("a", "b"), ((0, 2), (1,)))
ONE = Topology(("a",), ((0, 1),))


def test_a_worker_joins_once_and_on_its_node() -> None:
    membership = Membership(TWO, 0)
    assert membership.may_join(2) == ""
    membership.joined.add(2)
    assert membership.may_join(2) == "rank 2 is taken: another process on host a has joined the job as rank 2"
    assert membership.may_join(0) == ""
    assert membership.may_join(1) == "rank 1 does not belong on node 0 (host a), whose ranks are [0, 2]"
    assert membership.may_join(3) == "rank 3 does not belong on node 0 (host a), whose ranks are [0, 2]"


def test_a_node_is_up_once_its_workers_and_its_connections_are_there() -> None:
    membership = Membership(TWO, 0)
    membership.joined.update((0, 2))
    assert not membership.became_up()
    membership.mesh_up = True
    assert membership.became_up()
    assert not membership.became_up()  # said once


def test_a_job_of_one_node_needs_no_connections() -> None:
    membership = Membership(ONE, 0)
    membership.joined.add(0)
    assert not membership.became_up()
    membership.joined.add(1)
    assert membership.became_up()


def test_the_coordinator_waits_for_every_node() -> None:
    membership = Membership(TWO, 0)
    assert not membership.came_up(0, 0)
    assert membership.came_up(1, 0)


def test_everyone_has_left_when_every_local_worker_has() -> None:
    membership = Membership(TWO, 0)
    membership.left.add(0)
    assert not membership.everyone_left
    membership.left.add(2)
    assert membership.everyone_left


def test_who_is_missing() -> None:
    membership = Membership(TWO, 0)
    membership.joined.add(0)
    assert membership.missing() == "rank 2 (host a) did not connect to the daemon"
    membership.joined.add(2)
    membership.came_up(0, 0)
    assert membership.missing() == "node 1 did not come up: rank 1 (host b)"


def test_only_the_coordinator_knows_which_node_is_missing() -> None:
    membership = Membership(TWO, 1)
    membership.joined.add(1)
    assert membership.missing() == "node 0 did not say that every node is up: ranks 0,2 (host a)"


def test_links_that_are_still_measured_are_no_fault_of_a_node() -> None:
    membership = Membership(TWO, 0)
    membership.joined.update((0, 2))
    for node in (0, 1):
        membership.came_up(node, 0)
    assert membership.missing() == "every node came up, but not all links between them were measured"


def test_several_nodes_are_missing() -> None:
    membership = Membership(Topology(("a", "b", "c"), ((0,), (1,), (2,))), 0)
    membership.joined.add(0)
    assert membership.missing() == "nodes 1, 2 did not come up: rank 1 (host b), rank 2 (host c)"


def test_a_new_epoch_begins_when_all_local_workers_have_left_and_come_back() -> None:
    membership = Membership(TWO, 0)
    membership.mesh_up = True
    for rank in (0, 2):
        membership.join(rank)
    assert membership.became_up()
    membership.left.add(0)
    assert membership.may_join(0) == ""
    membership.join(0)  # before the other one has left
    assert membership.may_join(0) == "rank 0 is taken: another process on host a has joined the job as rank 0"
    assert membership.may_join(2) != ""
    assert (membership.epoch, membership.became_up()) == (0, False)
    membership.left.add(2)
    assert not membership.everyone_left  # one has come back
    membership.join(2)
    assert (membership.epoch, membership.left, membership.started) == (1, set(), False)
    assert membership.became_up()
    assert not membership.came_up(0, 1)
    assert not membership.came_up(1, 0)  # up in the epoch before only
    assert membership.came_up(1, 1)


def test_a_node_without_workers_is_up_with_its_connections_and_follows_all_others_into_an_epoch() -> None:
    membership = Membership(Topology(("a", "b", "c"), ((0,), (1,), ())), 2)
    assert membership.may_join(0) == "rank 0 does not belong on node 2 (host c), whose ranks are []"
    assert not membership.became_up()
    membership.mesh_up = True
    assert membership.became_up()
    assert not membership.became_up()  # said once
    assert not membership.everyone_left  # nobody was ever there
    assert not membership.follow(0, {0: 1})  # node 1 may still wait for something of the epoch before
    assert membership.follow(1, {0: 1, 1: 1})
    assert (membership.epoch, membership.started, membership.became_up()) == (1, False, True)
    assert not membership.follow(1, {0: 1, 1: 1})


def test_a_node_with_workers_goes_by_its_own() -> None:
    membership = Membership(Topology(("a", "b"), ((0,), (1,))), 1)
    assert not membership.follow(0, {0: 1})
    assert not membership.follow(1, {0: 1, 1: 1})


def test_workers_that_are_lost_are_not_waited_for_when_the_others_come_back() -> None:
    membership = Membership(Topology(("a",), ((0, 1, 2),)), 0)
    for rank in (0, 1, 2):
        membership.join(rank)
    membership.lose(1)
    membership.view_begins(View(1, (0,), (Loss(0, "rank 1 died", 1),)), 0)
    assert membership.awaited == [0, 2]
    for rank in (0, 2):
        membership.left.add(rank)
        membership.join(rank)
    assert (membership.epoch, membership.left) == (1, {1})
    assert membership.became_up()


def test_a_worker_that_is_lost_when_the_others_are_back_is_waited_for_until_the_view_is_without_it() -> None:
    membership = Membership(Topology(("a",), ((0, 1, 2),)), 0)
    for rank in (0, 1, 2):
        membership.join(rank)
    for rank in (0, 2):
        membership.left.add(rank)
        membership.join(rank)
    membership.lose(1)
    assert membership.epoch == 0
    membership.view_begins(View(1, (0,), (Loss(0, "rank 1 died", 1),)), 0)
    assert (membership.epoch, membership.left, membership.started) == (1, {1}, False)


def test_workers_that_came_back_and_were_lost_begin_no_epoch() -> None:
    membership = Membership(ONE, 0)
    for rank in (0, 1):
        membership.join(rank)
        membership.left.add(rank)
    membership.join(0)
    for rank in (0, 1):
        membership.lose(rank)
    membership.view_begins(View(1, (0,), (Loss(0, "rank 0 died", 0), Loss(0, "rank 1 died", 1))), 0)
    assert (membership.epoch, membership.everyone_left) == (0, True)


def test_a_node_whose_workers_are_lost_follows_the_others_and_is_not_waited_for() -> None:
    topology = Topology(("a", "b", "c", "d"), ((0,), (1,), (2,), ()))
    view = View(1, (0, 1, 2, 3), (Loss(0, "rank 0 died", 0),))
    memberships = [Membership(topology, node) for node in (0, 3)]
    memberships[0].join(0)
    memberships[0].lose(0)
    for membership in memberships:
        membership.view_begins(view, 1)
        assert [membership.has_workers(node) for node in range(4)] == [False, True, True, False]
        assert not membership.follow(1, {1: 1})
        assert membership.follow(2, {1: 1, 2: 1})
        membership.mesh_up = True
        assert (membership.epoch, membership.became_up()) == (1, True)


def test_nodes_that_are_not_in_the_view_are_not_waited_for() -> None:
    topology = Topology(("a", "b", "c", "d"), ((0,), (1,), (2,), ()))
    membership = Membership(topology, 1)
    membership.join(1)
    membership.view_begins(View(1, (1, 2, 3)), 1)
    for node in (1, 2):
        assert not membership.came_up(node, 0)
    assert membership.missing() == "node 3 did not come up: host d (no workers)"
    assert membership.came_up(3, 0)
    follower = Membership(topology, 3)
    follower.view_begins(View(1, (1, 2, 3)), 1)
    assert not follower.follow(1, {1: 1})
    assert follower.follow(2, {1: 1, 2: 1})
    assert follower.missing() == "node 1 did not say that every node is up: rank 1 (host b)"
