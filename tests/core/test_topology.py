"""Who is where, with nodes of different sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import FusionError, SettingError
from fusion_rt.core.topology import GLOBAL_SET, ProcessSet, Topology
from tests.for_each import for_each

UNEVEN = Topology(("a", "b", "c"), ((0, 1), (2,), (3, 4, 5)))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Ranks in any order on nodes of any size, some of them without a worker."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 9)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(ranks)), max_size=4)))
    nodes = [tuple(ranks[low:high]) for low, high in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    return Topology(tuple(f"h{n}" for n in range(len(nodes))), tuple(nodes))


def test_ranks_of_uneven_nodes() -> None:
    assert UNEVEN.size == 6
    assert [UNEVEN.node_of(r) for r in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [UNEVEN.local_rank(r) for r in range(6)] == [0, 1, 0, 0, 1, 2]
    assert [UNEVEN.local_size(r) for r in range(6)] == [2, 2, 1, 3, 3, 3]
    # Only nodes that have a worker of the same local_rank count, as with Horovod.
    assert [UNEVEN.cross_rank(r) for r in range(6)] == [0, 0, 1, 2, 1, 0]
    assert [UNEVEN.cross_size(r) for r in range(6)] == [3, 2, 3, 3, 2, 1]


@given(topology=topologies())
def test_local_and_cross_ranks_name_every_worker_once(topology: Topology) -> None:
    everyone = range(topology.size)
    for rank in everyone:
        assert topology.ranks[topology.node_of(rank)][topology.local_rank(rank)] == rank
        assert 0 <= topology.cross_rank(rank) < topology.cross_size(rank)
    places = {(topology.local_rank(rank), topology.cross_rank(rank)) for rank in everyone}
    assert len(places) == topology.size
    for local_rank in {place[0] for place in places}:
        across = sorted(cross for local, cross in places if local == local_rank)
        assert across == list(range(len(across)))


@for_each("rank", [-1, 6, 100])
def test_a_rank_that_is_not_there(rank: int) -> None:
    with pytest.raises(FusionError, match=f"there is no rank {rank} in a job of 6 ranks"):
        UNEVEN.node_of(rank)


@for_each(
    ("hosts", "ranks"),
    [
        (("a",), ((),)),
        ((), ()),
        (("a",), ((0,), (1,))),
        (("a", "b"), ((0, 1),)),
        (("a",), ((0, 2),)),
        (("a",), ((1, 2),)),
        (("a", "b"), ((0, 1), (1, 2))),
        (("a",), ((-1, 0),)),
    ],
)
def test_what_is_no_topology_is_refused(hosts: tuple[str, ...], ranks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="not a topology"):
        Topology(hosts, ranks)


def test_ranks_in_words() -> None:
    assert UNEVEN.describe([2]) == "rank 2 (host b)"
    assert UNEVEN.describe([5, 3, 0, 1]) == "ranks 0-1 (host a), ranks 3,5 (host c)"
    assert UNEVEN.describe({0, 1, 3, 4, 5}) == "ranks 0-1 (host a), ranks 3-5 (host c)"
    assert UNEVEN.describe([]) == ""


def test_a_process_set_as_its_nodes_see_it() -> None:
    members = ProcessSet(3, (1, 3, 5))
    assert members.nodes(UNEVEN) == (0, 2)
    assert [members.local(UNEVEN, node) for node in range(3)] == [(1,), (), (3, 5)]


@given(topology=topologies())
def test_the_global_set_holds_every_rank_of_every_node(topology: Topology) -> None:
    everyone = ProcessSet(GLOBAL_SET, tuple(range(topology.size)))
    local = [everyone.local(topology, node) for node in range(len(topology.hosts))]
    assert local == list(topology.ranks)
    assert everyone.nodes(topology) == tuple(n for n, ranks in enumerate(local) if ranks)


SHARDED = Topology(("a", "b", "c"), ((0, 1), (2,), ()))


def test_a_node_without_workers() -> None:
    assert SHARDED.size == 3
    assert [SHARDED.cross_size(rank) for rank in range(3)] == [2, 1, 2]
    assert ProcessSet(GLOBAL_SET, (0, 1, 2)).nodes(SHARDED) == (0, 1)
    assert SHARDED.describe_node(0) == "ranks 0-1 (host a)"
    assert SHARDED.describe_node(2) == "host c (no workers)"
    with pytest.raises(ValueError, match="are not a topology"):
        Topology(("a", "b"), ((), ()))


@for_each(("shard_hosts", "homes"), [("", (0, 1)), (" ", (0, 1)), ("c", (2,)), ("c, a", (0, 2)), ("a,b,c", (0, 1, 2))])
def test_homes_are_the_hosts_named_or_all_that_have_workers(shard_hosts: str, homes: tuple[int, ...]) -> None:
    assert SHARDED.homes(shard_hosts) == homes


@for_each(
    ("shard_hosts", "why"),
    [
        ("c,d", "shard host 'd' .* is no host of this job, whose hosts are a, b, c"),
        ("c,b,c", "shard host 'c' .* is named twice"),
        ("c,", "shard host '' .* is no host"),
    ],
)
def test_a_home_that_cannot_be_is_told(shard_hosts: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        SHARDED.homes(shard_hosts)
