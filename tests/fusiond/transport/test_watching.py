"""The peers that a daemon watches: a few, whatever the number of hosts, and those that owe it something."""

from __future__ import annotations

from benchmarks import control
from fusiond.transport.mesh import neighbours
from tests.for_each import for_each
from tests.fusiond.network_simulation import Network, VirtualDaemon, job


def watched(daemon: VirtualDaemon) -> list[int]:
    return sorted(daemon.mesh._watched)


def idle(nodes: int) -> Network:
    """A job whose workers have come, and that has been idle for some seconds."""
    network = Network(0, 1e9, 1e-4)
    workers = job(network, [1] * nodes, 8)
    for worker in workers:
        worker.begin(iter([[-1]]))
    network.run(lambda: all(worker.started for worker in workers), 30.0)
    control.let_pass(network, 5.0)
    return network


@for_each("count", [2, 3, 8, 9, 10, 11, 12, 16, 17, 64, 1000, 1024])
def test_a_node_watches_eight_others_at_most_each_of_which_watches_it(count: int) -> None:
    nodes = [2 * node + 1 for node in range(count)]
    of = {node: neighbours(nodes, node) for node in nodes}
    for node, others in of.items():
        assert len(set(others)) == len(others) == min(8, count - 1)
        assert node not in others
        assert all(node in of[other] for other in others)
    assert count < 3 or nodes[1] in of[nodes[0]]  # the coordinator's successor sees for itself that it is gone


def test_an_idle_daemon_exchanges_heartbeats_with_its_neighbours_alone() -> None:
    network = idle(16)
    for daemon in network.daemons:
        assert watched(daemon) == sorted(neighbours(range(16), daemon.node))
    before = network.messages.copy()
    control.let_pass(network, 10.0)
    sent = {node: network.messages[node] - before[node] for node in range(16)}
    assert all(10 * 2 * 8 * 0.8 <= count <= 11 * 2 * 8 for count in sent.values()), sent


def test_a_peer_is_watched_as_long_as_it_owes_an_acknowledgement() -> None:
    network = idle(16)
    one, far = network.daemons[0], 5
    assert far not in watched(one)
    network.cut.add(far)
    one.mesh.send(far, control.wire.Departed(()))
    assert far in watched(one)
    network.run(lambda: far in one.mesh.lost, 15.0)
    assert "silent" in one.failure


def test_when_a_neighbour_is_lost_others_take_its_place() -> None:
    network = idle(16)
    one = network.daemons[0]
    one.mesh.lose(1, "it died")
    assert one.mesh._neighbours == frozenset(neighbours([0, *range(2, 16)], 0))


@for_each("seed", range(2))
def test_a_host_that_is_cut_off_is_known_to_all_and_one_that_pauses_is_not_given_up(seed: int) -> None:
    """One packet in a hundred is lost, and daemons stand still for 3 s."""
    seconds, alarms = control.found_out(12, seed)
    assert alarms == 0
    assert 4.0 < seconds < 6.5  # half of the time-out after the last heartbeat, a look, and until all are told
